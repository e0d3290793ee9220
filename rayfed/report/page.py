"""The page of a run, and the page that compares several runs: a single file of HTML each, from
`templates/`.

Its figures are drawn in the browser, by `templates/page.js` with the libraries in `vendor/`, which
a page holds compressed. Without scripts there are the tables, which every figure has.
"""

import base64
import functools
import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rayfed.base.files import write_text
from rayfed.base.values import keys, table
from rayfed.data.partition import ALWAYS_SHOWN, PARTITIONS
from rayfed.data.unevenness import in_words
from rayfed.models.settings import Adapt
from rayfed.report import answers, charts, compared, plots
from rayfed.report.charts import MOST_ROWS, Chart
from rayfed.report.read import ClassLoss, Run, forgotten, grouped, read_run, shorten
from rayfed.report.runs import legible, read_runs
from rayfed.report.words import html_bar, listed, percent

FORGETTING = (
    "The accuracy lost since each class's best earlier round (peak; below 0, this round is the "
    "best yet), on average. A run by itself also has what was lost since the evaluated round "
    "before (round), the peak of the classes that no client of the round holds (continual), and, "
    "where confusion was measured, what was lost on the way to the models of the clients (local) "
    "and from them to the next model (aggregation)."
)
NOT_ALL = (
    " Only some rounds were evaluated, each with a point; the lines between points show no "
    "measurement. Forgetting looks back at multiples of train.eval_every only."
)
HERE = files("rayfed.report")
LIBRARIES = ("d3-7.9.0.min.js", "plot-0.6.17.umd.min.js")
# Nothing else runs or loads.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {}"
STRICT: Any = {"autoescape": True, "undefined": StrictUndefined}
TEMPLATES = Environment(
    loader=PackageLoader("rayfed.report"), trim_blocks=True, lstrip_blocks=True, **STRICT
)
TEMPLATES.filters["toml"] = lambda value: json.dumps(value, ensure_ascii=False, default=str)
TEMPLATES.filters["json"] = lambda value: Markup(
    json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
)


def _of_model(model: dict[str, Any]) -> dict[str, Any]:
    """A model's table without the keys of all models that have their defaults."""
    default = table(Adapt())
    return {
        key: value for key, value in model.items() if key not in default or value != default[key]
    }


TEMPLATES.filters["of_model"] = _of_model


def _of_partition(partition: dict[str, Any]) -> dict[str, Any]:
    """A partition's table without the keys that have their defaults, except those that everybody
    asks for.
    """
    # The runs of a row may have several rules: then their names are a list.
    name = partition.get("name")
    rule = PARTITIONS.get(name) if isinstance(name, str) else None
    default = {key.name: key.default for key in keys(rule)} if rule else {}
    return {
        key: value
        for key, value in partition.items()
        if key in (*ALWAYS_SHOWN, "seed") or key not in default or value != default[key]
    }


TEMPLATES.filters["of_partition"] = _of_partition


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Make a run's page from its folder alone: `report.html` in it, or `path`.

    Raises `InputError`.
    """
    with legible(folder):
        page = run_page(read_run(folder))
    path = path or folder / "report.html"
    write_text(path, page)
    return path


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Make the page of several runs.

    The others are compared with FedAvg, or else the first. Raises `InputError`.
    """
    runs = read_runs(folders)
    with legible(*folders):
        page = comparison_page(runs)
    write_text(path, page)
    return path


def run_page(run: Run) -> str:
    """Everything about a run."""
    losses = forgotten(run)
    played, sampled = len(run.rounds["round"]) > 0, len(run.clients["client"]) > 0
    packages = run.environment.get("packages", {})
    hashes = {
        key: value
        for key, value in run.environment.items()
        if key not in ("method", "packages", "unevenness")
    }
    if "hardware" in hashes:
        hashes["hardware"] = listed(
            " ".join(map(str, of_kind.values())) for of_kind in hashes["hardware"]
        )
    if "resumed" in hashes:
        hashes["resumed after round"] = listed(
            each["after_round"] for each in hashes.pop("resumed")
        )
    drawn = {
        "global": plots.global_model(grouped([run])) if played else [],
        "classes": [plots.class_accuracy(run)] if len(run.class_accuracy) > 1 else [],
        "local": plots.local_models(run),
        "clients": plots.clients(run) if sampled else [],
        "partition": [],
        "costs": plots.costs(run) if len(run.rounds["round"]) > 1 else [],
    }
    if len(run.partition["count"]):
        drawn["partition"] = [plots.partition(run)]
    rows, more = _class_rows(run, losses)
    return rendered(
        "run.html",
        run=run,
        answers=answers.of_run(run, losses),
        not_all=not_all([run]),
        forgetting=FORGETTING,
        classes=rows,
        more_classes=more,
        partition=_partition(run),
        clients=_clients(run),
        environment=[*hashes.items(), *packages.items()],
        drawn=drawn,
    )


def _class_rows(run: Run, losses: Sequence[ClassLoss]) -> tuple[list[list[Any]], str]:
    """A row per class, those that lost most first, and what to know about the rows."""
    shown = losses[:MOST_ROWS]
    text = (
        f" The {len(shown)} of {len(losses):,} classes that lost most."
        if len(shown) < len(losses)
        else ""
    )
    untrained = dict(zip(run.classes, run.class_accuracy[0], strict=False)) if losses else {}
    rows: list[list[Any]] = []
    for loss in shown:
        mark = "*" if 0 < loss.peak <= untrained[loss.name] else ""
        peak = percent(loss.peak) + mark
        rows.append([loss.name, peak, loss.peak_round, percent(loss.last), html_bar(loss.lost)])
    if any(row[1].endswith("*") for row in rows):
        text += " * Not above the untrained model, which may take every example for one class."
    return rows, text


def comparison_page(runs: Sequence[Run]) -> str:
    """The curves of all runs in the same figures, and a table that is their legend; a group's runs
    as one.
    """
    groups = grouped(runs)
    names = shorten(groups)
    key = answers.shared([run for group in groups for run in group.counted])
    rows = compared.paired(runs)
    references = compared.references(groups, names, rows)
    targets = compared.targets(groups, names)
    asked = dict.fromkeys(references.values())
    target_words = [f"{percent(targets[name])} of {name}" for name in asked if name in targets]
    gaps = (
        []
        if isinstance(rows, str)
        else [(row.name, row.difference) for row in rows if row.difference]
    )
    return rendered(
        "comparison.html",
        runs=runs,
        groups=groups,
        names=names,
        answers=answers.of_groups(groups, names, rows),
        columns=[
            "run",
            "seed",
            *(name for name, _, _ in answers.headline(runs[0], key)),
            "rounds to target",
        ],
        numbers=[
            compared.numbers(group, targets.get(references[name], np.nan), key)
            for name, group in zip(names, groups, strict=True)
        ],
        statuses=[listed(dict.fromkeys(run.status for run in group.runs)) for group in groups],
        target=listed(target_words),
        references=listed(asked),
        forgetting=FORGETTING,
        not_all=not_all(runs),
        differences=compared.differences(groups),
        partitions=[compared.partition_of(group) for group in groups],
        several=any(
            len({run.environment.get("partition") for run in group.runs}) > 1 for group in groups
        ),
        classes=compared.class_losses(groups),
        drawn={
            "global": plots.global_model(groups),
            "gaps": [charts.gaps("gaps", "Paired differences", "points of the last accuracy", gaps)]
            if gaps
            else [],
            "local": list(plots.local_groups(groups)),
        },
    )


def card(folder: Path) -> str:
    """A run for a notebook: its numbers, and its accuracy by round. Raises `InputError`."""
    with legible(folder):
        run = read_run(folder)
        line = (
            plots.curves(grouped([run]), "test_accuracy", 100)[0]
            if len(run.rounds["round"])
            else None
        )
        curve = list(zip(line.x.tolist(), line.y.tolist(), strict=True)) if line else []
        template = TEMPLATES.get_template("card.html")
        return template.render(
            run=run,
            headline=answers.headline(run, answers.shared([run])),
            curve=curve,
            not_all=not_all([run]),
        )


def rendered(template: str, drawn: dict[str, list[Chart]], **values: Any) -> str:
    """A page from its template, with the data of its figures, and a policy under which only its own
    scripts run.
    """
    script = HERE.joinpath("templates", "page.js").read_text("utf-8")
    hashes = (hashlib.sha256(of.encode()).digest() for of in (libraries(), script))
    policy = POLICY.format(
        " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in hashes)
    )
    return TEMPLATES.get_template(template).render(
        **values,
        drawn=drawn,
        charts={
            chart.key: {"title": chart.title, **chart.data} for of in drawn.values() for chart in of
        },
        library=packed(),
        script=Markup(script),
        policy=policy,
    )


@functools.cache
def libraries() -> str:
    """The libraries that draw, as one script."""
    return "\n".join(HERE.joinpath("vendor", name).read_text("utf-8") for name in LIBRARIES)


@functools.cache
def packed() -> str:
    """The same, compressed: 0.2 in place of 0.5 MB in each page."""
    return base64.b64encode(gzip.compress(libraries().encode(), mtime=0)).decode()


def not_all(runs: Iterable[Run]) -> str:
    """What to know about rounds without evaluation; '' where there is none."""
    return NOT_ALL if any(not run.evaluated.all() for run in runs) else ""


def _partition(run: Run) -> str:
    """The partition in a sentence; '' where it is not known."""
    counts = run.partition["count"]
    if not len(counts):
        return ""
    sizes = np.bincount(run.partition["client"], counts, run.num_clients)
    kinds = np.bincount(run.partition["client"], minlength=run.num_clients)
    return (
        f"{run.num_clients:,} clients hold {counts.sum():,} examples: {sizes.min():,.0f} to "
        f"{sizes.max():,.0f} each, of {kinds.min()} to {kinds.max()} of the {len(run.classes)} "
        "classes. Means over clients of the distance of a client's labels from all labels: "
        f"{in_words(run.unevenness)}."
    )


def _clients(run: Run) -> dict[str, Any]:
    """A sentence about the clients that took part, and a table of the slowest; nothing where no
    client has trained.
    """
    if not len(run.clients["client"]):
        return {}
    ids, index, sampled = np.unique(run.clients["client"], return_inverse=True, return_counts=True)
    columns = (run.clients[column] for column in ("num_examples", "train_loss", "seconds"))
    images, loss, seconds = (np.bincount(index, column) / sampled for column in columns)
    slowest = np.argsort(-seconds, kind="stable")[:MOST_ROWS]
    call = run.called
    rows = [
        [call(ids[i]), f"{images[i]:,.0f}", sampled[i], f"{loss[i]:.4f}", f"{seconds[i]:.2f}"]
        for i in slowest
    ]
    return {
        "text": (
            f"{len(ids):,} of {run.num_clients:,} clients took part, in {sampled.mean():.1f} "
            "rounds on average."
        ),
        "title": "All clients" if len(rows) == len(ids) else f"The {len(rows)} slowest clients",
        "rows": rows,
    }
