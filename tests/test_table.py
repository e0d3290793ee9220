"""`rayfed table`: means, paired differences and their intervals by hand; the paper's numbers beside
ours.
"""

import csv
import io
import json
import math
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rayfed
from rayfed.base.console import aligned, print_table
from rayfed.base.errors import InputError
from rayfed.cli import main
from rayfed.folder.found import find_runs
from rayfed.folder.tables import read_table
from rayfed.grid.cells import Cell
from rayfed.job import override
from rayfed.papers import tables as of_papers
from rayfed.papers.curves import series
from rayfed.papers.ours import Theirs, without
from rayfed.papers.tables import grids, read_paper
from rayfed.report.answers import _compared
from rayfed.report.compared import differences, numbers
from rayfed.report.forms import Sheet, as_csv, in_words, latex, markdown
from rayfed.report.read import grouped, read_run
from rayfed.report.runs import labelled
from rayfed.report.table import Difference, rows, sheet
from rayfed.report.words import T, interval

PAPERS = Path(__file__).resolve().parents[1] / "jobs" / "papers"
TWO = ("fedavg", "fedntd")
TINY = {
    "model.name": "lenet",
    "train.num_rounds": 1,
    "train.clients_per_round": 2,
    "train.local_steps": 1,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of one round, to be given other names, seeds and accuracies."""
    path = tmp_path_factory.mktemp("runs")
    changes = {**TINY, "name": "a", "ray.mode": "off", "output.path": str(path)}
    folder = rayfed.run("jobs/quickstart.toml", changes).path
    summary = json.loads((folder / "summary.json").read_text())
    # Of its one round, not of the numbers that it is given.
    del summary["no_better_than_a_guess"]
    (folder / "summary.json").write_text(json.dumps(summary))
    return read_run(folder)


@pytest.fixture
def run(made):
    def run(name, seed, *accuracies, partition="p", forgetting=0.25):
        count = len(accuracies) + 1
        rounds = {
            **made.rounds,
            "round": np.arange(count),
            "test_accuracy": np.array([0.1, *accuracies]),
        }
        rounds["forgetting"] = np.full(count, forgetting)
        job = {**made.job, "name": f"{name}/seed-{seed}", "seed": seed}
        summary, environment = (
            {**made.summary, "rounds": count - 1},
            {**made.environment, "partition": partition},
        )
        changed = {"rounds": rounds, "job": job, "summary": summary, "environment": environment}
        return replace(
            made,
            **changed,
            evaluated=np.ones(count, bool),
            folder=made.folder.parent / name / f"seed-{seed}",
        )

    return run


@pytest.mark.parametrize(
    ("method", "told"),
    [
        # A sweep says by its rows' names what differs, and rows of one job differ in nothing.
        ("fedntd", False),
        ("fedwsq", True),
    ],
)
def test_a_difference_that_is_not_the_methods_alone_is_told(run, method, told):
    plain = run("x/avg", 0, 0.5, 0.5)
    other = run("x/other", 0, 0.6, 0.6)
    model = {**other.job["model"], "weight_standardisation": 0.05}
    other = replace(other, job={**other.job, "method": method, "model": model})
    plain = replace(plain, job={**plain.job, "method": "fedntd"})
    third = replace(other, folder=other.folder.parents[1] / "third/seed-0")
    third = replace(third, job={**third.job, "name": "x/third/seed-0"})
    notes = sheet([plain, other, third], "text").notes
    words = "model.weight_standardisation = 0.05 and not 0.0"
    assert notes == ([f"other, third: not only another method than avg: {words}"] if told else [])


def begun_with(run, first):
    """Return a run that began with the last weights of another."""
    weights = f"runs/{first.name}/checkpoints/round-00002.safetensors"
    return replace(run, job={**run.job, "model": {**run.job["model"], "weights": weights}})


def test_a_value_that_is_empty_is_told(run):
    plain, other = run("x/avg", 0, 0.5), run("x/other", 0, 0.6)
    other = begun_with(replace(other, job={**other.job, "method": "fedavg"}), run("y/z", 0, 0.5))
    (note,) = sheet([plain, other], "text").notes
    weights = "'runs/y/z/seed-0/checkpoints/round-00002.safetensors'"
    assert note.endswith(f"than avg: model.weights = {weights} and not ''")


def test_a_first_run_is_no_reference_unless_it_is_asked_for(run):
    """Its difference from what follows would compare training with what comes after it."""
    first = run("g/first", 0, 0.2, 0.5)
    ntd, prox = (begun_with(run(f"g/{name}", 0, 0.3, 0.6), first) for name in ("ntd", "prox"))
    ntd = replace(ntd, job={**ntd.job, "method": "fedntd"})
    made = rows([first, ntd, prox])
    assert [row.difference and row.difference.reference for row in made] == [None, None, "ntd"]
    assert "from" not in sheet([first, ntd, prox], "text").head, "there is one reference"
    lines = sheet([first, ntd, prox], "text", columns="difference").lines
    assert lines == [["first", "comes first"], ["ntd", "reference"], ["prox", "+0.00"]]
    asked = rows([first, ntd, prox], reference="first")
    of_first = [row.difference and row.difference.reference for row in asked]
    assert of_first == [None, "first", "first"]


def test_figures_and_differences_by_hand(run):
    """Pairs by seed: +10, +20 and +30 points in the last round, although the runs come in another
    order.
    """
    one = [run("x/one", seed, 0.5, last) for seed, last in ((0, 0.3), (1, 0.2), (2, 0.1))]
    two = [run("x/two", seed, 0.6, last) for seed, last in ((2, 0.4), (0, 0.4), (1, 0.4))]
    first, second = rows([*one, *two])
    assert (first.name, second.name, first.difference) == ("one", "two", None)
    assert first.figures["last"] == (pytest.approx(20.0), pytest.approx(10.0))
    assert first.figures["best"] == (pytest.approx(50.0), pytest.approx(0.0, abs=1e-9))
    assert first.figures["last_10"][0] == pytest.approx((50 + 20) / 2)
    assert first.figures["forgetting"] == (25.0, 0.0)
    assert (second.difference.reference, second.difference.pairs) == ("one", 3)
    assert second.difference.mean == pytest.approx(20.0) and not second.difference.sure
    # Student's t with two degrees of freedom.
    half = 4.303 * 10.0 / np.sqrt(3)
    assert second.difference.interval == pytest.approx((20.0 - half, 20.0 + half))
    best = rows([*one, *two], "best")[1].difference
    assert best.mean == pytest.approx(10.0) and best.interval == pytest.approx((10.0, 10.0))


def test_the_mean_of_the_last_rounds_is_of_exactly_ten(run):
    """Of 0.0, 0.01, ..., 0.11: the mean of 0.02 to 0.11."""
    (row,) = rows([run("x/one", 0, *(number / 100 for number in range(12)))])
    assert row.figures["last_10"][0] == pytest.approx(6.5)
    (row,) = rows([run("x/one", 0, *(number / 100 for number in range(10)))])
    assert row.figures["last_10"][0] == pytest.approx(4.5), "not of round 0, which has 0.1"


def test_only_a_difference_that_is_sure_is_called_better_or_worse(run):
    """Seeds agree about `up` and `down`, not about `perhaps` and `hardly`; the one of `once` says
    nothing.
    """
    ends = {
        "fedavg": (0.50, 0.50, 0.50),
        "up": (0.60, 0.61, 0.62),
        "down": (0.40, 0.41, 0.42),
        "perhaps": (0.95, 0.45, 0.50),
        "hardly": (0.05, 0.55, 0.50),
        "once": (0.90,),
    }
    runs = [run(f"x/{name}", seed, end) for name, of in ends.items() for seed, end in enumerate(of)]
    answer = _compared(rows(runs))
    # The largest difference is of `once`. It has no interval.
    assert answer.numbers == [("from fedavg", "+40.0 points, may be chance", "once")]
    surely = _compared(rows([each for each in runs if "/once" not in each.job["name"]]))
    assert surely.numbers == [("from fedavg", "+13.3 points, may be chance", "perhaps")]
    assert "points" in surely.text and "+13.3" not in surely.text
    best = _compared(
        rows(
            [
                each
                for each in runs
                if "/up" in each.job["name"] or each.job["name"].startswith("x/fedavg")
            ]
        )
    )
    assert best.numbers == [("from fedavg", "+11.0 points", "up")]
    # Around names.
    said = answer.text.translate({0x2068: None, 0x2069: None})
    assert "Better, by the intervals: up. Worse, by the intervals: down." in said
    assert said.endswith("Differences that may be chance: 3 of 5.")


def test_personalised_accuracy_is_a_column_of_runs_that_measured_it_and_can_be_compared(
    made, tmp_path
):
    """By the tables of the runs: a mean over the clients of a round, and over the rounds."""
    ours, path = {}, str(tmp_path)
    for method in ("fedavg", "ditto"):
        changes = {
            **TINY,
            "name": method,
            "method": method,
            "train.num_rounds": 2,
            "output.path": path,
        }
        result = rayfed.run(
            "jobs/quickstart.toml", {**changes, "ray.mode": "off", "measure": ["local"]}
        )
        clients = [(row["round"], dict(row["notes"])) for row in result.clients.to_pylist()]
        by_round = [
            [notes["local.after.in_local"] for at, notes in clients if at == number]
            for number in (1, 2)
        ]
        ours[method] = 100 * np.mean([np.mean(values) for values in by_round])
    runs = [read_run(tmp_path / method) for method in ours]
    fedavg, ditto = rows(runs, "personalised")
    assert {row.name: row.figures["personalised"][0] for row in (fedavg, ditto)} == pytest.approx(
        ours
    )
    assert ditto.difference.mean == pytest.approx(ours["ditto"] - ours["fedavg"])

    # The other run has an empty cell, in each form.
    both = sheet([runs[0], made], "csv")
    column = both.head.index("personalised, mean of all 2 (%)")
    assert [line[column] for line in both.lines] == [f"{ours['fedavg']:.2f}", ""]
    assert [record["personalised"] for record in both.records] == [
        pytest.approx(ours["fedavg"]),
        None,
    ]
    # And its spread.
    assert as_csv(both).splitlines()[0].count("personalised") == 2
    assert not any("personalised" in head for head in sheet([made], "text").head)
    with pytest.raises(
        InputError,
        match=r"has no personalised accuracy: the job needs measure = \[\"local\"\]; run it",
    ):
        rows([made], "personalised")


def test_the_run_to_compare_with_is_named_by_the_end_of_its_name(run):
    runs = [
        run(f"g/{setting}/{method}", 0, 0.5)
        for setting in ("x", "y")
        for method in ("moon", "fedavg")
    ]
    names = ["x/moon", "x/fedavg", "y/moon", "y/fedavg"]
    # Also if it is not named.
    for first in ("fedavg", ""):
        found = rows(runs, reference=first)
        assert [row.name for row in found] == names, "in the order given"
        assert {row.difference.reference for row in found if row.difference} == {"x/fedavg"}
    moon = rows(runs, reference="y/moon")
    assert {row.difference.reference for row in moon if row.difference} == {"y/moon"}
    assert [row.name for row in moon] == names
    with pytest.raises(
        InputError, match="--from fedvg: no run has this name; did you mean 'y/fedavg'"
    ):
        rows(runs, reference="fedvg")


def test_only_runs_of_the_same_partition_seed_and_rounds_are_compared_and_the_table_says_why_not(
    run,
):
    one = run("x/one", 0, 0.5)
    for other, why in (
        (run("x/two", 1, 0.6), "other seed"),
        (run("x/two", 0, 0.6, partition="q"), "other partition"),
        (run("x/two", 0, 0.6, 0.7), "other number of rounds"),
        (run("x/two", 1, 0.6, partition="q"), "other partition, seed"),
    ):
        first, second = rows([one, other])
        assert (first.difference, second.difference) == (None, None)
        assert (first.unlike, second.unlike) == ("", why)
        made = sheet([one, other], "text")
        assert [line[made.head.index("difference in last (points)")] for line in made.lines] == [
            "reference",
            why,
        ]
    both = [run("x/one", 0, 0.5), run("x/one", 1, 0.5, partition="q")]
    crossed = [run("x/two", 1, 0.5), run("x/two", 0, 0.5, partition="q")]
    assert rows([*both, *crossed])[1].unlike == "other pairs of partition and seed"


@pytest.mark.parametrize("width", [24, 80, 400])
def test_on_a_terminal_of_any_width_no_cell_is_cut(width, monkeypatch, capsys):
    heads = ["run", *(f"accuracy in round {number} (%)" for number in range(12))]
    lines = [
        ["fedavg", *(f"{number}.25 ± 0.5" for number in range(12))],
        ["fedlmd_tf", *["-11.5 [-30.25, +7.5]"] * 12],
    ]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(heads, lines)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    if width >= 80:
        assert [shown.count(f" {cell} ") for cell in lines[0][1:]] == [1] * 12 and shown.count(
            lines[1][1]
        ) == 12
    else:
        # A column is wider than the terminal: its cells are folded.
        assert shown.count("fedavg") == 12


def test_sentences_are_wrapped_next_to_their_name(monkeypatch, capsys):
    sentence = "Distil the global model on all classes of the client but the label itself, softly."
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    print_table(["name", "default", "what"], [["fedntd", "0.5", sentence], ["kd", "1", "As it is"]])
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, shown)) <= 60
    assert sum("name" in line for line in shown) == 1, "one table"
    (first,) = [line for line in shown if "fedntd" in line]
    assert "0.5" in first and "Distil the global" in first


def test_a_difference_names_its_reference_where_there_are_several(run):
    runs = [
        run("x/one", 0, 0.5),
        run("y/one", 0, 0.5, partition="q"),
        run("y/two", 0, 0.6, partition="q"),
    ]
    third = rows(runs)[2]
    assert third.difference == Difference("y/one", 1, pytest.approx(10.0), None)
    # One pair says nothing about chance.
    assert not third.difference.sure
    made = sheet(runs, "text")
    assert [line[-2:] for line in made.lines] == [
        ["reference", ""],
        ["other partition", ""],
        ["+10.00", "y/one"],
    ]
    assert "from" not in sheet(runs[1:], "text").head
    assert [record["reference"] for record in made.records] == [None, None, "y/one"]


def test_runs_that_do_not_count_as_they_seem_are_named(run):
    one = [run("x/one", seed, 0.5, 0.6) for seed in (0, 1)]
    two = [run("x/two", 0, 0.5, 0.6), run("x/two", 1, 0.5), run("x/two", 2, 0.5, 0.6)]
    two[2] = replace(
        two[2], job={**two[2].job, "train": {**two[2].job["train"], "lr": 7.0, "eval_every": 2}}
    )
    waiting = replace(run("x/three", 0), evaluated=np.array([True]))
    made = sheet([*one, *two, waiting], "text")
    text = "\n".join(made.notes)
    lr = two[0].job["train"]["lr"]
    assert (
        f"two: its runs differ in more than their seeds: train.lr is {lr} in one run, 7.0 in "
        "another" in text
    )
    assert f"two: runs with fewer rounds are left out: {two[1].folder} (1)" in text
    assert "two: 1 of its 2 runs have a pair in one" in text
    assert "train.eval_every is 1 and 2:" in text
    assert f"{waiting.folder} is left out: no round has been evaluated yet" in text
    # eval_every is also in the job.
    assert len(made.notes) == 6 and [line[0] for line in made.lines] == [
        "one",
        "two",
    ]
    assert sheet(one, "text").notes == []


def test_a_run_that_has_ended_early_counts_with_its_own_rounds(run):
    def of_three(made, **more):
        job = {**made.job, "train": {**made.job["train"], "num_rounds": 3}}
        return replace(made, job=job, summary={**made.summary, **more})

    early = {"ended_early": "no better test accuracy"}
    one = [of_three(run("x/one", 0, 0.3, 0.2, 0.1)), of_three(run("x/one", 1, 0.4, 0.3), **early)]
    one.append(of_three(run("x/one", 2, 0.9)))
    two = [of_three(run("x/two", 0, 0.5, 0.5, 0.5)), of_three(run("x/two", 1, 0.5), **early)]
    first, second = rows([*one, *two])
    assert first.figures["last"] == (pytest.approx(20.0), pytest.approx(math.sqrt(200)))
    assert (first.behind, second.behind) == ([one[2]], []), "one run is not yet as far"
    assert (second.difference.pairs, second.difference.mean) == (2, pytest.approx(30.0))
    assert [line[2] for line in sheet([*one, *two], "text").lines] == ["2 to 3", "1 to 3"]
    # And the page of several runs counts the same ones.
    group = grouped([*one, *two])[0]
    told = numbers(group, target=0.35, key="forgetting.round.last_10")
    assert (told[0], told[5], group.left_out) == ("0, 1", "2 to 3", [one[2]])


def test_the_same_run_as_two_seeds_is_refused(run):
    one, copied = run("x/one", 0, 0.5), run("x/one", 0, 0.5)
    copied = replace(
        copied, folder=copied.folder.with_name("seed-7"), job={**one.job, "name": "x/one/seed-7"}
    )
    with pytest.raises(
        InputError, match="would count as two seeds although they are one; give only one"
    ):
        rows([one, copied])


def test_rounds_to_a_target_by_hand(run):
    one = [run("x/one", 0, 0.2, 0.3, 0.5, 0.5), run("x/one", 1, 0.1, 0.5, 0.6, 0.2)]
    two = [run("x/two", 0, 0.5, 0.1, 0.1, 0.1), run("x/two", 1, 0.4, 0.4, 0.4, 0.5)]
    missed = [run("x/six", 0, 0.5, 0.1, 0.1, 0.1), run("x/six", 1, 0.4, 0.4, 0.4, 0.4)]
    made = sheet([*one, *two, *missed], "text", target=0.5)
    assert made.head[-2:] == ["rounds to 50 %", "speed-up"]
    cells = [line[-2:] for line in made.lines]
    # Rounds 3 and 2.
    assert cells[0] == ["2.5 ± 0.7", ""]
    # Rounds 1 and 4, so 3 times and half as fast.
    assert cells[1] == ["2.5 ± 2.1", "1.75 ± 1.77"]
    assert cells[2] == ["reached by 1 of 2", ""]
    assert sheet(one, "text", target=0.9).lines[0][-2:] == ["not reached", ""]
    assert [record["rounds_to_target"] for record in made.records] == [2.5, 2.5, None]
    assert [record["speed_up"] for record in made.records] == [None, 1.75, None]


def test_a_round_that_was_not_evaluated_reaches_no_target(run):
    evaluated = np.array([True, False, True])
    seen = replace(run("x", 0, np.nan, 0.5), evaluated=evaluated)
    assert sheet([seen], "text", target=0.4).lines[0][-2] == "2.0"


MARKED = {"md": r"\*\*(.*)\*\*", "latex": r"\\textbf\{(.*)\}"}


@pytest.mark.parametrize("form", MARKED)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(-1, 1)), min_size=1, max_size=5))
def test_the_bold_cell_of_a_column_is_the_best_one(run, form, values):
    """The highest accuracy and the lowest forgetting, as printed; equal ones are all bold, and a
    single one is not.
    """
    runs = [
        run(f"x/m{n}", 0, accuracy, forgetting=lost) for n, (accuracy, lost) in enumerate(values)
    ]
    bold, plain = sheet(runs, form), sheet(runs, "text")
    for key, best in (("best (%)", max), ("last (%)", max), ("forgetting (%)", min)):
        at = plain.head.index(key)
        numbers = [float(line[at]) for line in plain.lines]
        marked = [re.fullmatch(MARKED[form], line[at]) for line in bold.lines]
        assert [bool(mark) for mark in marked] == [
            len(runs) > 1 and number == best(numbers) for number in numbers
        ]
        assert [
            mark[1] if mark else line[at] for mark, line in zip(marked, bold.lines, strict=True)
        ] == [line[at] for line in plain.lines]


@pytest.mark.parametrize("form", MARKED)
@pytest.mark.parametrize(
    ("means", "bold"),
    [
        ((0.5, 0.8, 0.4), [False, True, False]),
        ((0.5, 0.605, 0.4), [False, True, False]),
        ((0.5, 0.595, 0.4), [False, False, False]),
        ((0.6, 0.6, 0.4), [False, False, False]),
    ],
)
def test_a_mean_within_the_deviations_is_not_bold(run, form, means, bold):
    """Three rows of three seeds each, whose deviations are 1, 10 and 1 points."""
    runs = []
    for number, (mean, deviation) in enumerate(zip(means, (0.01, 0.1, 0.01), strict=True)):
        for seed, end in enumerate((mean - deviation, mean, mean + deviation)):
            runs.append(run(f"x/m{number}", seed, end))
    made = sheet(runs, form)
    at = made.head.index("last (%)")
    assert [re.fullmatch(MARKED[form], line[at]) is not None for line in made.lines] == bold


def test_rows_that_are_not_compared_have_a_best_of_their_own(run):
    numbers = [
        ("p", "fedavg", 0.5),
        ("p", "fedntd", 0.6),
        ("q", "fedavg", 0.9),
        ("q", "fedntd", 0.95),
    ]
    runs = [run(f"{p}/{method}", 0, last, partition=p) for p, method, last in numbers]
    made = sheet(runs, "md")
    at = made.head.index("last (%)")
    assert [line[at] for line in made.lines] == ["50.00", "**60.00**", "90.00", "**95.00**"]


def test_columns_are_chosen_in_an_order_and_a_row_has_its_label(run):
    runs = [run("x/fedavg", 0, 0.5, 0.4), run("x/fedntd", 0, 0.6, 0.7)]
    whole = sheet(runs, "text")
    chosen = sheet(
        labelled(runs, {"fedavg": "FedAvg", "fedntd": "FedNTD (ours)"}),
        "text",
        columns="difference,best",
    )
    assert chosen.head == ["run", "difference in last (points)", "best (%)"]
    assert chosen.lines == [["FedAvg", "reference", "50.00"], ["FedNTD (ours)", "+30.00", "70.00"]]
    assert sheet(runs, "text", columns=",".join(whole.head[1:3])).lines == [
        line[:3] for line in whole.lines
    ]
    named = labelled(runs, {"fedntd": "ours"})
    for first in ("ours", "fedntd"):
        made = sheet(named, "text", reference=first, columns="difference")
        assert made.lines == [["fedavg", "-30.00"], ["ours", "reference"]]


@pytest.mark.parametrize("form", ["text", "md", "latex", "csv"])
@pytest.mark.parametrize(
    ("sort", "order"),
    [
        # The highest first.
        ("best", "two six one"),
        ("last_10", "two six one"),
        # The lowest first.
        ("forgetting", "six one two"),
        ("difference", "two one six"),
        # Never comes last.
        ("rounds_to_target", "six two one"),
        ("run", "one six two"),
        # Equal ones as given.
        ("seeds", "one two six"),
        ("", "one two six"),
    ],
)
def test_rows_are_sorted_by_any_column_the_best_first(run, form, sort, order):
    one = run("x/one", 0, 0.3, 0.3, forgetting=0.2)
    two = run("x/two", 0, 0.7, 0.8, forgetting=0.3)
    six = run("x/six", 0, 0.5, 0.2, forgetting=0.1)
    six = replace(six, rounds={**six.rounds, "test_accuracy": np.array([0.1, 0.75, 0.2])})
    made = sheet([one, two, six], form, sort=sort, target=0.74)
    assert [record["run"] for record in made.records] == order.split()
    assert [line[0] for line in made.lines] == order.split()


def test_an_unknown_column_to_sort_by_is_refused_with_those_that_there_are(run):
    for sort, says in (
        ("bset", "--sort: the table has no column 'bset'; did you mean 'best'? (valid: best, "),
        ("speed_up", "--sort speed_up: give the accuracy to reach too, such as --target 0.5"),
        ("personalised", 'has no personalised accuracy: the job needs measure = ["local"]; run it'),
    ):
        with pytest.raises(InputError, match=re.escape(says)):
            sheet([run("x/one", 0, 0.5, 0.4)], "text", sort=sort)


@pytest.mark.parametrize(
    ("count", "words"), [(1, "mean of 1 round"), (3, "mean of all 3"), (12, "mean of last 10")]
)
def test_a_mean_says_how_many_rounds_it_is_of_and_round_0_is_none_of_them(run, count, words):
    one = run("x/one", 0, *[0.5] * count)
    made = sheet([one], "text", figure="last_10")
    at = made.head.index(f"{words} (%)")
    assert made.lines[0][at] == "50.00", "round 0 has 10 %"
    assert "last_10" in made.records[0], "scripts find it by its key"
    mixed = sheet([one, run("x/two", 0, *[0.5] * 20)], "text")
    assert count > 10 or "mean of last 10 at most (%)" in mixed.head


def test_a_column_is_chosen_by_its_key(run):
    runs = [run("x/fedavg", 0, 0.5, 0.4), run("x/fedntd", 0, 0.6, 0.7)]
    lines = [["fedavg", "50.00", ""], ["fedntd", "70.00", "fedavg"]]
    assert sheet(runs, "text", columns=" best ,  from").lines == lines
    for columns, says in (
        ("lost", "no column 'lost'; did you mean 'last'? (valid: best, difference, forgetting, "),
        ("", "no column '' (valid: "),
        ("best,,last", "no column '' (valid: "),
        ("best,best", "'best' is there twice; name each column once"),
        ("rounds_to_target", "rounds_to_target: give the accuracy to reach too, such as --target"),
        ("personalised", 'has no personalised accuracy: the job needs measure = ["local"]; run it'),
    ):
        with pytest.raises(InputError, match=re.escape(says)):
            sheet(runs, "text", columns=columns)


def test_the_accuracy_on_a_domain_is_shown_by_its_name(tmp_path):
    numbers = np.arange(400)
    of_rows = {"x": numbers % 7, "label": numbers % 2, "site": np.where(numbers % 3, "a|b c", "b")}
    pq.write_table(pa.table(of_rows), tmp_path / "t.parquet")
    data = {
        "source": str(tmp_path / "t.parquet"),
        "features": ["x"],
        "domain": "site",
        "test_fraction": 0.5,
    }
    job = {
        "data": {**data, "partition": {"name": "iid", "num_clients": 2}},
        "model": {"name": "mlp"},
    }
    job |= {"train": {"num_rounds": 2, "clients_per_round": 2}, "ray": {"mode": "off"}}
    runs = [
        rayfed.run({**job, "name": name, "method": name, "output": {"path": str(tmp_path)}})
        for name in TWO
    ]
    of_rounds = [dict(row["notes"]) for row in runs[1].rounds.to_pylist()]
    invoke = CliRunner().invoke
    for key in ("domain.a|b c", "domain.b"):
        done = invoke(
            main, ["table", *(str(run.path) for run in runs), "--of", key, "--format", "csv"]
        )
        (_, row) = csv.DictReader(io.StringIO(done.stdout))
        assert float(row[key]) == pytest.approx(100 * of_rounds[-1][key])
        heads, cells = ["run", in_words(key)], ["fedntd", f"{float(row[key]):.2f}"]
        shown = invoke(main, ["table", str(runs[1].path), "--columns", key]).stdout
        assert shown.startswith(aligned([heads, cells]) + "\n")
        assert series(read_run(runs[1].path), key)[1].tolist() == [
            notes[key] for notes in of_rounds
        ]
    drawn = invoke(
        main,
        ["figure", "curves", str(runs[1].path), "--of", "domain.b", "-o", str(tmp_path / "a.svg")],
    )
    assert drawn.exit_code == 0 and "Accuracy on b (%) by round" in drawn.stdout, drawn.output
    refused = invoke(main, ["table", str(runs[1].path), "--of", "domain.d"])
    assert (
        refused.exit_code == 2
        and "has no number 'domain.d'; did you mean 'domain.b'?" in refused.stderr
    )


def test_all_rounds_of_all_runs_are_one_table_with_run_and_seed(made, tmp_path):
    text = (made.folder / "job.toml").read_text()
    for method in ("fedavg", "fedntd"):
        for seed in (0, 1):
            copied = shutil.copytree(made.folder, tmp_path / f"g/{method}/seed-{seed}")
            named = text.replace('name = "a"', f'name = "g/{method}/seed-{seed}"').replace(
                "seed = 0", f"seed = {seed}", 1
            )
            (copied / "job.toml").write_text(named)
    every = rayfed.read_rounds(tmp_path)
    own = read_table(made.folder, "rounds")
    assert every.column_names == [
        "run",
        "seed",
        *(name for name in own.column_names if name != "notes"),
    ]
    assert len(every) == 4 * len(own) == len(rayfed.read_rounds(tmp_path / "g", tmp_path)), (
        "given twice, it is there once"
    )
    whose = every.group_by(["run", "seed"], use_threads=False).aggregate([]).to_pylist()
    assert whose == [
        {"run": method, "seed": seed} for method in ("fedavg", "fedntd") for seed in (0, 1)
    ]
    for row in whose:
        of_run = every.filter((pc.field("run") == row["run"]) & (pc.field("seed") == row["seed"]))
        for name in every.column_names[2:]:
            np.testing.assert_array_equal(of_run[name].to_numpy(), own[name].to_numpy())


@pytest.mark.parametrize("folders", [(), (["runs"],), (3,), ("runs", None)])
def test_what_is_no_folder_has_no_rounds(folders):
    with pytest.raises(
        InputError, match=r"read_rounds\(.*\): give folders of runs or grids as they are, not in"
    ):
        rayfed.read_rounds(*folders)


def test_a_folder_that_is_not_there_has_no_rounds(tmp_path):
    with pytest.raises(
        InputError, match=r"none' is not the folder of a run: there is no such folder"
    ):
        rayfed.read_rounds(tmp_path / "none")


def test_a_table_is_written_in_the_form_that_its_files_name_has(made, tmp_path):
    for suffix, begins in (
        (".tex", r"\begin{tabular}"),
        (".md", "| run |"),
        (".csv", "run,seeds"),
        (".txt", "run  "),
    ):
        file = tmp_path / f"table{suffix}"
        done = CliRunner().invoke(main, ["table", str(made.folder), "-o", str(file)])
        assert (done.exit_code, done.stdout) == (0, f"table in {file}\n"), done.output
        assert file.read_text().startswith(begins)
    refused = CliRunner().invoke(
        main, ["table", str(made.folder / "none"), "-o", str(tmp_path / "a.md")]
    )
    assert refused.exit_code == 2 and not (tmp_path / "a.md").exists()


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=12))
def test_an_interval_is_around_the_mean_and_moves_with_the_values(values):
    low, high = interval(values)
    assert (low + high) / 2 == pytest.approx(np.mean(values), abs=1e-9) and low <= high
    moved = interval([value + 7.0 for value in values])
    assert moved == pytest.approx((low + 7.0, high + 7.0))


def test_the_points_of_students_t_hold_95_percent():
    """The density, integrated numerically."""
    for free in (*range(1, 31), 31, 45, 200):
        t = T[free - 1] if free <= len(T) else 1.96 + 2.4 / free
        x = np.linspace(-t, t, 100_001)
        log_scale = (
            math.lgamma((free + 1) / 2) - math.lgamma(free / 2) - math.log(free * math.pi) / 2
        )
        density = math.exp(log_scale) * (1 + x**2 / free) ** (-(free + 1) / 2)
        area = ((density[1:] + density[:-1]) / 2 * np.diff(x)).sum()
        assert area == pytest.approx(0.95, abs=3e-4)


@pytest.mark.parametrize("pairs", [3, 6])
def test_where_nothing_differs_the_interval_leaves_0_out_in_one_of_twenty_cases(pairs):
    drawn = np.random.default_rng(0).normal(size=(4000, pairs))
    sure = [Difference("a", pairs, float(one.mean()), interval(one.tolist())).sure for one in drawn]
    assert np.mean(sure) == pytest.approx(0.05, abs=0.012)


def test_forms_mark_what_is_sure_and_escape_names(run):
    runs = [
        run(f"x/{name}", seed, last)
        for name, last in (("a_b|c", 0.2), ("d%", 0.3))
        for seed in range(3)
    ]
    assert sheet(runs, "text").lines[1][-1] == "+10.00 [+10.00, +10.00]*"
    md = markdown(sheet(runs, "md"))
    assert "| a_b\\|c | 3 |" in md and md.splitlines()[-1].endswith(
        "| **+10.00 [+10.00, +10.00]** |"
    )
    tex = latex(sheet(runs, "latex"))
    assert (
        r"a\_b\textbar{}c & 3" in tex
        and r"d\% & 3" in tex
        and r"\textbf{+10.00 [+10.00, +10.00]}" in tex
    )
    assert all(
        line.count("&") == tex.splitlines()[2].count("&")
        for line in tex.splitlines()
        if "&" in line
    )


def test_no_character_of_a_name_is_latex_and_csv_keeps_them_all():
    name = 'a\\b&c%d$e#f_g{h}~^ü,"|<>'
    made = Sheet(["run", "x (%)"], [[name, "1.00 ± 0.50"]], ["a note"], [{"run": name, "x": 1.0}])
    assert latex(made).splitlines()[4] == (
        r"a\textbackslash{}b\&c\%d\$e\#f\_g\{h\}\textasciitilde{}\textasciicircum{}ü,"
        r""""\textbar{}\textless{}\textgreater{} & 1.00 $\pm$ 0.50 \\"""
    )
    assert latex(made).endswith("\n% a note") and markdown(made).endswith("\n\na note")
    assert [*csv.DictReader(io.StringIO(as_csv(made)))] == [{"run": name, "x": "1.0"}]


@pytest.mark.parametrize(
    ("name", "md", "tex", "cell"),
    [
        ("=1+2", "=1+2", "=1+2", "'=1+2"),
        ("+x", "+x", "+x", "'+x"),
        ("-x", "-x", "-x", "'-x"),
        ("@x", "@x", "@x", "'@x"),
        ("a=b", "a=b", "a=b", "a=b"),
        ("a\nb", "a b", "a b", "a\nb"),
        ("a\r\nb", "a b", "a b", "a\r\nb"),
        ("a|b", r"a\|b", r"a\textbar{}b", "a|b"),
        (r"a\|b", r"a\\\|b", r"a\textbackslash{}\textbar{}b", r"a\|b"),
        ("**a**", r"\*\*a\*\*", "{}**a**", "**a**"),
        ("<b>`x`", r"\<b>\`x\`", r"\textless{}b\textgreater{}`x`", "<b>`x`"),
        ("[a](b)", r"\[a](b)", "{}[a](b)", "[a](b)"),
    ],
)
def test_a_name_is_one_cell_and_nothing_else_in_every_form(name, md, tex, cell):
    made = Sheet(["run", "x"], [[name, "-1.00"]], [f"{name}: a note"], [{"run": name, "x": -1.0}])
    assert markdown(made).splitlines()[2] == f"| {md} | -1.00 |"
    assert len(markdown(made).splitlines()) == 5
    assert latex(made).splitlines()[4] == rf"{tex} & -1.00 \\"
    assert latex(made).splitlines()[-1].startswith("% ")
    (read,) = csv.DictReader(io.StringIO(as_csv(made), newline=""))
    assert read == {"run": cell, "x": "-1.0"}


def test_a_label_is_no_latex_even_where_it_looks_like_a_mark_or_an_argument(run):
    for label, printed in (
        (r"\textbf{x}", r"\textbackslash{}textbf\{x\}"),
        # An argument of the line's end above.
        ("[ours] a_b & c", r"{}[ours] a\_b \& c"),
        ("*ours", "{}*ours"),
    ):
        runs = labelled([run("x/fedavg", 0, 0.5), run("x/fedntd", 0, 0.6)], {"fedavg": label})
        tex = latex(sheet(runs, "latex", columns="last,from"))
        assert tex.splitlines()[4] == rf"{printed} & 50.00 &  \\"
        assert (
            tex.splitlines()[5] == rf"fedntd & \textbf{{60.00}} & {printed.removeprefix('{}')} \\"
        )


@pytest.fixture
def papers(tmp_path, monkeypatch):
    """A paper with a grid of two methods, in jobs/papers of the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "jobs/papers/fedx"
    folder.mkdir(parents=True)
    grid = "\n".join(
        f'[[grid.method]]\nname = "{name}"\nmethod = "{name}"' for name in ("fedavg", "fedntd")
    )
    job = (
        'name = "fedx-table1"\n[data.partition]\nname = "dirichlet"\nalpha = 0.3\nnum_clients = '
        '20\nseed = "run"\n'
        '[model]\nname = "lenet"\n'
        "[train]\nnum_rounds = 1\nclients_per_round = 2\nlocal_steps = 1\nlr = 0.5\n[grid]\nseeds "
        "= [0, 1]\n"
    )
    (folder / "table1.toml").write_text(job + grid)
    lines = ["table,grid,setting,method,metric,value,spread,stat,note"]
    lines += [
        "T1,table1,,fedavg,test_accuracy,40.5,1.25,last,",
        "T1,table1,,fedavg,forgetting,0.5,,last,doubtful: a slip",
    ]
    lines += ["T2,table2,,fedavg,test_accuracy,99.0,,best,"]
    (folder / "results.csv").write_text("\n".join(lines))


def lines_of(made):
    return [dict(zip(made.head, line, strict=True)) for line in made.lines]


def test_each_number_of_the_paper_has_a_line_and_other_protocols_are_named(run, papers):
    paper = read_paper("fedx/table1")
    ours = [run(f"fedx-table1/{method}", 0, 0.5) for method in ("fedntd", "fedavg")]
    changed = {
        "train": {**ours[0].job["train"], "lr": 0.03},
        "data": {**ours[0].job["data"], "source": "images"},
    }
    ours = [replace(each, job={**each.job, **changed}) for each in ours]
    made = of_papers.sheet([*ours, run("other", 0, 0.5)], paper)
    accuracy, forgetting = lines_of(made)
    assert (accuracy["run"], accuracy["metric"]) == (
        "fedx-table1/fedavg",
        "test_accuracy, last (%)",
    )
    assert (accuracy["ours"], accuracy["paper"], accuracy["difference"]) == (
        "50.00",
        "40.5 ± 1.25",
        "+9.50",
    )
    assert (forgetting["ours"], forgetting["paper"], forgetting["difference"]) == (
        "0.250",
        "0.5",
        "-0.250",
    )
    assert (accuracy["notes"], forgetting["notes"]) == ("1", "1, 2")
    assert (
        made.notes[0].startswith("1. other than the paper's grid: ")
        and made.notes[0].count("train.lr is") == 1
    )
    assert (
        "train.lr is 0.5 in the grid, 0.03 here" in made.notes[0]
        and "data.source is" in made.notes[0]
    )
    assert "partition.seed" not in made.notes[0], "it follows the run's seed"
    assert made.notes[1:] == [
        "2. paper: doubtful: a slip",
        "results.csv has no number for fedx-table1/fedntd",
        "not of the paper's grid: other",
    ]
    assert (
        made.records[0]["difference"] == pytest.approx(9.5)
        and "doubtful" in made.records[1]["notes"]
    )


def test_all_numbers_of_the_papers_have_a_run_and_a_measure():
    there, in_all = 0, 0
    for paper in map(read_paper, grids()):
        for cell, of_cell in paper.numbers.items():
            with suppress(InputError):
                paper.cells[cell].job()
                there += sum(not without(number.metric) for number in of_cell)
            in_all += len(of_cell)
    assert there == in_all
    assert f"each of the {in_all} numbers" in (PAPERS / "README.md").read_text().replace("\n", " ")


def test_the_command_prints_every_form(made, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(made.folder, tmp_path / name)
        text = (tmp_path / name / "job.toml").read_text()
        (tmp_path / name / "job.toml").write_text(text.replace('name = "a"', f'name = "{name}"', 1))
    accuracy = f"{100 * made.rounds['test_accuracy'][1]:.2f}"
    for form in ("text", "md", "latex", "csv"):
        done = CliRunner().invoke(
            main, ["table", str(tmp_path / "one"), str(tmp_path / "two"), "--format", form]
        )
        assert done.exit_code == 0, done.output
        assert "one" in done.output and "two" in done.output
        assert accuracy in done.output or form == "csv"
    first, second = csv.DictReader(io.StringIO(done.stdout))
    assert "last_10: mean of 1 round" in done.stderr, "the column's name stays for scripts"
    assert (first["difference"], float(second["difference"]), second["difference_from"]) == (
        "",
        0.0,
        "",
    )
    assert f"{float(first['last']):.2f}" == accuracy
    assert CliRunner().invoke(main, ["table", str(tmp_path / "none")]).exit_code == 2


def test_a_run_that_has_not_begun_is_left_out_and_a_damaged_one_is_named(made, tmp_path):
    def printed(*arguments):
        done = CliRunner().invoke(main, ["table", *map(str, arguments)])
        return done.exit_code, done.output

    code, text = printed(made.folder, "--paper", "fedntd/table1")
    assert code == 2 and "none of the runs is of the paper's grid" in text
    (tmp_path / "begun").mkdir()
    shutil.copy(made.folder / "job.toml", tmp_path / "begun")
    assert "no evaluated round yet" in printed(tmp_path)[1]
    # Twice, by two paths.
    code, text = printed(tmp_path, made.folder, made.folder / ".." / made.folder.name)
    # The head, a row, and a note after an empty line.
    assert code == 0 and len(text.splitlines()) == 4
    assert "begun is left out: no round has been evaluated yet" in text
    (tmp_path / "begun" / "job.toml").write_text("name = 'mine'")
    assert (
        "begun cannot be shown, as a file in it is not as a run wrote it: KeyError('data')"
        in printed(tmp_path)[1]
    )


def test_the_command_prints_a_papers_table_in_every_form(made, tmp_path):
    text = (made.folder / "job.toml").read_text()
    for method in ("fedavg", "fedlmd"):
        folder = shutil.copytree(made.folder, tmp_path / method / "seed-0")
        name = f"fedlmd-table3/mnist-shards-2/{method}/seed-0"
        (folder / "job.toml").write_text(text.replace('name = "a"', f'name = "{name}"', 1))
    best = 100 * made.rounds["test_accuracy"][1]
    for form in ("text", "md", "latex", "csv"):
        done = CliRunner().invoke(
            main, ["table", str(tmp_path), "--paper", "fedlmd/table3", "--format", form]
        )
        assert done.exit_code == 0, done.output
        assert "train.num_rounds is 200 in the grid, 1 here" in done.output
    records = [*csv.DictReader(io.StringIO(done.stdout))]
    assert [(row["run"], row["metric"]) for row in records] == [
        (method, metric)
        for method in ("fedavg", "fedlmd")
        for metric in ("test_accuracy", "speed_up")
    ]
    assert float(records[0]["ours"]) == pytest.approx(best) and float(records[1]["ours"]) == 1.0
    assert float(records[2]["difference"]) == pytest.approx(best - float(records[2]["paper"]))


def test_a_folder_with_the_users_job_file_is_that_of_the_runs_in_it(tmp_path):
    (tmp_path / "job.toml").write_text("")
    assert find_runs(tmp_path) == [tmp_path]
    run = tmp_path / "runs/mine"
    run.mkdir(parents=True)
    (run / "job.toml").write_text("")
    (run / "summary.json").write_text("{}")
    assert find_runs(tmp_path) == find_runs(run) == [run]
    with pytest.raises(InputError, match="it is a file"):
        find_runs(run / "summary.json")


def test_a_papers_baseline_is_the_run_of_fedavg_of_the_same_setting_and_pair(run, papers):
    paper = read_paper("fedx/table1")
    ntd = "fedx-table1/fedntd"
    others = [run("fedx-table1/fedavg", seed, 0.5) for seed in (1, 0)]
    assert paper.baseline(run(ntd, 0, 0.6), others) is others[1]
    assert paper.baseline(run(ntd, 2, 0.6), others) is None
    assert paper.baseline(run(ntd, 0, 0.6, partition="q"), others) is None
    assert paper.baseline(run(ntd, 0, 0.6), [run(ntd, 0, 0.5)]) is None


def test_a_papers_number_has_no_mean_of_ours_where_one_of_the_runs_lacks_it(run, papers):
    """The mean of the others would be of other seeds than the rest of the row."""
    number = Theirs("rounds_to_target", "3", "", "", "")
    paper = replace(read_paper("fedx/table1"), numbers={"fedavg": [], "fedntd": [number]})
    runs = [run("fedx-table1/fedavg", seed, 0.5) for seed in (0, 1)]
    runs += [run("fedx-table1/fedntd", seed, end) for seed, end in ((0, 0.6), (1, 0.4))]
    (line,) = lines_of(of_papers.sheet(runs, paper))
    assert (line["ours"], line["difference"]) == ("", "")
    both = [*runs[:2], *(run("fedx-table1/fedntd", seed, 0.6) for seed in (0, 1))]
    (line,) = lines_of(of_papers.sheet(both, paper))
    assert line["ours"] == "1.0 ± 0.0"


def test_what_sets_rows_apart_is_named_only_where_no_run_has_it_in_both(run):
    """The seeds overlap, the partitions do not."""
    runs = [run("x/one", seed, 0.5) for seed in (0, 1)]
    runs += [run("x/two", seed, 0.6, partition="q") for seed in (1, 2)]
    _, second = rows(runs)
    assert (second.pairs, second.unlike) == ([], "other partition")


def test_runs_are_compared_with_a_reference_and_never_with_a_row_that_has_one_itself(run):
    """The last row has a pair in the second, which is compared with the first."""
    runs = [run("x/one", 0, 0.5), run("x/two", 0, 0.6), run("x/two", 1, 0.6)]
    _, second, third = rows([*runs, run("x/three", 1, 0.7)])
    assert [pair[0].job["seed"] for pair in second.pairs] == [0]
    assert (third.pairs, third.difference, third.unlike) == ([], None, "other seed")


def test_what_runs_differ_in_is_listed_within_groups_and_between_them(run):
    """Seeds may differ within a group. Keys of the data explain another hash of the data."""

    def changed(made, section, key, value):
        return replace(made, job={**made.job, section: {**made.job[section], key: value}})

    one = [run("x/one", 0, 0.5), changed(run("x/one", 1, 0.5), "train", "lr", 7.0)]
    lr = str(one[0].job["train"]["lr"])
    assert differences(grouped(one)) == [("train.lr", lr, "x/one"), ("train.lr", "7.0", "x/one")]
    assert differences(grouped([run("x/one", seed, 0.5) for seed in (0, 1)])) == []
    two = changed(run("x/two", 0, 0.5), "data", "size", 14)
    of_two = {**two.environment, "data": "other"}
    first, second = run("x/one", 0, 0.5), replace(two, environment=of_two)
    size = ("data.size", str(first.job["data"]["size"]), "one")
    assert differences(grouped([first, second])) == [size, ("data.size", "14", "two")]
    other = replace(run("x/two", 0, 0.5), environment=of_two)
    assert [key for key, _, _ in differences(grouped([first, other]))] == ["hash of the data"] * 2


def test_accuracy_is_two_numbers_and_the_name_of_its_column_is_the_last(run, made):
    one = run("x/one", 0, 0.5, 0.4)
    says = (
        "no number 'accuracy'; did you mean 'last'. .*\n"
        "'last' is the accuracy after the last round, 'best' that of the best round$"
    )
    with pytest.raises(InputError, match=says):
        rows([one], "accuracy")
    shown = [
        CliRunner().invoke(main, ["table", str(made.folder), "--of", of])
        for of in ("test_accuracy", "last")
    ]
    assert shown[0].exit_code == 0 and shown[0].stdout == shown[1].stdout


def test_a_second_stage_in_another_folder_is_not_another_protocol(run):
    paper = read_paper("fedcad/fig2")
    cell = paper.cells["cifar10-dirichlet-0.5/fedcad"]
    elsewhere = {"model.weights": "elsewhere/round-00010.safetensors"}
    job = Cell(override(cell.tables, elsewhere)).job().table()
    second = replace(run("fedcad-fig2/cifar10-dirichlet-0.5/fedcad/seed-0", 0, 0.5), job=job)
    assert paper.unlike(second) == []
    changed = {**job, "train": {**job["train"], "lr": 0.5}}
    assert paper.unlike(replace(second, job=changed)) == ["train.lr is 0.01 in the grid, 0.5 here"]
