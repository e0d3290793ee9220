"""Log the address of Ray's dashboard, which comes up beside the run.

`ray.init` would wait seconds for it, in which actors can start.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from rayfed.runtime import internals

# Seconds between two looks.
EVERY = 0.5
# Seconds, with a head that does not answer: the end of the run waits for it.
PATIENCE = 2.0

log = logging.getLogger(__name__)


@contextmanager
def announced() -> Iterator[None]:
    """Log the dashboard's address once it is known."""
    over = Event()
    looking = Thread(target=_announce, args=[over], daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


def _announce(over: Event) -> None:
    """Look for the dashboard's address until it is known or the run is over, and log it."""
    while not over.wait(EVERY):
        try:
            address = internals.dashboard_address(PATIENCE)
        except Exception:
            # The head is gone, of which the run hears too.
            return
        if address:
            log.info("Ray dashboard: http://%s", address)
            return
