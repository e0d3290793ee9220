"""Reading runs to show them, with one message for a damaged file."""

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
    """Raise `InputError` instead of whatever a damaged file raises while it is read and shown."""
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
    """Return the runs in these folders, each once.

    Raises `InputError` for a run with a damaged file.
    """
    paths: dict[Path, Path] = {}
    for folder in folders:
        paths |= {path.resolve(): path for path in find_runs(folder)}
    runs = []
    for path in paths.values():
        with legible(path, otherwise="leave this run out"):
            runs.append(read_run(path))
    return runs


def labelled(runs: Sequence[Run], labels: Mapping[str, str]) -> list[Run]:
    """Return the runs with labels, in which other words stand for steps of their names.

    Tables and figures call the runs by these labels. Raises `InputError` if a step does not exist,
    or if two groups of runs would have the same label.
    """
    groups = grouped(runs)
    names = [name.split("/") for name in shorten(groups)]
    steps = set().union(*names)
    for step in sorted(labels.keys() - steps):
        raise InputError(
            f"--label '{step}': it is no step of the runs' names{did_you_mean(step, steps)}"
        )
    words = {step: " ".join(harmless(label).split()) for step, label in labels.items()}
    called = [_relabelled(name, words) for name in names]
    twice = [name for name, count in Counter(called).items() if count > 1]
    if twice:
        raise InputError(
            f"--label: several runs would be called '{twice[0]}'; give each a name of its own"
        )
    runs_labelled = []
    for label, group in zip(called, groups, strict=True):
        for run in group.runs + group.behind:
            runs_labelled.append(replace(run, label=label if labels else ""))
    return runs_labelled


def _relabelled(steps: Sequence[str], words: Mapping[str, str]) -> str:
    """Return a name with other words for those of its steps that have some.

    >>> _relabelled(["shards", "fedntd"], {"fedntd": "FedNTD (ours)"})
    'shards/FedNTD (ours)'
    """
    return "/".join(words.get(step, step) for step in steps)


def read_rounds(*folders: str | Path) -> pa.Table:
    """Return the rounds of all runs in these folders, for example of a grid, as one table.

    Its columns are `run`, `seed`, and the columns of `rounds.parquet`. `run` is what `rayfed table`
    calls the row of the run. Raises `InputError` for what is no folder of runs.

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
            count = len(run.evaluated)
            columns = {"run": [name] * count, "seed": [run.job["seed"]] * count}
            tables.append(pa.table(columns | run.rounds))
    return pa.concat_tables(tables)
