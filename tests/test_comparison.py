"""The comparison on MNIST: its job files are fair, its choice and its tables are those of the runs."""

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

import rayfed
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
BOUNDED = {"fedavgm", "fedacg", "fedrs", "fedlsd", "fedcad", "feddisco", "fedrep"}  # a third or three times is too far
TINY = {
    "name": "tiny",
    "data": {"source": "fashion-mnist-mini", "partition": {"name": "shards", "s": 2, "num_clients": 20, "seed": "run"}},
    "model": {"name": "lenet"},
    "train": {"num_rounds": 2, "clients_per_round": 2, "local_steps": 8, "lr": 0.05, "momentum": 0.9},
    "ray": {"mode": "off"},
}
GRID = {"seeds": [0, 1, 2], "setting": [{"name": "shards-2"}], "method": ["fedavg", "fedntd", "fedlmd"]}


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
def test_differences_are_those_of_rayfed_table(tmp_path):
    cells = expand({**TINY, "name": "all", "grid": GRID}, {"output.path": str(tmp_path)})
    runs = [read_run(rayfed.run(cell.tables).path) for cell in cells]
    records = [
        tool.record(cell.setting, cell.method, cell.tables["seed"], run) for cell, run in zip(cells, runs, strict=True)
    ]
    baseline, *others = rows(runs, of="last_10")
    assert [row.name for row in others] == ["fedntd", "fedlmd"]
    for row in others:
        gap = tool.difference(records, "shards-2", row.name, baseline.name)
        assert (gap.reference, gap.pairs) == ("fedavg", 3)
        assert (gap.mean, *gap.interval) == pytest.approx((row.difference.mean, *row.difference.interval))


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
    assert page.startswith("a\n<!-- personal -->\n\n| method | shards 2: ") and page.endswith("personal -->\nb\n")
    assert "old" not in page and tool.LOST in page
    assert "| shards 2: personalised accuracy | difference from FedAvg | before the training |" in page
    lines = [line for line in page.splitlines() if line.startswith("| [")]
    assert lines[0].startswith("| [ditto](methods/ditto.md) | 92.8 ± 0.8 | +1.8 [")
    fedavg = (
        "| [fedavg](methods/fedavg.md) | 91.0 ± 1.0 |  | 71.0 ± 1.0 | 80.0 ± 0.0 (1 of 3 diverged) |  | 60.0 ± 0.0 |"
    )
    assert lines[1] == fedavg
    assert personal.put_tables(page, records) == page


def test_the_pages_table_of_own_models_is_made_from_its_results():
    records = tool.read_records(personal.RESULTS, personal.Record)
    page = personal.PAGE.read_text()
    assert personal.put_tables(page, records) == page
    assert len(records) == len({record[:3] for record in records}) == 42
