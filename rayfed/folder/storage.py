"""Files that are whole or not there, and a flat folder of them on any file system that pyarrow reaches."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyarrow import fs as pafs

from rayfed.data.files import locate, reach
from rayfed.errors import InputError, Unwritable

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
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`. On success it is renamed to `path`; on failure it is deleted."""
    aside = path.with_name(f".{path.name}.tmp")  # readers of a dataset pass over names with a leading dot
    try:
        yield aside
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
    with whole(path) as aside, aside.open("wb") as file:
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

    def names(self) -> list[str]:
        """The files in it, sorted; none where there is no folder. Half-written files are not listed."""
        chosen = pafs.FileSelector(self._root, allow_not_found=True)
        found = reach(self.place, lambda: self._fs.get_file_info(chosen))
        return sorted(info.base_name for info in found if info.is_file and not info.base_name.startswith("."))

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        with self._fs.open_input_stream(f"{self._root}/{name}") as stream:
            return bytes(stream.read())

    def write(self, name: str, *content: bytes) -> None:
        """Make or replace a file. On a local disk it outlives a power cut; elsewhere its store sees to that."""
        if self.local is not None:
            write_bytes(self.local / name, *content)
            return
        self._fs.create_dir(self._root)
        with self._fs.open_output_stream(f"{self._root}/{name}") as stream:
            for piece in content:
                stream.write(piece)

    def delete(self, name: str) -> None:
        self._fs.delete_file(f"{self._root}/{name}")
