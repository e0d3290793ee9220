"""A note for the parent process of what a run is at: it outlives the run, which any code may end
without a word.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

# Bytes
SIZE = 8192
# What is noted while a Ray is started: if that ends the process, it would do so again.
STARTING = "the start of Ray"
# With each process that is forked from this one.
_shared = mmap.mmap(-1, SIZE)


def note(run: str, work: str = "") -> None:
    """Note the folder of the run, and what is done there."""
    _shared[:] = f"{run}\n{work}".encode()[:SIZE].ljust(SIZE, b"\0")


def noted() -> tuple[str, str]:
    """The folder of the run, and what is done there; '' where nothing is noted."""
    run, _, work = _shared[:].rstrip(b"\0").decode(errors="replace").rpartition("\n")
    return run, work


@contextmanager
def at(work: str) -> Iterator[None]:
    """Code that may be the user's runs in the context."""
    run, _ = noted()
    note(run, work)
    try:
        yield
    finally:
        note(run)
