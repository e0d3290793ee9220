"""The places where a round's work is done: this process, or Ray. No other folder of this package imports Ray."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

OWNER = "rayfed_owner"  # in the metadata of a Ray that a run has started for itself: the run's name


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the context, an attribute of a module or class of Ray has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
