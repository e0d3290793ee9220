"""The papers' figures: their numbers are those of the tables, names stay text, and what is
missing is refused.
"""

import csv
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from matplotlib import style
from matplotlib.figure import Figure
from PIL import Image

import rayfed
from rayfed.base.errors import InputError
from rayfed.cli import main
from rayfed.folder.tables import read_table
from rayfed.papers import (
    classes,
    clients,
    epochs,
    global_model,
    one_client,
    partition,
    sweep,
    uneven,
)
from rayfed.papers.classes import class_accuracy, label_counts, similarity
from rayfed.papers.clients import ranks
from rayfed.papers.curves import curves, series
from rayfed.papers.global_model import lost_of, shown_matrices
from rayfed.papers.kinds import KINDS
from rayfed.papers.panels import apart, save
from rayfed.papers.style import STYLE
from rayfed.papers.sweep import scale_axis
from rayfed.report.forms import KEYS
from rayfed.report.measured import Spread, drifts, forgetting_of, over_clients, unmeasured
from rayfed.report.page import run_page
from rayfed.report.read import grouped, of_clients, read_run, shorten
from rayfed.report.runs import labelled

HOSTILE = ("<script>alert(1)</script>", "$x_{", "\u72ac \U0001f415", "a" * 60)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two methods on two-dimensional features, with all measures, evaluated in every round."""
    path = tmp_path_factory.mktemp("runs")
    job = {
        "data": {"partition": {"name": "shards", "s": 2, "num_clients": 6}},
        "model": {"name": "lenet", "project": 2},
        "train": {"num_rounds": 4, "clients_per_round": 3, "local_steps": 4, "lr": 0.05},
        "ray": {"mode": "off"},
        "output": {"path": str(path)},
        "measure": ["local", "epochs", "drift"],
        "measure_images": 200,
    }
    return [rayfed.run({**job, "name": name, "method": name}).path for name in ("fedavg", "fedntd")]


@pytest.fixture
def runs(folders):
    return [read_run(folder) for folder in folders]


@pytest.fixture
def copy(folders, tmp_path):
    """A copy of the first run's folder that a test may change."""
    return shutil.copytree(folders[0], tmp_path / "copy")


@pytest.fixture
def full(copy):
    """A run with the tables of `measure = ["confusion"]`: class c is taken for c and for c + 1."""
    run = read_run(copy)
    number = len(run.classes)
    rows = []
    for round, client in ((2, None), (2, 1), (4, None), (4, 0), (4, 5)):
        for c, name in enumerate(run.classes):
            rows.append((round, client, name, name, 3))
            rows.append(
                (round, client, name, run.classes[(c + 1) % number], 1 if client is None else 9)
            )
    columns = zip(*rows, strict=True)
    names = ("round", "client", "class", "predicted", "count")
    write(copy / "confusions.parquet", dict(zip(names, map(list, columns), strict=True)))
    return copy


def charts_of(text):
    """The data of a page's figures."""
    return json.loads(
        re.search(r'<script type="application/json" id="charts">(.*?)</script>', text)[1]
    )


def write(folder, table):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    pq.write_table(
        table if isinstance(table, pa.Table) else pa.table(table), folder / "round-00000.parquet"
    )


def drawn(draw, *args, **kwargs):
    """The figure, laid out as it is saved."""
    with style.context(["default", STYLE]):
        figure = draw(*args, **kwargs)
        figure.draw_without_rendering()
    return figure


def table(*arguments):
    return CliRunner().invoke(main, ["table", *map(str, arguments)])


def figure(*arguments):
    return CliRunner().invoke(main, ["figure", *map(str, arguments)])


def test_the_mean_of_what_classes_have_lost_is_the_forgetting(runs):
    for run in runs:
        rounds, lost = lost_of(run)
        assert rounds.tolist() == [2, 3, 4]
        np.testing.assert_allclose(
            lost.mean(axis=1), 100 * run.rounds["forgetting"][rounds], atol=1e-9
        )


def test_only_rounds_that_count_are_peaks(runs):
    accuracy = np.array([[0.9, 0.9], [0.5, 0.1], [0.7, 0.3], [0.4, 0.6]])
    run = replace(
        runs[0], classes=("a", "b"), class_rounds=np.array([0, 2, 3, 4]), class_accuracy=accuracy
    )
    every_second = replace(run, job={**run.job, "train": {**run.job["train"], "eval_every": 2}})
    assert [lost_of(each)[1][-1].round(6).tolist() for each in (run, every_second)] == [
        [30, -30],
        [10, -50],
    ]


def test_forgetting_by_each_of_its_names_is_that_of_the_tables(full):
    run = read_run(full)
    a, found = run.class_accuracy, run.forgetting
    held = {
        (row["round"], row["class"])
        for row in read_table(full, "classes").to_pylist()
        if row["seen"]
    }
    away = [[(r, name) not in held for name in run.classes] for r in range(5)]
    lost = [a[1:r].max(axis=0) - a[r] for r in (2, 3, 4)]
    drops = [np.maximum(a[r - 1] - a[r], 0).mean() for r in (2, 3, 4)]
    of_away = [lost[r - 2][away[r]].mean() for r in (2, 3, 4) if any(away[r])]
    wanted = {
        "peak": run.rounds["forgetting"][2:],
        "round": drops,
        "continual": of_away,
        "local": [
            np.maximum(a[r - 1] - 0.25, 0).mean() for r in (2, 4)
        ],  # 3 of 12 images of each class are right
        "aggregation": [np.maximum(0.25 - a[r], 0).mean() for r in (2, 4)],
    }
    for name, values in wanted.items():
        assert found[name][1] == pytest.approx(values), name
    told = forgetting_of(run)
    assert told["forgetting.round"] == pytest.approx(100 * drops[-1])
    assert told["forgetting.round.last_10"] == pytest.approx(100 * np.mean(drops)) and {*told} == {
        *KEYS
    }


def test_the_table_compares_any_forgetting_that_its_runs_have(full, folders):
    key = "forgetting.aggregation"
    (line,) = csv.DictReader(table(full, "--of", key, "--format", "csv").stdout.splitlines())
    assert float(line[key]) == pytest.approx(forgetting_of(read_run(full))[key])
    lacking = table(folders[1], "--of", "forgetting.local")
    assert lacking.exit_code == 2 and '"confusion"]; run it again' in lacking.stderr


def test_a_run_whose_rounds_hold_all_classes_is_told_why_it_has_no_continual_forgetting(tmp_path):
    changed = {
        "ray.mode": "off",
        "output.path": str(tmp_path),
        "name": "all",
        "data.partition": "iid",
    }
    few = {"train.num_rounds": 2, "train.local_steps": 1, "model": "lenet"}
    run = rayfed.run("jobs/quickstart.toml", changed | few)
    lacking = table(run.path, "--of", "forgetting.continual")
    assert (
        lacking.exit_code == 2
        and "in which a class is held by none of the round's clients" in lacking.stderr
    )


def test_a_line_of_local_models_is_the_mean_of_the_notes(runs):
    axes = drawn(clients.local, runs).axes
    assert [place.get_title(loc="left") for place in axes] == ["fedavg", "fedntd"]
    caption = axes[0].figure.get_label()
    assert (
        caption
        == "Local models: mean and standard deviation of n = 3 clients per round, on 200 test examples"
    )
    assert axes[0].get_ylim() == axes[1].get_ylim()
    for place, run in zip(axes, runs, strict=True):
        rows = read_table(run.folder, "clients").to_pylist()
        for line, when in zip(place.lines, ("before", "after"), strict=True):
            means = [
                100
                * np.mean(
                    [
                        dict(row["notes"])[f"local.{when}.accuracy"]
                        for row in rows
                        if row["round"] == number
                    ]
                )
                for number in (1, 2, 3, 4)
            ]
            np.testing.assert_allclose(line.get_ydata(), means)


def test_bars_are_the_notes_of_a_round(runs):
    axes = drawn(clients.in_out, runs[:1], 3).axes
    found = of_clients(runs[0].folder, "local.before.out_local", "local.after.out_local")
    heights = [bar.get_height() for bar in axes[1].patches]
    rows = found["round"] == 3
    expected = [100 * found[f"local.{when}.out_local"][rows].mean() for when in ("before", "after")]
    np.testing.assert_allclose(heights, expected)
    faces = [bar.get_facecolor() for bar in axes[1].patches]
    assert (
        faces[0] != faces[1]
        and axes[1].patches[0].get_hatch()
        and not axes[1].patches[1].get_hatch()
    )
    with pytest.raises(
        InputError,
        match=r"--round 9: the clients of .* were not measured in it; .* next to it is 4",
    ):
        clients.in_out(runs, 9)


def test_the_caption_of_bars_names_the_measured_rounds_that_have_none(runs, monkeypatch):
    all_drawn, one = drawn(clients.in_out, runs), drawn(clients.in_out, runs, 3)
    assert "not drawn" not in all_drawn.get_label() + one.get_label()
    for most, left_out in ((3, "round 2"), (2, "rounds 2, 3")):
        monkeypatch.setattr(clients, "BARS", most)
        figure = drawn(clients.in_out, runs)
        assert figure.get_label().endswith(f"test examples; not drawn, though measured: {left_out}")


def test_the_distance_of_distributions_is_that_of_the_model_which_the_client_was_sent(runs):
    """FedNTD's A_G is the global model's; the partition and the class accuracies of the round
    before give it.
    """
    run, (_, group) = runs[0], next(iter(apart(runs[:1]).items()))
    found = drifts(group)
    partition = read_table(run.folder, "partition").to_pylist()
    accuracy = read_table(run.folder, "classes").to_pylist()
    assert len(found["round"]) == 12
    columns = found["round"], found["client"], found["drift.distribution_distance"]
    for number, client, distance in zip(*columns, strict=True):
        p = {row["class"]: row["count"] for row in partition if row["client"] == client}
        of_round = [row for row in accuracy if row["round"] == number - 1]
        total = sum(row["accuracy"] for row in of_round)
        expected = sum(
            abs(row["accuracy"] / total - p.get(row["class"], 0) / sum(p.values()))
            for row in of_round
        )
        assert distance == pytest.approx(expected)


def test_a_band_lies_within_what_the_values_can_be():
    spread = Spread(np.arange(3), np.array([0.1, 0.5, 0.9]), np.array([0.2, 0.2, 0.2]))
    low, high = spread.band(1.0)
    assert low.tolist() == pytest.approx([0.0, 0.3, 0.7])
    assert high.tolist() == pytest.approx([0.3, 0.7, 1.0])


def test_ranks_are_those_of_a_sorted_list_with_ties_in_the_middle():
    values = np.random.default_rng(0).integers(0, 9, 50).astype(float)
    expected = [np.mean(np.flatnonzero(np.sort(values) == value)) for value in values]
    np.testing.assert_allclose(ranks(values), expected)
    assert clients.correlation(values, -values) == "rank correlation -1.00"


def test_runs_that_differ_in_their_seed_are_one_panel(folders, tmp_path):
    both = []
    for seed, folder in enumerate(folders):
        path = shutil.copytree(folder, tmp_path / f"grid/x/seed-{seed}")
        text = (path / "job.toml").read_text()
        (path / "job.toml").write_text(
            text.replace(f'name = "{folder.name}"', f'name = "grid/x/seed-{seed}"', 1)
        )
        both.append(read_run(path))
    (place,) = drawn(clients.local, both).axes
    of_each = [
        over_clients(
            of_clients(run.folder, "local.after.accuracy"), "local.after.accuracy", 100
        ).mean
        for run in both
    ]
    np.testing.assert_allclose(place.lines[1].get_ydata(), np.mean(of_each, axis=0))
    assert figure("local", tmp_path / "grid", "-o", tmp_path / "a.svg").exit_code == 0
    told = figure("forgetting", tmp_path / "grid").stderr
    assert "has several seeds" in told and f"such as {tmp_path / 'grid/x/seed-0'}\n" in told


def test_accuracy_stands_over_the_unevenness_that_environment_json_has(runs):
    """A line for each method, from the even partition to the uneven one, also of a run that
    lacks the measures.
    """
    assert runs[0].unevenness == pytest.approx(runs[0].environment["unevenness"])
    cells = {
        "client": np.arange(6),
        "class": np.zeros(6, int),
        "count": np.full(6, 10),
    }  # all clients are alike
    even = replace(
        runs[0], job={**runs[0].job, "name": "even/fedavg"}, partition=cells, environment={}
    )
    axes = drawn(uneven.unevenness, [*runs, even]).axes
    assert [place.get_xlabel() for place in axes[:3]] == [*uneven.MEASURES.values()][:3]
    handles, names = axes[0].get_legend_handles_labels()
    assert names == ["fedavg", "fedntd"]
    first = handles[0].lines[0].get_xydata()
    last = 100 * runs[0].rounds["test_accuracy"][-1]
    np.testing.assert_allclose(
        first, [[0, last], [runs[0].environment["unevenness"]["hellinger"], last]], atol=1e-7
    )
    # A line does not join settings of other data.
    data = runs[0].job["data"] | {"source": "mnist"}
    other = replace(even, job={**even.job, "data": data})
    lines = drawn(uneven.unevenness, [*runs, other]).axes[0].get_legend_handles_labels()[0]
    assert [len(of_line.lines[0].get_xydata()) for of_line in lines] == [1, 1, 1]
    with pytest.raises(InputError, match="equally uneven"):
        uneven.unevenness(runs)


def test_a_confusion_matrix_is_that_of_the_table(full):
    run = read_run(full)
    number, found, measured = shown_matrices(run, None)
    assert (number, [*found], measured) == (4, [-1, 0, 5], [0, 5])
    expected = 3 * np.eye(10) + np.roll(np.eye(10), 1, axis=1)
    np.testing.assert_array_equal(found[-1], expected)
    np.testing.assert_array_equal(found[5], 3 * np.eye(10) + 9 * np.roll(np.eye(10), 1, axis=1))
    assert [*shown_matrices(run, 2)[1]] == [-1, 1]
    axes = drawn(global_model.confusion, [run]).axes
    titles = [place.get_title(loc="left") for place in axes[:2]]
    assert titles == ["fedavg\nglobal model, round 4", "fedavg\nclient 0, round 4"]
    assert axes[0].images[0].get_array()[0, 0] == pytest.approx(75)
    bold = {
        text.get_text() for text in axes[1].get_yticklabels() if text.get_fontweight() == "bold"
    }
    partition = read_table(full, "partition").to_pylist()
    assert bold == {row["class"] for row in partition if row["client"] == 0}


# The others need models: test_model_figures.py.
OF_TABLES = [name for name, kind in KINDS.items() if "images" not in kind.takes]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_TABLES)
def test_names_are_text_in_every_figure(kind, full, tmp_path):
    """Of a class and a run, in SVG, and in PNG where the font has not every letter."""
    run = read_run(full)
    names = (*HOSTILE, *run.classes[4:])
    for table in ("classes", "partition", "confusions"):
        columns = pq.read_table(full / f"{table}.parquet").to_pydict()
        for column in {"class", "predicted"} & columns.keys() - (
            {"predicted"} if table == "classes" else set()
        ):
            columns[column] = [
                dict(zip(run.classes, names, strict=True))[name] for name in columns[column]
            ]
        shutil.rmtree(full / f"{table}.parquet") if (full / f"{table}.parquet").is_dir() else None
        if table == "partition":
            pq.write_table(pa.table(columns), full / "partition.parquet")
        else:
            write(full / f"{table}.parquet", columns)
    job = (full / "job.toml").read_text()
    (full / "job.toml").write_text(job.replace('name = "fedavg"', "name = '<b>$y$'", 1))
    drawn_runs = [full]
    options = {"sweep": ["--x", "train.lr"], "scatter": ["--x", "best"]}.get(kind, [])
    if kind == "sweep":
        other = shutil.copytree(full, tmp_path / "other")
        job = (full / "job.toml").read_text().replace("0.05", "0.1")
        (other / "job.toml").write_text(job.replace("'<b>$y$'", "'other/<b>$y$'", 1))
        drawn_runs.append(other)
    # It compares partitions.
    if kind == "unevenness":
        drawn_runs.append(shutil.copytree(full, tmp_path / "other"))
        partition = pq.read_table(full / "partition.parquet")
        pq.write_table(partition.slice(1), tmp_path / "other/partition.parquet")
        job = (full / "job.toml").read_text()
        (tmp_path / "other/job.toml").write_text(job.replace("'<b>$y$'", "'other/<b>$y$'", 1))
    for suffix in (".svg", ".png"):
        done = figure(kind, *drawn_runs, *options, "-o", tmp_path / f"a{suffix}")
        assert done.exit_code == 0, done.stderr
    text = (tmp_path / "a.svg").read_text()
    words = [element.text for element in ElementTree.fromstring(text).iter() if element.text]
    assert "<script" not in text and "<b>" not in text
    assert any("<b>$y$" in word for word in words), "a name is text, and not a formula"
    if kind in ("forgetting", "confusion", "classes", "counts", "client", "partition"):
        assert HOSTILE[1] in words and HOSTILE[2] in words
    with Image.open(tmp_path / "a.png") as picture:
        small = (
            "confusion",
            "epochs",
            "curves",
            "consistency",
            "sweep",
            "scatter",
            "bars",
            "client",
        )
        assert picture.width >= (400 if kind in small else 1350)
    wide = figure(kind, *drawn_runs, *options, "--width", 7, "-o", tmp_path / "b.svg")
    assert ElementTree.parse(tmp_path / "b.svg").getroot().get("width") == f"{7 * 72}pt"
    caption = wide.stdout.splitlines()[1]
    assert caption and caption not in words, "it is printed, to be put below the figure"


def seeds(*runs):
    """The runs as seeds of one name."""
    named = [(run, f"grid/fedntd/seed-{seed}") for seed, run in enumerate(runs)]
    return [
        replace(run, folder=run.folder.parent / name, job={**run.job, "name": name})
        for run, name in named
    ]


def test_a_curve_of_one_seed_is_the_column_of_the_run(runs):
    (axes,) = drawn(curves, runs).axes
    assert [line.get_label() for line in axes.lines] == ["fedavg", "fedntd"]
    assert (
        len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines})
        == 2
    )
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("round", "test accuracy (%)")
    for line, run in zip(axes.lines, runs, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), run.rounds["round"])
        np.testing.assert_array_equal(line.get_ydata(), 100 * run.rounds["test_accuracy"])
    run = runs[0]
    wanted = {
        "test_loss": ("test loss", run.rounds["test_loss"]),
        "forgetting": ("forgetting (%)", 100 * run.rounds["forgetting"][2:]),
        "forgetting.round": ("round forgetting (%)", 100 * run.forgetting["round"][1]),
        "loss.cross_entropy": ("loss.cross entropy", run.notes["loss.cross_entropy"][1]),
    }
    for of, (words, values) in wanted.items():
        (axes,) = drawn(curves, [run], of).axes
        np.testing.assert_array_equal(axes.lines[0].get_ydata(), values)
        assert axes.get_ylabel() == words
    with pytest.raises(
        InputError, match=r"'test_los': .* has no such number by round; did you mean 'test_loss'"
    ):
        curves(runs, "test_los")
    with pytest.raises(
        InputError, match=r'the job needs measure = \[.*"confusion"\]; run it again'
    ):
        curves(runs, "forgetting.local")


def test_a_curve_of_seeds_is_their_mean_in_a_band_from_the_lowest_to_the_highest(runs):
    values = [100 * run.rounds["test_accuracy"] for run in runs]
    for of_runs, low, high in (
        (seeds(*runs), np.minimum(*values), np.maximum(*values)),
        (seeds(runs[0], runs[0]), values[0], values[0]),  # of equal runs, the band has no height
    ):
        figure = drawn(curves, of_runs)
        (axes,) = figure.axes
        (line,), (filled,) = axes.lines, axes.collections
        np.testing.assert_allclose(line.get_ydata(), (low + high) / 2)
        for x, a, b in zip(line.get_xdata(), low, high, strict=True):
            ends = [y for at, y in filled.get_paths()[0].vertices if at == x]
            assert (min(ends), max(ends)) == pytest.approx((a, b))
        assert (
            "means of n = 2 seeds, in bands from the lowest seed to the highest"
            in figure.get_label()
        )


def test_many_curves_are_thinner_with_fainter_bands_and_the_legend_has_them_as_given(runs):
    looks = []
    for number in (2, 8):
        named = [(f"m{n}", 0.1 * (n * 5 % number)) for n in range(number)]
        values = [{**runs[0].rounds, "test_accuracy": np.full(5, y)} for _, y in named]
        jobs = [{**runs[0].job, "name": name} for name, _ in named]
        many = [
            replace(runs[0], job=job, rounds=rounds)
            for job, rounds in zip(jobs, values, strict=True)
        ]
        made = drawn(curves, many)
        (axes,) = made.axes
        assert [line.get_label() for line in axes.lines] == [name for name, _ in named], (
            "colours stay"
        )
        texts = [text.get_text() for text in made.legends[0].get_texts()]
        assert texts == [name for name, _ in named]
        looks.append((axes.lines[0].get_linewidth(), axes.collections[0].get_alpha()))
    (thick, strong), (thin, faint) = looks
    assert thin < thick and faint < strong


def test_a_curve_has_the_rounds_that_all_its_seeds_evaluated_and_names_the_seeds_with_fewer(runs):
    one, two, three = seeds(*runs, runs[0])
    gaps = two.rounds["test_accuracy"].copy()
    gaps[[1, 3]] = np.nan
    two = replace(two, rounds={**two.rounds, "test_accuracy": gaps})
    three = replace(three, rounds={name: column[:3] for name, column in three.rounds.items()})
    figure = drawn(curves, [one, two, three])
    assert figure.axes[0].lines[0].get_xdata().tolist() == [0, 2, 4]
    assert figure.get_label().endswith(
        f"; not drawn, as other seeds have more rounds: {three.folder}"
    )


def test_a_label_takes_the_place_of_a_step_of_the_names(runs):
    assert shorten(grouped(labelled(runs, {"fedntd": "FedNTD (ours)"}))) == [
        "fedavg",
        "FedNTD (ours)",
    ]
    cells = [
        replace(
            run,
            job={**run.job, "name": f"g/{setting}/{run.name}/seed-0"},
            folder=run.folder / setting,
        )
        for setting in "ab"
        for run in runs
    ]
    both = labelled(cells, {"fedntd": "FedNTD w/o", "b": "beta"})
    assert shorten(grouped(both)) == ["a/fedavg", "a/FedNTD w/o", "beta/fedavg", "beta/FedNTD w/o"]
    assert shorten(grouped(labelled(cells, {}))) == shorten(grouped(cells))
    with pytest.raises(
        InputError,
        match="--label 'fedntt': it is no step of the runs' names; did you mean 'fedntd'",
    ):
        labelled(runs, {"fedntt": "x"})
    with pytest.raises(InputError, match="--label: several runs would be called 'fedavg'"):
        labelled(runs, {"fedntd": "fedavg"})
    assert shorten(grouped(labelled(runs, {"fedntd": "a\x1b[31m\nb"})))[1] == "a b", (
        "an SVG takes no control character"
    )


def test_a_label_is_not_shortened_and_names_beside_it_take_their_rows(folders, runs, tmp_path):
    long = "FedNTD with all that belongs to it (ours)"
    done = figure(
        "curves", *folders, "--label", "fedntd", long, "--width", 3.3, "-o", tmp_path / "a.svg"
    )
    assert done.exit_code == 0 and f">{long}<" in (tmp_path / "a.svg").read_text()
    heights = [
        drawn(curves, labelled(runs, {"fedavg": name}), width=3.3).get_figheight()
        for name in ("a", long)
    ]
    assert heights[0] < heights[1]


def test_confusion_matrices_stand_one_below_the_other_where_a_figure_is_narrow(full, tmp_path):
    run = read_run(full)
    for width, columns in ((3.3, 1), (6.9, 2), (None, 3)):
        found = drawn(global_model.confusion, [run], width=width)
        lefts = {round(place.get_position().x0, 3) for place in found.axes[:3]}
        assert (len(lefts), found.get_figwidth()) == (columns, width or found.get_figwidth())
    assert figure("confusion", full, "--width", 1, "-o", tmp_path / "a.svg").stderr.startswith(
        "error: the figure is too narrow"
    )


def test_the_same_numbers_are_the_same_bytes(runs, tmp_path):
    for suffix in (".svg", ".pdf"):
        paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
        for path in paths:
            save(clients.in_out, path, runs)
        assert paths[0].read_bytes() == paths[1].read_bytes()


def noted_by_epoch(folder, name, by_client):
    """The run of a folder, in whose round 3 clients have these numbers by epoch."""
    rows = pq.read_table(folder / "clients.parquet")
    changed = []
    for row in rows.to_pylist():
        notes = dict(row["notes"])
        if row["round"] == 3 and by_client:
            notes = {
                f"epochs.{epoch}.{key}": value
                for epoch, numbers in by_client.pop(0).items()
                for key, value in numbers.items()
            }
        changed.append({**row, "notes": list(notes.items())})
    write(folder / "clients.parquet", pa.Table.from_pylist(changed, rows.schema))
    return replace(read_run(folder), label=name)


def test_curves_by_epoch_are_the_means_of_a_rounds_clients(copy):
    """A client with a longer last epoch has points of its own."""

    def of(share, distance):
        return {"accuracy": 0.5, "in_local": share, "out_local": 1 - share, "logit_kl": distance}

    by_client = [
        {"0": of(0.25, 0.0), "1": of(0.5, 1.0), "2": of(0.75, 3.0)},
        {"0": of(0.75, 0.0), "1": of(1.0, 2.0), "2.5": of(1.0, 4.0)},
        {},
    ]
    run = noted_by_epoch(copy, "fedavg", by_client)
    own, others = drawn(epochs.epochs, [run], round=3).axes
    assert own.lines[0].get_xdata().tolist() == [0, 1, 2, 2.5]
    assert own.lines[0].get_ydata().tolist() == [50, 75, 75, 100]
    assert others.lines[0].get_ydata().tolist() == [50, 25, 25, 0]
    (panel,) = drawn(epochs.epochs, [run], of="logit_kl", round=3).axes
    assert panel.lines[0].get_ydata().tolist() == [0, 1.5, 3, 4]
    assert panel.get_ylabel() == "logit distance (KL)"
    caption = drawn(epochs.epochs, [run], round=3).get_label()
    assert "in round 3: mean and standard deviation of n = 1 to 2 clients on 200" in caption


def test_a_figure_by_epoch_takes_the_last_measured_round_and_all_seeds(runs):
    names = [{**runs[0].job, "name": f"grid/fedavg/seed-{seed}"} for seed in (0, 1)]
    for of_runs in ([runs[0]], [replace(runs[0], job=job) for job in names]):
        (panel,) = drawn(epochs.epochs, of_runs, of="divergence").axes
        numbers = of_clients(runs[0].folder, "drift.divergence")
        last = numbers["drift.divergence"][numbers["round"] == 4]
        found = epochs.numbers_of(grouped(of_runs)[0], "divergence", 4)
        # Four steps are another share of an epoch for a client of another size.
        at_the_end = found["divergence"][found["round"] > 0]
        assert sorted(at_the_end) == sorted([*last] * len(of_runs))
        assert panel.lines[0].get_xdata().tolist() == np.unique(found["round"]).tolist()
        assert panel.lines[0].get_ydata()[0] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"of": "logit_kll"}, "did you mean 'logit_kl'"),
        ({"round": 9}, "were measured in the rounds 1, 2, 3, 4"),
    ],
)
def test_what_no_epoch_has_is_refused(options, words, runs):
    with pytest.raises(InputError, match=words):
        epochs.epochs(runs, **options)


WITHOUT_NUMBERS = {
    "epochs": "`rayfed replay` and `rayfed verify` cannot add these numbers",
    "forgetting": "has no two evaluated rounds after round 0",
    "local": """has no numbers of the measure 'local': the job needs measure = ["local"]; run it again""",
    "confusion": "job.toml -s 'measure=[\"confusion\"]' -s name=NEW",
}


def test_a_run_without_the_numbers_is_refused(folders, full, tmp_path):
    job = {**rayfed.read_job(folders[0] / "job.toml").table(), "name": "bare", "measure": []}
    job |= {"output": {"path": str(tmp_path)}, "model": "lenet"}
    path = rayfed.run(job, {"train.num_rounds": 1, "train.local_steps": 1}).path
    given = [(words, kind, path) for kind, words in WITHOUT_NUMBERS.items()]
    given.append(("has confusion matrices of the rounds 2, 4", "confusion", full, "--round", "3"))
    for words, *arguments in given:
        done = figure(*arguments, "-o", tmp_path / "a.svg")
        assert (done.exit_code, words in done.stderr, done.stderr.count("\n")) == (2, True, 1), (
            done.stderr
        )
        assert not (tmp_path / "a.svg").exists()


def test_the_page_draws_what_was_measured(runs):
    charts = charts_of(run_page(runs[0]))
    found = of_clients(runs[0].folder, "local.before.in_local", "drift.divergence")
    first = found["round"] == found["round"].min()
    line = charts["local-in-local"]["series"][0]
    assert line["y"][0] == pytest.approx(
        100 * found["local.before.in_local"][first].mean(), rel=1e-5
    )
    assert {y for _, _, y, _ in charts["drift"]["points"]} <= {
        float(f"{y:.6g}") for y in found["drift.divergence"]
    }


def test_class_accuracies_are_those_of_the_table_and_add_up_where_that_is_asked(runs, full):
    run = runs[0]
    rounds, values = class_accuracy(run, None)
    assert np.array_equal(rounds, run.class_rounds) and values is run.class_accuracy
    mesh = drawn(classes.accuracy, [run]).axes[0].collections[0]
    np.testing.assert_allclose(mesh.get_array().reshape(10, -1), 100 * values.T, atol=1e-9)
    mesh = drawn(classes.accuracy, [run], normalised=True).axes[0].collections[0]
    sums = mesh.get_array().reshape(10, -1).sum(axis=0)
    np.testing.assert_allclose(sums, 1, atol=1e-9)
    # In `full`, clients take a class for itself in three of twelve cases.
    rounds, values = class_accuracy(read_run(full), 1)
    assert rounds.tolist() == [2]
    np.testing.assert_allclose(values, 0.25)
    with pytest.raises(InputError, match=r"--client 3: .* it has some of 0, 1, 5"):
        class_accuracy(read_run(full), 3)
    both = drawn(classes.accuracy, [read_run(full)], client=1).axes
    assert [axes.get_title(loc="left") for axes in both[:2]] == [
        "fedavg\nthe global model",
        "fedavg\nclient 1's model",
    ]


def test_similarity_is_the_cosine_to_the_evaluated_round_before(runs):
    accuracy = np.array([[1.0, 1.0], [0.0, 0.0], [0.3, 0.4], [0.4, 0.3], [0.8, 0.6]])
    run = replace(
        runs[0],
        classes=("a", "b"),
        class_rounds=np.array([0, 1, 2, 3, 5]),
        class_accuracy=accuracy,
    )
    rounds, cosines = similarity(run)
    assert rounds.tolist() == [3, 5]
    np.testing.assert_allclose(cosines, [0.24 / 0.25, 1.0])
    with pytest.raises(InputError, match="no two evaluated rounds in a row"):
        similarity(replace(run, class_accuracy=np.zeros((5, 2))))


def test_counts_are_the_columns_of_the_table(runs):
    rounds, seen, predicted = label_counts(runs[0])
    table = read_table(runs[0].folder, "classes").to_pylist()
    assert rounds.tolist() == [1, 2, 3, 4]
    for place, name in enumerate(runs[0].classes):
        of_class = [row for row in table if row["class"] == name and row["round"] > 0]
        assert seen[:, place].tolist() == [row["seen"] for row in of_class]
        assert predicted[:, place].tolist() == [row["predicted"] for row in of_class]
    axes = drawn(classes.counts, runs).axes
    assert [place.get_title(loc="left") for place in axes[:2]] == [
        "fedavg\nheld by the clients",
        "fedavg\npredicted",
    ]


def settings(runs, key, *values):
    """Copies of runs in memory, whose jobs have these values of a key of `train`."""
    found = []
    for run in runs:
        for value in values:
            train = {**run.job["train"], key: value}
            found.append(
                replace(
                    run,
                    job={**run.job, "train": train},
                    label=f"{run.job['name']}/{key}-{value}",
                    folder=run.folder.parent / f"{run.job['name']}-{value}",
                )
            )
    return found


def test_a_sweep_has_a_line_for_each_method_over_the_values_of_the_key(runs):
    figure_of_lr = drawn(sweep.sweep, settings(runs, "lr", 0.1, 0.05, 0.2), x="train.lr")
    lines = [container[0] for container in figure_of_lr.axes[0].containers]
    assert [container.get_label() for container in figure_of_lr.axes[0].containers] == [
        "fedavg",
        "fedntd",
    ]
    for of_method, run in zip(lines, runs, strict=True):
        assert of_method.get_xdata().tolist() == [0.05, 0.1, 0.2]
        assert of_method.get_ydata() == pytest.approx([sweep.number_of(run, "last")] * 3)
    with pytest.raises(InputError, match=r"all runs have train\.lr = 0\.05, so there is no axis"):
        sweep.sweep(runs, x="train.lr")
    with pytest.raises(InputError, match=r"has no such key; did you mean 'train.lr'"):
        sweep.sweep(runs, x="train.lrr")


def test_a_sweep_of_a_parts_key_has_a_dotted_line_for_runs_without_it(runs):
    """The key is that of FedNTD's part. FedAvg has none, and stands everywhere."""
    fedavg, fedntd = runs
    found = [fedavg]
    for beta in (0.5, 2.0):
        parts = [part | ({"beta": beta} if "beta" in part else {}) for part in fedntd.job["method"]]
        job = {**fedntd.job, "method": parts}
        place = fedntd.folder.parent / f"beta-{beta}"
        found.append(replace(fedntd, job=job, label=f"fedntd-{beta}", folder=place))
    (axes,) = drawn(sweep.sweep, found, x="method.beta").axes
    (of_method,) = axes.containers
    assert of_method[0].get_xdata().tolist() == [0.5, 2.0]
    assert of_method.get_label() == "fedntd"
    (dotted,) = [line for line in axes.lines if line.get_linestyle() == ":"]
    assert dotted.get_label() == "fedavg"
    assert dotted.get_ydata()[0] == pytest.approx(sweep.number_of(fedavg, "last"))
    with pytest.raises(InputError, match=r"has no such key; did you mean 'method.beta'"):
        sweep.sweep([fedntd], x="method.betta")


def test_a_sweep_over_partitions_names_their_rules_and_tells_lines_of_one_method_apart(runs):
    rules = [{"name": "iid"}, {"name": "dirichlet", "alpha": 0.1}]
    found = []
    for source in ("one", "two"):
        for rule in rules:
            data = {**runs[0].job["data"], "partition": rule, "source": source}
            label = f"{source}-{rule['name']}/fedavg"
            place = runs[0].folder.parent / label
            job = {**runs[0].job, "data": data, "name": label}
            found.append(replace(runs[0], job=job, label=label, folder=place))
    (axes,) = drawn(sweep.sweep, found, x="data.partition").axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["iid", "dirichlet 0.1"]
    assert [line.get_label() for line in axes.containers] == ["fedavg, one", "fedavg, two"]


def named(run, name, **train):
    """A copy of a run in memory with another name, and other values of `train`."""
    job = {**run.job, "name": name, "train": {**run.job["train"], **train}}
    return replace(run, job=job)


def of_settings(runs):
    """Both methods in two settings."""
    found = []
    for setting, lr in (("slow", 0.1), ("fast", 0.2)):
        found += [named(run, f"g/{setting}/{run.folder.name}", lr=lr) for run in runs]
    return found


def test_curves_have_a_row_for_each_number_and_a_column_for_each_setting(runs):
    of = "local.after.in_local,test_accuracy"
    made = drawn(curves, of_settings(runs), of, by_setting=True)
    assert len(made.axes) == 4
    assert [axes.get_title(loc="left") or axes.get_title() for axes in made.axes[:2]] == [
        "slow",
        "fast",
    ]
    label = made.axes[0].get_ylabel()
    assert label.replace("\n", " ") == "accuracy on own classes after local training (%)"
    assert max(map(len, label.split("\n"))) <= 33, "the label of a panel fits beside it"
    _, values = series(runs[1], "local.after.in_local")
    np.testing.assert_allclose(made.axes[1].lines[1].get_ydata(), 100 * values)
    assert [line.get_label() for line in made.axes[3].lines] == ["fedavg", "fedntd"]
    looks = {axes.lines[1].get_color() for axes in made.axes}
    assert len(looks) == 1, "a method looks alike in all panels"
    several = [named(run, f"g/{lr}/{run.folder.name}", lr=lr) for run in runs for lr in range(1, 8)]
    assert len(drawn(curves, several, by_setting=True).axes) == 8
    with pytest.raises(InputError, match="7 settings do not fit side by side"):
        curves(several, of, by_setting=True)


def test_bars_by_setting_have_a_panel_for_each(runs):
    axes = drawn(sweep.bars, of_settings(runs), by_setting=True).axes
    assert [[text.get_text() for text in panel.get_xticklabels()] for panel in axes] == [
        ["fedavg", "fedntd"],
        ["fedavg", "fedntd"],
    ]
    assert axes[1].patches[1].get_height() == pytest.approx(sweep.number_of(runs[1], "last"))


def test_a_scatter_by_round_has_a_point_for_each_round(runs):
    options = {"x": "local.after.accuracy", "of": "test_accuracy", "by_round": True}
    points, _ = drawn(sweep.scatter, runs, **options).axes[0].lines[:2]
    of_clients = dict(zip(*series(runs[0], "local.after.accuracy"), strict=True))
    assert points.get_xdata() == pytest.approx([100 * of_clients[round] for round in (1, 2, 3, 4)])
    assert points.get_ydata() == pytest.approx(100 * runs[0].rounds["test_accuracy"][1:])


def test_shares_inside_and_outside_of_a_clients_data(runs):
    """Of FedNTD's eq. 7: (1 - p) / (C - 1)."""
    shares = partition.shares_of(runs[0])
    held = read_table(runs[0].folder, "partition").to_pylist()
    total = sum(row["count"] for row in held if row["client"] == 2)
    for row in held:
        if row["client"] == 2:
            place = runs[0].classes.index(row["class"])
            assert shares[2, place] == pytest.approx(row["count"] / total)
    axes = drawn(partition.of_runs, runs[:1], outside=True).axes
    inside, outside = (panel.collections[0].get_array().reshape(10, -1) for panel in axes[:2])
    np.testing.assert_allclose(inside, 100 * shares.T)
    np.testing.assert_allclose(outside, (100 - inside) / 9)


def test_a_clients_table_has_its_data_the_model_sent_and_the_models_trained(full):
    run = read_run(full)
    (axes,) = drawn(one_client.client, [run]).axes
    rows = axes.images[0].get_array()
    assert [text.get_text() for text in axes.get_yticklabels()] == ["data", "sent out", "fedavg"]
    np.testing.assert_allclose(rows[0], partition.shares_of(run)[0])
    np.testing.assert_allclose(rows[1], run.class_accuracy[3])
    np.testing.assert_allclose(rows[2], 0.25)
    assert axes.figure.get_label().startswith("Client 0 in round 4: ")
    for options, message in (
        (
            {"client": 1, "round": 4},
            "--client 1 --round 4: .* of the clients 0, 1, 5 in the rounds",
        ),
        ({"round": 3}, "no client: .* in the rounds 2, 4"),
    ):
        with pytest.raises(InputError, match=message):
            one_client.client([run], **options)


def test_a_number_may_be_of_two(runs):
    run = runs[0]
    rounds, gap = series(run, "test_accuracy - local.after.accuracy")
    of_rounds = dict(zip(*series(run, "test_accuracy"), strict=True))
    of_clients = dict(zip(*series(run, "local.after.accuracy"), strict=True))
    assert rounds.tolist() == [1, 2, 3, 4]
    expected = [of_rounds[round] - of_clients[round] for round in rounds.tolist()]
    np.testing.assert_allclose(gap, expected)
    with pytest.raises(InputError, match="no such number by round; did you mean"):
        series(run, "test_acuracy/train_loss")


def test_bars_and_points_are_the_numbers_of_the_table(runs):
    heights = [bar.get_height() for bar in drawn(sweep.bars, runs, of="best").axes[0].patches]
    np.testing.assert_allclose(heights, [sweep.number_of(run, "best") for run in runs])
    points = drawn(sweep.scatter, runs, x="drift.alignment", of="last").axes[0].lines
    for point, run in zip(points, runs, strict=True):
        _, alignment = run.notes["drift.alignment"]
        assert point.get_xdata()[0] == pytest.approx(alignment[-1])
        assert point.get_ydata()[0] == pytest.approx(sweep.number_of(run, "last"))
    with pytest.raises(InputError, match="no such number by round"):
        sweep.bars(runs, of="nonsense")


def test_the_command_lists_the_kinds():
    listed = figure().stdout
    assert all(f"\n{kind} " in listed for kind in KINDS) and "FedNTD 8" in listed


BACKEND = """
import sys
from rayfed.papers.backend import import_matplotlib
import_matplotlib()
import matplotlib
from rayfed.papers import panels
import os
print(matplotlib.rcParams._get("backend") == os.environ["MPLBACKEND"])
"""


@pytest.mark.parametrize(("named", "is_set"), [("pdf", True), ("nonsense", False)])
def test_figures_need_no_backend_and_one_that_is_there_is_left_to_others(named, is_set):
    """A notebook names its own in the environment of the commands that it starts."""
    done = subprocess.run(
        [sys.executable, "-c", BACKEND],
        env={**os.environ, "MPLBACKEND": named},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{is_set}\n", "")


def test_a_single_run_of_a_long_name_is_called_by_its_last_step(runs):
    long = named(runs[0], "a-grid-of-a-long-name/cifar10-shards-2/fedavg/seed-0")
    assert list(apart([long])) == ["fedavg"]
    assert list(apart([named(runs[0], "grid/fedavg")])) == ["grid/fedavg"]


def test_a_long_remark_above_a_figure_is_broken_into_lines(runs, tmp_path):
    remark = "not as in the paper: " + ", ".join(
        f"data.key-{number} = value" for number in range(9)
    )
    place = tmp_path / "figure.svg"
    save(curves, place, runs, remark=remark)
    written = re.sub(r"\s*<[^>]*>\s*", " ", place.read_text())
    assert remark not in written
    assert " ".join(remark.split()) in " ".join(written.split())


def test_wide_values_below_an_axis_are_written_as_numbers():
    axes = Figure().add_subplot()
    axes.plot([0.001, 0.1, 1], [1, 2, 3])
    scale_axis(axes, [0.001, 1, 0.1], [0.001, 1, 0.1])
    assert axes.get_xscale() == "log"
    labels = [*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)]
    assert [label.get_text() for label in labels] == ["0.001", "0.1", "1"]


def test_a_picture_that_cannot_be_written_leaves_the_older_one(folders, tmp_path):
    for suffix in (".png", ".svg"):
        picture = tmp_path / f"a{suffix}"
        assert figure("curves", *folders, "-o", picture).exit_code == 0
        before = picture.read_bytes()
        most = resource.getrlimit(resource.RLIMIT_FSIZE)
        # A full disk ends in the same way.
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most[1]))
        try:
            done = figure("local", *folders, "-o", picture)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, most)
        assert done.exit_code != 0 and "cannot be written to" in done.output, done.output
        assert picture.read_bytes() == before
        assert [file.name for file in tmp_path.glob(f"*{suffix}*")] == [picture.name]


def test_a_picture_with_large_letters_in_its_ending_is_one(folders, tmp_path):
    assert figure("curves", *folders, "-o", tmp_path / "A.SVG").exit_code == 0
    ElementTree.fromstring((tmp_path / "A.SVG").read_text())


def test_a_number_without_values_is_not_drawn_and_said(runs, tmp_path):
    unknown = np.full(len(runs[0].evaluated), np.nan)
    empty = replace(runs[0], rounds=runs[0].rounds | {"test_loss": unknown})
    with pytest.raises(InputError, match="nothing to draw: 'fedavg' has no value of test loss"):
        curves([empty], "test_loss")
    both = drawn(curves, [empty, runs[1]], "test_loss")
    assert both.get_label() == "Test loss by round; 'fedavg' has no value of test loss"
    assert len(both.axes[0].lines[1].get_xdata())


def test_accuracies_below_each_other_have_one_scale(runs):
    limits = [panel.get_ylim() for panel in drawn(curves, runs, ACCURACIES).axes]
    assert len(limits) == 2 and limits[0] == limits[1]
    limits = [panel.get_ylim() for panel in drawn(curves, runs, "test_accuracy,test_loss").axes]
    assert limits[0] != limits[1]


ACCURACIES = "test_accuracy,local.after.accuracy"


def test_titles_fit_into_narrow_panels(folders, tmp_path):
    picture = tmp_path / "a.svg"
    assert figure("in-out", *folders, "--width", "3.3", "-o", picture).exit_code == 0
    lines = [text for text in texts(picture) if "classes" in text]
    assert lines == ["own classes", "other classes"] * 2


def texts(picture):
    """Return the texts of an SVG, a line each."""
    nodes = ElementTree.fromstring(picture.read_text()).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(node.itertext()).strip() for node in nodes]


def test_the_advice_to_run_again_measures_some_round(runs):
    lacking = replace(runs[0], job=runs[0].job | {"measure": [], "measure_every": 5})
    assert "-s 'measure=[\"local\"]' -s measure_every=1 -s name=NEW" in str(
        unmeasured(lacking, "local", "numbers")
    )
    lacking = replace(runs[0], job=runs[0].job | {"measure": [], "measure_every": 4})
    assert "measure_every" not in str(unmeasured(lacking, "local", "numbers"))


def test_a_scatter_by_round_is_of_the_accuracy_if_nothing_is_given(runs):
    axes = drawn(sweep.scatter, runs, x="forgetting", by_round=True).axes[0]
    assert axes.get_ylabel() == "test accuracy (%)"


def test_a_wrong_number_of_bars_may_mean_one_of_the_table(runs):
    with pytest.raises(InputError, match="a number of the table is 'last_10'"):
        sweep.bars(runs, of="last10")


def test_a_run_in_the_place_of_a_kind_is_told(folders):
    done = figure(folders[0], folders[1])
    assert done.exit_code == 2
    assert "name the kind of figure before the runs" in done.stderr
    assert f"rayfed figure curves {folders[0]} {folders[1]}" in done.stderr


def test_what_is_outside_of_a_client_is_said(runs):
    label = drawn(partition.of_runs, runs, outside=True).get_label()
    assert "(1 - share) / (number of classes - 1) (out-local)" in label
