"""The papers' grids (jobs/papers/<paper>/<table>.toml) and the papers' numbers (results.csv) fit each other."""

import csv
import re
import tomllib
from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
import pytest

from rayfed.data.partition import Iid, Shards
from rayfed.grid.cells import expand

PAPERS = Path(__file__).resolve().parents[1] / "jobs" / "papers"
GRIDS = sorted(PAPERS.glob("*/*.toml"))
RESULTS = sorted(PAPERS.glob("*/results.csv"))
COLUMNS = ["table", "grid", "setting", "method", "metric", "value", "spread", "stat", "note"]


def short(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = csv.DictReader(file, strict=True)
        assert rows.fieldnames == COLUMNS
        return list(rows)


def names(path: Path, axis: str) -> list[str]:
    return [entry["name"] for entry in tomllib.loads(path.read_text())["grid"][axis]]


def test_every_paper_has_grids_and_numbers():
    papers = {"fedntd", "fedlmd", "fedcad", "fedssd", "fedcsd", "fedvls"}
    assert {path.parent.name for path in GRIDS} == papers == {path.parent.name for path in RESULTS}


@pytest.mark.parametrize("path", GRIDS, ids=short)
def test_a_grid_is_complete(path):
    job = tomllib.loads(path.read_text())
    assert {"name", "seed", "method", "data", "model", "train", "grid"} <= set(job)
    assert job["name"] == f"{path.parent.name}-{path.stem}"
    assert set(job["grid"]) == {"seeds", "setting", "method"}
    assert job["grid"]["seeds"]
    for setting in job["grid"]["setting"]:
        for key, value in setting.items():
            if key != "name":  # an override is a quoted, dotted key; without quotes it would be a nested table
                assert key.split(".")[0] in {"data", "model", "train"} and "." in key, key
            if key == "data.partition":
                assert {"name", "num_clients", "seed"} <= set(value), setting["name"]


@pytest.mark.parametrize("path", GRIDS, ids=short)
def test_the_first_line_is_the_command_that_runs_the_file(path):
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# rayfed run {path.relative_to(PAPERS.parents[1])}   (tiny: -s ")


@pytest.mark.parametrize("path", RESULTS, ids=short)
def test_every_number_belongs_to_a_run_is_in_range_and_is_listed_once(path):
    rows = read(path)
    for line, row in enumerate(rows, start=2):
        where = f"{path.parent.name}/results.csv:{line}"
        grid = path.with_name(row["grid"] + ".toml")
        assert grid.exists(), where
        assert row["setting"] in names(grid, "setting"), where
        assert row["method"] in names(grid, "method"), where
        assert row["stat"] in {"best", "last", ""}, where
        top = 1.0 if row["metric"].startswith(("forgetting", "alignment")) else 100.0
        assert 0 <= float(row["value"]) <= top, where
        assert not row["spread"] or 0 <= float(row["spread"]) < 10, where
    keys = Counter((r["table"], r["setting"], r["method"], r["metric"], r["stat"]) for r in rows)
    assert [key for key, count in keys.items() if count > 1] == []


def test_fednova_is_doubtful_where_all_clients_take_equally_many_steps():
    """There it is FedAvg (a law in tests/methods), and the papers print other numbers. Nowhere else for this reason."""
    jobs = {
        (grid.parent.name, grid.stem, cell.setting): cell.job()
        for grid in GRIDS
        for cell in expand(tomllib.loads(grid.read_text()))
        if cell.method == "fednova"
    }
    found = set()
    for path in RESULTS:
        for line, row in enumerate(read(path), start=2):
            if row["method"] == "fednova":
                key = path.parent.name, row["grid"], row["setting"]
                equal = bool(jobs[key].train.local_steps) or type(jobs[key].data.partition) in (Iid, Shards)
                where, told = f"{path.parent.name}/results.csv:{line}", "where FedNova is FedAvg" in row["note"]
                assert told == equal, where
                assert not told or row["note"].startswith("doubtful:"), where
                found.add((equal, key))
    assert {key for _, key in found} == jobs.keys()
    assert {equal for equal, _ in found} == {True, False}


def test_shards_of_the_papers_grids_give_clients_of_one_size_up_to_a_percent():
    """What the test above takes for equal: `n` images, as many of each class."""
    seen = set()
    for grid in GRIDS:
        for cell in expand(tomllib.loads(grid.read_text())):
            job = cell.job()
            if cell.method == "fednova" and isinstance(job.data.partition, Shards):
                classes = 100 if job.data.source == "cifar100" else 10
                n = {"mnist": 60_000, "cinic10": 90_000}.get(job.data.source, 50_000)
                seen.add((job.data.partition, classes, n))
    assert len(seen) == 7
    for partition, classes, n in seen:
        sizes = partition.split(np.arange(n) % classes, classes).sizes
        assert np.ptp(sizes) <= 0.01 * sizes.mean()


def hashes(grid: str) -> dict[str, str]:
    """The hash of each run of seed 0, by setting and method."""
    cells = expand(tomllib.loads((PAPERS / f"{grid}.toml").read_text()), {"grid.seeds": [0]})
    return {f"{cell.setting}/{cell.method}": cell.job().hash() for cell in cells}


@pytest.mark.parametrize(
    ("figure", "runs", "table"),
    [
        ("fedntd/fig15", "cifar10-shards-2/fedavg cifar10-shards-2/fedntd", "fedntd/table1"),
        ("fedntd/fig15", "cifar10-dirichlet-0.1/fedavg cifar10-dirichlet-0.1/fedntd", "fedntd/table1"),
        ("fedlmd/fig7", "epochs-5/fedavg epochs-5/fedntd epochs-5/fedlmd epochs-5/fedlmd-tf", "fedlmd/table3"),
        ("fedlmd/fig9", "cifar10-dirichlet-0.05/fedlmd cifar10-dirichlet-0.05/fedlmd-tf", "fedlmd/table3"),
        ("fedlmd/fig9", "cifar10-dirichlet-0.05/fedntd", "fedlmd/table3"),
        ("fedssd/fig9", "epochs-10/fedavg epochs-10/moon epochs-10/fedcad epochs-10/fedssd", "fedssd/table1-cifar10"),
        ("fedcsd/fig3", "cifar100-dirichlet-0.5/fedcsd", "fedcsd/table3"),
        ("fedcsd/fig4", "cifar100-dirichlet-0.5/decay-0 cifar100-dirichlet-0.5/decay-0.9", "fedcsd/table3"),
    ],
)
def test_a_figure_that_varies_one_thing_has_the_runs_of_its_table_where_it_does_not(figure, runs, table):
    ours, theirs = hashes(figure), set(hashes(table).values())
    assert [run for run in runs.split() if ours[run] not in theirs] == []


def test_moon_alone_has_a_projection_head_and_only_in_fedssd():
    for grid in GRIDS:
        for cell in expand(tomllib.loads(grid.read_text())):
            head = {"project": 256} if (grid.parent.name, cell.method) == ("fedssd", "moon") else {}
            assert {k: v for k, v in cell.job().model.options.items() if k == "project"} == head, cell.name


def test_the_index_names_every_file():
    index = (PAPERS / "README.md").read_text()
    assert [str(p.relative_to(PAPERS)) for p in GRIDS + RESULTS if f"`{p.relative_to(PAPERS)}`" not in index] == []


def test_every_number_is_one_that_a_run_of_its_grid_records():
    """By the beginning of its name: which key of the job it needs. The index names the grids that need one."""
    needs = {
        "test_accuracy_": lambda job: job.data.domain,
        "alignment_": lambda job: "drift" in job.measure and not job.measure_layers,
        "local_class_accuracy_": lambda job: "confusion" in job.measure and not job.measure_clients,
    }
    recorded = re.compile("test_accuracy|forgetting|rounds_to_target|speed_up|class_accuracy_[0-9]")
    found = {"fedcad/fig1.toml"}  # it has no numbers in print
    for path in RESULTS:
        for metric, grid in sorted({(row["metric"], row["grid"]) for row in read(path)}):
            if not recorded.fullmatch(metric):
                file = path.with_name(f"{grid}.toml")
                found.add(f"{path.parent.name}/{file.name}")
                [need] = [need for beginning, need in needs.items() if metric.startswith(beginning)]
                for cell in expand(tomllib.loads(file.read_text())):
                    job = cell.job()
                    assert need(job), (file, metric)
                    assert not job.measure or job.train.num_rounds % job.measure_every == 0, "the last is measured"
    told = re.search(r"^\* Four grids .*?(?=^\* )", (PAPERS / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    assert set(re.findall("`([^`]*toml)`", told)) == found
    local = [cell.job() for cell in expand(tomllib.loads((PAPERS / "fedcad/fig1.toml").read_text()))]
    assert all(job.measure == ["local"] and job.measure_every == 1 for job in local)


def test_every_folder_of_job_files_is_in_the_documentation():
    folders = [path.name for path in PAPERS.parent.iterdir() if path.is_dir()]
    index = (PAPERS.parents[1] / "docs/README.md").read_text()
    assert [name for name in folders if f"../jobs/{name}" not in index] == []


COMPARISONS = sorted((PAPERS.parent / "comparison").glob("*.toml"))
SINGLE = sorted(path for folder in (PAPERS.parent, PAPERS.parent / "cifar10") for path in folder.glob("*.toml"))


@pytest.mark.parametrize("path", [*GRIDS, *COMPARISONS, *SINGLE], ids=short)
def test_every_run_is_a_valid_job(path):
    tables = tomllib.loads(path.read_text())
    jobs = [cell.job() for cell in expand(tables)]
    assert len({job.name for job in jobs}) == len(jobs) == prod(map(len, tables.get("grid", {}).values()))
    assert len({job.hash() for job in jobs}) == len(jobs)  # no run is listed twice under two names
