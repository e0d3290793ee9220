"""Regular files alone: to open a pipe would wait for ever, and to write through a link would change another file."""

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path | str, flags: int) -> int:
    """A descriptor as `os.open` gives it, of a regular file; links are followed to read only. Raises OSError."""
    only_read = flags & os.O_ACCMODE == os.O_RDONLY
    file = os.open(path, flags | os.O_NONBLOCK | (0 if only_read else os.O_NOFOLLOW), 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def read_regular(path: Path) -> bytes:
    """The content of a regular file. Raises OSError."""
    with open(path, "rb", opener=open_regular) as file:
        return file.read()
