"""The summary at the top of a page: accuracy, baseline, forgetting and cost."""

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from rich.filesize import decimal as size

from rayfed.report.forms import HEADLINES, in_words, mean_of
from rayfed.report.measured import forgetting_of, rounds_of_means
from rayfed.report.read import ClassLoss, Group, Run
from rayfed.report.table import Difference, Row
from rayfed.report.words import in_sentence, interval, listed, mean_percent, percent, spread

# Most classes that the answer on forgetting names.
WORST = 3
MEANING = "Mean over classes: accuracy lost since the best earlier round."
COSTS = ("seconds", "bytes_down", "bytes_up")
# Name, value, note.
Number = tuple[str, str, str]


class Answer(NamedTuple):
    """A question with its numbers and a sentence."""

    question: str
    numbers: Sequence[Number]
    text: str


def shared(runs: Sequence[Run]) -> str:
    """Return the key of the forgetting to show: the first of `HEADLINES` that all runs have."""
    known = [forgetting_of(run) for run in runs]
    for key in HEADLINES:
        if all(key in numbers for numbers in known):
            return key
    return HEADLINES[-1]


def headline(run: Run) -> list[Number]:
    """Return the numbers that sum up a run, as the terminal has them."""
    summary = run.summary
    best = summary.get("best", {})
    last_round = summary.get("last", {})
    at_last = ""
    if last_round and last_round["round"] < summary["rounds"]:
        at_last = f"round {last_round['round']}"
    at_best = f"round {best['round']}" if best else ""
    return [
        ("best accuracy", percent(best.get("test_accuracy")), at_best),
        ("last accuracy", percent(last_round.get("test_accuracy")), at_last),
        ("forgetting", percent(last_round.get("forgetting")), at_last),
        ("rounds", f"{summary['rounds']:,}", f"of {run.job['train']['num_rounds']:,}"),
        ("time", str(timedelta(seconds=int(summary.get("seconds", 0)))), ""),
        ("sent to clients", size(summary.get("bytes_down", 0)), ""),
        ("sent back", size(summary.get("bytes_up", 0)), ""),
    ]


def headline_of_key(run: Run, key: str) -> Number:
    """Return the forgetting of this key, with the rounds that a mean is of."""
    lost = forgetting_of(run).get(key, math.nan) / 100
    counts = rounds_of_means(run)
    means = mean_of([counts[key]]) if key in counts else ""
    name = in_words(key).partition(" (")[0].partition(",")[0]
    return (name, percent(lost), means)


def of_run(run: Run, losses: Sequence[ClassLoss]) -> list[Answer]:
    """Return the answers about a single run."""
    numbers = headline(run)
    accuracy = numbers[:2]
    forgetting = numbers[2:3]
    costs = [*numbers[3:], *_privacy(run)]
    others = f"With other runs: rayfed report {run.name} OTHER"
    return [
        Answer("How good is it?", accuracy, _how_good(run)),
        Answer("Compared with what?", _untrained(run), others),
        Answer("What was forgotten?", forgetting, _worst(losses)),
        Answer("What did it cost?", costs, ""),
    ]


def _privacy(run: Run) -> list[Number]:
    """Return the epsilon of a private average after the last round; nothing where there is none."""
    notes = run.round_notes
    if "privacy.epsilon" not in notes:
        return []
    rounds, values = notes["privacy.epsilon"]
    is_simulated = bool(notes["privacy.simulation"][1][-1])
    after = "a simulation, not private" if is_simulated else f"after round {rounds[-1]}"
    return [("epsilon", f"{values[-1]:,.2f}", after)]


def _how_good(run: Run) -> str:
    """Say that a run is no better than a guess, and what to try; else that it is a single seed."""
    warning = run.summary.get("no_better_than_a_guess", "")
    if warning:
        return f"{warning[:1].upper()}{warning[1:]}."
    return "Another seed gives other numbers: run several."


def _untrained(run: Run) -> list[Number]:
    """Return the accuracies of a guess among the classes, and of the initial model."""
    numbers = []
    if "guess" in run.summary:
        numbers.append(("a guess", percent(run.summary["guess"]), "always the most frequent class"))
    elif run.classes:
        count = len(run.classes)
        numbers.append(("a guess", percent(1 / count), f"of {count:,} classes"))
    if len(run.evaluated) and run.evaluated[0]:
        accuracy = float(run.rounds["test_accuracy"][0])
        numbers.append(("the untrained model", percent(accuracy), "round 0"))
    return numbers


def _worst(losses: Sequence[ClassLoss]) -> str:
    """Say what forgetting is, and name the classes that lost most accuracy."""
    if not losses:
        return "Nothing can be forgotten before the second evaluated round of training."
    lost = [loss for loss in losses if loss.lost > 0]
    if not lost:
        return f"{MEANING} No class is below its best earlier round."
    worst = []
    for loss in lost[:WORST]:
        points = f"{100 * loss.lost:.1f} points since round {loss.peak_round}"
        worst.append(f"{in_sentence(loss.name)}, {points}")
    count = f"{len(lost):,} of {len(losses):,} classes lost accuracy"
    return f"{MEANING} {count}, most of all {'; '.join(worst)}."


def of_groups(
    groups: Sequence[Group], names: Sequence[str], rows: Sequence[Row] | str
) -> list[Answer]:
    """Return the answers about several runs, by the rows of their table, or why there are none."""
    runs: list[Run] = []
    counted: list[Run] = []
    for group in groups:
        runs += group.runs + group.behind
        counted += group.counted
    key = shared(counted)
    counts = [rounds_of_means(run) for run in counted]
    words = in_words(key, mean_of(of_run[key] for of_run in counts if key in of_run))
    accuracies = [_last_accuracies(group) for group in groups]
    forgetting = [headlines(group, key) for group in groups]
    return [
        _best(_sorted(names, accuracies)),
        _compared(rows),
        _most_forgotten(_sorted(names, forgetting), words),
        Answer("What did it cost?", _costs(runs), f"{len(runs):,} runs; by row, see below."),
    ]


def _last_accuracies(group: Group) -> list[float]:
    """Return the last accuracies of the runs of a group that have one."""
    rounds = [run.summary.get("last") for run in group.counted]
    return [last_round["test_accuracy"] for last_round in rounds if last_round]


def _costs(runs: Sequence[Run]) -> list[Number]:
    """Return the time and the bytes of all runs together."""
    totals = {}
    for key in COSTS:
        totals[key] = int(sum(run.summary.get(key, 0) for run in runs))
    return [
        ("time of all runs", str(timedelta(seconds=totals["seconds"])), ""),
        ("sent to clients", size(totals["bytes_down"]), ""),
        ("sent back", size(totals["bytes_up"]), ""),
    ]


def headlines(group: Group, key: str) -> list[float]:
    """Return the forgetting of this key for the runs of a group that have it."""
    of_runs = [forgetting_of(run) for run in group.counted]
    return [known[key] / 100 for known in of_runs if key in known]


def _sorted(names: Sequence[str], values: Sequence[list[float]]) -> list[tuple[str, list[float]]]:
    """Return groups' names and their runs' values, the highest mean first."""
    ranked = [(name, of_runs) for name, of_runs in zip(names, values, strict=True) if of_runs]
    return sorted(ranked, key=lambda pair: -spread(pair[1])[0])


def _best(ranked: list[tuple[str, list[float]]]) -> Answer:
    """Name the group with the highest last accuracy."""
    question = "How good are they?"
    if not ranked:
        return Answer(question, [], "No round was evaluated.")
    name, shares = ranked[0]
    numbers = [("highest last accuracy", mean_percent(shares), name)]
    ends = interval(shares)
    if ends is None:
        return Answer(question, numbers, "One seed each: how much of this is chance is not known.")
    low = percent(max(ends[0], 0.0))
    high = percent(min(ends[1], 1.0))
    return Answer(question, numbers, f"95% interval from {len(shares)} seeds: {low} to {high}.")


def _most_forgotten(ranked: list[tuple[str, list[float]]], measure: str) -> Answer:
    """Name the groups that have forgotten least and most."""
    if len(ranked) < 2:
        named = [("forgetting", pair) for pair in ranked]
    else:
        named = [("least forgetting", ranked[-1]), ("most", ranked[0])]
    numbers = [(words, mean_percent(shares), name) for words, (name, shares) in named]
    several = any(len(shares) > 1 for _, shares in ranked)
    text = measure.capitalize() + (", averaged over seeds." if several else ".")
    return Answer("What was forgotten?", numbers, text)


def _compared(rows: Sequence[Row] | str) -> Answer:
    """Return the largest difference, and say which differences are unlikely to be chance."""
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
    # A reader may remember only the large number, so the doubt stands next to it.
    shown = points if gap.sure else f"{points}, may be chance"
    numbers = [(f"from {gap.reference}", shown, name)]
    pairs = f"{gap.pairs} {'pair' if gap.pairs == 1 else 'pairs'}"
    if gap.interval:
        low, high = gap.interval
        text = f"95% interval from {pairs}: {low:+.1f} to {high:+.1f} points."
    else:
        text = f"From {pairs}, which has no interval."
    return Answer(question, numbers, text + _verdicts(gaps))


def _verdicts(gaps: Mapping[str, Difference]) -> str:
    """Name the rows that are better and worse by the intervals, and count the others."""
    text = ""
    better = [in_sentence(name) for name, gap in gaps.items() if gap.sure and gap.mean > 0]
    worse = [in_sentence(name) for name, gap in gaps.items() if gap.sure and gap.mean < 0]
    unsure = len(gaps) - len(better) - len(worse)
    if better:
        text += f" Better, by the intervals: {listed(better)}."
    if worse:
        text += f" Worse, by the intervals: {listed(worse)}."
    if unsure:
        text += f" Differences that may be chance: {unsure} of {len(gaps)}."
    return text
