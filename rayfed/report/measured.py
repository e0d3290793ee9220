"""The numbers of measured clients (`measure = ["local", "drift"]`).

A client counts once per round.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from rayfed.base.errors import InputError
from rayfed.folder.tables import Columns, read_table
from rayfed.report.forms import LAST
from rayfed.report.read import Group, Run, of_clients

WHEN = {"before": "before the client's training", "after": "after the client's training"}
WHERE = {"in_local": "own classes (in-local)", "out_local": "other classes (out-local)"}
# The accuracy of the client's model on test examples that are distributed as the client's.
IN_LOCAL = "local.after.in_local"
DISTANCES = {
    "drift.distribution_distance": "distribution distance (L1)",
    "drift.divergence": "weight divergence (L2)",
}


class Spread(NamedTuple):
    """The mean and the deviation of the clients' values, round by round."""

    rounds: np.ndarray
    mean: np.ndarray
    # The standard deviation of the population.
    deviation: np.ndarray

    def band(self, most: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean minus and plus a standard deviation, within the values that can be.

        These are 0 to `most`.
        """
        low = np.maximum(self.mean - self.deviation, 0)
        high = np.minimum(self.mean + self.deviation, most)
        return low, high


def forgetting_of(run: Run) -> dict[str, float]:
    """Return a run's values of `forms.KEYS` in percent.

    They are those of the last round with a value, and the means of the last rounds.
    """
    values = {}
    for name, (_, of_rounds) in run.forgetting.items():
        values[f"forgetting.{name}"] = 100 * float(of_rounds[-1])
        values[f"forgetting.{name}.last_{LAST}"] = 100 * float(of_rounds[-LAST:].mean())
    return values


def rounds_of_means(run: Run) -> dict[str, int]:
    """Return how many rounds a mean of the last may take, by the mean's key in a table.

    Round 0 never counts: it is no outcome of training.
    """
    counts = {"last_10": int(run.evaluated[1:].sum())}
    for name, (rounds, _) in run.forgetting.items():
        counts[f"forgetting.{name}.last_{LAST}"] = len(rounds)
    if "local" in run.job["measure"] and IN_LOCAL in run.notes:
        counts["personalised"] = len(run.notes[IN_LOCAL][0])
    return counts


def over_clients(columns: Columns, name: str, factor: float = 1) -> Spread:
    """Return the mean and the standard deviation over the clients of each round.

    A client without the number does not count.
    """
    rounds, index = np.unique(columns["round"], return_inverse=True)
    known = np.isfinite(columns[name])
    index = index[known]
    values = factor * columns[name][known]
    counts = np.bincount(index, minlength=len(rounds))
    counts = np.where(counts, counts, np.nan)
    mean = np.bincount(index, values, len(rounds)) / counts
    squares = np.bincount(index, (values - mean[index]) ** 2, len(rounds))
    return Spread(rounds, mean, np.sqrt(squares / counts))


def notes_of(runs: Sequence[Run], measure: str, *names: str) -> Columns:
    """Return the notes of the clients of all runs, `round` and each name: (M,).

    Raises `InputError` where a run has none.
    """
    of_runs = [of_clients(run.folder, *names) for run in runs]
    for run, columns in zip(runs, of_runs, strict=True):
        if not len(columns["round"]):
            raise unmeasured(run, measure, f"numbers of the measure '{measure}'")
    notes = {}
    for name in of_runs[0]:
        notes[name] = np.concatenate([columns[name] for columns in of_runs])
    return notes


def personalised(run: Run, num_rounds: int, when: str = "after") -> float:
    """Return the mean accuracy in percent of the clients' models on examples as their own.

    The models are those after the training, or before it. The mean is over the clients of a round,
    each once, and over the last `num_rounds` measured rounds.
    """
    name = f"local.{when}.in_local"
    by_round = over_clients(notes_of([run], "local", name), name, 100)
    return float(by_round.mean[-num_rounds:].mean())


def unmeasured(run: Run, measure: str, numbers: str) -> InputError:
    """Return the error that says why a run lacks the numbers of a measure, and what helps.

    The run's job may have asked for them.
    """
    job = run.folder / "job.toml"
    rounds = run.summary["rounds"]
    if measure not in run.job["measure"]:
        wanted = json.dumps([*run.job["measure"], measure])
        # Else the new run would measure no round.
        every = " -s measure_every=1" if run.job["measure_every"] > rounds else ""
        return InputError(
            f"'{run.folder}' has no {numbers}: the job needs measure = {wanted}; run it again: "
            f"rayfed run {job} -s 'measure={wanted}'{every} -s name=NEW"
        )
    return InputError(
        f"'{run.folder}' has no {numbers}: no client was measured in its {rounds} rounds, with "
        f"measure_every = {run.job['measure_every']}; resume it with more rounds, or run it again: "
        f"rayfed run {job} -s measure_every=1 -s name=NEW"
    )


def drifts(group: Group) -> Columns:
    """Return the round and the notes of `DISTANCES` of the measured clients (M,) that have both.

    Raises `InputError` if there are none.
    """
    columns = notes_of(group.runs, "drift", *DISTANCES)
    known = np.all([np.isfinite(columns[name]) for name in DISTANCES], axis=0)
    if not known.any():
        raise InputError(
            f"'{group.runs[0].folder}': no measured round has a distribution distance: the global "
            "model is right on none of the examples; measure more with a larger measure_images"
        )
    return {key: column[known] for key, column in columns.items()}


def measured_on(run: Run) -> int:
    """Return the number of test examples that a run's clients were measured on."""
    total = num_test_examples(run)
    return min(run.job["measure_images"] or total, total)


def num_test_examples(run: Run) -> int:
    """Return the number of a run's test examples."""
    initial = read_table(run.folder, "classes").filter(pc.field("round") == 0)
    return pc.sum(initial["predicted"]).as_py() or 0
