"""The first screen: how good it is, compared with what, what was forgotten, what it cost."""

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from rich.filesize import decimal as size

from rayfed.folder.read import ClassLoss, Group, Run, tested
from rayfed.report.forms import spread
from rayfed.report.table import Row, interval
from rayfed.report.words import isolated, listed, mean_percent, percent, points, wilson

WORST = 3  # classes
COSTS = ("seconds", "bytes_down", "bytes_up")


class Answer(NamedTuple):
    """A question with its numbers (name, value, note), and a sentence."""

    question: str
    numbers: Sequence[tuple[str, str, str]]
    text: str


def headline(run: Run) -> list[tuple[str, str, str]]:
    """Name, value and note of the numbers that sum up a run."""
    total, best, last = run.summary, run.summary.get("best", {}), run.summary.get("last", {})
    at = f"round {last['round']}" if last and last["round"] < total["rounds"] else ""
    return [
        ("best accuracy", percent(best.get("test_accuracy")), f"round {best['round']}" if best else ""),
        ("last accuracy", percent(last.get("test_accuracy")), at),
        ("forgetting", percent(last.get("forgetting")), at),
        ("rounds", f"{total['rounds']:,}", f"of {run.job['train']['num_rounds']:,}"),
        ("time", str(timedelta(seconds=int(total.get("seconds", 0)))), ""),
        ("sent to clients", size(total.get("bytes_down", 0)), ""),
        ("sent back", size(total.get("bytes_up", 0)), ""),
    ]


def of_run(run: Run, losses: Sequence[ClassLoss]) -> list[Answer]:
    """About a single run."""
    best, last, forgetting, rounds, time, down, up = headline(run)
    return [
        Answer("How good is it?", [best, last], _sure(run)),
        Answer("Compared with what?", _beside(run), "With other runs: rayfed report RUN RUN"),
        Answer("What was forgotten?", [forgetting], _worst(losses)),
        Answer("What did it cost?", [rounds, time, down, up], ""),
    ]


def _sure(run: Run) -> str:
    last, count = run.summary.get("last", {}).get("test_accuracy"), tested(run)
    if last is None or not count:
        return ""
    low, high = wilson(last, count)
    examples = f"95% interval of the last, from {count:,} test examples: {percent(low)} to {percent(high)}."
    return f"{examples} Another seed may differ by more: run several."


def _beside(run: Run) -> list[tuple[str, str, str]]:
    """A guess among the classes, and the initial model."""
    found = [("a guess", percent(1 / len(run.classes)), f"of {len(run.classes):,} classes")] if run.classes else []
    if len(run.evaluated) and run.evaluated[0]:
        found.append(("the untrained model", percent(float(run.rounds["test_accuracy"][0])), "round 0"))
    return found


def _worst(losses: Sequence[ClassLoss]) -> str:
    lost = [loss for loss in losses if loss.lost > 0]
    if not losses:
        return "Nothing can be forgotten before the second evaluated round of training."
    if not lost:
        return "No class is below its best earlier round."
    worst = (f"{isolated(c.name)}, {100 * c.lost:.1f} points since round {c.peak_round}" for c in lost[:WORST])
    return f"{len(lost):,} of {len(losses):,} classes lost accuracy, most of all {'; '.join(worst)}."


def of_groups(groups: Sequence[Group], names: Sequence[str], found: Sequence[Row] | str) -> list[Answer]:
    """About several runs; `found` are the rows of their table, or why there are none."""
    last = {name: shares for name, group in zip(names, groups, strict=True) if (shares := _of(group, "test_accuracy"))}
    lost = {name: shares for name, group in zip(names, groups, strict=True) if (shares := _of(group, "forgetting"))}
    runs = [run for group in groups for run in [*group.runs, *group.behind]]
    seconds, down, up = (int(sum(run.summary.get(key, 0) for run in runs)) for key in COSTS)
    forgotten = "Of the last evaluated round" + (
        ", averaged over seeds." if any(len(of) > 1 for of in lost.values()) else "."
    )
    spent = [("time of all runs", str(timedelta(seconds=seconds)), ""), ("sent to clients", size(down), "")]
    return [
        Answer("How good are they?", _top(last, "last accuracy"), _interval(last)),
        Answer("Compared with what?", *_gaps(found)),
        Answer("What was forgotten?", _ends(lost), forgotten),
        Answer("What did it cost?", [*spent, ("sent back", size(up), "")], f"{len(runs):,} runs; by row, see below."),
    ]


def _of(group: Group, figure: str) -> list[float]:
    return [run.summary["last"][figure] for run in group.counted if run.summary.get("last")]


def _order(known: dict[str, list[float]]) -> list[str]:
    return sorted(known, key=lambda name: -spread(known[name])[0])


def _top(known: dict[str, list[float]], words: str) -> list[tuple[str, str, str]]:
    return [(f"highest {words}", mean_percent(known[name]), name) for name in _order(known)[:1]]


def _interval(known: dict[str, list[float]]) -> str:
    if not known:
        return "No round was evaluated."
    of_top = known[_order(known)[0]]
    ends = interval(of_top)
    if ends is None:
        return "One seed each: how much of this is chance is not known."
    return f"95% interval from {len(of_top)} seeds: {percent(max(ends[0], 0.0))} to {percent(min(ends[1], 1.0))}."


def _ends(known: dict[str, list[float]]) -> list[tuple[str, str, str]]:
    names = _order(known)
    chosen = {"forgetting": names[:1]} if len(names) < 2 else {"least forgetting": names[-1:], "most": names[:1]}
    return [(words, mean_percent(known[name]), name) for words, of in chosen.items() for name in of]


def _gaps(found: Sequence[Row] | str) -> tuple[list[tuple[str, str, str]], str]:
    """The largest difference, and which of the others are not chance."""
    if isinstance(found, str):
        return [], found
    gaps = {row.name: row.difference for row in found if row.difference}
    if not gaps:
        return [], "No two rows have the same data, partition, seed and number of rounds, so none are a pair."
    name, gap = max(gaps.items(), key=lambda item: item[1].mean)
    better = [name for name, gap in gaps.items() if gap.sure and gap.mean > 0]
    worse = [name for name, gap in gaps.items() if gap.sure and gap.mean < 0]
    told = [f"{how}: {listed(map(isolated, of))}." for how, of in (("Better", better), ("Worse", worse)) if of]
    rest = len(gaps) - len(better) - len(worse)
    told += [f"Neither better nor worse for sure: {rest} of {len(gaps)}."] if rest else []
    number = (f"from {gap.reference}", f"{gap.mean:+.1f} points", name)
    if not any(gap.interval for gap in gaps.values()):
        return [number], "A single pair each, which has no interval: how much of this is chance is not known."
    pairs = f"over {gap.pairs} {'pair' if gap.pairs == 1 else 'pairs'}"
    return [number], f"{points(gap.mean, gap.interval)} {pairs}. By these intervals: {' '.join(told)}"
