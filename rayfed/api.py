"""The functions of `import rayfed` that train: `run` and `resume`, with the usual observers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec

from rayfed import experiment
from rayfed.base.errors import InputError
from rayfed.experiment import RunOptions, Trained
from rayfed.folder.tables import read_table
from rayfed.job import Job, key_meant, read_toml
from rayfed.methods.part import Method
from rayfed.observers.display import follow
from rayfed.observers.usual import usual_observers
from rayfed.report.result import Result
from rayfed.rounds.observer import Observer

P = ParamSpec("P")


def _naming_overrides(function: Callable[P, Result]) -> Callable[P, Result]:
    """Return the function, which tells where a setting goes that is given as an argument."""
    known = signature(function).parameters

    @wraps(function)
    def checked(*args: P.args, **given: P.kwargs) -> Result:
        for name, value in given.items():
            if name not in known:
                key = key_meant(name) or "KEY"
                raise TypeError(
                    f"{function.__name__}() got an unexpected keyword argument '{name}'; settings "
                    f"go into the second argument: {{'{key}': {value!r}}}"
                )
        return function(*args, **given)

    return checked


@_naming_overrides
def run(
    job: str | Path | Mapping[str, Any] | Job,
    overrides: Mapping[str, Any] | None = None,
    *,
    method: Method | None = None,
    force: bool = False,
    resume: bool = False,
    other_bits: bool = False,
    observers: Sequence[Observer] = (),
    progress: bool = False,
) -> Result:
    """Run a job to its end and return its results.

    `job` is a TOML file, a table, or a `Job`. `overrides` replace single values, for example
    `{"train.num_rounds": 2}`. A `method` that was made with `compose` replaces the job's.

    Everything is checked before anything is started or written. Raises `InputError` if something
    that the user gave is wrong. With `force`, results of an earlier run are replaced. With
    `resume`, the job continues if it was begun, so the same call may be made again and again.
    `other_bits` allows hardware of several kinds, as in `resume`.

    `observers` hear of each round. Only warnings are printed, unless an observer prints more.
    `progress` shows what the command shows: a bar on a terminal, a line for each round in a
    notebook or a file. Trackers and the page of the run are always there.

    >>> result = run("quickstart", {"train.num_rounds": 2, "ray.mode": "off"})  # doctest: +SKIP
    >>> result.rounds.column("test_accuracy").to_pylist()  # doctest: +SKIP
    [0.094, 0.427, 0.5635]
    """
    if force and resume:
        raise InputError("force begins the run again, and resume continues it: give one of the two")
    source = job if isinstance(job, Job) else read_toml(job)
    checked = experiment.read(source, overrides, method)
    options = RunOptions(force=force, other_bits=other_bits)
    with shown(checked, observers, progress) as everyone:
        return _result(experiment.run(checked, everyone, options, resume=resume))


@_naming_overrides
def resume(
    run: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    method: Method | None = None,
    other_bits: bool = False,
    observers: Sequence[Observer] = (),
    progress: bool = False,
) -> Result:
    """Continue a run from its newest checkpoint, to the results of a run that never stopped.

    `run` is its folder, or the folder or URI of its checkpoints. The run continues up to
    `train.num_rounds`. `overrides` may change these:

    * where the work is done (`ray.*`) and where results go (`output.*`, `track`);
    * what is measured (`measure*`, `data.domain`);
    * how many rounds there are, and when they end early (`train.num_rounds`, `train.patience`).

    Give a `method` again that was made in Python and that a job file cannot name. Raises
    `InputError` if there is nothing to continue from, or if the hardware, the partition or the code
    of the user's own modules has changed. `other_bits` allows such changes; `environment.json`
    notes them. `observers` and `progress` are those of `run`.

    >>> resume("runs/quickstart", {"train.num_rounds": 6})  # doctest: +SKIP
    """
    job, saved = experiment.find(run, overrides, method)
    with shown(job, observers, progress) as everyone:
        return _result(experiment.resume(job, saved, everyone, RunOptions(other_bits=other_bits)))


@contextmanager
def shown(job: Job, observers: Sequence[Observer], progress: bool) -> Iterator[list[Observer]]:
    """Yield the observers of a run: the progress if it is wanted, the user's, and the usual."""
    everyone = [*observers, *usual_observers(job)]
    if not progress:
        yield everyone
        return
    with follow() as display:
        yield [display, *everyone]


def _result(trained: Trained) -> Result:
    """Return the results of a run that has ended."""
    return Result(trained.path, read_table(trained.path, "rounds"), trained.weights)
