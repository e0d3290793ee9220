"""Runs read to be shown: a damaged file is one message."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from jinja2 import TemplateError

from rayfed.base.errors import InputError, did_you_mean, harmless, told
from rayfed.folder.found import find_runs
from rayfed.report.read import Run, grouped, read_run, shorten
from rayfed.report.words import listed


@contextmanager
def legible(
    *folders: Path, otherwise: str = "move it away: the page does without it"
) -> Iterator[None]:
    """`InputError` in place of whatever a damaged file raises while it is read and shown."""
    try:
        yield
    except InputError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        TemplateError,
        TypeError,
        ValueError,
        pa.ArrowException,
    ) as error:
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
    """The runs as tables and figures shall call them: with other words for steps of their names,
    which must exist.
    """
    groups = grouped(runs)
    names = [name.split("/") for name in shorten(groups)]
    steps = {step for name in names for step in name}
    for step in sorted(labels.keys() - steps):
        raise InputError(
            f"--label '{step}': it is no step of the runs' names{did_you_mean(step, steps)}"
        )
    words = {step: " ".join(harmless(label).split()) for step, label in labels.items()}
    called = ["/".join(words.get(step, step) for step in name) for name in names]
    twice = [name for name, count in Counter(called).items() if count > 1]
    if twice:
        raise InputError(
            f"--label: several runs would be called '{twice[0]}'; give each a name of its own"
        )
    pairs = zip(called if labels else [""] * len(groups), groups, strict=True)
    return [
        replace(run, label=label) for label, group in pairs for run in group.runs + group.behind
    ]


def read_rounds(*folders: str | Path) -> pa.Table:
    """The rounds of all runs in these folders as one table, such as a grid's: `run`, `seed`, and
    what a round has.

    `run` is what `rayfed table` calls the row of the run; the other columns are those of
    `rounds.parquet`. Raises `InputError` for what is no folder of runs.

    >>> read_rounds("runs/quickstart").column_names[:4]  # doctest: +SKIP
    ['run', 'seed', 'round', 'test_accuracy']
    """
    if not folders or not all(isinstance(folder, str | Path) for folder in folders):
        how = (
            "give folders of runs or grids as they are, not in a list: read_rounds('runs/mine', "
            "'runs/grid')"
        )
        raise InputError(f"read_rounds({', '.join(map(told, folders))}): {how}")
    groups = grouped(read_runs(map(Path, folders)))
    tables = []
    for name, group in zip(shorten(groups), groups, strict=True):
        for run in group.runs + group.behind:
            whose = {
                "run": [name] * len(run.evaluated),
                "seed": [run.job["seed"]] * len(run.evaluated),
            }
            tables.append(pa.table(whose | run.rounds))
    return pa.concat_tables(tables)
