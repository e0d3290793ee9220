"""Runs as a table, as papers print it: means over seeds, and paired differences from FedAvg or else
the first run.

Accuracies are in percent. Two runs are a pair if they have the same data, partition, seed and
number of rounds, so that only the method, or whatever else their jobs say, differs between them.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayfed.base.errors import InputError, did_you_mean
from rayfed.job import MEASURE, differences
from rayfed.measures import metrics
from rayfed.report.forms import (
    DOMAIN,
    HEADLINES,
    KEYS,
    LAST,
    MARKS,
    OF_CLIENTS,
    Sheet,
    in_words,
    mean_of,
)
from rayfed.report.measured import (
    IN_LOCAL,
    forgetting_of,
    personalised,
    rounds_of_means,
    unmeasured,
)
from rayfed.report.read import Group, Run, grouped, shorten
from rayfed.report.words import Stat, interval, spread, stat_text

# What the two runs of a pair have in common.
PAIR = (
    "data",
    "partition",
    "seed",
    "number of rounds",
)
HEADS = {
    "best": "best (%)",
    "last": "last (%)",
    # Or of all, if they are fewer: `_heads`.
    "last_10": f"mean of last {LAST} (%)",
    "forgetting": "forgetting (%)",
    **{key: in_words(key) for key in HEADLINES},
    # Of runs that measured `local`.
    "personalised": f"personalised, mean of last {LAST} (%)",
}

REFERENCE = "fedavg"


@dataclass(frozen=True)
class Difference:
    """From the reference, in points of accuracy: the mean over pairs, and its 95 % interval from 2
    pairs on.
    """

    reference: str
    pairs: int
    mean: float
    interval: tuple[float, float] | None

    @property
    def sure(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True)
class Row:
    """A group of runs that differ in their seeds."""

    name: str
    runs: Sequence[Run]
    # With fewer rounds, so that they do not count.
    behind: Sequence[Run]
    # By the keys of `figures` that all runs have.
    figures: dict[str, Stat]
    # Of the reference's runs and these; empty for a reference.
    pairs: Sequence[tuple[Run, Run]]
    # None for a reference.
    difference: Difference | None
    # Of a reference that is not the first row: in what it differs, so that they are not compared.
    unlike: str


def rows(runs: Sequence[Run], of: str = "last", first: str = "") -> list[Row]:
    """A row for each group, in the order of the runs; the difference `of` one of its `figures` is
    from a reference.

    That is the group `first`, by its name or the end of its name, if it has the pairs of a row;
    else the first group that has them. If `first` is not given, it is fedavg, where that is there:
    so the end of a grid, the table and the page have one reference. Runs without an evaluated round
    are left out. Raises `InputError` if no other is there, for a `first` that no group has, for a
    run without the accuracy `of`, and for two runs in a group that are a pair: they would count as
    two seeds.
    """
    groups = grouped([run for run in runs if run.evaluated[1:].any()])
    if not groups:
        raise InputError(
            f"'{runs[0].folder}' has no evaluated round yet, so there is nothing to put into a "
            "table"
        )
    made: list[Row] = []
    for name, group in _references_first(groups, first):
        made.append(_row(name, group, of, made))
    order = shorten(groups)
    return sorted(made, key=lambda row: order.index(row.name))


def _row(name: str, group: Group, of: str, above: Sequence[Row]) -> Row:
    """A group's row, compared with the first of the rows above it that has its pairs."""
    counted = group.counted
    _refuse_twins(counted)
    numbers = [figures(run) for run in counted]
    for run, known in zip(counted, numbers, strict=True):
        if of not in known:
            raise lacking(run, of)
    stats = {}
    for key in numbers[0]:
        if all(key in known for known in numbers):
            stats[key] = spread([known[key] for known in numbers])
    for reference in above:
        if reference.pairs:
            continue
        others = {pair_of(run): run for run in reference.runs}
        pairs = [(others[pair_of(run)], run) for run in counted if pair_of(run) in others]
        if pairs:
            gaps = [figures(run)[of] - figures(other)[of] for other, run in pairs]
            difference = Difference(reference.name, len(gaps), float(np.mean(gaps)), interval(gaps))
            return Row(name, counted, group.left_out, stats, pairs, difference, "")
    unlike = _unlike(above[0].runs, counted) if above else ""
    return Row(name, counted, group.left_out, stats, [], None, unlike)


def _references_first(groups: Sequence[Group], first: str) -> list[tuple[str, Group]]:
    """The groups with their names; those that others are compared with come before them."""
    named = list(zip(shorten(groups), groups, strict=True))
    # A name may be a label.
    of = {name: (f"/{name}", f"/{group.name}") for name, group in named}
    at_first = {
        name
        for name, both in of.items()
        if any(each.endswith(f"/{first or REFERENCE}") for each in both)
    }
    if first and not at_first:
        raise InputError(f"--from {first}: no run has this name{did_you_mean(first, of)}")
    return sorted(named, key=lambda pair: pair[0] not in at_first)


def figures(run: Run) -> dict[str, float]:
    """The numbers of an evaluated run by their keys in `HEADS` and `KEYS`, and by domain, as far as
    it has them.
    """
    accuracy = 100 * run.rounds["test_accuracy"][run.evaluated][1:]
    last = float(np.mean(accuracy[-LAST:]))
    found = {"best": float(accuracy.max()), "last": float(accuracy[-1]), "last_10": last}
    lost = 100 * float(run.rounds["forgetting"][run.evaluated][-1])
    if math.isfinite(lost):
        found["forgetting"] = lost
    if "local" in run.job["measure"] and IN_LOCAL in run.notes:
        found["personalised"] = personalised(run, LAST)
    by_domain = {
        name: 100 * float(of[-1])
        for name, (_, of) in run.round_notes.items()
        if name.startswith(DOMAIN)
    }
    return found | forgetting_of(run) | by_domain


def lacking(run: Run, of: str) -> InputError:
    """Why a run has no number `of` this name."""
    if of not in (*HEADS, *KEYS):
        return InputError(
            f"'{run.folder}' has no number '{of}'{did_you_mean(of, {*HEADS, *KEYS, *figures(run)})}"
        )
    if of == "personalised":
        return unmeasured(run, "local", "personalised accuracy")
    if of == "forgetting":
        of = "forgetting.peak"
    if of.split(".")[1] in OF_CLIENTS:
        return unmeasured(run, "confusion", "confusion matrices of clients")
    if of.split(".")[1] == "continual" and len(run.class_rounds) > 2:
        return InputError(
            f"'{run.folder}' has no round after its first in which a class is held by none of the "
            "round's clients, so there is no forgetting.continual; forgetting.round sees every "
            "class in every round"
        )
    return InputError(
        f"'{run.folder}' has no two evaluated rounds after round 0, so nothing can be forgotten"
    )


def pair_of(run: Run) -> tuple[Any, ...]:
    """The values of `PAIR`; a run that has ended early counts with the rounds that it might have
    played.
    """
    rounds = (
        run.job["train"]["num_rounds"] if run.summary.get("ended_early") else run.summary["rounds"]
    )
    return *map(run.environment.get, ("data", "partition")), run.job["seed"], rounds


def _refuse_twins(runs: Sequence[Run]) -> None:
    seen: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        other = seen.setdefault(pair_of(run), run)
        if other is not run:
            raise InputError(
                f"'{other.folder}' and '{run.folder}' have the same {', '.join(PAIR)}, "
                "so they would count as two seeds although they are one; give only one of them"
            )


def _unlike(reference: Sequence[Run], runs: Sequence[Run]) -> str:
    theirs, ours = (list(zip(*map(pair_of, of), strict=True)) for of in (reference, runs))
    other = [name for name, a, b in zip(PAIR, theirs, ours, strict=True) if not {*a} & {*b}]
    return f"other {', '.join(other) or 'pairs of partition and seed'}"


# As text
# --------------------------------------------------------------------------------------------------------------


def sheet(
    runs: Sequence[Run],
    form: str,
    of: str = "last",
    target: float | None = None,
    first: str = "",
    columns: Any = None,
    sort: str = "",
) -> Sheet:
    """The `rows` of runs in the form "text", "md", "latex" or "csv".

    With a `target`, a fraction of 1, also the rounds to this accuracy, and how many times sooner
    than the reference. In "md" and "latex", the best among rows that are compared is bold. With
    `columns`, the lines have only these. With the key of a column in `sort`, the best comes first;
    where none is the best, the smallest.
    """
    made = rows(runs, of, first)
    keys = dict.fromkeys(key for row in made for key in row.figures)
    heads = _heads(made, keys)
    compared = of if of == "personalised" else heads[of].removesuffix(" (%)")
    head = {"run": "run", "seeds": "seeds", "rounds": "rounds", **heads}
    head |= {"difference": f"difference in {compared} (points)", "from": "from"}
    if target is not None:
        head |= {"rounds_to_target": f"rounds to {100 * target:g} %", "speed_up": "speed-up"}
    unasked = {key for key in heads if key not in (of, *HEADS)}
    if sum(not row.pairs for row in made) < 2:
        unasked.add("from")
    kept = (
        [key for key in head if key not in unasked]
        if columns is None
        else _chosen(columns, head, runs[0])
    )
    if sort:
        if sort not in head:
            raise _no_column("--sort", sort, head, runs[0])
        made = _sorted(made, sort, of, target)
    lines, records = [], []
    for row in made:
        line = {"run": row.name, "seeds": str(len(row.runs)), "rounds": rounds_text(row)}
        line |= {key: _cell(row, key, made, form) for key in heads}
        line |= {
            "difference": _gap(row, form),
            "from": row.difference.reference if row.difference else "",
        }
        record = _record(row, [key for key in heads if key not in unasked])
        if target is not None:
            reached, faster = _to_target(row, target)
            there = [number for number in reached if number is not None]
            line["rounds_to_target"] = _reached(reached)
            line["speed_up"] = stat_text(spread(faster), 2) if faster else ""
            record["reached"] = len(there)
            record["rounds_to_target"] = spread(there)[0] if len(there) == len(reached) else None
            record["speed_up"] = spread(faster)[0] if faster else None
        lines.append([line[key] for key in kept])
        records.append(record)
    notes = [f"{row.name}: {note}" for row in made for note in remarks(row)]
    for row in made:
        if row.difference and len(row.pairs) < len(row.runs):
            reference = row.difference.reference
            notes.append(
                f"{row.name}: {len(row.pairs)} of its {len(row.runs)} runs have a pair in "
                f"{reference}"
            )
    if form == "csv":
        notes += [
            f"{key}: {heads[key].removesuffix(' (%)')}"
            for key in heads
            if key not in unasked
            and key in rounds_of_means(made[0].runs[0])
            and f"last {LAST} (" not in heads[key]
        ]
    every = sorted({run.eval_every for row in made for run in row.runs})
    if len(every) > 1:
        values = " and ".join(map(str, every))
        notes.append(
            f"train.eval_every is {values}: best, the mean of the last and forgetting depend on it"
        )
    return Sheet([head[key] for key in kept], lines, notes + left_out(runs), records)


def _heads(made: Sequence[Row], keys: Iterable[str]) -> dict[str, str]:
    """The words above the columns of numbers with these keys: a mean says how many rounds it is of."""
    known = [key for key in HEADS if key in keys]
    known += [key for key in keys if key not in HEADS]
    counts = [rounds_of_means(run) for row in made for run in row.runs]
    heads: dict[str, str] = {}
    for key in known:
        of = mean_of(count[key] for count in counts if key in count)
        if key == "last_10":
            heads[key] = f"{of} (%)"
        elif key == "personalised":
            heads[key] = f"personalised, {of} (%)"
        elif key in HEADS and key not in HEADLINES:
            heads[key] = HEADS[key]
        else:
            heads[key] = in_words(key, of)
    return heads


def _sorted(made: Sequence[Row], key: str, of: str, target: float | None) -> list[Row]:
    """The rows by a column: the best first, rows without the number last, equal ones in the order
    that they had.
    """
    numbers = [_sortable(row, key, of, target) for row in made]
    known = [pair for pair in zip(numbers, made, strict=True) if pair[0] is not None]
    without = [row for number, row in zip(numbers, made, strict=True) if number is None]
    return [row for _, row in sorted(known, key=lambda pair: pair[0])] + without


def _sortable(row: Row, key: str, of: str, target: float | None) -> Any:
    """What a row is sorted by, the smallest first: of numbers that are better if they are higher,
    the negative.
    """
    if key == "run":
        return row.name
    if key == "from":
        return row.difference and row.difference.reference
    if key == "seeds":
        return len(row.runs)
    if key == "rounds":
        return max(run.summary["rounds"] for run in row.runs)
    if key == "difference":
        # A reference is as far from itself as can be said: 0.
        gap = row.difference.mean if row.difference else 0.0
        return gap if of.startswith("forgetting") else -gap
    if key in ("rounds_to_target", "speed_up") and target is not None:
        reached, faster = _to_target(row, target)
        if key == "speed_up":
            return -spread(faster)[0] if faster else None
        there = [number for number in reached if number is not None]
        # Runs that do not reach the target come after those that do, however early the others of
        # the row are there.
        return (len(reached) - len(there), spread(there)[0]) if there else None
    if key not in row.figures:
        return None
    mean = row.figures[key][0]
    return mean if key.startswith("forgetting") else -mean


def _no_column(option: str, key: str, head: Mapping[str, str], run: Run) -> InputError:
    """Why the table has no column of this name, with those that it has, or what would make it."""
    if key in (*HEADS, *KEYS):
        return lacking(run, key)
    if key in ("rounds_to_target", "speed_up"):
        return InputError(f"{option} {key}: give the accuracy to reach too, such as --target 0.5")
    return InputError(f"{option}: the table has no column '{key}'{did_you_mean(key, head)}")


def _chosen(columns: str, head: Mapping[str, str], run: Run) -> list[str]:
    """The keys of the columns that a list names."""
    keys = [key.strip() for key in columns.split(",")]
    for key in keys:
        if key not in head:
            raise _no_column("--columns", key, head, run)
        if keys.count(key) > 1:
            raise InputError(f"--columns: '{key}' is there twice; name each column once")
    return keys if "run" in keys else ["run", *keys]


def _cell(row: Row, key: str, made: Sequence[Row], form: str) -> str:
    """A number of a row; in a paper's form bold if it is the best of the rows that are compared
    with it.

    Equal numbers, as printed, are all the best. A mean over seeds is bold only where it stands out.
    """
    if key not in row.figures:
        return ""
    text = stat_text(row.figures[key], 2)
    if form not in ("md", "latex"):
        return text
    of = (row.difference and row.difference.reference) or row.name
    rivals = [
        other
        for other in made
        if of in (other.name, other.difference and other.difference.reference)
    ]
    stats = [other.figures[key] for other in rivals if key in other.figures]
    means = [round(mean, 2) for mean, _ in stats]
    best = min(means) if key.startswith("forgetting") else max(means)
    is_best = len(means) > 1 and round(row.figures[key][0], 2) == best
    if is_best and _stands_out(row.figures[key], stats):
        return MARKS[form].format(text)
    return text


def _stands_out(stat: Stat, among: Sequence[Stat]) -> bool:
    """Whether a mean differs from each other one by more than either's deviation over seeds.

    Two single seeds have no deviations: nothing is known against their difference.
    """
    for other in among:
        deviations = [deviation for _, deviation in (stat, other) if deviation is not None]
        if other is not stat and deviations and abs(stat[0] - other[0]) <= max(deviations):
            return False
    return True


def protocol(job: dict[str, Any]) -> dict[str, Any]:
    """What a number depends on in a job's tables, but for the seed."""
    tables = {
        key: value
        for key, value in job.items()
        if key not in ("name", "seed", "ray", "output", *MEASURE)
    }
    tables["data"] = {key: value for key, value in job["data"].items() if key != "root"}
    return tables


def remarks(row: Row) -> list[str]:
    """What the numbers of a row do not say."""
    jobs = [copy.deepcopy(protocol(run.job)) for run in row.runs]
    for job in jobs:
        # The runs of a row have played equally many, or ended early.
        job["train"].pop("num_rounds")
        job["data"]["partition"].pop("seed", None)
    mixed = [
        text for job in jobs[1:] for text in differences(jobs[0], job, "in one run", "in another")
    ]
    notes = [f"its runs differ in more than their seeds: {text}" for text in dict.fromkeys(mixed)]
    warnings = [run.summary.get("no_better_than_a_guess") for run in row.runs]
    for warning in dict.fromkeys(filter(None, warnings)):
        count = warnings.count(warning)
        among = f" (so {count} of {len(warnings)} runs)" if len(warnings) > 1 else ""
        notes.append(f"{warning}{among}")
    if row.behind:
        names = ", ".join(f"{run.folder} ({run.summary['rounds']})" for run in row.behind)
        notes.append(f"runs with fewer rounds are left out: {names}")
    return notes


def left_out(runs: Sequence[Run]) -> list[str]:
    """Names the runs that have no row."""
    return [
        f"{run.folder} is left out: no round has been evaluated yet"
        for run in runs
        if not run.evaluated[1:].any()
    ]


def rounds_text(row: Row) -> str:
    """The rounds that a row's runs have played, and how many they should play if these are more."""
    played = sorted({run.summary["rounds"] for run in row.runs})
    wanted = row.runs[0].job["train"]["num_rounds"]
    rounds = str(played[0]) if len(played) == 1 else f"{played[0]} to {played[-1]}"
    return rounds if played[-1] == wanted else f"{rounds} of {wanted}"


def accuracies(run: Run) -> np.ndarray:
    """The accuracies (T,) after rounds 1 to T; nan, which reaches no target, where there was no
    evaluation.
    """
    return run.rounds["test_accuracy"][1:]


def _to_target(row: Row, target: float) -> tuple[list[int | None], list[float]]:
    """The first evaluated round with this accuracy for each run, and each pair's speed-up, unless
    one has none.
    """
    reached = [metrics.rounds_to_target(accuracies(run), target) for run in row.runs]
    speed_ups = [
        metrics.speed_up(accuracies(run), accuracies(other), target) for other, run in row.pairs
    ]
    faster = [speed_up for speed_up in speed_ups if speed_up is not None]
    return reached, faster if len(faster) == len(speed_ups) else []


def _reached(rounds: Sequence[int | None]) -> str:
    there = [number for number in rounds if number is not None]
    if len(there) < len(rounds):
        return f"reached by {len(there)} of {len(rounds)}" if there else "not reached"
    return stat_text(spread(there), 1)


def _gap(row: Row, form: str) -> str:
    if row.difference is None:
        return row.unlike or "reference"
    gap = f"{row.difference.mean:+.2f}"
    if row.difference.interval is not None:
        low, high = row.difference.interval
        gap += f" [{low:+.2f}, {high:+.2f}]"
    return MARKS[form].format(gap) if row.difference.sure else gap


def _record(row: Row, keys: Iterable[str]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "run": row.name,
        "seeds": len(row.runs),
        "rounds": row.runs[0].summary["rounds"],
    }
    for key in keys:
        mean, deviation = row.figures.get(key, (None, None))
        record |= {key: mean, f"{key}_spread": deviation}
    gap = row.difference
    low, high = gap.interval if gap and gap.interval else (None, None)
    return record | {
        "difference": gap and gap.mean,
        "difference_from": low,
        "difference_to": high,
        "pairs": gap and gap.pairs,
        "reference": gap and gap.reference,
    }
