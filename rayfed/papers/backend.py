"""matplotlib, imported for figures that go to files: whatever window or notebook a variable names
for others.
"""

import os
import sys
from contextlib import suppress
from importlib import import_module

# A notebook sets it for its kernel, and the commands that are started there inherit it.
BACKEND = "MPLBACKEND"


def import_matplotlib() -> None:
    """Import matplotlib, unless it is imported, without the backend that a variable names.

    That may not be installed here, and a figure that goes to a file needs none. Where it is
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
