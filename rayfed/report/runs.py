"""Runs read to be shown: a damaged file is one message."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from jinja2 import TemplateError

from rayfed.base.errors import InputError, did_you_mean
from rayfed.folder.read import Run, find_runs, grouped, read_run, shorten
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


def labelled(runs: Sequence[Run], labels: Mapping[str, str]) -> list[Run]:
    """The runs with the labels of their names in tables and figures, or of steps of these names.

    Raises `InputError` for a label of a name that none has, and where two runs would have one name.
    """
    if not labels:
        return [*runs]
    groups = grouped(runs)
    names = shorten(groups)
    valid = {*names, *(step for name in names for step in name.split("/"))}
    for name in sorted(labels.keys() - valid):
        raise InputError(f"--label {name}=...: no run is called '{name}'{did_you_mean(name, valid)}")
    called = {name: "/".join(labels.get(step, step) for step in name.split("/")) for name in names} | {**labels}
    of_groups = [called[name] for name in names]
    if len({*of_groups}) < len(names):
        raise InputError(f"--label: of the names {', '.join(of_groups)} two are the same; give labels that differ")
    return [
        replace(run, label=called[name]) for name, of in zip(names, groups, strict=True) for run in of.runs + of.behind
    ]
