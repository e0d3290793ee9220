"""The import of matplotlib for figures that go to files.

An environment variable may name a window or a notebook as the backend of other figures.
"""

import os
import sys
from contextlib import suppress
from importlib import import_module

# A notebook sets this variable for its kernel. Commands that are started there inherit it.
BACKEND = "MPLBACKEND"


def import_matplotlib() -> None:
    """Import matplotlib, unless it is imported, without the backend that a variable names.

    The backend may not be installed here, and a figure that goes to a file needs none. If it is
    installed, it is set afterwards, for other figures of this process.
    """
    if "matplotlib" in sys.modules:
        return
    named = os.environ.pop(BACKEND, None)
    try:
        matplotlib = import_module("matplotlib")
    finally:
        if named is not None:
            os.environ[BACKEND] = named
    if named:
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = named
