"""Grids: the runs of a job file with a [grid], and the table of their results."""

import csv
import json
import re
import tomllib
from itertools import product

import numpy as np
import pytest
from click.testing import CliRunner

from rayfed.base.errors import InputError, RunFailed, WorkersLost
from rayfed.cli import main
from rayfed.data import sources
from rayfed.folder.found import find_runs, write_order
from rayfed.grid.cells import Cell, expand, matching
from rayfed.job import read_job
from rayfed.report.read import read_run

GRID = """
name = "g"
method = "fedavg"
[data]
source = "data"
[data.partition]
name = "iid"
num_clients = 4
[model]
name = "lenet"
[train]
num_rounds = 1
clients_per_round = 2
[ray]
mode = "off"
[grid]
seeds = [0, 1]
[[grid.setting]]
name = "two"
"train.clients_per_round" = 2
[[grid.setting]]
name = "shards"
"data.partition" = { name = "shards", s = 2, num_clients = 2 }
[[grid.method]]
name = "avg"
method = "fedavg"
[[grid.method]]
name = "prox"
method = { name = "fedprox", mu = 0.1 }
"""


@pytest.fixture
def tables():
    return tomllib.loads(GRID)


def test_each_combination_of_seed_setting_and_method_is_a_run(tables):
    cells = expand(tables)
    order = product((0, 1), ("two", "shards"), ("avg", "prox"))
    assert [cell.name for cell in cells] == [
        f"g/{setting}/{method}/seed-{seed}" for seed, setting, method in order
    ]
    assert {(cell.grid, cell.setting) for cell in cells} == {("g", "two"), ("g", "shards")}
    job = cells[-1].job()
    assert (job.seed, job.data.partition.num_clients, job.train.clients_per_round) == (1, 2, 2)
    assert job == Cell(cells[-1].tables).job()
    assert tables == tomllib.loads(GRID), "expand must not change its argument"


def test_overrides_win_in_every_run(tables):
    cells = expand(
        tables, {"train.clients_per_round": 1, "data.partition.num_clients": 3, "name": "other"}
    )
    assert {cell.tables["train"]["clients_per_round"] for cell in cells} == {1}
    assert {cell.tables["data"]["partition"]["num_clients"] for cell in cells} == {3}
    assert {cell.name.split("/")[0] for cell in cells} == {"other"}


def test_overrides_of_the_grid_choose_its_seeds(tables):
    assert [cell.tables["seed"] for cell in expand(tables, {"grid.seeds": [7]})] == [7] * 4
    del tables["grid"]
    assert [cell.name for cell in expand(tables, {"grid.seeds": [3, 4]})] == [
        "g/seed-3",
        "g/seed-4",
    ]


def test_a_job_without_a_grid_is_one_run(tables):
    del tables["grid"]
    assert expand(tables, {"seed": 5}) == [Cell(tables | {"seed": 5})]


def test_a_method_may_have_keys_of_its_own(tables):
    tables["grid"]["method"].append({"name": "moon", "method": "moon", "model.project": 256})
    jobs = {cell.method: cell.job() for cell in expand(tables)}
    assert jobs.pop("moon").model.options == {"project": 256}
    assert [job.model.options for job in jobs.values()] == [{}, {}]


def test_a_table_with_a_name_stays_whole_in_every_form(tables):
    """Of the job's own partition, no key is left."""
    tables["data"]["partition"] = {"name": "dirichlet", "alpha": 0.3, "num_clients": 4}
    named = {"name": "dirichlet", "num_clients": 3}
    for setting in ({"data.partition": named}, {"data": {"partition": named}}):
        tables["grid"] = {"setting": [{"name": "even", **setting}]}
        (cell,) = expand(tables)
        assert cell.tables["data"] == {"source": "data", "partition": named}


def test_lists_of_values_are_combined_and_named_by_the_end_of_their_key(tables):
    lists = {
        "seeds": [0],
        "method": ["fedavg", "fedntd"],
        "train": {"lr": [0.1, 1e-5]},
        "data.augment.flip": [True],
    }
    cells = expand(tables | {"grid": lists})
    assert [cell.name for cell in cells] == [
        f"g/{method}/lr-{lr}/flip-true/seed-0"
        for method in ("fedavg", "fedntd")
        for lr in ("0.1", "1e-05")
    ]
    assert [cell.job().train.lr for cell in cells] == [0.1, 1e-5] * 2
    assert all(cell.job().data.augment.flip for cell in cells)
    assert (
        cells[2].job().method == expand(tables | {"grid": {}, "method": "fedntd"})[0].job().method
    )
    both = {"train.momentum": [0.0], "method.momentum": [0.5]}
    names = [cell.name for cell in expand(tables | {"method": "fedavgm", "grid": both})]
    assert names == ["g/train.momentum-0.0/method.momentum-0.5/seed-0"], (
        "keys that end alike are whole"
    )
    assert [c.tables["model"] for c in expand(tables | {"grid": {"model": ["cnn", "lenet"]}})] == [
        {"name": "cnn"},
        {"name": "lenet"},
    ]


def test_keys_without_quotes_change_single_values_too(tables):
    """TOML reads `train.lr = 0.1` as a table; it must not replace all of [train]."""
    tables["grid"] = tomllib.loads(
        '[[setting]]\nname = "a"\ntrain.lr = 0.5\ndata.partition.s = 3\n'
    )
    tables["data"]["partition"] = {"name": "shards", "s": 2, "num_clients": 2}
    (cell,) = expand(tables)
    assert cell.tables["train"] == {**tables["train"], "lr": 0.5}
    assert cell.tables["data"] == {
        "source": "data",
        "partition": {"name": "shards", "s": 3, "num_clients": 2},
    }
    tables["grid"] = tomllib.loads(
        '[[setting]]\nname = "a"\ndata.partition = { name = "iid", num_clients = 4 }\n'
    )
    assert expand(tables)[0].tables["data"]["partition"] == {"name": "iid", "num_clients": 4}


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        ("setting", "method", "train.lr"),
        ("setting", "train.lr", "train.lr"),
        ("method", "train.lr", "train.lr"),
        ("seeds", "setting", "seed"),
        ("seeds", "method", "seed"),
    ],
)
def test_no_two_lists_of_a_grid_give_the_same_key(tables, first, second, key):
    lists = {
        "seeds": [0, 1],
        "setting": [{"name": "a", key: 1}],
        "method": [{"name": "avg", "method": "fedavg", key: 1}],
        "train.lr": [0.1, 0.2],
    }
    tables["grid"] = {first: lists[first], second: lists[second]}
    with pytest.raises(InputError, match=f"both give {key}; leave it out of one of the two"):
        expand(tables)


def test_the_command_line_gives_lists_of_values(tables):
    del tables["grid"]
    cells = expand(tables, {"grid.train.lr": [0.1, 0.2], "grid.seeds": [3]})
    assert [cell.name for cell in cells] == ["g/lr-0.1/seed-3", "g/lr-0.2/seed-3"]
    tables["method"] = "fedntd"
    assert expand(tables, {"grid.method.beta": [0.5]})[0].name == "g/beta-0.5/seed-0"


def test_partitions_follow_the_seeds_of_the_runs_when_asked(tables):
    jobs = [
        cell.job() for cell in expand(tables, {"data.partition.seed": "run", "grid.seeds": [3, 4]})
    ]
    assert [job.data.partition.seed for job in jobs] == [3] * 4 + [4] * 4
    assert jobs[0].table()["data"]["partition"]["seed"] == 3, "a run's own file has the number"
    assert read_job({"name": "n"}, {"data.partition.seed": "run"}).data.partition.seed == 0
    with pytest.raises(InputError, match=r"data.partition.seed = 'walk': give a whole number"):
        read_job({"name": "n"}, {"data.partition.seed": "walk"})


# The command
# ------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch, write_images):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path, 16, 16)
    (tmp_path / "grid.toml").write_text(GRID)
    return tmp_path


def rayfed(*arguments: str):
    return CliRunner().invoke(main, arguments)


def test_a_grid_runs_what_is_not_done_and_prints_its_table(folder, tables):
    result = rayfed("run", "grid.toml", "--only", "*/seed-0")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    names = [
        f"g/{setting}/{method}/seed-0"
        for setting in ("two", "shards")
        for method in ("avg", "prox")
    ]
    assert [line.split()[:3] for line in lines[:4]] == [
        ["run", f"{i}/4", name] for i, name in enumerate(names, 1)
    ]
    assert lines[3].endswith("  0:00:00 left")
    assert result.stderr.splitlines() == [
        f"{name} begins; its rounds: runs/{name}/log.txt" for name in names
    ]
    assert "4 of 8 runs done; mean ± deviation over seeds, in runs/g/table.csv:" in result.stdout

    result = rayfed("run", "grid.toml")
    assert "4 of 8 runs done already\n" in result.stdout
    assert re.search(r"\nrun 4/4  g/shards/prox/seed-1  best \d+\.\d%", result.stdout)
    assert "\nas a page: rayfed report runs/g\n" in result.stdout
    table = list(csv.DictReader((folder / "runs/g/table.csv").read_text().splitlines()))
    assert [(row["run"], row["seeds"]) for row in table] == [
        (f"{setting}/{method}", "2") for setting in ("two", "shards") for method in ("avg", "prox")
    ]
    text = result.stdout.partition("runs/g/table.csv:\n")[2]
    folders = [f"runs/{cell.name}" for cell in expand(tables)]
    assert text == rayfed("table", *folders).stdout, "the table is that of `rayfed table`"

    result = rayfed("run", "grid.toml")
    assert "8 of 8 runs done already" in result.stdout
    assert "\nrun 1/" not in result.stdout


def test_a_grid_says_which_of_its_finished_runs_are_of_a_module_that_has_changed_since(
    folder, monkeypatch
):
    monkeypatch.syspath_prepend(folder)
    part = "from rayfed.methods import Average\nclass Mine(Average):\n    pass\n"
    (folder / "mine_of_grid.py").write_text(part)
    (folder / "grid.toml").write_text(
        GRID + '[[grid.method]]\nname = "ours"\nmethod = "mine_of_grid:Mine"\n'
    )
    assert rayfed("run", "grid.toml", "--only", "two/*/seed-0").exit_code == 0
    assert rayfed("run", "grid.toml", "--only", "two/ours/seed-1").exit_code == 0
    (folder / "mine_of_grid.py").write_text(part + "# a change\n")
    again = rayfed("run", "grid.toml", "--only", "two/*/seed-0")
    assert again.exit_code == 0 and "3 of 3 runs done already" in again.stdout
    assert again.stderr == (
        "warning: mine_of_grid has changed since; the results of 1 runs are of before: "
        "g/two/ours/seed-0; --force trains them again, with --only some of them\n"
    )
    both = rayfed("run", "grid.toml", "--only", "two/ours/*")
    assert (
        "2 runs are of before: g/two/ours/seed-0, g/two/ours/seed-1; --force trains" in both.stderr
    )
    assert rayfed("run", "grid.toml", "--only", "two/ours/*", "--force").exit_code == 0
    assert "changed since" not in rayfed("run", "grid.toml", "--only", "two/*/seed-0").stderr


def test_a_grid_repeats_unfinished_runs_and_refuses_another_grids_folders(folder):
    assert rayfed("run", "grid.toml", "--only", "two/avg/*").exit_code == 0
    path = folder / "runs/g/two/avg/seed-1/summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "running"}))
    result = rayfed("run", "grid.toml", "--only", "two/avg/*")
    assert "1 of 2 runs done already" in result.stdout
    assert json.loads(path.read_text())["status"] == "done"

    result = rayfed("run", "grid.toml", "-s", "train.lr=0.5")
    assert result.exit_code == 2
    assert "runs/g/two/avg/seed-0' holds the results of another job of this name" in result.stderr
    assert not (folder / "runs/g/two/prox").exists()
    assert (
        rayfed("run", "grid.toml", "-s", "train.lr=0.5", "--force", "--only", "two/avg/*").exit_code
        == 0
    )


def test_the_other_runs_continue_after_one_run_fails(folder):
    diverges = 'grid.method=[{name="a",method={name="fedprox",mu=1e38}},{name="b",method="fedavg"}]'
    result = rayfed(
        "run", "grid.toml", "--only", "two/*/seed-0", "-s", diverges, "-s", "train.batch_size=1"
    )
    assert result.exit_code == 1
    assert result.stderr.endswith("error: 1 of 2 runs failed:\ng/two/a/seed-0\n")
    assert "run 1/2  g/two/a/seed-0  failed\n" in result.stdout
    assert json.loads((folder / "runs/g/two/b/seed-0/summary.json").read_text())["status"] == "done"


@pytest.mark.parametrize(
    ("of_avg", "of_prox", "code"),
    [
        (WorkersLost("no actor is left"), WorkersLost("no actor is left"), 75),
        (WorkersLost("no actor is left"), RunFailed("a client fails"), 1),
        (RunFailed("a client fails"), InputError("no such file"), 1),
    ],
)
def test_a_grid_whose_failed_runs_can_all_be_resumed_says_so_by_its_exit_code(
    folder, monkeypatch, of_avg, of_prox, code
):
    def fails(job, *args, **options):
        raise of_avg if "/avg/" in job.name else of_prox

    monkeypatch.setattr("rayfed.experiment.run", fails)
    ended = rayfed("run", "grid.toml", "--only", "two/*/seed-0")
    assert ended.exit_code == code
    names = "g/two/avg/seed-0\ng/two/prox/seed-0\n"
    assert ended.stderr.endswith(f"error: 2 of 2 runs failed:\n{names}")


def test_list_runs_nothing(folder):
    result = rayfed("run", "grid.toml", "--list", "--only", "shards/prox/*")
    assert result.stdout == "g/shards/prox/seed-0\ng/shards/prox/seed-1\n"
    assert not (folder / "runs").exists()


def test_bad_input_ends_a_grid_at_once(folder):
    result = rayfed("run", "grid.toml", "-s", "data.source=./nowhere")
    assert result.exit_code == 2
    assert result.stderr.count("error:") == 1
    assert not (folder / "runs").exists()


def test_bad_input_of_a_later_run_does_not_end_a_grid(folder):
    """It may be that run's alone, as here: there are fewer images than clients."""
    settings = (
        'grid.setting=[{name="first"},{name="many","data.partition.num_clients"=9999},'
        '{name="last","train.lr"=0.02}]'
    )
    result = rayfed("run", "grid.toml", "-s", settings, "--only", "*/avg/seed-0")
    assert result.exit_code == 2
    assert "run 2/3  g/many/avg/seed-0   failed\n" in result.stdout
    assert "9999 clients cannot be made of" in result.stderr
    assert result.stderr.endswith("error: 1 of 3 runs failed:\ng/many/avg/seed-0\n")
    summary = json.loads((folder / "runs/g/last/avg/seed-0/summary.json").read_text())
    assert summary["status"] == "done"


def test_a_grid_reads_its_data_once_and_its_table_has_no_blank_columns(folder, monkeypatch):
    read, places = sources.read_files, []
    monkeypatch.setattr(
        sources, "read_files", lambda data: places.append(data.source) or read(data)
    )
    text = GRID.partition("[[grid.setting]]")[0]
    (folder / "seeds.toml").write_text(
        text + '[[grid.setting]]\nname = "x"\n"data.partition" = "shards"\n'
    )
    assert rayfed("run", "seeds.toml", "-s", "data.partition.seed=run").exit_code == 0
    assert places == ["data"]
    (folder / "seeds.toml").write_text(text)
    result = rayfed("run", "seeds.toml", "-s", "name=seeds")
    assert result.exit_code == 0, result.output
    assert places == ["data"] * 2, "another command reads again"
    assert [line.split()[:2] for line in result.stdout.splitlines()[-2:]] == [
        ["run", "seeds"],
        ["seeds", "2"],
    ]


# A run that comes first
# ------------------------------------------------------------------------------------------


FIRST = 'seeds = [0, 1]\nfirst = { "train.num_rounds" = 2, "data.partition.num_clients" = 3 }'


@pytest.fixture
def staged():
    """The grid, with a first run of two rounds for each seed."""
    return tomllib.loads(GRID.replace("seeds = [0, 1]", FIRST))


def test_all_runs_of_a_seed_begin_with_the_weights_of_its_first_run(staged):
    cells = expand(staged, {"output.path": "here"})
    assert [cell.name for cell in cells[:2]] == ["g/first/seed-0", "g/first/seed-1"]
    assert len(cells) == 10
    first = cells[1].job()
    assert (first.train.num_rounds, first.data.partition.num_clients, first.seed) == (2, 3, 1)
    assert (cells[1].method, cells[1].after, first.model.adapt.weights) == ("first", "", "")
    job = cells[-1].job()
    assert (job.train.num_rounds, job.seed, cells[-1].after) == (1, 1, "g/first/seed-1")
    weights = "here/g/first/seed-1/checkpoints/round-00002.safetensors"
    assert job.model.adapt.weights == weights
    chosen = matching(cells, "two/avg/seed-1", "--only")
    assert [cell.name for cell in chosen] == ["g/first/seed-1", "g/two/avg/seed-1"]


def test_an_override_of_all_runs_leaves_what_the_first_run_names(staged):
    cells = expand(staged, {"train.num_rounds": 5, "train.lr": 0.5})
    assert [cell.job().train.num_rounds for cell in cells[1:3]] == [2, 5]
    assert [cell.job().train.lr for cell in cells[1:3]] == [0.5, 0.5]
    cells = expand(staged, {"train.num_rounds": 5, "grid.first": {"train.num_rounds": 7}})
    assert [cell.job().train.num_rounds for cell in cells[1:3]] == [7, 5]


def test_the_second_stage_begins_where_the_first_ended(folder, staged):
    (folder / "grid.toml").write_text(GRID.replace("seeds = [0, 1]", FIRST))
    done = rayfed("run", "grid.toml", "--only", "two/avg/seed-0", "-s", "train.lr=0.05")
    assert done.exit_code == 0, done.output
    names = [
        line.split()[2]
        for line in done.stdout.splitlines()
        if line.startswith(("run 1/", "run 2/"))
    ]
    assert names == ["g/first/seed-0", "g/two/avg/seed-0"]
    first, second = (read_run(folder / f"runs/g/{name}/seed-0") for name in ("first", "two/avg"))
    # Round 0 of the second is the last model of the first, on the same test images.
    assert second.rounds["test_loss"][0] == first.rounds["test_loss"][2]
    assert second.rounds["test_loss"][0] != first.rounds["test_loss"][0]
    again = rayfed("run", "grid.toml", "--only", "two/*/seed-0", "-s", "train.lr=0.05")
    assert again.stdout.startswith("2 of 3 runs done already\n")


def test_a_first_run_does_not_leave_the_runs_that_began_with_its_weights(folder):
    (folder / "grid.toml").write_text(GRID.replace("seeds = [0, 1]", FIRST))
    rounds = folder / "runs/g/first/seed-0/summary.json"
    grid = ("run", "grid.toml", "--only")
    assert rayfed(*grid, "two/avg/seed-0").exit_code == 0
    longer = ("-s", FIRST.partition("\n")[2].replace("first = ", "grid.first=").replace("2", "3"))
    # The runs that a command leaves out count too.
    for chosen in (["two/avg/seed-0"], ["first/seed-0"], ["two/prox/seed-0", "--force"]):
        refused = rayfed(*grid, *chosen, *longer)
        assert refused.exit_code == 2
        assert refused.stderr.startswith(
            "error: grid.first: 'runs/g/two/avg/seed-0' began with the weights of round 2 of "
            "'g/first/seed-0', which would end after round 3; choose one:\n"
        )
        assert "-s name=NEW\n" in refused.stderr
        assert "--force" in refused.stderr
        assert not refused.stdout
        assert json.loads(rounds.read_text())["rounds"] == 2
    assert rayfed(*grid, "two/avg/seed-0").stdout.startswith("2 of 2 runs done already\n")
    replaced = rayfed(*grid, "two/avg/seed-0", *longer, "--force")
    assert replaced.exit_code == 0, replaced.output
    assert json.loads(rounds.read_text())["rounds"] == 3


def test_a_first_run_with_whose_weights_none_began_continues(folder):
    (folder / "grid.toml").write_text(GRID.replace("seeds = [0, 1]", FIRST))
    for num_rounds in (2, 3):
        first = FIRST.partition("\n")[2].replace("first = ", "grid.first=")
        changed = first.replace("2", str(num_rounds))
        done = rayfed("run", "grid.toml", "--only", "first/seed-0", "-s", changed)
        assert done.exit_code == 0, done.output
    summary = json.loads((folder / "runs/g/first/seed-0/summary.json").read_text())
    assert summary["rounds"] == 3


def test_runs_whose_first_run_fails_are_not_run(folder):
    lost = GRID.replace("seeds = [0, 1]", FIRST).replace('num_clients" = 3', 'num_clients" = 1000')
    (folder / "grid.toml").write_text(lost)
    done = rayfed("run", "grid.toml")
    assert done.exit_code == 2, done.output
    assert not (folder / "runs/g/two").exists()


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ({"model": "cnn"}, "'g/two/avg/seed-0' has another network than the first run"),
        ({"name": "x"}, "leave 'name' out"),
        ({"seed": 3}, "leave 'seed' out"),
        ({"output.checkpoints": "x"}, "leave output.checkpoints out"),
        ({"output.path": "x"}, r"leave 'output\.path' out.* -s output\.path=FOLDER"),
        ({"output": {"path": "x"}}, r"leave 'output\.path' out"),
        (3, "this is a table of dotted keys"),
        ([], "this is a table of dotted keys"),
    ],
)
def test_a_first_run_that_cannot_be_is_refused(staged, first, message):
    staged["grid"]["first"] = first
    with pytest.raises(InputError, match=message):
        expand(staged)


def test_weights_of_their_own_and_of_a_first_run_are_refused(staged):
    message = r"leave model\.weights out.*first = \{ \"model\.weights\" = \"x\.safetensors\", "
    with pytest.raises(InputError, match=message):
        expand(staged, {"model.weights": "x.safetensors"})


def test_a_first_run_may_begin_with_weights_from_a_file(staged):
    staged["grid"]["first"]["model.weights"] = "x.safetensors"
    cells = expand(staged)
    weights = [cell.job().model.adapt.weights for cell in cells[:3]]
    last = "runs/g/first/seed-0/checkpoints/round-00002.safetensors"
    assert weights == ["x.safetensors", "x.safetensors", last]


def test_a_first_run_without_values_is_none(tables, staged):
    """So `-s grid.first={}` leaves out the first run of a job file."""
    assert expand(staged, {"grid.first": {}}) == expand(tables)


# A paper's table
# ------------------------------------------------------------------------------------------


@pytest.fixture
def paper(folder):
    """The grid as the table `p/t` of a paper, which prints a number for two of its four rows."""
    (folder / "jobs/papers/p").mkdir(parents=True)
    (folder / "jobs/papers/p/t.toml").write_text(GRID)
    (folder / "jobs/papers/p/results.csv").write_text(
        "table,grid,setting,method,metric,value,spread,stat,note\n"
        "Table 1,t,two,avg,test_accuracy,50,0.5,last,\n"
        "Table 1,t,two,prox,forgetting,0.25,,last,\n"
    )
    return folder


def test_a_papers_table_is_run_and_printed_beside_the_papers_numbers(paper):
    result = rayfed("reproduce", "p/t", "--rows", "two/*", "-s", "train.lr=0.05")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [
        ["run", f"{number}/4"] for number in (1, 2, 3, 4)
    ]
    summaries = [
        json.loads((paper / f"runs/g/two/avg/seed-{seed}/summary.json").read_text())
        for seed in (0, 1)
    ]
    ours = np.mean([100 * summary["last"]["test_accuracy"] for summary in summaries])
    row = next(line.split() for line in lines if line.startswith("avg"))
    assert row[:6] == ["avg", "2", "1", "test_accuracy,", "last", "(%)"]
    assert f"{ours:.2f}" in row
    assert f"{ours - 50:+.2f}" in row
    assert any(line.startswith("prox") and " forgetting, last (of 1)  " in line for line in lines)
    assert "train.lr is 0.01 in the grid, 0.05 here" in result.stdout
    assert rayfed("reproduce", "p/t", "--rows", "two/*", "-s", "train.lr=0.05").stdout.startswith(
        "4 of 4 runs done"
    )


def test_runs_of_a_grid_have_the_order_of_its_job_file_and_others_that_of_their_names(tmp_path):
    names = ["b/seed-10", "b/seed-2", "a/seed-2", "c/seed-0"]
    runs = [tmp_path / "g" / name for name in names]
    for run in runs:
        run.mkdir(parents=True)
        (run / "job.toml").write_text("")
    by_name = [tmp_path / "g" / name for name in ("a/seed-2", "b/seed-2", "b/seed-10", "c/seed-0")]
    assert find_runs(tmp_path / "g") == by_name
    write_order(tmp_path / "g", runs[:3])
    assert find_runs(tmp_path / "g") == find_runs(tmp_path) == runs, "new runs come last"
    assert find_runs(tmp_path / "g/b") == runs[:2]
    write_order(tmp_path / "g", [runs[1]])
    assert find_runs(tmp_path / "g") == runs, "a part of the grid changes no order"


def test_a_papers_table_is_listed_and_a_wrong_name_is_refused(paper):
    listed = rayfed("reproduce", "p/t", "--rows", "*/seed-1", "--list")
    assert listed.stdout.splitlines() == [
        cell.name for cell in expand(tomllib.loads(GRID)) if cell.tables["seed"]
    ]
    # Of a paper alone: its tables.
    for listing in (["p"], ["p", "--list"]):
        shown = rayfed("reproduce", *listing).stdout
        assert shown.startswith("the papers' tables and figures, to give one of:\n\np/t\n")
        assert "2 methods x 2 settings, 8 runs of 1 round" in shown and "cost not known" in shown
    wrong = rayfed("reproduce", "p/tt")
    assert (
        wrong.exit_code,
        "'p/tt': there is no such table or figure in jobs/papers; did you mean 'p/t'?"
        in wrong.stderr,
    ) == (
        2,
        True,
    )
    none = rayfed("reproduce", "p/t", "--rows", "fedntd")
    assert (none.exit_code, "--rows 'fedntd': none of 8 runs matches" in none.stderr) == (2, True)
    assert not (paper / "runs").exists()
