"""Files that are whole or not there, and a flat folder of them on any file system that pyarrow reaches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from pyarrow import fs as pafs

from rayfed.values import InputError

T = TypeVar("T")


def locate(path: str) -> tuple[pafs.FileSystem, str]:
    """The file system, and the path on it, that a local path or a URI (`s3://bucket/key`) stands for."""
    if "://" in path:
        return reach(path, lambda: pafs.FileSystem.from_uri(path))
    return pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(path))


def reach(path: str, ask: Callable[[], T]) -> T:
    """What `ask` gives; an `InputError` that names the path where its file system does not answer."""
    try:
        return ask()
    except InputError:
        raise
    except (pa.ArrowException, ValueError, OSError, ImportError) as error:
        raise InputError(f"'{path}': cannot be reached ({error})") from None


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place beside a file to write it at; then it replaces the file. Nothing is left of it where writing fails."""
    aside = path.with_name(f".{path.name}.tmp")  # readers of a dataset pass over names with a leading dot
    try:
        yield aside
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


class Folder:
    """A folder at a local path or a URI; it is made when something is written to it."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._fs, self._root = locate(place)

    def names(self) -> list[str]:
        """The files in it, sorted; none where there is no folder. What was left half written is not listed."""
        chosen = pafs.FileSelector(self._root, allow_not_found=True)
        found = reach(self.place, lambda: self._fs.get_file_info(chosen))
        return sorted(info.base_name for info in found if info.is_file and not info.base_name.startswith("."))

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""
        with self._fs.open_input_stream(f"{self._root}/{name}") as stream:
            return bytes(stream.read())

    def write(self, name: str, content: bytes) -> None:
        """Replace a file, or make it; on a local disk it outlives a power cut, elsewhere its store sees to that."""
        self._fs.create_dir(self._root)
        if not isinstance(self._fs, pafs.LocalFileSystem):
            with self._fs.open_output_stream(f"{self._root}/{name}") as stream:
                stream.write(content)
            return
        with whole(Path(self._root, name)) as aside, aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(self._root, os.O_RDONLY)  # the new name itself lies in the folder
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def delete(self, name: str) -> None:
        self._fs.delete_file(f"{self._root}/{name}")
