"""`rayfed table`: means, paired differences and their intervals by hand; the paper's numbers beside ours."""

import csv
import io
import shutil
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import rayfed
from rayfed.cli import main
from rayfed.errors import InputError
from rayfed.report.read import read_run
from rayfed.report.table import Difference, cells_of, interval, latex, markdown, read_paper, rows

TINY = {"model.name": "lenet", "train.num_rounds": 1, "train.clients_per_round": 2, "train.local_steps": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of one round, to be given other names, seeds and accuracies."""
    path = tmp_path_factory.mktemp("runs")
    changes = {**TINY, "name": "a", "ray.mode": "off", "output.path": str(path)}
    return read_run(rayfed.run("jobs/quickstart.toml", changes).path)


@pytest.fixture
def run(made):
    def run(name, seed, *accuracies, partition="p", forgetting=0.25):
        count = len(accuracies) + 1
        rounds = {**made.rounds, "round": np.arange(count), "test_accuracy": np.array([0.1, *accuracies])}
        rounds["forgetting"] = np.full(count, forgetting)
        job = {**made.job, "name": f"{name}/seed-{seed}", "seed": seed}
        summary, environment = {**made.summary, "rounds": count - 1}, {**made.environment, "partition": partition}
        changed = {"rounds": rounds, "job": job, "summary": summary, "environment": environment}
        return replace(
            made, **changed, evaluated=np.ones(count, bool), folder=made.folder.parent / name / f"seed-{seed}"
        )

    return run


def test_figures_and_differences_by_hand(run):
    """Pairs by seed: +10, +20 and +30 points in the last round, although the runs come in another order."""
    one = [run("x/one", seed, 0.5, last) for seed, last in ((0, 0.3), (1, 0.2), (2, 0.1))]
    two = [run("x/two", seed, 0.6, last) for seed, last in ((2, 0.4), (0, 0.4), (1, 0.4))]
    first, second = rows([*one, *two])
    assert (first.name, second.name, first.difference) == ("one", "two", None)
    assert first.figures["last"] == (pytest.approx(20.0), pytest.approx(10.0))
    assert first.figures["best"] == (pytest.approx(50.0), pytest.approx(0.0, abs=1e-9))
    assert first.figures["last_10"][0] == pytest.approx((50 + 20) / 2)
    assert first.figures["forgetting"] == (0.25, 0.0)
    assert (second.difference.reference, second.difference.pairs) == ("one", 3)
    assert second.difference.mean == pytest.approx(20.0) and second.difference.sure
    assert 10.0 <= second.difference.interval[0] < 20.0 < second.difference.interval[1] <= 30.0
    best = rows([*one, *two], "best")[1].difference
    assert best.mean == pytest.approx(10.0) and best.interval == pytest.approx((10.0, 10.0))


def test_only_runs_of_the_same_partition_seed_and_rounds_are_compared(run):
    one = run("x/one", 0, 0.5)
    assert [row.difference for row in rows([one, run("x/two", 1, 0.6)])] == [None, None]
    assert [row.difference for row in rows([one, run("x/two", 0, 0.6, partition="q")])] == [None, None]
    assert [row.difference for row in rows([one, run("x/two", 0, 0.6, 0.7)])] == [None, None]
    third = rows([one, run("y/one", 0, 0.5, partition="q"), run("y/two", 0, 0.6, partition="q")])[2]
    assert third.difference == Difference("y/one", 1, pytest.approx(10.0), None)
    assert not third.difference.sure  # one pair says nothing about chance


@given(st.lists(st.floats(-50, 50), min_size=3, max_size=12))
def test_an_interval_is_within_the_values_around_their_mean_and_moves_with_them(values):
    low, high = interval(values)
    assert min(values) - 1e-9 <= low <= np.mean(values) + 1e-9 and np.mean(values) - 1e-9 <= high <= max(values) + 1e-9
    moved = interval([value + 7.0 for value in values])
    assert moved == pytest.approx((low + 7.0, high + 7.0))
    assert interval(values) == (low, high)


def test_a_run_without_an_evaluated_round_is_refused(run):
    started = replace(run("x", 0), evaluated=np.array([True]))
    with pytest.raises(InputError, match="has no evaluated round yet"):
        rows([started])


def test_forms_mark_what_is_sure_and_escape_names(run):
    one = [run("x/a_b|c", seed, 0.2) for seed in range(3)]
    two = [run("x/d%", seed, 0.3) for seed in range(3)]
    found = rows([*one, *two])
    assert cells_of(found, None, "text")[1][1][-1] == "+10.00 [+10.00, +10.00]*"
    md = markdown(*cells_of(found, None, "md")[:2])
    assert "| a_b\\|c | 3 |" in md and md.splitlines()[-1].endswith("| **+10.00 [+10.00, +10.00]** |")
    tex = latex(*cells_of(found, None, "latex")[:2])
    assert r"a\_b|c & 3" in tex and r"d\% & 3" in tex and r"\textbf{+10.00 [+10.00, +10.00]}" in tex
    assert all(line.count("&") == tex.splitlines()[2].count("&") for line in tex.splitlines() if "&" in line)


@pytest.fixture
def papers(tmp_path):
    """A paper with a grid of two methods, in a folder as jobs/papers."""
    folder = tmp_path / "papers" / "fedx"
    folder.mkdir(parents=True)
    grid = "\n".join(f'[[grid.method]]\nname = "{name}"\nmethod = "{name}"' for name in ("fedavg", "fedntd"))
    job = (
        'name = "fedx-table1"\n[data.partition]\nname = "dirichlet"\nalpha = 0.3\nnum_clients = 20\n'
        '[model]\nname = "lenet"\n'
        "[train]\nnum_rounds = 1\nclients_per_round = 2\nlocal_steps = 1\nlr = 0.5\n[grid]\nseeds = [0, 1]\n"
    )
    (folder / "table1.toml").write_text(job + grid)
    lines = ["table,grid,setting,method,metric,value,spread,stat,note"]
    lines += [
        "T1,table1,,fedavg,test_accuracy,40.5,1.25,last,",
        "T1,table1,,fedavg,forgetting,0.5,,last,doubtful: a slip",
    ]
    lines += ["T2,table2,,fedavg,test_accuracy,99.0,,best,"]
    (folder / "results.csv").write_text("\n".join(lines))
    return tmp_path / "papers"


def test_the_papers_numbers_stand_beside_ours_and_other_protocols_are_named(run, papers):
    paper = read_paper("fedx/table1", papers)
    ours = [run(f"fedx-table1/{method}", 0, 0.5) for method in ("fedavg", "fedntd")]
    ours = [replace(each, job={**each.job, "train": {**each.job["train"], "lr": 0.03}}) for each in ours]
    head, (avg, ntd), notes = cells_of(rows(ours), paper, "text")
    assert dict(zip(head, avg, strict=True))["paper's accuracy (%)"] == "40.50 ± 1.25 (last)"
    assert dict(zip(head, avg, strict=True))["ours less theirs"] == "+9.50"
    assert dict(zip(head, avg, strict=True))["paper's forgetting"] == "0.50"
    assert ntd[-3:] == ["", "", ""]
    assert "fedavg: train.lr is 0.5 in the grid, 0.03 here" in notes
    assert "fedavg: the paper's forgetting is doubtful: a slip" in notes
    *_, notes = cells_of(rows([run("other", 0, 0.5)]), paper, "text")
    assert any("fedx-table1/fedavg" in note and "no number for these runs" in note for note in notes)


def test_an_unknown_paper_is_refused_with_the_nearest_name(papers):
    with pytest.raises(InputError, match=r"fedx/tabel1: there is no such grid; did you mean 'fedx/table1'"):
        read_paper("fedx/tabel1", papers)
    with pytest.raises(InputError, match="the grids are sought in"):
        read_paper("fedx/table1", papers / "away")


def test_the_command_prints_every_form(made, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(made.folder, tmp_path / name)
        text = (tmp_path / name / "job.toml").read_text()
        (tmp_path / name / "job.toml").write_text(text.replace('name = "a"', f'name = "{name}"', 1))
    accuracy = f"{100 * made.rounds['test_accuracy'][1]:.2f}"
    for form in ("text", "md", "latex", "csv"):
        done = CliRunner().invoke(main, ["table", str(tmp_path / "one"), str(tmp_path / "two"), "--format", form])
        assert done.exit_code == 0, done.output
        assert "one" in done.output and "two" in done.output
        assert accuracy in done.output or form == "csv"
    first, second = csv.DictReader(io.StringIO(done.output))
    assert (first["difference"], float(second["difference"]), second["difference_from"]) == ("", 0.0, "")
    assert f"{float(first['last']):.2f}" == accuracy
    assert CliRunner().invoke(main, ["table", str(tmp_path / "none")]).exit_code == 2
