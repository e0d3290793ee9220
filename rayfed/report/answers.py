"""The first screen: how good it is, compared with what, what was forgotten, what it cost."""

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from rich.filesize import decimal as size

from rayfed.report.forms import HEADLINES, in_words, mean_of
from rayfed.report.measured import forgetting_of, rounds_of_means
from rayfed.report.read import ClassLoss, Group, Run
from rayfed.report.table import Row
from rayfed.report.words import in_sentence, interval, listed, mean_percent, percent, spread

# Classes
WORST = 3
COSTS = ("seconds", "bytes_down", "bytes_up")
# Name, value, note.
Number = tuple[str, str, str]


class Answer(NamedTuple):
    """A question with its numbers, and a sentence."""

    question: str
    numbers: Sequence[Number]
    text: str


def shared(runs: Sequence[Run]) -> str:
    """The forgetting to tell of runs: the first of `HEADLINES` that all of them have."""
    known = [forgetting_of(run) for run in runs]
    return next((key for key in HEADLINES if all(key in each for each in known)), HEADLINES[-1])


def headline(run: Run, key: str) -> list[Number]:
    """The numbers that sum up a run, with the forgetting of this key."""
    total = run.summary
    told = forgetting_of(run).get(key, math.nan) / 100
    best, last = total.get("best", {}), total.get("last", {})
    counts = rounds_of_means(run)
    means = mean_of([counts[key]]) if key in counts else ""
    at_last = f"round {last['round']}" if last and last["round"] < total["rounds"] else ""
    return [
        (
            "best accuracy",
            percent(best.get("test_accuracy")),
            f"round {best['round']}" if best else "",
        ),
        ("last accuracy", percent(last.get("test_accuracy")), at_last),
        (in_words(key).partition(" (")[0].partition(",")[0], percent(told), means),
        ("since the peak", percent(last.get("forgetting")), at_last),
        ("rounds", f"{total['rounds']:,}", f"of {run.job['train']['num_rounds']:,}"),
        ("time", str(timedelta(seconds=int(total.get("seconds", 0)))), ""),
        ("sent to clients", size(total.get("bytes_down", 0)), ""),
        ("sent back", size(total.get("bytes_up", 0)), ""),
    ]


def of_run(run: Run, losses: Sequence[ClassLoss]) -> list[Answer]:
    """About a single run."""
    best, last, told, since_peak, *costs = headline(run, shared([run]))
    return [
        Answer("How good is it?", [best, last], _how_good(run)),
        Answer("Compared with what?", _untrained(run), "With other runs: rayfed report RUN RUN"),
        Answer("What was forgotten?", [told, since_peak], _worst(losses)),
        Answer("What did it cost?", costs, ""),
    ]


def _how_good(run: Run) -> str:
    """That a run is no better than a guess, and what to try; of others, that they are a single
    seed.
    """
    warning = run.summary.get("no_better_than_a_guess", "")
    if warning:
        return f"{warning[:1].upper()}{warning[1:]}."
    return "Another seed gives other numbers: run several."


def _untrained(run: Run) -> list[Number]:
    """A guess among the classes, and the initial model."""
    numbers = []
    if "guess" in run.summary:
        numbers.append(("a guess", percent(run.summary["guess"]), "always the most frequent class"))
    elif run.classes:
        numbers.append(
            ("a guess", percent(1 / len(run.classes)), f"of {len(run.classes):,} classes")
        )
    if len(run.evaluated) and run.evaluated[0]:
        numbers.append(
            ("the untrained model", percent(float(run.rounds["test_accuracy"][0])), "round 0")
        )
    return numbers


def _worst(losses: Sequence[ClassLoss]) -> str:
    lost = [loss for loss in losses if loss.lost > 0]
    if not losses:
        return "Nothing can be forgotten before the second evaluated round of training."
    if not lost:
        return "No class is below its best earlier round."
    worst = (
        f"{in_sentence(c.name)}, {100 * c.lost:.1f} points since round {c.peak_round}"
        for c in lost[:WORST]
    )
    return (
        f"{len(lost):,} of {len(losses):,} classes lost accuracy, most of all {'; '.join(worst)}."
    )


def of_groups(
    groups: Sequence[Group], names: Sequence[str], rows: Sequence[Row] | str
) -> list[Answer]:
    """About several runs, by the rows of their table, or why there are none."""
    runs = [run for group in groups for run in [*group.runs, *group.behind]]
    key = shared([run for group in groups for run in group.counted])
    lasts = [
        [run.summary["last"]["test_accuracy"] for run in of.counted if run.summary.get("last")]
        for of in groups
    ]
    seconds, down, up = (int(sum(run.summary.get(key, 0) for run in runs)) for key in COSTS)
    costs = [
        ("time of all runs", str(timedelta(seconds=seconds)), ""),
        ("sent to clients", size(down), ""),
        ("sent back", size(up), ""),
    ]
    counts = [rounds_of_means(run) for group in groups for run in group.counted]
    words = in_words(key, mean_of(of_run[key] for of_run in counts if key in of_run))
    return [
        _best(_sorted(names, lasts)),
        _compared(rows),
        _most_forgotten(_sorted(names, [headlines(group, key) for group in groups]), words),
        Answer("What did it cost?", costs, f"{len(runs):,} runs; by row, see below."),
    ]


def headlines(group: Group, key: str) -> list[float]:
    """The forgetting of this key, of the runs of a group that have it."""
    of_runs = [forgetting_of(run) for run in group.counted]
    return [known[key] / 100 for known in of_runs if key in known]


def _sorted(names: Sequence[str], values: Sequence[list[float]]) -> list[tuple[str, list[float]]]:
    """Groups' names and their runs' values, the highest mean first."""
    ranked = [(name, of_runs) for name, of_runs in zip(names, values, strict=True) if of_runs]
    return sorted(ranked, key=lambda pair: -spread(pair[1])[0])


def _best(ranked: list[tuple[str, list[float]]]) -> Answer:
    question = "How good are they?"
    if not ranked:
        return Answer(question, [], "No round was evaluated.")
    name, shares = ranked[0]
    numbers = [("highest last accuracy", mean_percent(shares), name)]
    ends = interval(shares)
    if ends is None:
        return Answer(question, numbers, "One seed each: how much of this is chance is not known.")
    low, high = percent(max(ends[0], 0.0)), percent(min(ends[1], 1.0))
    return Answer(question, numbers, f"95% interval from {len(shares)} seeds: {low} to {high}.")


def _most_forgotten(ranked: list[tuple[str, list[float]]], what: str) -> Answer:
    ends = (
        {"forgetting": ranked}
        if len(ranked) < 2
        else {"least forgetting": ranked[-1:], "most": ranked[:1]}
    )
    numbers = [
        (words, mean_percent(shares), name) for words, of in ends.items() for name, shares in of
    ]
    several = any(len(shares) > 1 for _, shares in ranked)
    text = f"{what.capitalize()}" + (", averaged over seeds." if several else ".")
    return Answer("What was forgotten?", numbers, text)


def _compared(rows: Sequence[Row] | str) -> Answer:
    """The largest difference, and which of the others are not chance."""
    question = "Compared with what?"
    if isinstance(rows, str):
        return Answer(question, [], rows)
    gaps = {row.name: row.difference for row in rows if row.difference}
    if not gaps:
        text = (
            "No two rows have the same data, partition, seed and number of rounds, so none are a "
            "pair."
        )
        return Answer(question, [], text)
    name, gap = max(gaps.items(), key=lambda item: item[1].mean)
    points = f"{gap.mean:+.1f} points"
    if not any(gap.interval for gap in gaps.values()):
        text = "A single pair each, which has no interval: how much of this is chance is not known."
        return Answer(question, [(f"from {gap.reference}", points, name)], text)
    # A reader may take only the large number home, so the doubt stands beside it.
    shown = points if gap.sure else f"{points}, may be chance"
    numbers = [(f"from {gap.reference}", shown, name)]
    pairs = f"{gap.pairs} {'pair' if gap.pairs == 1 else 'pairs'}"
    if gap.interval:
        text = (
            f"95% interval from {pairs}: {gap.interval[0]:+.1f} to {gap.interval[1]:+.1f} points."
        )
    else:
        text = f"From {pairs}, which has no interval."
    better = [in_sentence(name) for name, gap in gaps.items() if gap.sure and gap.mean > 0]
    worse = [in_sentence(name) for name, gap in gaps.items() if gap.sure and gap.mean < 0]
    unsure = len(gaps) - len(better) - len(worse)
    if better:
        text += f" Better, by the intervals: {listed(better)}."
    if worse:
        text += f" Worse, by the intervals: {listed(worse)}."
    if unsure:
        text += f" Differences that may be chance: {unsure} of {len(gaps)}."
    return Answer(question, numbers, text)
