"""Runs as a table, as papers print it.

A row has means over seeds, and a paired difference from FedAvg, or from the first run if there is
no FedAvg. Runs with whose weights others begin are not compared with them. Accuracies are in
percent. Two runs are a pair if they have the same data, partition, seed and number of rounds. Then
only the method, or whatever else their jobs say, differs between them.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rayfed.base.errors import InputError, did_you_mean, told
from rayfed.job import MEASURE, differences, flat
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
from rayfed.report.read import Group, Run, comes_first, grouped, shorten
from rayfed.report.words import Stat, interval, spread, stat_text

# The two runs of a pair have these in common.
PAIR = ("data", "partition", "seed", "number of rounds")
HEADS = {
    "best": "best (%)",
    "last": "last (%)",
    # If a run has fewer rounds, `_heads` says "mean of all".
    "last_10": f"mean of last {LAST} (%)",
    "forgetting": "forgetting (%)",
    **{key: in_words(key) for key in HEADLINES},
    # Only runs that measured `local` have this number.
    "personalised": f"personalised, mean of last {LAST} (%)",
}

# Rows are compared with the run of this name unless another one is named.
REFERENCE = "fedavg"
# Stands in place of the difference of runs with whose weights others begin.
BEFORE = "comes first"


@dataclass(frozen=True)
class Difference:
    """The difference of a row from its reference, in points of accuracy.

    `mean` is the mean over pairs, and `interval` its 95 % interval, which exists from 2 pairs on.
    """

    reference: str
    pairs: int
    mean: float
    interval: tuple[float, float] | None

    @property
    def sure(self) -> bool:
        """Say whether the interval excludes 0.

        >>> Difference("fedavg", 3, 2.0, (0.5, 3.5)).sure, Difference("fedavg", 1, 2.0, None).sure
        (True, False)
        """
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True)
class Row:
    """A group of runs that differ in their seeds."""

    name: str
    runs: Sequence[Run]
    # Runs that have fewer rounds than the others, so that they do not count.
    behind: Sequence[Run]
    # The numbers that all runs have, by their keys in `figures`.
    figures: dict[str, Stat]
    # Pairs of a run of the reference and a run of this row. A reference has none.
    pairs: Sequence[tuple[Run, Run]]
    # None for a reference.
    difference: Difference | None
    # If a reference is not the first row: in what it differs, so that the two are not compared.
    # `BEFORE` for runs with whose weights others begin.
    unlike: str


def rows(runs: Sequence[Run], figure: str = "last", reference: str = "") -> list[Row]:
    """Return a row for each group of runs, in the order of the runs.

    The difference of a row is in one of its `figures`, from a reference. That is the group named
    `reference`, by its name or the end of its name, if it has the pairs of a row. Otherwise it is
    the first group that has them. If no `reference` is given, it is fedavg, where that is there: so
    the end of a grid, the table and the page have one reference. A group with whose weights others
    begin is a reference only if it is named: otherwise the difference would compare training with
    what follows it. Runs without an evaluated round are left out. Raises `InputError` if no other
    is there, for a `reference` that no group has, for a run without the number `figure`, and for
    two runs in a group that are a pair: they would count as two seeds.
    """
    groups = grouped([run for run in runs if run.evaluated[1:].any()])
    if not groups:
        raise InputError(
            f"'{runs[0].folder}' has no evaluated round yet, so there is nothing to put into a "
            "table"
        )
    made: list[Row] = []
    before: list[Row] = []
    for name, group in _references_first(groups, reference):
        if _is_named(name, group, reference) or not _comes_first(group, groups):
            made.append(_row(name, group, figure, made))
        else:
            before.append(replace(_row(name, group, figure, []), unlike=BEFORE))
    order = shorten(groups)
    return sorted(made + before, key=lambda row: order.index(row.name))


def _row(name: str, group: Group, figure: str, above: Sequence[Row]) -> Row:
    """Return a group's row, compared with the first of the rows `above` it that has its pairs."""
    counted = group.counted
    _refuse_twins(counted)
    numbers = [figures(run) for run in counted]
    for run, known in zip(counted, numbers, strict=True):
        if figure not in known:
            raise lacking(run, figure)
    stats = {}
    for key in numbers[0]:
        if all(key in known for known in numbers):
            stats[key] = spread([known[key] for known in numbers])
    for reference in above:
        if reference.pairs:
            continue
        pairs = _pairs(reference.runs, counted)
        if pairs:
            gaps = [figures(run)[figure] - figures(other)[figure] for other, run in pairs]
            difference = Difference(reference.name, len(gaps), float(np.mean(gaps)), interval(gaps))
            return Row(name, counted, group.left_out, stats, pairs, difference, "")
    unlike = _unlike(above[0].runs, counted) if above else ""
    return Row(name, counted, group.left_out, stats, [], None, unlike)


def _pairs(reference: Sequence[Run], runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Return each run that has a partner in the reference, behind its partner."""
    partners = {pair_of(run): run for run in reference}
    pairs = []
    for run in runs:
        partner = partners.get(pair_of(run))
        if partner is not None:
            pairs.append((partner, run))
    return pairs


def _references_first(groups: Sequence[Group], reference: str) -> list[tuple[str, Group]]:
    """Return the groups with their names: references stand before the groups compared with them."""
    names = shorten(groups)
    named = list(zip(names, groups, strict=True))
    at_first = set()
    for name, group in named:
        if _is_named(name, group, reference or REFERENCE):
            at_first.add(name)
    if reference and not at_first:
        nearest = did_you_mean(reference, names)
        raise InputError(f"--from {reference}: no run has this name{nearest}")
    return sorted(named, key=lambda pair: pair[0] not in at_first)


def _is_named(name: str, group: Group, reference: str) -> bool:
    """Say whether a reference that is given means a group with this name."""
    ending = f"/{reference}"
    # The name may be a label, so the group's own name counts as well.
    return f"/{name}".endswith(ending) or f"/{group.name}".endswith(ending)


def _comes_first(group: Group, groups: Sequence[Group]) -> bool:
    """Say whether runs of other groups begin with the weights of a run of a group."""
    others: list[Run] = []
    for other in groups:
        if other is not group:
            others += other.runs + other.behind
    return any(comes_first(run, others) for run in group.runs + group.behind)


def figures(run: Run) -> dict[str, float]:
    """Return the numbers of an evaluated run that it has, by their keys in `HEADS` and `KEYS`.

    The accuracy on a domain has the key `domain.NAME`.
    """
    accuracy = 100 * run.rounds["test_accuracy"][run.evaluated][1:]
    numbers = {
        "best": float(accuracy.max()),
        "last": float(accuracy[-1]),
        "last_10": float(np.mean(accuracy[-LAST:])),
    }
    lost = 100 * float(run.rounds["forgetting"][run.evaluated][-1])
    if math.isfinite(lost):
        numbers["forgetting"] = lost
    if "local" in run.job["measure"] and IN_LOCAL in run.notes:
        numbers["personalised"] = personalised(run, LAST)
    numbers |= forgetting_of(run)
    for name, (_, shares) in run.round_notes.items():
        if name.startswith(DOMAIN):
            numbers[name] = 100 * float(shares[-1])
    return numbers


def lacking(run: Run, figure: str) -> InputError:
    """Return the error that says why a run has no number of this name."""
    if figure not in (*HEADS, *KEYS):
        known = {*HEADS, *KEYS} | figures(run).keys()
        near = "last" if figure in ("accuracy", "test_accuracy") else ""
        meant = did_you_mean(figure, known, near)
        message = f"'{run.folder}' has no number '{figure}'{meant}"
        if near:
            message += (
                "\n'last' is the accuracy after the last round, 'best' that of the best round"
            )
        return InputError(message)
    if figure == "personalised":
        return unmeasured(run, "local", "personalised accuracy")
    if figure == "forgetting":
        figure = "forgetting.peak"
    definition = figure.split(".")[1]
    if definition in OF_CLIENTS:
        return unmeasured(run, "confusion", "confusion matrices of clients")
    if definition == "continual" and len(run.class_rounds) > 2:
        return InputError(
            f"'{run.folder}' has no round after its first in which a class is held by none of the "
            "round's clients, so there is no forgetting.continual; forgetting.round sees every "
            "class in every round"
        )
    return InputError(
        f"'{run.folder}' has no two evaluated rounds after round 0, so nothing can be forgotten"
    )


def pair_of(run: Run) -> tuple[Any, ...]:
    """Return the values of `PAIR` for a run.

    A run that has ended early counts with the number of rounds that its job asks for.
    """
    rounds = run.summary["rounds"]
    if run.summary.get("ended_early"):
        rounds = run.job["train"]["num_rounds"]
    facts = run.environment
    return facts.get("data"), facts.get("partition"), run.job["seed"], rounds


def _refuse_twins(runs: Sequence[Run]) -> None:
    """Raise `InputError` if two of the runs agree in all of `PAIR`."""
    seen: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        other = seen.setdefault(pair_of(run), run)
        if other is not run:
            raise InputError(
                f"'{other.folder}' and '{run.folder}' have the same {', '.join(PAIR)}, "
                "so they would count as two seeds although they are one; give only one of them"
            )


def _unlike(reference: Sequence[Run], runs: Sequence[Run]) -> str:
    """Say which values of `PAIR` no run shares with a run of the reference."""
    theirs = [pair_of(run) for run in reference]
    ours = [pair_of(run) for run in runs]
    unshared = []
    for place, name in enumerate(PAIR):
        if not {pair[place] for pair in theirs} & {pair[place] for pair in ours}:
            unshared.append(name)
    return f"other {', '.join(unshared) or 'pairs of partition and seed'}"


# As text
# --------------------------------------------------------------------------------------------------


def sheet(
    runs: Sequence[Run],
    form: str,
    figure: str = "last",
    target: float | None = None,
    reference: str = "",
    columns: str | None = None,
    sort: str = "",
) -> Sheet:
    """Return the `rows` of runs in the form "text", "md", "latex" or "csv".

    With a `target`, a fraction of 1, the table also has the rounds to this accuracy, and how many
    times sooner than the reference a row reaches it. In "md" and "latex", the best among rows that
    are compared is bold. With `columns`, the lines have only these columns. With the key of a
    column in `sort`, the best row comes first. If none is the best, the smallest comes first.
    """
    made = rows(runs, figure, reference)
    heads = _heads(made, _keys(made))
    head = _all_heads(heads, figure, target)
    unasked = _unasked(made, heads, figure)
    if columns is None:
        shown = [key for key in head if key not in unasked]
    else:
        shown = _chosen(columns, head, runs[0])
    if sort:
        if sort not in head:
            raise _no_column("--sort", sort, head, runs[0])
        made = _sorted(made, sort, figure, target)
    numbers = [key for key in heads if key not in unasked]
    lines, records = [], []
    for row in made:
        line = _line(row, made, heads, form)
        record = _record(row, numbers)
        if target is not None:
            _add_target(row, target, line, record)
        lines.append([line[key] for key in shown])
        records.append(record)
    notes = _notes(made)
    if form == "csv":
        notes += _meanings(made[0].runs[0], {key: heads[key] for key in numbers})
    notes += _eval_every_note(made) + left_out(runs)
    return Sheet([head[key] for key in shown], lines, notes, records)


def _runs_of(made: Sequence[Row]) -> list[Run]:
    """Return the runs of all rows."""
    runs: list[Run] = []
    for row in made:
        runs += row.runs
    return runs


def _keys(made: Sequence[Row]) -> list[str]:
    """Return the keys of the numbers that at least one row has, in the order of the rows."""
    keys: dict[str, None] = {}
    for row in made:
        keys |= dict.fromkeys(row.figures)
    return list(keys)


def _heads(made: Sequence[Row], keys: Iterable[str]) -> dict[str, str]:
    """Return the words above the columns of numbers with these keys.

    The words of a mean say how many rounds it is of.
    """
    keys = list(keys)
    known = [key for key in HEADS if key in keys]
    known += [key for key in keys if key not in HEADS]
    counts = [rounds_of_means(run) for run in _runs_of(made)]
    heads: dict[str, str] = {}
    for key in known:
        mean = mean_of(count[key] for count in counts if key in count)
        if key == "last_10":
            heads[key] = f"{mean} (%)"
        elif key == "personalised":
            heads[key] = f"personalised, {mean} (%)"
        elif key in HEADS and key not in HEADLINES:
            heads[key] = HEADS[key]
        else:
            heads[key] = in_words(key, mean)
    return heads


def _all_heads(heads: Mapping[str, str], figure: str, target: float | None) -> dict[str, str]:
    """Return the words above all columns that a table may have, those of `heads` among them."""
    compared = figure if figure == "personalised" else heads[figure].removesuffix(" (%)")
    head = {"run": "run", "seeds": "seeds", "rounds": "rounds", **heads}
    head["difference"] = f"difference in {compared} (points)"
    head["from"] = "from"
    if target is not None:
        head["rounds_to_target"] = f"rounds to {100 * target:g} %"
        head["speed_up"] = "speed-up"
    return head


def _unasked(made: Sequence[Row], heads: Iterable[str], figure: str) -> set[str]:
    """Return the keys of the columns that a table leaves out unless they are asked for."""
    unasked = {key for key in heads if key not in (figure, *HEADS)}
    # If there is a single reference, the column of references says nothing.
    if sum(not row.pairs and row.unlike != BEFORE for row in made) < 2:
        unasked.add("from")
    return unasked


def _line(row: Row, made: Sequence[Row], heads: Iterable[str], form: str) -> dict[str, str]:
    """Return the cells of a row by the keys of their columns, without those of a target."""
    line = {"run": row.name, "seeds": str(len(row.runs)), "rounds": rounds_text(row)}
    for key in heads:
        line[key] = _cell(row, key, made, form)
    line["difference"] = _gap(row, form)
    line["from"] = row.difference.reference if row.difference else ""
    return line


def _add_target(row: Row, target: float, line: dict[str, str], record: dict[str, Any]) -> None:
    """Add to a row's line and record when its runs reach the target accuracy."""
    reached, speed_ups = _to_target(row, target)
    known = [number for number in reached if number is not None]
    line["rounds_to_target"] = _reached(reached)
    line["speed_up"] = stat_text(spread(speed_ups), 2) if speed_ups else ""
    record["reached"] = len(known)
    record["rounds_to_target"] = spread(known)[0] if len(known) == len(reached) else None
    record["speed_up"] = spread(speed_ups)[0] if speed_ups else None


def _notes(made: Sequence[Row]) -> list[str]:
    """Return the remarks on each row, then which rows have runs without a pair."""
    notes = []
    for row in made:
        notes += [f"{row.name}: {remark}" for remark in remarks(row)]
    for row in made:
        if row.difference and len(row.pairs) < len(row.runs):
            notes.append(
                f"{row.name}: {len(row.pairs)} of its {len(row.runs)} runs have a pair in "
                f"{row.difference.reference}"
            )
    return notes + _not_the_method_alone(made)


def _not_the_method_alone(made: Sequence[Row]) -> list[str]:
    """Say of each row with another method than its reference what else differs in their jobs."""
    rows_by_text: dict[str, list[str]] = {}
    for row in made:
        if not row.difference:
            continue
        # All pairs of a row have the same jobs but for their seeds.
        reference, run = row.pairs[0]
        if reference.job["method"] == run.job["method"]:
            continue
        theirs, ours = flat(protocol(reference.job)), flat(protocol(run.job))
        found = []
        for key in sorted(theirs.keys() & ours.keys()):
            # Pairs have the same partition and rounds, and methods were compared above.
            is_of_a_pair = key.startswith(("method", "data.partition", "train.num_rounds"))
            if not is_of_a_pair and theirs[key] != ours[key]:
                found.append(f"{key} = {told(ours[key])} and not {told(theirs[key])}")
        if found:
            text = f"not only another method than {row.difference.reference}: {', '.join(found)}"
            rows_by_text.setdefault(text, []).append(row.name)
    return [f"{', '.join(names)}: {text}" for text, names in rows_by_text.items()]


def _meanings(run: Run, heads: Mapping[str, str]) -> list[str]:
    """Say for comma-separated values which rounds a mean is of, where the key does not say it."""
    means = rounds_of_means(run)
    notes = []
    for key, head in heads.items():
        if key in means and f"last {LAST} (" not in head:
            notes.append(f"{key}: {head.removesuffix(' (%)')}")
    return notes


def _eval_every_note(made: Sequence[Row]) -> list[str]:
    """Say if the runs differ in how often they were evaluated."""
    periods = sorted({run.eval_every for run in _runs_of(made)})
    if len(periods) < 2:
        return []
    values = " and ".join(map(str, periods))
    return [f"train.eval_every is {values}: best, the mean of the last and forgetting depend on it"]


def _sorted(made: Sequence[Row], key: str, figure: str, target: float | None) -> list[Row]:
    """Return the rows sorted by a column, the best first.

    Rows without the number come last. Equal rows keep their order.
    """
    known, without = [], []
    for row in made:
        number = _sortable(row, key, figure, target)
        if number is None:
            without.append(row)
        else:
            known.append((number, row))
    return [row for _, row in sorted(known, key=lambda pair: pair[0])] + without


def _sortable(row: Row, key: str, figure: str, target: float | None) -> Any:
    """Return what a row is sorted by, the smallest first; None if the row has no number.

    If a higher number is better, this is its negative.
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
        # The difference of a reference from itself is 0.
        gap = row.difference.mean if row.difference else 0.0
        return gap if figure.startswith("forgetting") else -gap
    if key in ("rounds_to_target", "speed_up") and target is not None:
        return _sortable_target(row, key, target)
    if key not in row.figures:
        return None
    mean = row.figures[key][0]
    return mean if key.startswith("forgetting") else -mean


def _sortable_target(row: Row, key: str, target: float) -> Any:
    """Return what a row is sorted by in a column of the target; None if it is not reached."""
    reached, speed_ups = _to_target(row, target)
    if key == "speed_up":
        return -spread(speed_ups)[0] if speed_ups else None
    known = [number for number in reached if number is not None]
    # A row with runs that do not reach the target comes after the rows that reach it, however early
    # the other runs of the row are there.
    return (len(reached) - len(known), spread(known)[0]) if known else None


def _no_column(option: str, key: str, head: Mapping[str, str], run: Run) -> InputError:
    """Return the error that says why the table has no column of this name, and what would help."""
    if key in (*HEADS, *KEYS):
        return lacking(run, key)
    if key in ("rounds_to_target", "speed_up"):
        return InputError(f"{option} {key}: give the accuracy to reach too, such as --target 0.5")
    return InputError(f"{option}: the table has no column '{key}'{did_you_mean(key, head)}")


def _chosen(columns: str, head: Mapping[str, str], run: Run) -> list[str]:
    """Return the keys of the columns that a list names."""
    keys = [key.strip() for key in columns.split(",")]
    for key in keys:
        if key not in head:
            raise _no_column("--columns", key, head, run)
        if keys.count(key) > 1:
            raise InputError(f"--columns: '{key}' is there twice; name each column once")
    return keys if "run" in keys else ["run", *keys]


def _cell(row: Row, key: str, made: Sequence[Row], form: str) -> str:
    """Return a number of a row, which is bold in a paper's form if it is the best.

    It is the best of the rows that are compared with it. Equal numbers, as printed, are all the
    best. A mean over seeds is bold only where it stands out.
    """
    if key not in row.figures:
        return ""
    text = stat_text(row.figures[key], 2)
    if form not in ("md", "latex"):
        return text
    stats = [rival.figures[key] for rival in _rivals(row, made) if key in rival.figures]
    means = [round(mean, 2) for mean, _ in stats]
    best = min(means) if key.startswith("forgetting") else max(means)
    is_best = len(means) > 1 and round(row.figures[key][0], 2) == best
    if is_best and _stands_out(row.figures[key], stats):
        return MARKS[form].format(text)
    return text


def _rivals(row: Row, made: Sequence[Row]) -> list[Row]:
    """Return the rows that have the same reference, and the reference; the row itself is there."""
    name = row.difference.reference if row.difference else row.name
    rivals = []
    for other in made:
        reference = other.difference.reference if other.difference else None
        if name in (other.name, reference):
            rivals.append(other)
    return rivals


def _stands_out(stat: Stat, among: Sequence[Stat]) -> bool:
    """Say whether a mean differs from each other mean by more than both deviations over seeds.

    Two single seeds have no deviations: nothing is known against their difference.
    """
    for other in among:
        deviations = [deviation for _, deviation in (stat, other) if deviation is not None]
        if other is not stat and deviations and abs(stat[0] - other[0]) <= max(deviations):
            return False
    return True


def protocol(job: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a job's tables that a number depends on, without the seed."""
    left_out = ("name", "seed", "ray", "output", *MEASURE)
    tables = {key: value for key, value in job.items() if key not in left_out}
    tables["data"] = {key: value for key, value in job["data"].items() if key != "root"}
    return tables


def remarks(row: Row) -> list[str]:
    """Return what the numbers of a row do not say."""
    notes = [f"its runs differ in more than their seeds: {text}" for text in _mixed(row.runs)]
    warnings = [run.summary.get("no_better_than_a_guess") for run in row.runs]
    for warning in dict.fromkeys(filter(None, warnings)):
        count = warnings.count(warning)
        among = f" (so {count} of {len(warnings)} runs)" if len(warnings) > 1 else ""
        notes.append(f"{warning}{among}")
    if row.behind:
        names = ", ".join(f"{run.folder} ({run.summary['rounds']})" for run in row.behind)
        notes.append(f"runs with fewer rounds are left out: {names}")
    return notes


def _mixed(runs: Sequence[Run]) -> list[str]:
    """Return in what the jobs of a row's runs differ, except for the seeds; each text once."""
    jobs = [copy.deepcopy(protocol(run.job)) for run in runs]
    for job in jobs:
        # The runs of a row have played the same number of rounds, or they ended early.
        job["train"].pop("num_rounds")
        job["data"]["partition"].pop("seed", None)
    mixed: dict[str, None] = {}
    for job in jobs[1:]:
        mixed |= dict.fromkeys(differences(jobs[0], job, "in one run", "in another"))
    return list(mixed)


def left_out(runs: Sequence[Run]) -> list[str]:
    """Return a note for each run that has no row."""
    return [
        f"{run.folder} is left out: no round has been evaluated yet"
        for run in runs
        if not run.evaluated[1:].any()
    ]


def rounds_text(row: Row) -> str:
    """Return the rounds that a row's runs have played.

    If their job asks for more rounds, the text says how many.
    """
    played = sorted({run.summary["rounds"] for run in row.runs})
    wanted = row.runs[0].job["train"]["num_rounds"]
    rounds = str(played[0]) if len(played) == 1 else f"{played[0]} to {played[-1]}"
    return rounds if played[-1] == wanted else f"{rounds} of {wanted}"


def accuracies(run: Run) -> np.ndarray:
    """Return the accuracies (T,) after rounds 1 to T.

    A round without an evaluation has nan, which reaches no target.
    """
    return run.rounds["test_accuracy"][1:]


def _to_target(row: Row, target: float) -> tuple[list[int | None], list[float]]:
    """Return each run's first evaluated round with this accuracy, and the speed-up of each pair.

    If one pair has no speed-up, none is returned.
    """
    reached = [metrics.rounds_to_target(accuracies(run), target) for run in row.runs]
    speed_ups = []
    for other, run in row.pairs:
        speed_up = metrics.speed_up(accuracies(run), accuracies(other), target)
        if speed_up is None:
            return reached, []
        speed_ups.append(speed_up)
    return reached, speed_ups


def _reached(rounds: Sequence[int | None]) -> str:
    """Return the mean of the rounds in which runs reached the target, or how many reached it.

    >>> _reached([3, 5]), _reached([3, None]), _reached([None])
    ('4.0 ± 1.4', 'reached by 1 of 2', 'not reached')
    """
    known = [number for number in rounds if number is not None]
    if len(known) < len(rounds):
        return f"reached by {len(known)} of {len(rounds)}" if known else "not reached"
    return stat_text(spread(known), 1)


def _gap(row: Row, form: str) -> str:
    """Return a row's difference with its interval; for a reference, that it is one."""
    if row.difference is None:
        return row.unlike or "reference"
    gap = f"{row.difference.mean:+.2f}"
    if row.difference.interval is not None:
        low, high = row.difference.interval
        gap += f" [{low:+.2f}, {high:+.2f}]"
    return MARKS[form].format(gap) if row.difference.sure else gap


def _record(row: Row, keys: Iterable[str]) -> dict[str, Any]:
    """Return a row's numbers for other programs by the names of their columns.

    A number that does not exist is None.
    """
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
