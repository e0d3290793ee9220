"""The page of a run: its numbers are those of the tables, and everything in a run's files is shown
as plain text.
"""

import base64
import functools
import gzip
import hashlib
import html
import json
import math
import os
import re
import shutil
import subprocess
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
import torch
from click.testing import CliRunner
from extras import needs
from torch import nn

import rayfed
from rayfed.base.errors import InputError
from rayfed.cli import main
from rayfed.data.federation import federate
from rayfed.data.samples import Dataset, Samples
from rayfed.folder.found import find_runs
from rayfed.folder.places import folder_of
from rayfed.folder.recorder import Recorder as Keeper
from rayfed.folder.tables import read_table, write_round
from rayfed.job import make_job, read_toml
from rayfed.measures.metrics import Evaluation
from rayfed.report import page, plots, read
from rayfed.report.compared import class_losses
from rayfed.report.page import comparison_page, run_page, write_comparison, write_report
from rayfed.report.read import ClassLoss, forgotten, grouped, read_run
from rayfed.rounds.round import ClientRow, Round
from rayfed.rounds.setup import Setup, open_data
from rayfed.runtime.this_process import ThisProcess

HOSTILE = (
    "</td></svg><script src=//evil.example></script><img src=x onerror='alert(1)'>&amp;$\\x$\"_"
)
# Elements without an end tag.
VOID = {"meta", "img", "link", "br"}


class Page(HTMLParser):
    """The parts of a page. Fails where elements are not properly nested."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.rows, self.tiles, self.open = Counter(), [], [], {}, []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.attributes += attributes
        self.open += [] if tag in VOID else [tag]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data
        elif self.open and self.open[-1] == "dt":
            self._tile = data
        elif self.open and self.open[-1] == "dd":
            self.tiles[self._tile] = data

    def values_of(self, *names):
        return [value for name, value in self.attributes if name in names]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return {
        "name": "look",
        "method": "fedntd",
        "data": {"partition": {"name": "dirichlet", "alpha": 0.3, "num_clients": 6}},
        "model": {"name": "lenet"},
        "train": {"num_rounds": 3, "clients_per_round": 2, "local_steps": 5, "lr": 0.05},
        "ray": {"mode": "off"},
        "output": {"path": str(tmp_path_factory.mktemp("runs"))},
    }


@pytest.fixture(scope="module")
def result(tables, pages):
    return rayfed.run(tables)


@pytest.fixture
def copy(result, tmp_path):
    """A copy of the run's folder that a test may change."""
    return shutil.copytree(result.path, tmp_path / "copy")


@pytest.fixture
def keeper(tmp_path):
    """Make the keeper of an invented run, with classes of any names."""

    def make(classes=("cat", "dog"), name="hand", alpha=0.5, **more):
        partition = {"name": "dirichlet", "num_clients": 7, "min_size": 0, "alpha": alpha}
        job = make_job(
            {
                "name": name,
                "output": {"path": str(tmp_path)},
                "data": {"partition": partition},
                **more,
            }
        )
        samples = Samples(np.zeros((60, 1, 4, 4), np.uint8), np.arange(60) % len(classes), classes)
        federation = federate(Dataset(samples, samples), job.data.partition)
        setup = Setup(nn.Linear(1, 1), federation, job, torch.device("cpu"))
        return Keeper(setup, ThisProcess(setup))

    return make


def keep(keeper, *history, error=None):
    """Keep a run of these rounds, which ends with `error` if one is given; gives its folder."""
    with suppress(ArithmeticError, KeyboardInterrupt), keeper:
        for number, right in enumerate(history):
            keeper.round(a_round(number, right))
        if error is not None:
            raise error
    return keeper.path


def a_round(number, right):
    """A round after which the model recognises `right[c]` of the 4 test images of class `c`; None:
    not evaluated.
    """
    clients = (
        (ClientRow(number % 5, 10, 1 / number, 0.5, HOSTILE), ClientRow(5, 30, 2.0, 1.5, "b"))
        if number
        else ()
    )
    if right is None:
        return Round(number, {}, {}, {}, None, np.ones(2), None, clients)
    confusion = np.zeros((len(right), len(right)), np.int64)
    for c, count in enumerate(right):
        confusion[c, c], confusion[c, c - 1] = count, 4 - count
    return Round(number, {}, {}, {}, Evaluation(confusion, 8.0), np.ones(len(right)), 0.1, clients)


def charts_of(text):
    """The data of a page's figures."""
    return json.loads(
        re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL)[1]
    )


def scripts_of(text):
    """The contents of a page's scripts: data, compressed libraries, and what draws."""
    return re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)


RECORDS = Path(__file__).parent / "records/pages.json"


def said_by(text):
    """What a page says, line by line, without its job and its environment, and what its figures
    draw.
    """
    body = text[text.index("<body>") :].partition('<h2 id="job">')[0].partition("<footer>")[0]
    for end in ("</th>", "</td>", "</dt>", "</dd>"):
        body = body.replace(end, " | ")
    lines = [
        " ".join(line.split())
        for line in re.sub(r"<[^>]*>", " ", body).replace("</tr>", "\n").splitlines()
    ]
    return {"lines": [html.unescape(line) for line in lines if line], "charts": charts_of(text)}


def share(percent):
    """What a cell such as '12.3%' or '12.3%*' says, as a fraction."""
    return float(percent.rstrip("*%")) / 100


def test_a_run_ends_with_a_page_that_has_the_numbers_of_its_tables(result):
    page, rounds = Page((result.path / "report.html").read_text()), result.rounds.to_pylist()
    best = max(rounds[1:], key=lambda row: row["test_accuracy"])
    assert page.tiles["best accuracy"] == f"{100 * best['test_accuracy']:.1f}%"
    assert page.tiles["forgetting"] == f"{100 * rounds[-1]['forgetting']:.1f}%"
    assert (
        page.tiles["sent to clients"] == f"{sum(row['bytes_down'] for row in rounds) / 1e6:.1f} MB"
    )

    accuracy = {(row["round"], row["class"]): row["accuracy"] for row in result.classes.to_pylist()}
    start = page.rows.index(["class", "peak", "in round", "last", "lost"])
    losses = page.rows[start + 1 : start + 11]
    for name, peak, number, last, lost in losses:
        assert peak.endswith("*") == (0 < accuracy[int(number), name] <= accuracy[0, name]), (
            "no better than untrained"
        )
        assert share(peak) == pytest.approx(max(accuracy[1, name], accuracy[2, name]), abs=6e-4)
        assert share(last) == pytest.approx(accuracy[3, name], abs=6e-4)
        assert share(lost) == pytest.approx(share(peak) - share(last), abs=2e-3)
    assert [row[4] for row in losses] == sorted((row[4] for row in losses), key=share, reverse=True)

    own = [row for row in result.clients.to_pylist() if row["client"] == 0]
    loss = f"{np.mean([row['train_loss'] for row in own]):.4f}" if own else ""
    assert not own or ["0", f"{own[0]['num_examples']:,}", str(len(own)), loss] in [
        row[:4] for row in page.rows
    ]


def test_a_page_begins_with_what_was_run_and_lists_what_differs_from_the_defaults(result):
    text = (result.path / "report.html").read_text()
    head = " ".join(re.sub(r"<[^>]*>", " ", text.partition("<header>")[2]).split())
    words = "fedntd · fashion-mnist-mini · 6 clients: dirichlet (alpha = 0.3) · lenet · seed 0"
    assert head.partition("How good")[0].strip() == f"look done {words}"
    rows = Page(text).rows
    keys = dict(rows[rows.index(["key", "value"]) + 1 : rows.index(["item", "version or hash"])])
    assert keys["method"] == "fedntd" and keys["train.lr"] == "0.05"
    assert keys["data.partition.name"] == '"dirichlet"' and keys["train.num_rounds"] == "3"
    assert not {"name", "seed", "train.momentum", "data.partition.cap", "model.freeze"} & {*keys}


def test_the_partition_is_written_as_it_was_dealt(result, tables):
    federation = open_data(make_job(tables))
    counts = np.zeros((6, 10), np.int64)
    for row in read_table(result.path, "partition").to_pylist():
        assert row["count"] > 0
        counts[row["client"], federation.train.classes.index(row["class"])] = row["count"]
    assert (counts == [federation.label_counts(i) for i in range(6)]).all()


def test_the_page_loads_nothing_and_runs_only_its_own_scripts(result):
    text = (result.path / "report.html").read_text()
    found = Page(text)
    assert set(re.findall(r"\w+://[^\s\"']*", text)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xhtml",
    }
    assert "@import" not in text and "url(" not in text
    assert not {"link", "iframe", "object", "img"} & set(found.tags)
    assert all(link.startswith("#") for link in found.values_of("src", "href", "xlink:href"))
    assert {link[1:] for link in found.values_of("href")} <= set(found.values_of("id"))
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    names = found.values_of("id")
    assert len(names) == len(set(names)), "no id is used twice"

    _, library, script = scripts_of(text)
    (policy,) = [value for value in found.values_of("content") if "default-src" in value]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    own = (script.encode(), gzip.decompress(base64.b64decode(library)))
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(of).digest()).decode()}'" for of in own}
    assert set(rules.pop("script-src").split()) == hashes, (
        "browsers are told to run these two, and nothing else"
    )
    assert rules == {"default-src": "'none'", "style-src": "'unsafe-inline'", "img-src": "data:"}


def test_the_libraries_are_those_of_the_registry():
    """The table of vendor/README.md has a file's hash in the registry's package; pages hold these
    files.
    """
    vendor = Path(page.__file__).parent / "vendor"
    told = re.findall(
        r"^\| `(.*?)` \|.*`([0-9a-f]{64})` \|$", (vendor / "README.md").read_text(), re.MULTILINE
    )
    assert [name for name, _ in told] == list(page.LIBRARIES)
    for name, digest in told:
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest
        assert "</script" not in (vendor / name).read_text()


def test_every_figure_has_its_numbers_as_a_table(result):
    text = (result.path / "report.html").read_text()
    found, charts = Page(text), charts_of(text)
    assert found.values_of("data-chart") == list(charts)
    assert text.count("<figure") == text.count("as a table</summary>") == len(charts) > 8
    rows = result.rounds.to_pylist()
    assert charts["accuracy"]["series"][0]["y"] == pytest.approx(
        [100 * row["test_accuracy"] for row in rows], rel=1e-5
    )
    accuracy = {
        (row["round"], row["class"]): 100 * row["accuracy"] for row in result.classes.to_pylist()
    }
    for name, values in zip(charts["classes"]["rows"], charts["classes"]["values"], strict=True):
        assert values == pytest.approx([accuracy[round, name] for round in (1, 2, 3)], rel=1e-5)
        assert [name, *(f"{accuracy[round, name]:.1f}" for round in (1, 2, 3))] in found.rows
    kilobytes = [row["bytes_down"] / 1e3 for row in rows[1:]]
    assert (
        charts["bytes"]["series"][0]["y"] == pytest.approx(kilobytes, rel=1e-5)
        and charts["bytes"]["unit"] == " kB"
    )


def test_the_figures_of_a_long_run_stay_small():
    rounds = np.arange(3001)
    chart = plots.charts.lines("a", "A", "%", [plots.Line("a", 0, rounds, np.sqrt(rounds))])
    line = chart.data["series"][0]
    assert (len(line["x"]), line["x"][0], line["x"][-1]) == (400, 0, 3000)
    assert line["y"] == pytest.approx(np.sqrt(line["x"]), rel=1e-5)
    assert len(chart.rows) == 50 and chart.rows[-1] == ["3000", "54.8"]
    assert (
        chart.note
        == "Of 3,001 rounds, the table has 50 and the figure has 400; the Parquet files have all."
    )
    values = np.tile(np.arange(3000.0), (100, 1))
    classes, columns = ([str(n) for n in range(many)] for many in (100, 3000))
    heat = plots.charts.heat("b", "B", values, classes, columns, "round", "%")
    assert (
        len(heat.data["values"]) == 100
        and len(heat.data["values"][0]) == 400
        and heat.data["values"][7][-1] == 2999
    )
    assert (
        "Of 100 classes, the table has 50;" in heat.note
        and "Of 3,000 rounds, the table has 12 and" in heat.note
    )


def test_a_page_made_again_is_the_same_byte_for_byte(copy):
    first = (copy / "report.html").read_bytes()
    (copy / "report.html").unlink()
    done = CliRunner().invoke(main, ["report", str(copy)])
    assert done.exit_code == 0, done.output
    assert (copy / "report.html").read_bytes() == first
    assert (
        CliRunner().invoke(main, ["report", str(copy), "-o", str(copy / "deep/a.html")]).exit_code
        == 0
    )
    assert (copy / "deep/a.html").read_bytes() == first


def test_names_are_shown_as_plain_text(keeper):
    rounds = [[number, 1, 2, 3] for number in range(3)]
    run = read_run(
        keep(keeper((HOSTILE, "$x_{", "\u72ac", "<b>")), *rounds, error=ArithmeticError(HOSTILE))
    )
    assert HOSTILE in run.error
    job = {**run.job, "name": HOSTILE, "method": [{"name": HOSTILE, HOSTILE: HOSTILE}]}
    run = replace(run, job=job, status=HOSTILE, job_text=HOSTILE, environment={HOSTILE: HOSTILE})
    for text in (run_page(run), comparison_page([run, run])):
        found = Page(text)
        assert (
            found.tags["script"] == text.count("<script") == text.count("</script") == 3
            and not found.tags["img"]
        )
        assert not [name for name, _ in found.attributes if name.startswith("on")]
        assert text.count("&lt;script") > 5
    assert "\u72ac" in run_page(run)
    assert charts_of(run_page(run))["classes"]["rows"] == [HOSTILE, "$x_{", "\u72ac", "<b>"]
    assert charts_of(comparison_page([run]))["accuracy"]["series"][0]["name"] == HOSTILE


def test_hardware_and_resumes_are_said_in_words(copy):
    written = json.loads((copy / "environment.json").read_text())
    written |= {
        "hardware": [{"device": "cpu", "maker": "A"}],
        "contents": {"the test set": "10 of 3x2", "its labels": "checksum 1a"},
        "resumed": [{"after_round": 2, **written}, {"after_round": 3}],
    }
    (copy / "environment.json").write_text(json.dumps(written))
    rows = Page(run_page(read_run(copy))).rows
    assert ["contents", "the test set: 10 of 3x2; its labels: checksum 1a"] in rows
    assert ["hardware", "cpu A"] in rows and ["resumed after round", "2, 3"] in rows


def test_a_page_is_made_even_if_a_file_is_missing(copy):
    for gone in ("rounds", "clients", "classes", "partition", "environment", "summary"):
        for file in copy.glob(f"{gone}.*"):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        text = write_report(copy).read_text()
        assert "look" in text and Page(text).tiles


def test_an_unfinished_run_has_a_page(keeper):
    with keeper() as made:
        assert "No round was finished" in write_report(made.path).read_text()
        assert "There are no paired differences: " in comparison_page([read_run(made.path)])
        made.round(a_round(0, [1, 2]))
        assert "There are no paired differences: " in comparison_page([read_run(made.path)])
        text = write_report(made.path).read_text()
        assert 'class="status running"' in text and "before the second round of training" in text
        assert "7 clients hold 60 examples" in text and "own images" not in text


def test_the_last_round_may_lack_a_table(keeper):
    path = keep(keeper(), *([number, 3 - number] for number in range(4)))
    file = path / "classes.parquet/round-00000.parquet"
    pq.write_table(pq.read_table(file, filters=[("round", "<", 3)]), file)
    run = read_run(path)
    assert len(run.rounds["round"]) == 4 and len(run.class_accuracy) == 3
    assert forgotten(run) == [
        ClassLoss("dog", 0.5, 1, 0.25, 0.25),
        ClassLoss("cat", 0.25, 1, 0.5, -0.25),
    ]
    assert Page(run_page(run)).tiles["rounds"] == "3"


@needs("dp_accounting")
def test_a_private_run_shows_its_epsilon(tables, result, monkeypatch):
    monkeypatch.delenv("RAYFED_NOISE_SECRET", raising=False)
    private = {
        "name": "private",
        "train.num_rounds": 2,
        "method": [{"name": "private_average", "noise": 0.01, "delta": 0.01}],
    }
    for secret, words in ((None, "a simulation, not private"), ("x" * 40, "after round ")):
        if secret:
            monkeypatch.setenv("RAYFED_NOISE_SECRET", secret)
        run = read_run(rayfed.run(tables, private, force=True).path)
        tiles = Page(run_page(run)).tiles
        epsilon = run.round_notes["privacy.epsilon"][1][-1]
        assert tiles["epsilon"] == f"{epsilon:,.2f}" and words in run_page(run)
    assert "epsilon" not in Page(run_page(read_run(result.path))).tiles


def test_a_seldom_evaluated_run_has_the_forgetting_of_its_tables(tables, result):
    seldom = {
        "name": "seldom",
        "train.num_rounds": 5,
        "train.eval_every": 2,
        "train.local_steps": 2,
    }
    found = rayfed.run(tables, seldom)
    rows = found.rounds.to_pylist()
    losses = forgotten(read_run(found.path))
    assert {loss.peak_round for loss in losses} <= {2, 4}
    assert np.mean([loss.lost for loss in losses]) == pytest.approx(rows[5]["forgetting"])
    assert f"forgetting {rows[5]['forgetting']:.1%}, in round 5" in repr(found)
    assert "Only some rounds were evaluated" in found._repr_html_()
    assert "Only some rounds were evaluated" not in result._repr_html_()


def test_many_clients_share_the_columns_of_the_figure(keeper):
    run = read_run(keep(keeper()))
    many = {
        "client": np.arange(10_000),
        "class": np.arange(10_000) % 2,
        "count": np.full(10_000, 5),
    }
    chart = plots.partition(replace(run, partition=many, num_clients=10_001))
    assert (
        chart.data["unit"] == "examples, mean of 26 clients" and len(chart.data["columns"]) == 385
    )
    assert chart.data["columns"][-1] == "9984 to 10000"
    crowd = replace(run, partition=many, num_clients=10_001)
    assert "10,001 clients hold 50,000 examples: 0 to 5 each" in run_page(crowd)


def test_a_failed_run_has_a_page_that_says_why(tables, pages):
    with pytest.raises(rayfed.base.errors.Diverged):
        rayfed.run(tables, {"name": "failed", "train.lr": 1e30})
    text = (folder_of(make_job({**tables, "name": "failed"})) / "report.html").read_text()
    assert 'class="status failed"' in text and "the loss became" in text


def test_a_page_that_cannot_be_made_does_not_fail_the_run(tables, pages, monkeypatch):
    def fail(path):
        raise ValueError("no ink")

    monkeypatch.setattr(page, "write_report", fail)
    result = rayfed.run(tables, {"name": "no-page", "train.num_rounds": 1})
    assert result.rounds.num_rows == 2
    assert (
        "the run has no page, because ValueError('no ink')" in (result.path / "log.txt").read_text()
    )
    assert not (result.path / "report.html").exists()


def grid(keeper):
    """Two methods with three seeds each, one of which was killed, and one behind."""
    folders = []
    for number, (method, ends) in enumerate({"avg": [1, 2, 3], "ntd": [3, 4, 4]}.items()):
        for seed, last in enumerate(ends):
            made = keeper(
                name=f"g/s/{method}/seed-{seed}", seed=seed, method=["fedavg", "fedntd"][number]
            )
            folders.append(keep(made, [0, 0], [2, 0], [last, last]))
    killed(folders[-1])
    return [*folders, keep(keeper(name="g/s/ntd/seed-3", seed=3), [4, 4])]


def killed(path):
    summary = path / "summary.json"
    summary.write_text(summary.read_text().replace('"done"', '"running"'))


def two_seeds(keeper):
    """A point of both needs both of them."""
    histories = [[0, 0], None, [2, 2], None, [4, 4]], [[0, 0], None, [0, 0], [1, 1], [2, 2]]
    return [
        keep(keeper(name=f"g/seed-{seed}", seed=seed, train={"eval_every": 2}), *history)
        for seed, history in enumerate(histories)
    ]


def unfinished(keeper):
    """No process writes to it: it is not called running. A class has no test images."""
    path = keep(keeper(("cat", "dog", "elk")), [0, 1, 1], [1, 2, 1], [3, 2, 1])
    table = read_table(path, "classes").to_pydict()
    table["accuracy"] = [
        np.nan if name == "elk" else value
        for name, value in zip(table["class"], table["accuracy"], strict=True)
    ]
    shutil.rmtree(path / "classes.parquet")
    pq.write_table(pa.table(table), path / "classes.parquet")
    killed(path)
    return [path]


def notes(keeper):
    """Means over images where there are any: of clients with 10 and 30; a NaN does not count."""
    path = keep(keeper(), [1, 1], [2, 2], [3, 3])
    row = {
        "round": 1,
        "client": 0,
        "num_examples": 10,
        "train_loss": 1.0,
        "seconds": 0.5,
        "node": "a",
    }
    for number, pair in {
        1: ([("loss.a", 1.0), ("loss.b", 7.0)], [("loss.a", 3.0), ("loss.b", math.nan)]),
        2: (
            [("loss.a", 5.0), ("local.before.accuracy", 0.5), ("local.after.accuracy", math.nan)],
            [],
        ),
    }.items():
        of_both = zip((10, 30), pair, strict=True)
        rows = [
            {**row, "round": number, "num_examples": images, "notes": given}
            for images, given in of_both
        ]
        write_round(path, number, {"clients": rows})
    return [path]


def seldom(keeper):
    """Round 3 was the last of a shorter run: its accuracies are shown, but are no peak."""
    history = [[0, 0], None, [3, 1], [4, 4], [1, 2], None]
    method = [{"until": 1, "method": "fedavg"}, {"method": "fedntd"}]
    made = keeper(name="seldom", method=method, train={"eval_every": 2, "num_rounds": 6})
    return [keep(made, *history, error=KeyboardInterrupt())]


def three(keeper):
    histories = {"one": [0, 1, 3, 2], "two": [0, 3, 3, 4], "three": [0, 1, 1, 1]}
    folders = []
    for name, history in histories.items():
        error = KeyboardInterrupt() if name == "three" else None
        folders.append(keep(keeper(name=name), *([right, right] for right in history), error=error))
    return folders


def unlike(keeper):
    even, skewed = keeper(name="even", alpha=9.0), keeper(name="skewed", train={"lr": 0.5})
    return [keep(made, [1, 1], [2, 2]) for made in (even, skewed)]


def own_partitions(keeper):
    data = {"partition": {"name": "dirichlet", "num_clients": 7, "min_size": 0, "seed": "run"}}
    return [
        keep(
            keeper(name=f"g/{method}/seed-{seed}", seed=seed, method=method, data=data),
            [1, 1],
            [2, 2],
        )
        for method in ("fedavg", "fedntd")
        for seed in (0, 1, 2)
    ]


# Name -> the folders of its runs: of a single run its page, of several the page that compares them.
WORLDS = {
    "one": lambda keeper: [keep(keeper(), [0, 4], [2, 4], [2, 1])],
    **{made.__name__: made for made in (seldom, three, unlike, own_partitions)},
    **{made.__name__: made for made in (two_seeds, unfinished, notes)},
}


@pytest.mark.parametrize("name", WORLDS)
def test_a_page_says_and_draws_what_is_recorded(name, keeper):
    """After an intended change, RECORD=1 in the environment writes the record anew: read its
    difference.
    """
    folders = WORLDS[name](keeper)
    runs = [read_run(folder) for folder in folders]
    said = said_by(run_page(runs[0]) if len(runs) == 1 else comparison_page(runs))
    records = json.loads(RECORDS.read_text())
    if os.environ.get("RECORD"):
        records[name] = said
        text = json.dumps(records, indent=1, ensure_ascii=False) + "\n"
        RECORDS.write_text(
            re.sub(r"\[[^\[\]{}\"]*\]", lambda numbers: " ".join(numbers[0].split()), text)
        )
    assert said == records[name]


@pytest.mark.parametrize(
    ("partition", "shown"),
    [
        (
            {"name": "dirichlet", "seed": 0, "alpha": 0.5, "cap": True, "sizes": "drawn"},
            "seed alpha",
        ),
        (
            {"name": "dirichlet", "seed": 0, "alpha": 0.1, "cap": False, "sizes": "drawn"},
            "seed alpha cap",
        ),
        ({"name": "dirichlet", "min_size": [10, 0], "cap": True}, "min_size"),
        ({"name": "my_rule:Mine", "cap": True}, "cap"),
        ({"name": ["iid", "shards"], "cap": True}, "cap"),
    ],
)
def test_of_a_partition_only_defaults_are_left_out(partition, shown):
    assert " ".join(page._of_partition(partition)) == f"name {shown}"


def test_a_grid_is_a_line_per_method(keeper, tmp_path):
    grid(keeper)
    done = CliRunner().invoke(main, ["report", str(tmp_path / "g")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "g/report.html").read_text()
    _, avg, ntd = Page(text).rows[:3]
    assert avg[:4] == ["avg", "0, 1, 2", "50.0 ± 25.0%", "50.0 ± 25.0%"] and avg[5] == "10.0 ± 0.0%"
    assert ntd[:4] == ["ntd", "0, 1, 2", "91.7 ± 14.4%", "91.7 ± 14.4%"]
    assert "more rounds: g/s/ntd/seed-3 (done, 0 rounds)." in text
    # 75 - 25, 100 - 50 and 100 - 75 points; t with 2 degrees of freedom.
    (gap,) = charts_of(text)["gaps"]["points"]
    half = 4.303 * np.std([50, 50, 25], ddof=1) / math.sqrt(3)
    assert gap["ends"] == pytest.approx([125 / 3 - half, 125 / 3 + half])
    (tmp_path / "g/s/avg/seed-0").rename(tmp_path / "g/s/avg/seed-10")
    runs = find_runs(tmp_path / "g/s/avg")
    assert [run.name for run in runs] == ["seed-1", "seed-2", "seed-10"], (
        "in the order of their numbers"
    )


def test_of_several_runs_the_class_of_which_a_group_has_lost_most_comes_first(keeper):
    """Of 4 images of each class: `even` loses one of each cat and elk, `uneven` three elks."""
    classes = ("cat", "dog", "elk")
    even = keep(keeper(classes, name="even"), [0, 0, 0], [4, 4, 4], [3, 4, 3])
    uneven = keep(keeper(classes, name="uneven"), [0, 0, 0], [4, 4, 4], [4, 2, 1])
    losses = class_losses(grouped([read_run(even), read_run(uneven)]))
    assert [name for name, *_ in losses] == ["elk", "dog", "cat"]
    percents = [re.findall(r"<span>([\d.]+)%", str(cells)) for _, *cells in losses]
    assert percents == [["25.0", "75.0"], ["0.0", "50.0"], ["25.0", "0.0"]]


def test_runs_of_one_name_in_two_places_stay_apart(keeper, tmp_path):
    grid(keeper)
    old = shutil.copytree(tmp_path / "g", tmp_path / "old" / "g")
    runs = [read_run(run) for folder in (tmp_path / "g", old) for run in find_runs(folder)]
    assert [(len(group.runs), len(group.behind)) for group in grouped(runs)] == [(3, 0), (3, 1)] * 2
    assert len({group.name for group in grouped(runs)}) == 4


def test_how_clients_answered_the_virtual_time_and_an_early_end_are_shown(tables, tmp_path):
    clients = {"dropout": 0.3, "seconds_per_example": 0.01, "deadline": 1e6, "oversample": 1.5}
    train = {**tables["train"], "num_rounds": 12, "lr": 1e-9, "patience": 2}
    found = rayfed.run(
        {**tables, "clients": clients, "train": train, "output": {"path": str(tmp_path)}}
    )
    page, rounds = run_page(read_run(found.path)), found.rounds.to_pylist()[1:]
    notes = [dict(row["notes"]) for row in rounds]
    charts = charts_of(page)
    drawn = {line["name"]: line["y"] for line in charts["answers"]["series"]}
    assert drawn == {
        name: [note[f"clients.{name}"] for note in notes]
        for name in ("answered", "dropped", "late")
    }
    seconds = np.cumsum([note["clients.virtual_seconds"] for note in notes])
    assert charts["virtual"]["series"][0]["y"] == pytest.approx(seconds.tolist(), rel=1e-3)
    assert (
        f"Ended after round {len(rounds)} of 12: no better test accuracy" in page
        and len(rounds) < 12
    )


def everywhere(content, hostile):
    """A table of a file, again and again, with a value in it or in an inner table or list replaced,
    each in turn.
    """
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        inner = everywhere(value, hostile) if isinstance(value, dict | list) else ()
        for other in (*inner, hostile):
            replaced = {**content} if isinstance(content, dict) else [*content]
            replaced[key] = other
            yield replaced


@pytest.mark.slow
@pytest.mark.parametrize("hostile", [HOSTILE, [{HOSTILE: HOSTILE}]], ids=["text", "list"])
def test_every_value_of_a_file_is_plain_text_or_refused(hostile, copy, monkeypatch, tmp_path):
    """Each value of job.toml, environment.json and summary.json, and each table of them, is a
    script, in turn.
    """
    monkeypatch.setattr(read, "read_table", functools.cache(read_table))
    method = [
        {"until": 1, "method": [{"name": "fedavg"}]},
        {"method": [{"name": "fedntd", "beta": [1.0]}]},
    ]
    files = {
        "job.toml": (tomli_w.dumps, {**read_toml(copy / "job.toml"), "method": method}),
        "environment.json": (json.dumps, json.loads((copy / "environment.json").read_text())),
        "summary.json": (json.dumps, json.loads((copy / "summary.json").read_text())),
    }
    shown, refused = set(), set()
    for name, (written, content) in files.items():
        for number, table in enumerate(everywhere(content, hostile)):
            (copy / name).write_text(written(table))
            try:
                pages = [
                    write_report(copy, tmp_path / "a.html"),
                    write_comparison([copy, copy], tmp_path / "b.html"),
                ]
            except InputError as error:
                refused.add((str(error), "cannot be shown" in str(error)))
                continue
            shown.add((name, number))
            for text in (path.read_text() for path in pages):
                assert text.count("<script") == text.count("</script") == 3 and "<img" not in text
                Page(text)
        (copy / name).write_text(written(content))
    assert len(shown) > 50 and {name for name, _ in shown} == set(files)
    assert all(told for _, told in refused)


def test_a_damaged_file_is_one_message(copy):
    for file, content in (("rounds.parquet/round-00002.parquet", "PAR1"), ("job.toml", "name = 1")):
        (copy / file).write_text(content)
        for runs in ([copy], [copy, copy.parent]):
            done = CliRunner().invoke(main, ["report", *map(str, runs)])
            assert (done.exit_code, "cannot be shown" in done.stderr, done.stderr.count("\n")) == (
                2,
                True,
                1,
            )


def test_a_result_is_four_lines_and_in_a_notebook_a_table_and_a_curve(result):
    first, best, _, last = repr(result).splitlines()
    row = max(result.rounds.to_pylist()[1:], key=lambda row: row["test_accuracy"])
    assert (first, last) == ("Result of 3 rounds", f"  path  {result.path}")
    shown = (
        f"accuracy {row['test_accuracy']:.1%}, forgetting {row['forgetting']:.1%}, in round "
        f"{row['round']}"
    )
    assert best == f"  best  {shown}"
    text = result._repr_html_()
    found = Page(text)
    assert found.rows[0][:2] == ["best accuracy", f"{100 * row['test_accuracy']:.1f}%"]
    assert found.tags["svg"] == 1 and "<title>round 3: " in text and "html" not in found.tags


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
    # Of its own clock: until all is drawn.
    "--virtual-time-budget=20000",
)
# What a browser asks for whatever it shows.
ITS_OWN = ("google.com", "googleapis.com", "gvt1.com")


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
# No window is narrower than 500.
@pytest.mark.parametrize("width", [500, 1280])
def test_a_browser_draws_every_figure_and_says_nothing(width, keeper, tmp_path):
    names = (HOSTILE, "</script><script>console.error('run')</script>", "\u202eabc & \"'", "\u72ac")
    rounds = [[number, 1, 2, 3] for number in range(4)]
    runs = [read_run(keep(keeper(names, name=name), *rounds)) for name in ("one", "two")]
    runs = [
        replace(run, job={**run.job, "name": name})
        for run, name in zip(runs, (HOSTILE, names[1]), strict=True)
    ]
    for number, text in enumerate((run_page(runs[0]), comparison_page(runs))):
        (tmp_path / "page.html").write_text(text)
        log = tmp_path / f"net-{number}.json"
        options = (
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--log-net-log={log}",
            f"--window-size={width},2000",
        )
        command = [CHROMIUM, *FLAGS, *options, "--dump-dom", (tmp_path / "page.html").as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
        assert 'data-drawn="yes"' in done.stdout
        assert done.stdout.count('role="img"') >= len(charts_of(text))
        asked = {
            urlsplit(url).hostname or ""
            for url in re.findall(r'"url":"(https?://[^"]*)"', log.read_text())
        }
        assert [host for host in asked if not host.endswith(ITS_OWN)] == []


QUANTITIES = {
    **{"53.2% (round 12)": 53.2, "-3.0 ± 1.0%": -3.0, "1,234": 1234, "+0.5": 0.5, "100.0%*": 100},
    **{
        "2.0 kB": 2000,
        "1.5 MB": 1.5e6,
        "0:01:02": 62,
        "1 day, 0:00:01": 86401,
        "n/a": "n/a",
        "fedavg": "fedavg",
    },
}
CLICKS = """<script>
QUANTITY
const wait = setInterval(() => {
  if (document.documentElement.dataset.drawn === undefined) return;
  clearInterval(wait);
  const cell = (textContent) => Object.assign(document.createElement("td"), { textContent });
  const quantities = TEXTS.map((text) => quantity(cell(text)));
  const tables = [...document.querySelectorAll("table")].filter((table) => table.querySelector("button"));
  const orders = tables.flatMap((table) =>
    [...table.tHead.rows[0].cells].map((head, column) => {
      const said = () => [...table.tBodies[0].rows].map((row) => row.cells[column].textContent.trim());
      return [said(), ...["descending", "ascending"].map((order) => {
        head.querySelector("button").click();
        if (head.getAttribute("aria-sort") !== order) throw new Error(order);
        return said();
      })];
    }));
  const said = JSON.stringify([quantities, orders]);
  document.body.append(Object.assign(document.createElement("pre"), { id: "said", textContent: said }));
}, 10);
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_a_click_on_the_head_of_a_column_sorts_the_table_by_it(keeper, tmp_path):
    run = read_run(keep(keeper(), *([number, 3] for number in range(4))))
    quantity = re.search(
        r"  function quantity.*?\n  }\n",
        page.HERE.joinpath("templates", "page.js").read_text(),
        re.DOTALL,
    )[0]
    script = CLICKS.replace("QUANTITY", quantity).replace("TEXTS", json.dumps([*QUANTITIES]))
    text = re.sub(r"<meta http-equiv=.Content-Security-Policy.[^>]*>", "", run_page(run)).replace(
        "</body>", script
    )
    (tmp_path / "page.html").write_text(text)
    options = (
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        (tmp_path / "page.html").as_uri(),
    )
    shown = subprocess.run(
        [CHROMIUM, *FLAGS, *options], capture_output=True, text=True, timeout=400
    ).stdout
    quantities, orders = json.loads(
        html.unescape(re.search(r'<pre id="said">(.*?)</pre>', shown)[1])
    )
    assert quantities == [*QUANTITIES.values()]
    assert len(orders) > 5
    for before, down, up in orders:
        assert sorted(before) == sorted(down) == sorted(up)
        if all(re.match(r"-?[\d.]+", text) for text in before):
            numbers = [float(re.match(r"-?[\d.]+", text)[0]) for text in down]
            assert numbers == sorted(numbers, reverse=True)
            assert [float(re.match(r"-?[\d.]+", text)[0]) for text in up] == sorted(numbers)
