"""Ray's dashboard comes up beside the run: `ray.init` would wait seconds for it, in which actors can start."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Event, Thread
from typing import Any

from ray._private import ray_constants
from ray.experimental import internal_kv

from rayfed.runtime import replaced

KEY, SPACE = ray_constants.DASHBOARD_ADDRESS.encode(), ray_constants.KV_NAMESPACE_DASHBOARD
EVERY = 0.5  # seconds between two looks
PATIENCE = 2.0  # seconds, with a head that does not answer: the end of the run waits for it

log = logging.getLogger(__name__)


def not_awaited() -> AbstractContextManager[None]:
    """Within the context, `ray.init` starts the dashboard's process, and goes on before its address is known."""
    get = internal_kv._internal_kv_get

    def at_once(key: str | bytes, **given: Any) -> bytes | None:
        return b"" if key == ray_constants.DASHBOARD_ADDRESS else get(key, **given)

    return replaced(internal_kv, "_internal_kv_get", at_once)


@contextmanager
def announced() -> Iterator[None]:
    """Log the dashboard's address once it is known, and put it where Ray's own tools look for it."""
    over = Event()
    looking = Thread(target=_announce, args=[over], daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


def _announce(over: Event) -> None:
    head = internal_kv.internal_kv_get_gcs_client()
    while not over.wait(EVERY):
        try:
            address = head.internal_kv_get(KEY, SPACE, timeout=PATIENCE)
            if address:
                head.internal_kv_put(b"webui:url", address, True, SPACE, timeout=PATIENCE)
        except Exception:  # the head is gone, of which the run hears too
            return
        if address:
            log.info("Ray dashboard: http://%s", address.decode())
            return
