"""The page of a run, and the page that compares several runs.

The observer `Page` (observers/page.py) writes that of a run at its end. Each is a single file of
HTML, made from `templates/`. `templates/page.js` draws its figures in the browser, with the
libraries in `vendor/`, which a page holds compressed. A reader without scripts has a table for each
figure.
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
from rayfed.base.values import Key, keys, table
from rayfed.data.partition import ALWAYS_SHOWN, PARTITIONS
from rayfed.data.unevenness import in_words
from rayfed.job import Job, flat
from rayfed.models.settings import ANY, Adapt
from rayfed.report import answers, charts, compared, plots
from rayfed.report.charts import MOST_ROWS, Chart
from rayfed.report.read import ClassLoss, Group, Run, forgotten, grouped, read_run, shorten
from rayfed.report.runs import legible, read_runs
from rayfed.report.table import Row
from rayfed.report.words import html_bar, listed, percent

FORGETTING = (
    "the accuracy that a class has lost since its best earlier round, averaged over the classes. "
    "Below 0, this round is the best yet."
)
# The other lines of the page of one run, by their names.
OTHERS = {
    "round": "the same since the evaluated round before",
    "continual": "only of classes that no client of the round holds",
    "local": "lost by the clients' training",
    "aggregation": "lost when the clients' models are averaged",
}
NOT_ALL = (
    " Only some rounds were evaluated, each with a point; the lines between points show no "
    "measurement. Forgetting looks back at multiples of train.eval_every only."
)
HERE = files("rayfed.report")
LIBRARIES = ("d3-7.9.0.min.js", "plot-0.6.17.umd.min.js")
# The browser runs the page's own scripts. Nothing else runs or loads.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {}"
STRICT: Any = {"autoescape": True, "undefined": StrictUndefined}
TEMPLATES = Environment(
    loader=PackageLoader("rayfed.report"), trim_blocks=True, lstrip_blocks=True, **STRICT
)


def _as_toml(value: Any) -> str:
    """Return a value as a job file has it."""
    return json.dumps(value, ensure_ascii=False, default=str)


TEMPLATES.filters["toml"] = _as_toml
TEMPLATES.filters["json"] = lambda value: Markup(
    json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
)


def _of_model(model: dict[str, Any]) -> dict[str, Any]:
    """Return a model's table without the keys of all models that have their defaults."""
    return _without_defaults(model, table(Adapt()))


def _without_defaults(values: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """Return a table without the keys that have their defaults.

    >>> _without_defaults({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 0})
    {'b': 2, 'c': 3}
    """
    shown = {}
    for key, value in values.items():
        if key not in default or value != default[key]:
            shown[key] = value
    return shown


TEMPLATES.filters["of_model"] = _of_model


def _of_partition(partition: dict[str, Any]) -> dict[str, Any]:
    """Return a partition's table without the keys that have their defaults.

    The keys that everybody asks for stay.
    """
    # The runs of a row may have several rules: then their names are a list.
    name = partition.get("name")
    rule = PARTITIONS.get(name) if isinstance(name, str) else None
    default = {key.name: key.default for key in keys(rule)} if rule else {}
    for key in (*ALWAYS_SHOWN, "seed"):
        default.pop(key, None)
    return _without_defaults(partition, default)


TEMPLATES.filters["of_partition"] = _of_partition


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Write a run's page from its folder alone, to `report.html` in it or to `path`.

    Returns where the page is. Raises `InputError` if a file of the run is damaged.
    """
    with legible(folder):
        page = run_page(read_run(folder))
    path = path or folder / "report.html"
    write_text(path, page)
    return path


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write the page of several runs, and return its path.

    The runs are compared with FedAvg, or else with the first run. Raises `InputError` if a file of
    a run is damaged.
    """
    runs = read_runs(folders)
    with legible(*folders):
        page = comparison_page(runs)
    write_text(path, page)
    return path


def run_page(run: Run) -> str:
    """Return the page that shows everything about a run."""
    losses = forgotten(run)
    rows, more = _class_rows(run, losses)
    return rendered(
        "run.html",
        run=run,
        answers=answers.of_run(run, losses),
        not_all=not_all([run]),
        forgetting=_forgetting(run),
        classes=rows,
        more_classes=more,
        partition=_partition(run),
        clients=_clients(run),
        head=_head(run),
        changed=_changed(run),
        environment=_environment(run),
        drawn=_drawn(run),
    )


def _forgetting(run: Run) -> str:
    """Return what each line of forgetting is that a run has."""
    text = FORGETTING
    for name in run.forgetting:
        if name in OTHERS:
            text += f" {name.capitalize()}: {OTHERS[name]}."
    return text


def _head(run: Run) -> list[str]:
    """Return what was trained on what, in a few words each, without what is as it always is."""
    data, model = run.job["data"], _of_model(run.job["model"])
    partition = _of_partition(data["partition"])
    for key, usual in (("num_clients", run.num_clients), ("seed", 0)):
        if partition.get(key) == usual:
            del partition[key]
    clients = f"{run.num_clients:,} clients: {_with_values(partition)}"
    return [str(data["source"]), clients, _with_values(model), f"seed {run.job['seed']}"]


def _with_values(named: dict[str, Any]) -> str:
    """Return a name with its values.

    >>> _with_values({"name": "dirichlet", "alpha": 0.5}), _with_values({"name": "iid"})
    ('dirichlet (alpha = 0.5)', 'iid')
    """
    values = [f"{key} = {_as_toml(value)}" for key, value in named.items() if key != "name"]
    return f"{named.get('name')} ({', '.join(values)})" if values else f"{named.get('name')}"


def _changed(run: Run) -> list[tuple[str, str]]:
    """Return the keys of a run's job that differ from the defaults, and their values."""
    values = flat(run.job)
    defaults: dict[str, list[Key]] = {}
    for key in keys(Job):
        defaults.setdefault(key.name, []).append(key)
    changed = [("method", str(run.environment["method"]))] if "method" in run.environment else []
    for name, value in values.items():
        if name in ("name", "method"):
            continue
        kind = values.get(f"{name.rpartition('.')[0]}.name", "")
        usual = [key.default for key in defaults.get(name, []) if key.kind in ("", kind, ANY)]
        if value not in usual:
            changed.append((name, _as_toml(value)))
    return changed


def _environment(run: Run) -> list[tuple[str, Any]]:
    """Return the items of environment.json for a table, in words; packages come last."""
    left_out = ("method", "packages", "unevenness")
    items = {}
    for key, value in run.environment.items():
        if key not in left_out and value not in ("", [], {}, None):
            items[key] = value
    if "hardware" in items:
        kinds = [" ".join(map(str, kind.values())) for kind in items["hardware"]]
        items["hardware"] = listed(kinds)
    if "contents" in items:
        items["contents"] = "; ".join(f"{key}: {value}" for key, value in items["contents"].items())
    if "resumed" in items:
        times = items.pop("resumed")
        items["resumed after round"] = listed(time["after_round"] for time in times)
    packages = run.environment.get("packages", {})
    return list(items.items()) + [(name, it) for name, it in packages.items() if it is not None]


def _drawn(run: Run) -> dict[str, list[Chart]]:
    """Return the charts of a run's page by their places in it."""
    drawn: dict[str, list[Chart]] = {
        "global": [],
        "classes": [],
        "local": plots.local_models(run),
        "clients": [],
        "partition": [],
        "costs": [],
    }
    if len(run.rounds["round"]):
        drawn["global"] = plots.global_model(grouped([run]))
    if len(run.class_accuracy) > 1:
        drawn["classes"] = [plots.class_accuracy(run)]
    if len(run.clients["client"]):
        drawn["clients"] = plots.clients(run)
    if len(run.partition["count"]):
        drawn["partition"] = [plots.partition(run)]
    if len(run.rounds["round"]) > 1:
        drawn["costs"] = plots.costs(run)
    return drawn


def _class_rows(run: Run, losses: Sequence[ClassLoss]) -> tuple[list[list[Any]], str]:
    """Return a row per class, those that lost most first, and what to know about the rows."""
    shown = losses[:MOST_ROWS]
    text = ""
    if len(shown) < len(losses):
        text = f" The {len(shown)} of {len(losses):,} classes that lost most."
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
    """Return the page with the curves of all runs in the same figures.

    A table is their legend. A group's runs are one curve.
    """
    groups = grouped(runs)
    names = shorten(groups)
    counted: list[Run] = []
    for group in groups:
        counted += group.counted
    key = answers.shared(counted)
    rows = compared.paired(runs)
    references = compared.references(groups, names, rows)
    targets = compared.targets(groups, names)
    asked = dict.fromkeys(references.values())
    target_words = [f"{percent(targets[name])} of {name}" for name in asked if name in targets]
    numbers, statuses, partitions = [], [], []
    for name, group in zip(names, groups, strict=True):
        target = targets.get(references[name], np.nan)
        numbers.append(compared.numbers(group, target, key))
        statuses.append(listed(dict.fromkeys(run.status for run in group.runs)))
        partitions.append(compared.partition_of(group))
    headings = [name for name, _, _ in compared.columns(runs[0], key)]
    return rendered(
        "comparison.html",
        runs=runs,
        groups=groups,
        names=names,
        answers=answers.of_groups(groups, names, rows),
        columns=["run", "seed", *headings, "rounds to target"],
        numbers=numbers,
        statuses=statuses,
        target=listed(target_words),
        references=listed(asked),
        forgetting=FORGETTING,
        not_all=not_all(runs),
        differences=compared.differences(groups),
        partitions=partitions,
        several=any(_has_several_partitions(group) for group in groups),
        classes=compared.class_losses(groups),
        drawn={
            "global": plots.global_model(groups),
            "gaps": _gaps(rows),
            "local": list(plots.local_groups(groups)),
        },
    )


def _has_several_partitions(group: Group) -> bool:
    """Say whether the runs of a group have different partitions."""
    return len({run.environment.get("partition") for run in group.runs}) > 1


def _gaps(rows: Sequence[Row] | str) -> list[Chart]:
    """Return the chart of the rows' differences, if there are any."""
    if isinstance(rows, str):
        return []
    gaps = [(row.name, row.difference) for row in rows if row.difference]
    if not gaps:
        return []
    return [charts.gaps("gaps", "Paired differences", "points of the last accuracy", gaps)]


def card(folder: Path) -> str:
    """Return a run's numbers and its accuracy by round, for a notebook.

    Raises `InputError` if a file of the run is damaged.
    """
    with legible(folder):
        run = read_run(folder)
        curve = []
        if len(run.rounds["round"]):
            line = plots.curves(grouped([run]), "test_accuracy", 100)[0]
            curve = list(zip(line.x.tolist(), line.y.tolist(), strict=True))
        template = TEMPLATES.get_template("card.html")
        return template.render(
            run=run,
            headline=answers.headline(run),
            curve=curve,
            not_all=not_all([run]),
        )


def rendered(template: str, drawn: dict[str, list[Chart]], **values: Any) -> str:
    """Return a page made of its template and the data of its figures.

    The page has a policy under which only its own scripts run.
    """
    script = HERE.joinpath("templates", "page.js").read_text("utf-8")
    policy = POLICY.format(f"{_hash_of(libraries())} {_hash_of(script)}")
    data = {}
    for of_place in drawn.values():
        for chart in of_place:
            data[chart.key] = {"title": chart.title, **chart.data}
    return TEMPLATES.get_template(template).render(
        **values,
        drawn=drawn,
        charts=data,
        library=packed(),
        script=Markup(script),
        policy=policy,
    )


def _hash_of(script: str) -> str:
    """Return the hash of a script as a policy names it."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@functools.cache
def libraries() -> str:
    """Return the libraries that draw, as one script."""
    return "\n".join(HERE.joinpath("vendor", name).read_text("utf-8") for name in LIBRARIES)


@functools.cache
def packed() -> str:
    """Return the libraries compressed: 0.2 instead of 0.5 MB in each page."""
    return base64.b64encode(gzip.compress(libraries().encode(), mtime=0)).decode()


def not_all(runs: Iterable[Run]) -> str:
    """Return what to know about rounds without evaluation; '' where there is none."""
    return NOT_ALL if any(not run.evaluated.all() for run in runs) else ""


def _partition(run: Run) -> str:
    """Return the partition in a sentence; '' where it is not known."""
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
    """Return a sentence about the clients that took part, and a table of the slowest.

    Nothing is returned where no client has trained.
    """
    if not len(run.clients["client"]):
        return {}
    ids, index, sampled = np.unique(run.clients["client"], return_inverse=True, return_counts=True)
    images = np.bincount(index, run.clients["num_examples"]) / sampled
    loss = np.bincount(index, run.clients["train_loss"]) / sampled
    seconds = np.bincount(index, run.clients["seconds"]) / sampled
    rows: list[list[Any]] = []
    for i in np.argsort(-seconds, kind="stable")[:MOST_ROWS]:
        name = run.called(ids[i])
        rows.append([name, f"{images[i]:,.0f}", sampled[i], f"{loss[i]:.4f}", f"{seconds[i]:.2f}"])
    return {
        "text": (
            f"{len(ids):,} of {run.num_clients:,} clients took part, in {sampled.mean():.1f} "
            "rounds on average."
        ),
        "title": "All clients" if len(rows) == len(ids) else f"The {len(rows)} slowest clients",
        "rows": rows,
    }
