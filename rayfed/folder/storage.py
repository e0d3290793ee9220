"""Files that are whole or not there, and a flat folder of them on any file system that pyarrow reaches."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pyarrow import fs as pafs

from rayfed.data.files import locate, reach
from rayfed.errors import InputError, Unwritable
from rayfed.folder.regular import read_regular

PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)  # errors of a disk that may be gone the next time


@contextmanager
def writing_to(place: Path | str) -> Iterator[None]:
    """Raise one sentence in place of an OSError: `Unwritable` where it may help to try again, else `InputError`."""
    try:
        yield
    except OSError as error:
        kind = Unwritable if error.errno in PASSING else InputError
        raise kind(f"'{place}' cannot be written to: {error}") from None


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file beside `path`. On success it is renamed to `path`; on failure it is deleted."""
    aside = path.with_name(f".{path.name}.tmp")  # readers of a dataset pass over names with a leading dot
    try:
        aside.unlink(missing_ok=True)  # of a killed run; or a link, and nothing is written through one
        with aside.open("xb") as file:
            yield file
        try:
            os.replace(aside, path)
        except IsADirectoryError:
            path.rmdir()  # only if it is empty
            os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a small file, or replace it whole. It outlives a power cut."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, *content: bytes) -> None:
    """Write a file, or replace it whole. It outlives a power cut. Its content may be in pieces, which takes no copy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as file:
        file.writelines(content)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)  # the new name itself lies in the folder
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Folder:
    """A folder at a local path or a URI. Writing to it makes it."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._fs, self._root = locate(place)

    @property
    def local(self) -> Path | None:
        """Its path; None on another file system."""
        return Path(self._root) if isinstance(self._fs, pafs.LocalFileSystem) else None

    def names(self, odd: bool = False) -> list[str]:
        """The files in it, sorted; none where there is no folder. Half-written files are not listed.

        With `odd`, also what is no file, such as a folder or a pipe.
        """
        chosen = pafs.FileSelector(self._root, allow_not_found=True)
        found = reach(self.place, lambda: self._fs.get_file_info(chosen))
        return sorted(info.base_name for info in found if (odd or info.is_file) and not info.base_name.startswith("."))

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError, and any other OSError where there is no file that can be read."""
        if self.local is not None:
            return read_regular(self.local / name)
        with self._fs.open_input_stream(f"{self._root}/{name}") as stream:
            return bytes(stream.read())

    def write(self, name: str, *content: bytes) -> None:
        """Make or replace a file. On a local disk it outlives a power cut; elsewhere its store sees to that."""
        if self.local is not None:
            try:
                return write_bytes(self.local / name, *content)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size, free = sum(map(len, content)) / 1e6, shutil.disk_usage(self.local).free / 1e6
                what = f"{error.strerror}: '{name}' takes {size:,.1f} MB, and {free:,.1f} MB are free"
                raise OSError(error.errno, what) from None
        self._fs.create_dir(self._root)
        with self._fs.open_output_stream(f"{self._root}/{name}") as stream:
            for piece in content:
                stream.write(piece)

    def delete(self, name: str) -> None:
        self._fs.delete_file(f"{self._root}/{name}")
