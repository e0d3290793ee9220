"""The page of a run, and the page that compares several runs: a single file of HTML each, from `templates/`."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, TemplateError
from markupsafe import Markup
from rich.filesize import decimal as size

from rayfed.errors import InputError
from rayfed.folder.storage import write_text
from rayfed.grid import spread
from rayfed.job import MEASURE, flat
from rayfed.metrics import rounds_to_target
from rayfed.report import figures
from rayfed.report.clients import divergence, in_out, local
from rayfed.report.read import Group, Run, forgotten, grouped, read_run, shorten
from rayfed.report.svg import look, svg

MOST_ROWS = 50  # of a table of classes or clients
FORGETTING = "The accuracy lost since each class's best earlier round, on average. Below 0, this round is the best yet."
NOT_ALL = (
    " Only some rounds were evaluated, each with a point; the lines between points show no measurement. "
    "Forgetting looks back at multiples of train.eval_every only."
)
LOCAL_MODELS = {  # figures of what a job has measured, with their captions
    local: "The global model and the clients' models after training, on test images of all classes.",
    in_out: "On test images distributed as the client's labels (in-local), and as their reverse (out-local).",
    divergence: "Each point is a client in a round, the darker the later. Weight divergence: how far its training "
    "moved the parameters. Distribution distance: of the global model's class accuracies, scaled to sum to 1, from "
    "the client's labels.",
}
COSTS = ("seconds", "bytes_down", "bytes_up")
MEASURED = ("local.", "drift.")  # beginnings of notes
HASHES = {"hash of the data": "data", "hash of the partition": "partition"}  # and their keys in environment.json
VARIED = ("seed", "data.partition.seed", "hash of the partition")  # may differ between the runs of a group
STRICT: Any = {"autoescape": True, "undefined": StrictUndefined}
TEMPLATES = Environment(loader=PackageLoader("rayfed.report"), trim_blocks=True, **STRICT)
TEMPLATES.globals.update(figures=figures, forgetting=FORGETTING, grouped=grouped)
TEMPLATES.filters["toml"] = lambda value: json.dumps(value, ensure_ascii=False, default=str)


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Make a run's page from its folder alone: `report.html` in it, or `path`. Raises `InputError`."""
    with legible(folder):
        page = run_page(read_run(folder))
    write_text(path := path or folder / "report.html", page)
    return path


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Make the page of several runs. The others are compared with the first. Raises `InputError`."""
    runs = []
    for folder in folders:
        with legible(folder):
            runs.append(read_run(folder))
    with legible(*folders):
        page = comparison_page(runs)
    write_text(path, page)
    return path


@contextmanager
def legible(*folders: Path) -> Iterator[None]:
    """`InputError` in place of whatever a damaged file raises while it is read and shown."""
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, TemplateError, TypeError, ValueError) as error:
        what = f"{listed(dict.fromkeys(folders))} cannot be shown, as a file in it is not as a run wrote it: {error!r}"
        raise InputError(f"{what}; put that file back, or move it away: the page does without it") from error


def run_page(run: Run) -> str:
    """Everything about a run."""
    losses = forgotten(run)
    shown = losses[:MOST_ROWS]
    more = f" The {len(shown)} of {len(losses):,} classes that lost most." if len(shown) < len(losses) else ""
    untrained = dict(zip(run.classes, run.class_accuracy[0], strict=False)) if losses else {}
    peaks = {loss.name: percent(loss.peak) + ("*" if 0 < loss.peak <= untrained[loss.name] else "") for loss in shown}
    if any(peak.endswith("*") for peak in peaks.values()):
        more += " * Not above the untrained model, which may take every image for one class."
    packages = run.environment.get("packages", {})
    return TEMPLATES.get_template("run.html").render(
        run=run,
        headline=_headline(run),
        not_all=_not_all([run]),
        classes=[[c.name, peaks[c.name], c.peak_round, percent(c.last), percent(c.lost), bar(c.lost)] for c in shown],
        more_classes=more,
        partition=_partition(run),
        clients=_clients(run),
        local_models=_local_models(run),
        environment=list({**{k: v for k, v in run.environment.items() if k != "packages"}, **packages}.items()),
    )


def card(folder: Path) -> str:
    """A run for a notebook: its numbers, and its accuracy by round. Raises `InputError`."""
    with legible(folder):
        run = read_run(folder)
        return TEMPLATES.get_template("card.html").render(run=run, headline=_headline(run), not_all=_not_all([run]))


def comparison_page(runs: Sequence[Run]) -> str:
    """The curves of all runs in the same figures, and a table that is their legend; a group's runs as one."""
    groups = grouped(runs)
    bests = [run.summary["best"]["test_accuracy"] for run in groups[0].runs if "best" in run.summary]
    target = spread(bests)[0] if bests else math.nan
    return TEMPLATES.get_template("comparison.html").render(
        runs=runs,
        groups=groups,
        looks=[look(number) for number in range(len(groups))],
        columns=["run", "seed", *(name for name, _, _ in _headline(runs[0])), "rounds to target"],
        numbers=[_numbers(group, target) for group in groups],
        statuses=[listed(dict.fromkeys(run.status for run in group.runs)) for group in groups],
        target=percent(target),
        not_all=_not_all(runs),
        differences=_differences(groups),
        partitions=[_partition_of(group) for group in groups],
        several=any(len({run.environment.get("partition") for run in group.runs}) > 1 for group in groups),
        classes=_class_losses(groups),
    )


def _numbers(group: Group, target: float) -> list[str]:
    """A group's row in the table; of several runs, means and deviations."""
    seeds = listed(run.job["seed"] for run in group.runs)
    reached = listed(rounds_to_target(run.rounds["test_accuracy"][1:], target) or "never" for run in group.runs)
    if len(group.runs) == 1:
        shown = [f"{value} ({note})" if note else value for _, value, note in _headline(group.runs[0])]
        return [seeds, *shown, reached]
    totals = [run.summary for run in group.runs]
    shares = [
        mean_percent([total[which][figure] for total in totals if which in total])
        for which, figure in (("best", "test_accuracy"), ("last", "test_accuracy"), ("last", "forgetting"))
    ]
    seconds, down, up = (int(np.mean([total.get(key, 0) for total in totals])) for key in COSTS)
    rounds = f"{totals[0]['rounds']:,}"
    return [seeds, *shares, rounds, str(timedelta(seconds=seconds)), size(down), size(up), reached]


def _differences(groups: Sequence[Group]) -> list[tuple[str, str, str]]:
    """Key, value and groups, for each key of the jobs in which runs differ, and the hashes of data and partition."""
    settings = [(name, _settings(run)) for name, of in zip(shorten(groups), groups, strict=True) for run in of.runs]
    rows: list[tuple[str, str, str]] = []
    for key in dict.fromkeys(key for _, setting in settings for key in setting):
        users: dict[str, dict[str, None]] = {}  # value -> groups, in their order
        values: dict[str, set[str]] = {}  # group -> values
        for name, setting in settings:
            users.setdefault(setting.get(key, "not set"), {})[name] = None
            values.setdefault(name, set()).add(setting.get(key, "not set"))
        inside = key not in VARIED and any(len(of) > 1 for of in values.values())
        explained = key in HASHES and any(other.startswith("data.") for other, _, _ in rows)
        if not explained and (inside or len({frozenset(of) for of in values.values()}) > 1):
            rows += [(key, value, listed(names)) for value, names in users.items()]
    return rows


def _partition_of(group: Group) -> dict[str, Any]:
    """The table [data.partition] of a group; where its runs have several values of a key (the seed), a list of them."""
    tables = [run.job["data"]["partition"] for run in group.runs]
    values = {key: [table.get(key) for table in tables] for key in tables[0]}
    return {key: of if any(value != of[0] for value in of) else of[0] for key, of in values.items()}


def _settings(run: Run) -> dict[str, str]:
    """Whatever two runs may differ in; not the method, which is shown beside, nor what changes no numbers."""
    job = flat(
        {key: value for key, value in run.job.items() if key not in ("name", "method", "ray", "output", *MEASURE)}
    )
    hashes = {name: run.environment.get(key, "unknown") for name, key in HASHES.items()}
    return {key: str(value)[:64] for key, value in {**job, **hashes}.items()}


def _class_losses(groups: Sequence[Group]) -> list[list[Any]]:
    """A row per class, the worst first: how much of it each group has lost, as the mean over its runs."""
    found: dict[str, list[list[float]]] = {}
    for number, group in enumerate(groups):
        for loss in (loss for run in group.runs for loss in forgotten(run)):
            found.setdefault(loss.name, [[] for _ in groups])[number].append(loss.lost)
    means = {name: [float(np.mean(lost)) if lost else math.nan for lost in losses] for name, losses in found.items()}
    worst = sorted(means, key=lambda name: -max(np.nan_to_num(means[name], nan=-np.inf)))[:MOST_ROWS]
    cell = Markup('<div class="lost">{}<span>{}</span></div>')
    return [[name, *(cell.format(bar(lost), percent(lost)) for lost in means[name])] for name in worst]


def _not_all(runs: Iterable[Run]) -> str:
    """What to know about rounds without evaluation; '' where there is none."""
    return NOT_ALL if any(not run.evaluated.all() for run in runs) else ""


def _headline(run: Run) -> list[tuple[str, str, str]]:
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


def _partition(run: Run) -> str:
    """The partition in a sentence; '' where it is not known."""
    counts = run.partition["count"]
    if not len(counts):
        return ""
    sizes = np.bincount(run.partition["client"], counts, run.num_clients)
    kinds = np.bincount(run.partition["client"], minlength=run.num_clients)
    return (
        f"{run.num_clients:,} clients hold {counts.sum():,} images: {sizes.min():,.0f} to {sizes.max():,.0f} each, "
        f"of {kinds.min()} to {kinds.max()} of the {len(run.classes)} classes."
    )


def _clients(run: Run) -> dict[str, Any]:
    """A sentence about the sampled clients, and a table of the slowest; nothing where no client has trained."""
    if not len(run.clients["client"]):
        return {}
    ids, index, sampled = np.unique(run.clients["client"], return_inverse=True, return_counts=True)
    columns = (run.clients[column] for column in ("num_examples", "train_loss", "seconds"))
    images, loss, seconds = (np.bincount(index, column) / sampled for column in columns)
    slowest = np.argsort(-seconds, kind="stable")[:MOST_ROWS]
    rows = [[ids[i], f"{images[i]:,.0f}", sampled[i], f"{loss[i]:.4f}", f"{seconds[i]:.2f}"] for i in slowest]
    return {
        "text": f"{len(ids):,} of {run.num_clients:,} clients were sampled, {sampled.mean():.1f} times on average.",
        "title": "All clients" if len(rows) == len(ids) else f"The {len(rows)} slowest clients",
        "rows": rows,
    }


def _local_models(run: Run) -> list[tuple[Markup, str]]:
    """The figures of measured clients that the run has numbers for, with their captions."""
    found = []
    for draw, caption in LOCAL_MODELS.items() if any(name.startswith(MEASURED) for name in run.notes) else ():
        with suppress(InputError):  # it says what is missing
            found.append((svg(draw)([run]), caption))
    return found


def bar(share: float) -> Markup:
    """A bar over a share of the width; none for an unknown or negative share."""
    return Markup(f'<div class="bar" style="width: {100 * max(np.nan_to_num(share), 0):.1f}%"></div>')


def listed(values: Iterable[object]) -> str:
    """
    >>> listed([0, 1, 1]), listed("abcdefgh")
    ('0, 1, 1', 'a, b, c, d, e, f and 2 more')
    """
    words = [str(value) for value in values]
    return ", ".join(words[:6]) + (f" and {len(words) - 6:,} more" if len(words) > 6 else "")


def percent(share: float | None) -> str:
    """
    >>> percent(0.5), percent(None)
    ('50.0%', 'n/a')
    """
    return "n/a" if share is None or np.isnan(share) else f"{100 * share:.1f}%"


def mean_percent(shares: Sequence[float]) -> str:
    """
    >>> mean_percent([0.5, 0.7]), mean_percent([0.5])
    ('60.0 ± 14.1%', '50.0%')
    """
    average, deviation = spread(shares) if shares else (math.nan, None)
    return percent(average) if deviation is None else f"{100 * average:.1f} ± {100 * deviation:.1f}%"
