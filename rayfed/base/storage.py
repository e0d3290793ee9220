"""Files and flat folders on any file system that pyarrow reaches."""

import errno
import mmap
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from pyarrow import fs as pafs
from rich.filesize import decimal

from rayfed.base.errors import InputError, refuse_secrets
from rayfed.base.files import write_bytes

T = TypeVar("T")


def locate(path: str) -> tuple[pafs.FileSystem, str]:
    """Return the file system, and the path on it, of a local path or a URI (`s3://bucket/key`)."""
    refuse_secrets(path)
    if "://" in path:
        return reach(path, lambda: pafs.FileSystem.from_uri(path))
    return pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(path))


def joined(path: str, name: str) -> str:
    """Name a file or folder in another: in a URI the name goes before the parameters.

    >>> joined("s3://bucket/kept/?region=eu", "mine"), joined("/kept?", "mine")
    ('s3://bucket/kept/mine?region=eu', '/kept?/mine')
    """
    end = re.search(r"[?#].*|$", path if "://" in path else "", re.DOTALL)[0]  # type: ignore[index]
    return f"{path.removesuffix(end).rstrip('/')}/{name}{end}"


def reach(path: str, ask: Callable[[], T]) -> T:
    """Return the answer of `ask`. Raise `InputError` where a path's file system does not answer."""
    try:
        return ask()
    except InputError:
        raise
    except (pa.ArrowException, ValueError, OSError, ImportError) as error:
        raise InputError(f"'{path}': cannot be reached ({' '.join(str(error).split())})") from None


def exists(path: str) -> bool:
    """Say whether there is a file or a folder at a local path or URI."""
    fs, place = locate(path)
    return reach(path, lambda: fs.get_file_info(place)).type != pafs.FileType.NotFound


def open_file(fs: pafs.FileSystem, path: str) -> pa.NativeFile:
    """Open a file to read from. Raises OSError.

    Arrow takes names in UTF-8 alone. A name on a local disk may have any bytes, as in archives of
    Windows.
    """
    if isinstance(fs, pafs.LocalFileSystem) and not _is_utf8(path):
        with open(path, "rb") as file:
            is_empty = os.fstat(file.fileno()).st_size == 0
            content = b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return pa.BufferReader(content)
    return fs.open_input_file(path)


def read_file(fs: pafs.FileSystem, path: str, limit: int = -1) -> bytes:
    """Return the content of a file, or its first `limit` bytes. Raises OSError."""
    if isinstance(fs, pafs.LocalFileSystem) and not _is_utf8(path):
        with open(path, "rb") as file:
            return file.read(limit)
    with fs.open_input_file(path) as file:
        content: bytes = file.read() if limit < 0 else file.read(limit)
        return content


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class Folder:
    """A folder at a local path or a URI. Writing to it makes it."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._fs, self._root = locate(place)

    @property
    def local(self) -> Path | None:
        """Return its path; None on another file system."""
        return Path(self._root) if isinstance(self._fs, pafs.LocalFileSystem) else None

    def names(self, odd: bool = False) -> list[str]:
        """Return the names of the files in it, sorted; none where there is no folder.

        Half-written files are not listed. With `odd`, also what is no file, such as a folder, is.
        """
        chosen = pafs.FileSelector(self._root, allow_not_found=True)
        found = reach(self.place, lambda: self._fs.get_file_info(chosen))
        return sorted(
            info.base_name
            for info in found
            if (odd or info.is_file) and not info.base_name.startswith(".")
        )

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises OSError where there is none that can be read."""
        if self.local is not None:
            return (self.local / name).read_bytes()
        with self._fs.open_input_stream(f"{self._root}/{name}") as stream:
            return bytes(stream.read())

    def write(self, name: str, *content: bytes) -> None:
        """Make or replace a file.

        On a local disk it outlives a power cut; elsewhere its store sees to that.
        """
        if self.local is not None:
            try:
                return write_bytes(self.local / name, *content)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size = decimal(sum(len(part) for part in content))
                free = decimal(shutil.disk_usage(self.local).free)
                what = f"{error.strerror}: '{name}' takes {size}, and {free} are free"
                raise OSError(error.errno, what) from None
        self._fs.create_dir(self._root)
        with self._fs.open_output_stream(f"{self._root}/{name}") as stream:
            for piece in content:
                stream.write(piece)

    def delete(self, name: str) -> None:
        self._fs.delete_file(f"{self._root}/{name}")
