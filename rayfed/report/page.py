"""The page of a run, and the page that compares several runs: a single file of HTML each, from `templates/`."""

import json
import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.filesize import decimal as size

from rayfed.folder.storage import write_text
from rayfed.metrics import rounds_to_target
from rayfed.report import figures
from rayfed.report.read import Run, forgotten, read_run

MOST_ROWS = 50  # of a table of classes or clients
FORGETTING = "The accuracy lost since each class's best earlier round, on average. Below 0, this round is the best yet."
STRICT: Any = {"autoescape": True, "undefined": StrictUndefined}
TEMPLATES = Environment(loader=PackageLoader("rayfed.report"), trim_blocks=True, **STRICT)
TEMPLATES.globals.update(figures=figures, forgetting=FORGETTING)
TEMPLATES.filters["toml"] = lambda value: json.dumps(value, ensure_ascii=False)


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Make a run's page from its folder alone: `report.html` in it, or `path`."""
    write_text(path := path or folder / "report.html", run_page(read_run(folder)))
    return path


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Make the page of several runs. The others are compared with the first."""
    write_text(path, comparison_page([read_run(folder) for folder in folders]))
    return path


def run_page(run: Run) -> str:
    """Everything about a run."""
    losses = forgotten(run)
    shown = losses[:MOST_ROWS]
    more = f" The {len(shown)} of {len(losses):,} classes that lost most." if len(shown) < len(losses) else ""
    packages = run.environment.get("packages", {})
    return TEMPLATES.get_template("run.html").render(
        run=run,
        headline=_headline(run),
        classes=[[c.name, decimal(c.peak), c.peak_round, decimal(c.last), decimal(c.lost), bar(c.lost)] for c in shown],
        more_classes=more,
        partition=_partition(run),
        clients=_clients(run),
        environment=list({**{k: v for k, v in run.environment.items() if k != "packages"}, **packages}.items()),
    )


def comparison_page(runs: Sequence[Run]) -> str:
    """The curves of all runs in the same figures, and a table that is their legend."""
    target = runs[0].summary.get("best", {}).get("test_accuracy", math.nan)
    numbers = [
        [
            *(f"{value} ({note})" if note else value for _, value, note in _headline(run)),
            rounds_to_target(run.rounds["test_accuracy"][1:], target) or "never",
        ]
        for run in runs
    ]
    return TEMPLATES.get_template("comparison.html").render(
        runs=runs,
        columns=["run", *(name for name, _, _ in _headline(runs[0])), "rounds to target"],
        numbers=numbers,
        looks=[figures.look(number) for number in range(len(runs))],
        target=decimal(target),
    )


def _headline(run: Run) -> list[tuple[str, str, str]]:
    """Name, value and note of the numbers that sum up a run."""
    total, best, last = run.summary, run.summary.get("best", {}), run.summary.get("last", {})
    return [
        ("best accuracy", decimal(best.get("test_accuracy")), f"round {best['round']}" if best else ""),
        ("last accuracy", decimal(last.get("test_accuracy")), ""),
        ("forgetting", decimal(last.get("forgetting")), ""),
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
    rows = [[ids[i], f"{images[i]:,.0f}", sampled[i], decimal(loss[i]), f"{seconds[i]:.2f}"] for i in slowest]
    return {
        "text": f"{len(ids):,} of {run.num_clients:,} clients were sampled, {sampled.mean():.1f} times on average.",
        "title": "All clients" if len(rows) == len(ids) else f"The {len(rows)} slowest clients",
        "rows": rows,
    }


def bar(share: float) -> Markup:
    """A bar over a share of the width; none for an unknown or negative share."""
    return Markup(f'<div class="bar" style="width: {100 * max(np.nan_to_num(share), 0):.1f}%"></div>')


def decimal(value: float | None) -> str:
    return "n/a" if value is None or np.isnan(value) else f"{value:.4f}"
