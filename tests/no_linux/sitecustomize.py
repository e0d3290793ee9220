"""Make what only Linux has fail in rayfed's own code, as on a Mac: /proc, prctl, sched_getaffinity.

Python imports this module at its start where the folder is in PYTHONPATH, so it also counts in the
processes that tests start: `make test-no-linux`. Libraries such as psutil and Ray may go on using
what Linux has, and so may the tests.
"""

import os
import sys
import sysconfig
from pathlib import Path

PACKAGE = str(Path(__file__).resolve().parents[2] / "rayfed") + os.sep
# What opens files on behalf of others.
LIBRARY = tuple({sysconfig.get_path("stdlib") + os.sep, "<frozen "})
OPENS = {"open", "os.listdir", "os.scandir", "os.readlink"}


def is_rayfeds() -> bool:
    """Say whether the call came from rayfed: the next file outside Python's own is rayfed's."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "site-packages" in file or not file.startswith(LIBRARY):
            return file.startswith(PACKAGE)
        frame = frame.f_back
    return False


def refuse(event: str, arguments: tuple) -> None:
    """Raise what macOS would raise; Python calls this before it opens a file or finds a symbol."""
    if event in OPENS and isinstance(arguments[0], str | bytes):
        path = os.fsdecode(arguments[0])
        if (path == "/proc" or path.startswith("/proc/")) and is_rayfeds():
            raise FileNotFoundError(2, "No such file or directory", path)
    elif event == "ctypes.dlsym" and arguments[1] == "prctl" and is_rayfeds():
        raise AttributeError("dlsym(RTLD_DEFAULT, prctl): symbol not found")


sys.addaudithook(refuse)

if hasattr(os, "sched_getaffinity"):
    affinity_of_linux = os.sched_getaffinity

    def sched_getaffinity(pid: int) -> set[int]:
        """Return the processors that a process may use, to all but rayfed."""
        if is_rayfeds():
            raise AttributeError("module 'os' has no attribute 'sched_getaffinity'")
        return affinity_of_linux(pid)

    os.sched_getaffinity = sched_getaffinity
