"""Files of this machine: whole or not there, and regular alone."""

import errno
import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from rayfed.base.errors import InputError, Unwritable

# Errors of a disk that may be gone the next time.
PASSING = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
)

STANDARD_LIBRARY = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")


def is_installed(file: str) -> bool:
    """Say whether a module's file is Python's own, or a package's.

    The package may be of this environment, or of another that this one uses.
    """
    return (
        "/site-packages/" in file or "/dist-packages/" in file or file.startswith(STANDARD_LIBRARY)
    )


@contextmanager
def writing_to(place: Path | str) -> Iterator[None]:
    """Raise one sentence in place of an OSError.

    It is `Unwritable` where it may help to try again, else `InputError`.
    """
    try:
        yield
    except OSError as error:
        kind = Unwritable if error.errno in PASSING else InputError
        raise kind(f"'{place}' cannot be written to: {error}") from None


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file beside `path`.

    On success it is renamed to `path`; on failure it is deleted.
    """
    # Readers of a dataset pass over names with a leading dot.
    aside = path.with_name(f".{path.name}.tmp")
    try:
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside)
        # A killed run may have left it.
        aside.unlink(missing_ok=True)
        with aside.open("xb") as file:
            yield file
        try:
            os.replace(aside, path)
        except IsADirectoryError:
            # This removes it only if it is empty.
            path.rmdir()
            os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def refuse_unwritable(path: Path) -> None:
    """Raise an error now if a file could not be written later. Makes its folder."""
    if path.is_dir():
        raise InputError(f"'{path}' is a folder; give the path of a file")
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # It is deleted when it is closed.
        TemporaryFile(dir=path.parent).close()


def write_text(path: Path, text: str) -> None:
    """Write a small file, or replace it whole. It outlives a power cut."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, *content: bytes) -> None:
    """Write a file, or replace it whole.

    It outlives a power cut. Its content may be in pieces, which takes no copy.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as file:
        file.writelines(content)
        file.flush()
        os.fsync(file.fileno())
    # The new name itself lies in the folder.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
