"""Runs read to be shown: a damaged file is one message."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jinja2 import TemplateError

from rayfed.base.errors import InputError
from rayfed.folder.read import Run, find_runs, read_run
from rayfed.report.words import listed


@contextmanager
def legible(*folders: Path, otherwise: str = "move it away: the page does without it") -> Iterator[None]:
    """`InputError` in place of whatever a damaged file raises while it is read and shown."""
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, TemplateError, TypeError, ValueError) as error:
        names = listed(dict.fromkeys(folders))
        raise InputError(
            f"{names} cannot be shown, as a file in it is not as a run wrote it: {error!r}; "
            f"put that file back, or {otherwise}"
        ) from error


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """The runs in these folders, each once. Raises `InputError` for a run with a damaged file."""
    paths = {path.resolve(): path for folder in folders for path in find_runs(folder)}
    runs = []
    for path in paths.values():
        with legible(path, otherwise="leave this run out"):
            runs.append(read_run(path))
    return runs
