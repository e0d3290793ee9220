"""The page of a run: its numbers are those of the tables, and everything in a run's files is shown as plain text."""

import re
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import rayfed
from rayfed.cli import main
from rayfed.data.federation import federate
from rayfed.data.samples import Dataset, Samples
from rayfed.engine import ClientRow, Round
from rayfed.folder.keeper import Keeper
from rayfed.folder.places import folder_of
from rayfed.folder.tables import read_table
from rayfed.job import make_job
from rayfed.local import Evaluation, Site, open_data
from rayfed.methods import Part
from rayfed.report import figures, page
from rayfed.report.page import comparison_page, run_page, write_report
from rayfed.report.read import ClassLoss, forgotten, read_run
from rayfed.runtime.here import Here

HOSTILE = "</td></svg><script src=//evil.example></script><img src=x onerror='alert(1)'>&amp;$\\x$\"_"
VOID = {"meta", "img", "link", "br"}  # elements without an end tag


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
def result(tables):
    return rayfed.run(tables)


@pytest.fixture
def copy(result, tmp_path):
    """A copy of the run's folder that a test may change."""
    return shutil.copytree(result.path, tmp_path / "copy")


@pytest.fixture
def keeper(tmp_path):
    """Make the keeper of an invented run, with classes of any names."""

    def make(classes=("cat", "dog"), name="hand"):
        partition = {"name": "dirichlet", "num_clients": 7, "min_size": 0}
        job = make_job({"name": name, "output": {"path": str(tmp_path)}, "data": {"partition": partition}})
        samples = Samples(np.zeros((60, 1, 4, 4), np.uint8), np.arange(60) % len(classes), classes)
        federation = federate(Dataset(samples, samples), job.data.partition)
        site = Site(nn.Linear(1, 1), federation, job, torch.device("cpu"))
        return Keeper(site, Here(site))

    return make


def keep(keeper, *history, error=None):
    """Keep a run of these rounds, which ends with `error` if one is given; gives its folder."""
    with suppress(ArithmeticError, KeyboardInterrupt), keeper:
        for number, right in enumerate(history):
            keeper.keep(a_round(number, right))
        if error is not None:
            raise error
    return keeper.path


def a_round(number, right):
    """A round after which the model recognises `right[c]` of the 4 test images of class `c`."""
    confusion = np.zeros((len(right), len(right)), np.int64)
    for c, count in enumerate(right):
        confusion[c, c], confusion[c, c - 1] = count, 4 - count
    clients = (ClientRow(number % 5, 10, 1 / number, 0.5, HOSTILE), ClientRow(5, 30, 2.0, 1.5, "b")) if number else ()
    return Round(number, {}, {}, {}, Evaluation(confusion, 8.0), np.ones(len(right)), 0.1, clients)


def test_a_run_ends_with_a_page_that_has_the_numbers_of_its_tables(result):
    page, rounds = Page((result.path / "report.html").read_text()), result.rounds.to_pylist()
    best = max(rounds[1:], key=lambda row: row["test_accuracy"])
    assert page.tiles["best accuracy"] == f"{best['test_accuracy']:.4f}"
    assert page.tiles["last accuracy"] == f"{rounds[-1]['test_accuracy']:.4f}"
    assert page.tiles["forgetting"] == f"{rounds[-1]['forgetting']:.4f}"
    assert page.tiles["rounds"] == "3"
    assert page.tiles["sent to clients"] == f"{sum(row['bytes_down'] for row in rounds) / 1e6:.1f} MB"

    accuracy = {(row["round"], row["class"]): row["accuracy"] for row in result.classes.to_pylist()}
    start = page.rows.index(["class", "peak", "in round", "last", "lost", ""])
    losses = page.rows[start + 1 : start + 11]
    for name, peak, number, last, lost, _ in losses:
        assert float(peak) == pytest.approx(max(accuracy[1, name], accuracy[2, name]))
        assert float(peak) == pytest.approx(accuracy[int(number), name])
        assert float(last) == pytest.approx(accuracy[3, name])
        assert float(lost) == pytest.approx(float(peak) - float(last))
    assert [row[4] for row in losses] == sorted((row[4] for row in losses), key=float, reverse=True)
    assert np.mean([float(row[4]) for row in losses]) == pytest.approx(rounds[-1]["forgetting"])

    clients = result.clients.to_pylist()
    start = page.rows.index(["client", "images", "times sampled", "mean training loss", "mean seconds"])
    for client, images, sampled, loss, _ in page.rows[start + 1 : start + 1 + len({row["client"] for row in clients})]:
        own = [row for row in clients if row["client"] == int(client)]
        assert (images, sampled) == (f"{own[0]['num_examples']:,}", str(len(own)))
        assert loss == f"{np.mean([row['train_loss'] for row in own]):.4f}"


def test_the_partition_is_written_as_it_was_dealt(result, tables):
    federation = open_data(make_job(tables))
    counts = np.zeros((6, 10), np.int64)
    for row in read_table(result.path, "partition").to_pylist():
        assert row["count"] > 0
        counts[row["client"], federation.train.classes.index(row["class"])] = row["count"]
    assert (counts == [federation.label_counts(i) for i in range(6)]).all()


def test_the_page_says_what_ran(result):
    text = (result.path / "report.html").read_text()
    assert "<b>not_true_distill</b> (beta = 1.0, tau = 1.0" in text
    assert "alpha = 0.3" in text and "T-shirt/top" in text
    environment = read_run(result.path).environment
    assert environment["packages"]["torch"] in text and environment["partition"] in text


def test_the_page_loads_nothing_and_runs_nothing(result):
    text = (result.path / "report.html").read_text()
    found = Page(text)
    assert "://" not in text and "@import" not in text and "url(//" not in text
    assert not {"script", "link", "iframe", "object", "img"} & set(found.tags)
    assert all(re.match("#|data:image/png;base64,", link) for link in found.values_of("src", "href", "xlink:href"))
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert "default-src 'none'" in text, "browsers are told to load nothing"
    names = found.values_of("id")
    assert len(names) == len(set(names)), "no id is used twice"
    assert {link[1:] for link in found.values_of("xlink:href") if link.startswith("#")} <= set(names)


def test_every_figure_has_axes_with_units_and_a_caption(result):
    text = (result.path / "report.html").read_text()
    assert text.count("<figure>") == text.count("<figcaption>") == 5
    for words in ("test accuracy (fraction)", "mean loss per image (nats)", "seconds per client", "images", "round"):
        assert f">{words}</text>" in text
    assert figures.INK not in text, "lines and text take the page's colour"


def test_a_page_made_again_is_the_same_byte_for_byte(copy):
    first = (copy / "report.html").read_bytes()
    (copy / "report.html").unlink()
    done = CliRunner().invoke(main, ["report", str(copy)])
    assert done.exit_code == 0, done.output
    assert (copy / "report.html").read_bytes() == first
    assert CliRunner().invoke(main, ["report", str(copy), "-o", str(copy / "deep/a.html")]).exit_code == 0
    assert (copy / "deep/a.html").read_bytes() == first


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    done = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert (done.exit_code, "is not the folder of a run: it holds no job.toml" in done.stderr) == (2, True)


def test_names_are_shown_as_plain_text(keeper):
    rounds = [[number, 1, 2, 3] for number in range(3)]
    run = read_run(keep(keeper((HOSTILE, "$x_{", "\u72ac", "<b>")), *rounds, error=ArithmeticError(HOSTILE)))
    assert HOSTILE in run.error
    job = {**run.job, "name": HOSTILE, "method": [{"name": HOSTILE, HOSTILE: HOSTILE}]}
    run = replace(run, job=job, status=HOSTILE, job_text=HOSTILE, environment={HOSTILE: HOSTILE})
    for text in (run_page(run), comparison_page([run, run])):
        found = Page(text)
        assert not {"script", "img"} & set(found.tags)
        assert not [name for name, _ in found.attributes if name.startswith("on")]
        assert "<script" not in text and text.count("&lt;script") > 5
    assert "\u72ac" in run_page(run)


@pytest.mark.parametrize("gone", ["rounds", "clients", "classes", "partition", "environment", "summary"])
def test_a_page_is_made_even_if_a_file_is_missing(gone, copy):
    for file in copy.glob(f"{gone}.*"):
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    text = write_report(copy).read_text()
    assert "look" in text and Page(text).tiles


def test_an_unfinished_run_has_a_page(keeper):
    with keeper() as made:
        assert "No round was finished" in write_report(made.path).read_text()
        made.keep(a_round(0, [1, 2]))
        text = write_report(made.path).read_text()
        assert 'class="status running"' in text and "before the second round of training" in text
        assert "7 clients hold 60 images" in text


def test_the_last_round_may_lack_a_table(keeper):
    path = keep(keeper(), *([number, 3 - number] for number in range(4)))
    (path / "classes.parquet" / "round-00003.parquet").unlink()
    run = read_run(path)
    assert len(run.rounds["round"]) == 4 and len(run.class_accuracy) == 3
    assert forgotten(run) == [ClassLoss("dog", 0.5, 1, 0.25, 0.25), ClassLoss("cat", 0.25, 1, 0.5, -0.25)]
    assert Page(run_page(run)).tiles["rounds"] == "3"


def test_a_class_without_test_images_has_no_numbers(keeper):
    run = read_run(keep(keeper(("cat", "dog", "elk"))))
    history = np.array([[1.0, 1.0, np.nan], [0.9, 0.0, np.nan], [0.2, 0.5, np.nan], [0.3, 0.6, np.nan]])
    run = replace(run, classes=("cat", "dog", "elk"), class_accuracy=history)
    losses = forgotten(run)
    assert [(loss.name, loss.peak_round, loss.peak) for loss in losses[:2]] == [("cat", 1, 0.9), ("dog", 2, 0.5)]
    assert [round(loss.lost, 6) for loss in losses[:2]] == [0.6, -0.1]
    assert losses[2].name == "elk" and ["elk", "n/a", "1", "n/a", "n/a", ""] in Page(run_page(run)).rows


def test_many_clients_share_the_columns_of_the_figure(keeper):
    run = read_run(keep(keeper()))
    many = {"client": np.arange(10_000), "class": np.arange(10_000) % 2, "count": np.full(10_000, 5)}
    assert "images, mean of 26 clients" in figures.partition(many, run.classes, 10_001)
    crowd = replace(run, partition=many, num_clients=10_001)
    assert "10,001 clients hold 50,000 images: 0 to 5 each" in run_page(crowd)


@dataclass(frozen=True)
class Fails(Part):
    """Raises an error in round `at`."""

    at: int = 2

    def begin(self, client):
        if client.round == self.at:
            raise RuntimeError("as asked")


def test_a_failed_run_has_a_page_that_says_why(tables):
    with pytest.raises(RuntimeError, match="as asked"):
        rayfed.run(tables, {"name": "failed"}, method=rayfed.compose(Fails()))
    text = (folder_of(make_job({**tables, "name": "failed"})) / "report.html").read_text()
    assert 'class="status failed"' in text and "as asked" in text and Page(text).tiles["rounds"] == "1"


def test_a_page_that_cannot_be_made_does_not_fail_the_run(tables, monkeypatch):
    def fail(path):
        raise ValueError("no ink")

    monkeypatch.setattr(page, "write_report", fail)
    result = rayfed.run(tables, {"name": "no-page", "train.num_rounds": 1})
    assert result.rounds.num_rows == 2
    assert "the run has no page, because ValueError('no ink')" in (result.path / "log.txt").read_text()
    assert not (result.path / "report.html").exists()


def test_runs_are_compared_with_the_first(keeper, tmp_path):
    histories = {"one": [0, 1, 3, 2], "two": [0, 3, 3, 4], "three": [0, 1, 1, 1]}
    ends = {"three": KeyboardInterrupt()}
    folders = [
        str(keep(keeper(name=name), *([right, right] for right in history), error=ends.get(name)))
        for name, history in histories.items()
    ]
    done = CliRunner().invoke(main, ["report", *folders, "-o", str(tmp_path / "compare.html")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "compare.html").read_text()
    found = Page(text)
    head, *rows = found.rows[:4]
    told = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["run"] for row in told] == ["one", "two", "three"]
    assert [row["best accuracy"] for row in told] == ["0.7500 (round 2)", "1.0000 (round 3)", "0.2500 (round 1)"]
    assert [row["last accuracy"] for row in told] == ["0.5000", "1.0000", "0.2500"]
    assert [row["rounds to target"] for row in told] == ["2", "1", "never"]
    assert "stopped" in text and "://" not in text
    assert text.count(figures.COLOURS[2].lower()) >= 4, "three lines and the swatch in the table"
