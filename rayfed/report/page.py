"""The page of a run, and the page of several beside one another: one file of HTML that needs nothing else.

Whatever a run's files say is text: `tag` escapes it, and the page's policy forbids scripts and anything from elsewhere.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rayfed.display import duration
from rayfed.metrics import rounds_to_target
from rayfed.report import ClassLoss, Run, figures, forgotten, read_run
from rayfed.storage import whole

MOST_ROWS = 50  # of a table of classes or clients
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60666d; --line: #dfe2e6; --paper: #fff; --tint: #f4f6f8;
  --mark: #d55e00aa; --good: #0a7d5a; --bad: #c2410c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --soft: #9aa2ab; --line: #343a41; --paper: #14171a;
  --tint: #1e2327; --mark: #d55e00cc; --good: #3ecf9b; --bad: #fb923c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2.5rem 1.5rem 4rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0; font-size: 2rem; line-height: 1.2; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { margin: 3.2rem 0 .4rem; padding-top: .9rem; border-top: 1px solid var(--line); font-size: 1.3rem; }
p { margin: .4rem 0; max-width: 46rem; }
.soft, figcaption, dt { color: var(--soft); }
.status { margin-left: .8rem; padding: .1rem .6rem; border: 1px solid; border-radius: 1rem; vertical-align: middle;
  font-size: .85rem; font-weight: 500; letter-spacing: 0; color: var(--good); }
.status.failed, .status.stopped, .status.running { color: var(--bad); }
dl { display: flex; flex-wrap: wrap; gap: 1px; margin: 1.6rem 0 0; border: 1px solid var(--line);
  background: var(--line); }
dl div { flex: 1 1 7.4rem; padding: .7rem .9rem; background: var(--paper); }
dt { font-size: .8rem; }
dd { margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
dd small { display: block; font-size: .8rem; font-weight: 400; color: var(--soft); }
figure { margin: 1.4rem 0; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: inherit !important; }
figcaption { max-width: 46rem; font-size: .9rem; }
table { width: 100%; margin: 1.2rem 0; border-collapse: collapse; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
caption { padding-bottom: .4rem; text-align: left; color: var(--soft); }
th { font-weight: 600; text-align: left; vertical-align: bottom; }
th, td { padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--line); }
td { overflow-wrap: anywhere; vertical-align: top; }
tr { break-inside: avoid; }
.number { text-align: right; }
td.number { white-space: nowrap; }
.bar { height: 1rem; margin: .2rem 0; background: var(--mark); }
th:empty { width: 40%; }
.run { display: flex; align-items: center; gap: .6rem; min-width: 9rem; }
.swatch { flex: 0 0 2rem; height: .75rem; }
pre, code { font: .85rem/1.5 ui-monospace, "Cascadia Mono", Menlo, Consolas, monospace; }
.job { columns: 24rem 2; column-gap: 2.5rem; }
.job code { display: block; margin-bottom: 1.2rem; break-inside: avoid; }
pre { padding: 1rem 1.2rem; background: var(--tint); white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --line: #ccc; --paper: #fff; --tint: #f4f4f4; }
  html { font-size: 75%; print-color-adjust: exact; } body { padding: 0; max-width: none; }
  h2, .soft { break-after: avoid; } }
"""


class Html(str):
    """Text that is HTML already; any other is escaped where it enters some."""


def tag(name: str, *children: str, **attributes: str) -> Html:
    """An element; `class_` is its attribute `class`.

    >>> print(tag("td", "a < b", tag("b", "c"), class_="number"))
    <td class="number">a &lt; b<b>c</b></td>
    """
    given = "".join(f' {key.rstrip("_")}="{html.escape(value)}"' for key, value in attributes.items())
    inner = "".join(child if isinstance(child, Html) else html.escape(child) for child in children)
    return Html(f"<{name}{given}>{inner}</{name}>")


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Make a run's page anew, from its folder alone: `report.html` in it, or `path`."""
    return _write(run_page(read_run(folder)), path or folder / "report.html")


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Make the page of several runs; the first is what the others are measured by."""
    return _write(comparison_page([read_run(folder) for folder in folders]), path)


def _write(text: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as aside:
        aside.write_text(text, encoding="utf-8")
    return path


# Pages ---------------------------------------------------------------------------------------------------------------


def page(title: str, *body: Html) -> str:
    head = (
        Html(f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    return f"<!DOCTYPE html>\n{tag('html', tag('head', *head), tag('body', *body), lang='en')}\n"


def run_page(run: Run) -> str:
    """Everything there is to say about a run."""
    sections = (header(run), *progress(run), *what_was_forgotten(run), *partition(run), *clients(run), *origin(run))
    return page(f"{run.name}: rayfed", *sections)


def comparison_page(runs: Sequence[Run]) -> str:
    """Curves over one another, and a table that is their legend."""
    target = best(runs[0]).get("test_accuracy", math.nan)
    names = [tag("div", swatch(number), tag("b", run.name), class_="run") for number, run in enumerate(runs)]
    columns = ["run", *(name for name, _, _ in headline(runs[0])), "rounds to target"]
    rows = [
        [
            name,
            *(f"{value} ({note})" if note else value for _, value, note in headline(run)),
            str(rounds_to_target(run.rounds["test_accuracy"][1:], target) or "never"),
        ]
        for name, run in zip(names, runs, strict=True)
    ]
    about = [[name, run.status, method(run.job["method"])] for name, run in zip(names, runs, strict=True)]
    return page(
        "comparison: rayfed",
        tag("h1", f"{len(runs)} runs compared"),
        table(columns, rows, caption=f"The target is the best accuracy of the first run, {decimal(target)}."),
        heading("Accuracy and loss"),
        figure(figures.progress(runs), "Each line is a run, in its colour in the table; round 0 is the initial model."),
        heading("Forgetting"),
        figure(figures.forgetting(runs), FORGETTING),
        heading("Methods"),
        table(["run", "status", "method"], about, words=3),
    )


# Sections of a run's page --------------------------------------------------------------------------------------------

FORGETTING = (
    "How far the classes are below their best earlier accuracy, on average: 0 is nothing forgotten, "
    "below 0 the model of that round is the best yet."
)


def header(run: Run) -> Html:
    tiles = [
        tag("div", tag("dt", name), tag("dd", value, *([tag("small", note)] if note else [])))
        for name, value, note in headline(run)
    ]
    return tag(
        "header",
        tag("h1", run.name, tag("span", run.status, class_=f"status {run.status}")),
        tag("p", method(run.job["method"])),
        *([tag("pre", run.error)] if run.error else []),
        tag("dl", *tiles),
    )


def headline(run: Run) -> list[tuple[str, str, str]]:
    """Name, value and note of the numbers that sum up a run."""
    total, last = run.summary, run.summary.get("last", {})
    return [
        ("best accuracy", decimal(best(run).get("test_accuracy")), f"round {best(run)['round']}" if best(run) else ""),
        ("last accuracy", decimal(last.get("test_accuracy")), ""),
        ("forgetting", decimal(last.get("forgetting")), ""),
        ("rounds", f"{total['rounds']:,}", f"of {run.job['train']['num_rounds']:,}"),
        ("time", duration(total.get("seconds", 0)), ""),
        ("sent to clients", size(total.get("bytes_down", 0)), ""),
        ("sent back", size(total.get("bytes_up", 0)), ""),
    ]


def progress(run: Run) -> Iterable[Html]:
    yield heading("Accuracy and loss")
    if not len(run.rounds["round"]):
        yield paragraph("No round was finished.")
        return
    yield figure(
        figures.progress([run]),
        "The global model on the test images after each round, 0 being the initial model and the orange dot the best; "
        "the training loss is the method's whole objective on the clients' own images.",
    )


def what_was_forgotten(run: Run) -> Iterable[Html]:
    yield heading("What was forgotten")
    if len(run.class_accuracy):
        yield figure(
            figures.class_accuracy(run),
            "Each row is a class: bright is recognised; a row that darkens to the right has been forgotten.",
        )
    losses = forgotten(run)
    if not losses:
        yield paragraph("Nothing can be forgotten before the second round of training.")
        return
    yield class_table(losses)
    yield figure(figures.forgetting([run]), FORGETTING)


def class_table(losses: list[ClassLoss]) -> Html:
    shown = losses[:MOST_ROWS]
    caption = "The peak is the best accuracy before the last round; the mean of what was lost is the forgetting."
    if len(shown) < len(losses):
        caption += f" The {len(shown)} of {len(losses):,} classes that lost most."
    rows = [
        [loss.name, decimal(loss.peak), str(loss.peak_round), decimal(loss.last), decimal(loss.lost), bar(loss.lost)]
        for loss in shown
    ]
    return table(["class", "peak", "in round", "last", "lost", ""], rows, caption=caption)


def partition(run: Run) -> Iterable[Html]:
    counts = run.partition["count"]
    if not len(counts):
        return
    sizes = np.bincount(run.partition["client"], counts, run.num_clients)
    kinds = np.bincount(run.partition["client"], minlength=run.num_clients)
    yield heading("Partition")
    yield paragraph(
        f"{run.num_clients:,} clients hold {counts.sum():,} images: {sizes.min():,.0f} to {sizes.max():,.0f} each, "
        f"of {kinds.min()} to {kinds.max()} of the {len(run.classes)} classes."
    )
    yield figure(figures.partition(run), "Each column is a client: how many images of which class; blank is none.")


def clients(run: Run) -> Iterable[Html]:
    if not len(run.clients["client"]):
        return
    ids, where, sampled = np.unique(run.clients["client"], return_inverse=True, return_counts=True)
    images, loss, seconds = (
        np.bincount(where, run.clients[column]) / sampled for column in ("num_examples", "train_loss", "seconds")
    )
    slowest = np.argsort(-seconds, kind="stable")[:MOST_ROWS]
    yield heading("Clients")
    yield paragraph(f"{len(ids):,} of {run.num_clients:,} clients were sampled, {sampled.mean():.1f} times on average.")
    yield figure(
        figures.clients(run),
        "Line: the median of the round's clients; band: from the lowest to the highest. A wide band of seconds means "
        "clients that the others wait for.",
    )
    rows = [[str(ids[i]), f"{images[i]:,.0f}", str(sampled[i]), decimal(loss[i]), f"{seconds[i]:.2f}"] for i in slowest]
    columns = ["client", "images", "times sampled", "mean training loss", "mean seconds"]
    which = "All clients" if len(rows) == len(ids) else f"The {len(rows)} slowest clients"
    yield tag("details", tag("summary", f"{which}, slowest first"), table(columns, rows, words=0))


def origin(run: Run) -> Iterable[Html]:
    yield heading("Job")
    yield tag("pre", *(tag("code", block) for block in run.job_text.strip().split("\n\n")), class_="job")
    yield heading("Environment")
    packages = run.environment.get("packages", {})
    rows = {**{key: value for key, value in run.environment.items() if key != "packages"}, **packages}
    yield table(["what", "version or hash"], [[key, str(value)] for key, value in rows.items()], words=2)


# Pieces --------------------------------------------------------------------------------------------------------------


def heading(text: str) -> Html:
    return tag("h2", text)


def paragraph(text: str) -> Html:
    return tag("p", text, class_="soft")


def figure(svg: str, caption: str) -> Html:
    return tag("figure", Html(svg), tag("figcaption", caption))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1, caption: str = "") -> Html:
    """A table whose first columns are words and whose others are numbers."""

    def line(cell: str, texts: Sequence[str]) -> Html:
        return tag(
            "tr", *(tag(cell, text, **({"class_": "number"} if i >= words else {})) for i, text in enumerate(texts))
        )

    above = [tag("caption", caption)] if caption else []
    return tag("table", *above, tag("thead", line("th", columns)), tag("tbody", *(line("td", row) for row in rows)))


def bar(share: float) -> Html:
    """A bar over so much of the width; none for what is unknown or less than 0."""
    return tag("div", class_="bar", style=f"width: {100 * max(np.nan_to_num(share), 0):.1f}%")


def method(entries: list[dict[str, Any]]) -> Html:
    """A method as job files have it, with all its parameters."""
    if "method" in entries[0]:
        periods = [(entry.get("until"), method(entry["method"])) for entry in entries]
        return Html(
            "; ".join(f"until round {until}: {parts}" if until else f"then {parts}" for until, parts in periods)
        )
    return Html(" + ".join(part(**entry) for entry in entries))


def part(name: str, **parameters: Any) -> Html:
    values = ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in parameters.items())
    return Html(tag("b", name) + html.escape(f" ({values})" if values else ""))


def swatch(number: int) -> Html:
    """A piece of a run's line."""
    colour, dashes = figures.look(number)
    line = f'<line x1="0" y1="6" x2="32" y2="6" stroke="{colour}" stroke-width="3" stroke-dasharray="{dashes}"/>'
    return tag("svg", Html(line), class_="swatch", viewBox="0 0 32 12")


def best(run: Run) -> dict[str, Any]:
    return run.summary.get("best", {})


def decimal(value: float | None) -> str:
    return "n/a" if value is None or np.isnan(value) else f"{value:.4f}"


def size(count: float) -> str:
    """A number of bytes.

    >>> size(999), size(15_300_000)
    ('999 B', '15.3 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
