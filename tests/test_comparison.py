"""The comparison on MNIST: its job files are fair, its choice and its tables are those of the runs."""

import importlib.util
import itertools
import math
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import tomli_w

import rayfed
from rayfed.base.errors import Diverged, InputError
from rayfed.folder.read import read_run
from rayfed.grid.cells import expand
from rayfed.job import read_toml
from rayfed.methods import RECIPES
from rayfed.methods.registry import parameters
from rayfed.report.table import protocol, rows

ROOT = Path(__file__).resolve().parents[1]


def script(name):
    """A file of tools/ as a module, which other tools can import."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool, personal = script("make_comparison"), script("make_personal")

PERSONAL = {"fedbn", "fedper", "fedrep", "ditto"}  # what the global model says is not what they are for
TUNED = set(RECIPES) - PERSONAL - {"ccvr"}  # which changes the last round alone, where the last ten are compared
BOUNDED = {
    "fedavgm",
    "fedacg",
    "fedrs",
    "fedlsd",
    "fedcad",
    "feddisco",
    "fedrep",
}  # a third and three times would leave the range
TINY = {
    "name": "tiny",
    "data": {"source": "fashion-mnist-mini", "partition": {"name": "shards", "s": 2, "num_clients": 20, "seed": "run"}},
    "model": {"name": "lenet"},
    "train": {"num_rounds": 2, "clients_per_round": 2, "local_steps": 8, "lr": 0.05, "momentum": 0.9},
    "ray": {"mode": "off"},
}
SETTINGS = [{"name": "shards-2"}, {"name": "dirichlet-0.1", "data.partition.num_clients": 10}]
TRIES = [
    {"name": "fedavg", "method": "fedavg"},
    {"name": "fedavg+lr-1e9", "method": "fedavg", "train.lr": 1e9},  # diverges
    {"name": "fedlmd", "method": "fedlmd"},
    {"name": "fedlmd+beta-0.3", "method": {"name": "fedlmd", "beta": 0.3}},
]
TUNING = {**TINY, "grid": {"seeds": [9], "setting": SETTINGS, "method": TRIES}}
REPORTED = {**TINY, "grid": {"seeds": [0, 1, 2], "setting": SETTINGS[:1], "method": ["fedavg", "fedntd", "fedlmd"]}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The tiny tuning and the tiny comparison."""
    path = tmp_path_factory.mktemp("runs")
    for tables, of in ((TUNING, "tune"), (REPORTED, "all")):
        for cell in expand({**tables, "name": of}, {"output.path": str(path)}):
            diverges = cell.method == "fedavg+lr-1e9"
            with pytest.raises(Diverged, match="the loss became") if diverges else nullcontext():
                rayfed.run(cell.tables)
    return path


@pytest.fixture(scope="module")
def records(runs):
    found = tool.played({**REPORTED, "name": "all"}, runs)
    return [tool.record(cell.setting, cell.method, cell.tables["seed"], run) for cell, run in found]


@pytest.mark.parametrize(
    ("file", "methods", "count"),
    [(tool.TUNING, TUNED, 414), (personal.TUNING, PERSONAL | {"fedavg", "fedprox", "fedbabu"}, 54)],
    ids=["global", "personal"],
)
def test_every_method_has_the_same_tries(file, methods, count):
    tables = read_toml(file)
    by_method = {}
    for entry in tables["grid"]["method"]:
        by_method.setdefault(entry["name"].partition("+")[0], []).append(entry)
    assert set(by_method) == methods
    for name, (middle, *others) in by_method.items():
        assert middle["name"] == name and middle["train.lr"] == 0.02
        assert [(each["method"], each["train.lr"]) for each in others[:2]] == [
            (middle["method"], lr) for lr in (0.007, 0.06)
        ]
        strengths = [middle["method"], *(each["method"] for each in others[2:])]
        numbers = [default for _, default, _ in parameters(name) if type(default) in (int, float)]
        assert len(strengths) == (3 if numbers else 1)
        if len(strengths) == 3:
            key = others[2]["name"].partition("+")[2].rpartition("-")[0].removeprefix("method.")
            ratios = [each[key] / middle["method"][key] for each in strengths]
            assert ratios[0] == 1 and ratios[1] < 1
            assert ratios == pytest.approx([1, 1 / 3, 3], rel=0.12) or name in BOUNDED
    assert len(expand(tables)) == count
    assert f"{count} runs" in file.read_text() and f"# {count} runs" in tool.PAGE.read_text()


def told(cell):
    """A cell's method, and what its numbers depend on beside the seed."""
    return cell.method.partition("+")[0], protocol(cell.job().table())


def test_the_reported_runs_are_tries_of_the_tuning_on_other_seeds():
    tables = read_toml(tool.TUNING)
    seeds = {seed for file in tool.REPORTED.values() for seed in read_toml(file)["grid"]["seeds"]}
    assert len(seeds) == 3 and not seeds & {*tables["grid"]["seeds"]}
    tried = [(cell.setting, *told(cell)) for cell in expand(tables, {"grid.seeds": [0]})]
    for setting, file in tool.REPORTED.items():
        cells = [cell for cell in expand(read_toml(file)) if cell.tables["seed"] == 0]
        assert sorted(cell.method for cell in cells) == sorted(TUNED)
        assert all((setting, *told(cell)) in tried for cell in cells)
        assert cells[0].name == f"comparison-mnist/{setting}/fedavg/seed-0"


def test_the_reported_runs_of_own_models_are_tries_of_their_tuning_on_other_seeds():
    tables, reported = read_toml(personal.TUNING), read_toml(personal.REPORTED)
    assert not {*reported["grid"]["seeds"]} & {*tables["grid"]["seeds"]}
    assert tables["train"] == read_toml(tool.TUNING)["train"]
    tried = [(cell.setting, *told(cell)) for cell in expand(tables, {"grid.seeds": [0]})]
    cells = expand(reported)
    assert len(cells) == 42 == len({cell.name for cell in cells})
    for cell in cells:
        job = cell.job()
        assert cell.tables["seed"] or (cell.setting, *told(cell)) in tried
        assert (job.measure, job.measure_every, job.measure_images) == (["local"], 1, 1000)
    assert {cell.setting for cell in cells} == {*tool.SETTINGS}


@pytest.mark.slow
def test_the_best_try_of_each_method_is_chosen_per_setting(runs):
    tables = {**TUNING, "name": "tune"}
    last = {
        (cell.setting, cell.method): run and tool.figures(run)["last_10"] for cell, run in tool.played(tables, runs)
    }
    for setting, text in tool.chosen(tables, runs).items():
        # What was written is a job file again, with the best try of each method under the method's name.
        written = tool.put_methods('seeds = [0]\nmethod = [\n  # old\n  { name = "old" },\n]\nx = 1\n', text)
        assert (
            "old" not in written
            and written.startswith("seeds = [0]\nmethod = [\n  # middle ")
            and written.endswith("]\nx = 1\n")
        )
        assert "lr-1e9 diverged" in written
        found = tomllib.loads(written)["method"]
        assert [entry["name"] for entry in found] == ["fedavg", "fedlmd"]
        for entry in found:
            tries = {name: number or -math.inf for (of, name), number in last.items() if of == setting}
            own = {name: number for name, number in tries.items() if name.partition("+")[0] == entry["name"]}
            best = next(each for each in TRIES if each["name"] == max(own, key=own.get))
            assert entry == {**best, "name": entry["name"]}


@pytest.mark.slow
def test_runs_that_are_not_there_are_refused(runs):
    with pytest.raises(
        InputError, match=r"tiny/shards-2/fedavg/seed-9' is not done: not begun; give `rayfed run` again"
    ):
        tool.chosen(TUNING, runs)
    with pytest.raises(InputError, match=r"train\.lr"):  # the folder is another job's
        tool.chosen({**TUNING, "name": "tune", "train": {**TINY["train"], "lr": 0.02}}, runs)


@pytest.mark.slow
def test_the_commands_write_what_the_runs_say(runs, records, tmp_path, monkeypatch):
    methods = "".join(f"  {tool.inline({'name': name, 'method': name})},\n" for name in ("fedavg", "fedntd", "fedlmd"))
    grid = f"[grid]\nseeds = [0, 1, 2]\nmethod = [\n{methods}]\n"
    files = {setting: tmp_path / f"{setting}.toml" for setting in tool.SETTINGS}
    for setting, file in files.items():
        file.write_text(tomli_w.dumps({**TINY, "name": f"all/{setting}"}) + grid)
    page = tmp_path / "page.md"
    page.write_text(tool.put_tables(tool.PAGE.read_text(), []))
    places = {"TUNING": {**TUNING, "name": "tune"}, "PAGE": page, "FIGURES": tmp_path, "ROOT": tmp_path}
    places |= {"REPORTED": {"shards-2": files["shards-2"]}, "RESULTS": tmp_path / "results.csv"}
    for name, place in {**places, "SETTINGS": {"shards-2": "shards 2"}, "CLAIMS": tool.CLAIMS[:2]}.items():
        monkeypatch.setattr(tool, name, place)

    tool.main("page", str(runs))
    assert {each[:3] for each in tool.read_records(tool.RESULTS)} == {each[:3] for each in records}
    assert tool.put_tables(page.read_text(), tool.read_records(tool.RESULTS)) == page.read_text()
    assert page.read_text().count("| method | shards 2: mean of last 10 | difference from FedAvg |\n") == 1
    assert sorted(path.stem for path in tmp_path.glob("*.svg")) == ["fedavg", "fedlmd", "fedntd"]

    monkeypatch.setattr(tool, "REPORTED", files)
    tool.main("best", str(runs))
    for setting, text in tool.chosen(tool.TUNING, runs).items():
        assert text in files[setting].read_text()
        assert len(expand(read_toml(files[setting]))) == 6
    with pytest.raises(SystemExit, match=r"make_comparison\.py best runs"):
        tool.main("best")


@pytest.mark.slow
def test_differences_are_those_of_rayfed_table(runs, records):
    methods = "fedavg", "fedntd", "fedlmd"
    folders = [runs / f"all/shards-2/{method}/seed-{seed}" for method in methods for seed in range(3)]
    baseline, *others = rows(list(map(read_run, folders)), of="last_10")
    assert [row.name for row in others] == ["fedntd", "fedlmd"]
    for row in others:
        gap = tool.difference(records, "shards-2", row.name, baseline.name)
        assert (gap.reference, gap.pairs) == ("fedavg", 3)
        assert (gap.mean, *gap.interval) == pytest.approx((row.difference.mean, *row.difference.interval))


@pytest.mark.slow
def test_records_are_read_as_written(records, tmp_path):
    lost = tool.record("shards-2", "fedntd", 3, None)
    tool.write_records([*records, lost], tmp_path / "results.csv")
    *read, last = tool.read_records(tmp_path / "results.csv")
    assert last == lost
    for one, two in zip(read, records, strict=True):
        assert one[:3] == two[:3] and one[3:] == pytest.approx(two[3:], abs=1e-4)


def test_a_diverged_seed_is_told_and_has_no_pair():
    def four(method, *values):
        return [tool.Record("shards-2", method, seed, *[value] * 4) for seed, value in enumerate(values)]

    records = [*four("fedavg", 50.0, 60.0, 70.0, None), *four("fedntd", 51.0, 62.0, 73.0, 80.0)]
    records += four("fedlmd", 40.0, 50.0, 40.0, None)
    gap = tool.difference(records, "shards-2", "fedntd", "fedavg")
    assert (gap.pairs, gap.mean, gap.sure) == (3, 2.0, False)
    assert gap.interval == pytest.approx((2.0 - 2.484, 2.0 + 2.484), abs=1e-3)
    lines = [line for line in tool.tables(records).splitlines() if line.startswith("| [")]
    assert [line.partition("]")[0] for line in lines] == ["| [fedntd", "| [fedavg", "| [fedlmd"]
    assert lines[0].split(" | ")[1:3] == ["66.5 ± 12.7", "+2.0 [-0.5, +4.5]"]
    assert lines[1].startswith("| [fedavg](methods/fedavg.md) | 60.0 ± 10.0 (1 of 4 diverged) |  |")
    assert tool.tables(records).endswith("which flatters their methods.")
    (none,) = (line for line in tool.tables([*records, *four("moon", None)]).splitlines() if "moon" in line)
    assert none == "| [moon](methods/moon.md) | (1 of 1 diverged) |  |  |  |"


def test_the_pages_tables_are_made_from_its_results():
    """No number was typed by hand, and every method, setting and seed is there."""
    records = tool.read_records(tool.RESULTS)
    page = tool.PAGE.read_text()
    assert tool.put_tables(page, records) == page
    seeds = {record.seed for record in records}
    cells = {(record.setting, record.method, record.seed) for record in records}
    assert cells == set(itertools.product(tool.SETTINGS, TUNED, seeds))
    assert len(records) == len(cells) and len(seeds) >= 3


def test_a_table_of_own_models_compares_them_by_personalised_accuracy():
    def three(setting, method, *values):
        rows = [(value, None if value is None else value - 20) for value in values]
        return [personal.Record(setting, method, seed, *row) for seed, row in enumerate(rows)]

    records = [*three("shards-2", "fedavg", 90.0, 91.0, 92.0), *three("shards-2", "ditto", 92.0, 93.5, 93.0)]
    records += three("dirichlet-0.1", "fedavg", 80.0, 80.0, None)
    page = personal.put_tables("a\n<!-- personal -->\nold\n<!-- end of personal -->\nb\n", records)
    assert page.startswith("a\n<!-- personal -->\n\n### MNIST, shards 2\n") and page.endswith("personal -->\nb\n")
    assert "old" not in page and tool.LOST in page
    assert "| method | personalised accuracy | difference from FedAvg | before the client's training |" in page
    lines = [line for line in page.splitlines() if line.startswith("| [")]
    assert lines[0].startswith("| [ditto](methods/ditto.md) | 92.8 ± 0.8 | +1.8 [")
    assert lines[1] == "| [fedavg](methods/fedavg.md) | 91.0 ± 1.0 |  | 71.0 ± 1.0 |"
    assert lines[2] == "| [fedavg](methods/fedavg.md) (1 of 3 diverged) | 80.0 ± 0.0 |  | 60.0 ± 0.0 |"
    assert personal.put_tables(page, records) == page


def test_the_pages_table_of_own_models_is_made_from_its_results():
    records = tool.read_records(personal.RESULTS, personal.Record)
    page = personal.PAGE.read_text()
    assert personal.put_tables(page, records) == page
    assert len(records) == len({record[:3] for record in records}) == 42


@pytest.mark.slow
def test_own_models_are_read_from_the_notes_of_runs_and_the_best_try_is_that_of_both_settings(tmp_path, monkeypatch):
    """By the tables of the runs: a mean over the clients of a round, then over the rounds (both, of two)."""
    tries = [{"name": "ditto", "method": "ditto"}, {"name": "ditto+lr-0.01", "method": "ditto", "train.lr": 0.01}]
    tries += [{"name": "fedper", "method": "fedper"}]
    grid = {"seeds": [9], "setting": SETTINGS, "method": tries}
    files = {"TUNING": tmp_path / "tune.toml", "REPORTED": tmp_path / "all.toml"}
    methods = "method = [\n" + "".join(f"  {tool.inline(each)},\n" for each in tries[::2]) + "]\n"
    tables = {**TINY, "measure": ["local"], "measure_images": 200}
    files["TUNING"].write_text(tomli_w.dumps({**tables, "name": "tune", "grid": grid}))
    files["REPORTED"].write_text(tomli_w.dumps({**tables, "name": "all"}) + f"[grid]\nseeds = [0]\n{methods}")
    (page := tmp_path / "page.md").write_text("<!-- personal -->\n<!-- end of personal -->\n")
    for name, place in {**files, "PAGE": page, "RESULTS": tmp_path / "personal.csv"}.items():
        monkeypatch.setattr(personal, name, place)
    found = {}
    for cell in expand(read_toml(personal.TUNING), {"output.path": str(tmp_path)}):
        clients = rayfed.run(cell.tables).clients.to_pylist()
        after = [(row["round"], dict(row["notes"])["local.after.in_local"]) for row in clients]
        means = [np.mean([accuracy for at, accuracy in after if at == round]) for round in (1, 2)]
        found.setdefault(cell.method, []).append(100 * np.mean(means))
        run = read_run(tmp_path / cell.name)
        assert personal.personalised(run, last=10) == pytest.approx(found[cell.method][-1])
        one = personal.record("shards-2", "ditto", 9, run)
        assert (one.after, one.before) == (personal.personalised(run, 10), personal.personalised(run, 10, "before"))
        assert one.after != one.before

    personal.main("best", str(tmp_path))
    entries = read_toml(personal.REPORTED)["grid"]["method"]
    best = max(("ditto", "ditto+lr-0.01"), key=lambda name: sum(found[name]))
    assert entries == [{**next(each for each in tries if each["name"] == best), "name": "ditto"}, tries[2]]
    cells = expand(read_toml(personal.REPORTED), {"output.path": str(tmp_path), "grid.setting": SETTINGS[:1]})
    for cell in cells:
        rayfed.run(cell.tables)
    monkeypatch.setattr(personal, "REPORTED", {**read_toml(personal.REPORTED)})
    personal.REPORTED["grid"]["setting"] = SETTINGS[:1]
    personal.main("page", str(tmp_path))
    assert [each[:3] for each in tool.read_records(personal.RESULTS, personal.Record)] == [
        ("shards-2", "ditto", 0),
        ("shards-2", "fedper", 0),
    ]
    assert page.read_text().count("| [ditto](methods/ditto.md) |") == 1
    with pytest.raises(SystemExit, match=r"make_personal\.py best runs"):
        personal.main("best")


def test_a_figure_has_a_column_per_setting(tmp_path):
    curves = {(setting, method): [np.full((2, 5), 0.5)] * 3 for setting in tool.SETTINGS for method in ("fedavg", "kd")}
    tool.draw("kd", curves, tmp_path / "kd.svg")
    text = (tmp_path / "kd.svg").read_text()
    assert text.count('<g id="axes_') == 4
    assert "MNIST, shards 2" in text and "MNIST, Dirichlet 0.1" in text and "CIFAR" not in text
