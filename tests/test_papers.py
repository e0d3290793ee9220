"""The papers' grids (jobs/papers/<paper>/<table>.toml) and the papers' numbers (results.csv) fit
each other.
"""

import csv
import importlib
import tomllib
from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import rayfed
from rayfed.grid.cells import expand

PAPERS = Path(__file__).resolve().parents[1] / "jobs" / "papers"
GRIDS = sorted(path for path in PAPERS.glob("*/*.toml") if path.name != "items.toml")
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
    papers = {"fedntd", "fedlmd", "fedcad", "fedssd", "fedcsd", "fedvls", "fl-simulator"}
    papers |= {"niid-bench", "fedacg", "fedrcl", "fedwsq", "pfllib"}
    assert {path.parent.name for path in GRIDS} == papers == {path.parent.name for path in RESULTS}


@pytest.mark.parametrize("path", GRIDS, ids=short)
def test_a_grid_is_complete(path):
    job = tomllib.loads(path.read_text())
    assert {"name", "seed", "method", "data", "model", "train", "grid"} <= set(job)
    assert job["name"] == f"{path.parent.name}-{path.stem}"
    first = path.read_text().splitlines()[0]
    assert first.startswith(f"# rayfed run {path.relative_to(PAPERS.parents[1])}   (tiny: -s ")
    assert set(job["grid"]) - {"first"} == {"seeds", "setting", "method"}
    assert job["grid"]["seeds"]
    for setting in job["grid"]["setting"]:
        for key, value in setting.items():
            # An override is a quoted, dotted key; without quotes it would be a nested table.
            if key != "name":
                assert key.split(".")[0] in {"data", "model", "train"} and "." in key, key
            if key == "data.partition":
                assert {"name", "num_clients", "seed"} <= set(value), setting["name"]


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


def hashes(grid: str) -> dict[str, str]:
    """The hash of each run of seed 0, by setting and method."""
    cells = expand(tomllib.loads((PAPERS / f"{grid}.toml").read_text()), {"grid.seeds": [0]})
    return {f"{cell.setting}/{cell.method}": cell.job().hash() for cell in cells}


@pytest.mark.parametrize(
    ("figure", "runs", "table"),
    [
        ("fedntd/fig15", "cifar10-shards-2/fedavg cifar10-shards-2/fedntd", "fedntd/table1"),
        (
            "fedntd/fig15",
            "cifar10-dirichlet-0.1/fedavg cifar10-dirichlet-0.1/fedntd",
            "fedntd/table1",
        ),
        (
            "fedlmd/fig7",
            "epochs-5/fedavg epochs-5/fedntd epochs-5/fedlmd epochs-5/fedlmd-tf",
            "fedlmd/table3",
        ),
        (
            "fedlmd/fig9",
            "cifar10-dirichlet-0.05/fedlmd cifar10-dirichlet-0.05/fedlmd-tf",
            "fedlmd/table3",
        ),
        ("fedlmd/fig9", "cifar10-dirichlet-0.05/fedntd", "fedlmd/table3"),
        (
            "fedssd/fig9",
            "epochs-10/fedavg epochs-10/moon epochs-10/fedcad epochs-10/fedssd",
            "fedssd/table1-cifar10",
        ),
        ("fedcsd/fig3", "cifar100-dirichlet-0.5/fedcsd", "fedcsd/table3"),
        (
            "fedcsd/fig4",
            "cifar100-dirichlet-0.5/decay-0 cifar100-dirichlet-0.5/decay-0.9",
            "fedcsd/table3",
        ),
    ],
)
def test_a_figure_that_varies_one_thing_has_the_runs_of_its_table_where_it_does_not(
    figure, runs, table
):
    ours, theirs = hashes(figure), set(hashes(table).values())
    assert [run for run in runs.split() if ours[run] not in theirs] == []


def test_the_index_names_every_file():
    index = (PAPERS / "README.md").read_text()
    assert [
        str(p.relative_to(PAPERS))
        for p in GRIDS + RESULTS + sorted(PAPERS.glob("*/items.toml"))
        if f"`{p.relative_to(PAPERS)}`" not in index
    ] == []
    docs = (PAPERS.parents[1] / "docs/README.md").read_text()
    assert all(f"../jobs/{path.name}" in docs for path in PAPERS.parent.iterdir() if path.is_dir())


COMPARISONS = sorted((PAPERS.parent / "comparison").glob("*.toml"))
SINGLE = sorted(
    path for folder in (PAPERS.parent, PAPERS.parent / "cifar10") for path in folder.glob("*.toml")
)


@pytest.mark.parametrize("path", [*GRIDS, *COMPARISONS, *SINGLE], ids=short)
def test_every_run_is_a_valid_job(path):
    tables = tomllib.loads(path.read_text())
    jobs = [cell.job() for cell in expand(tables)]
    lists = dict(tables.get("grid", {}))
    # For each seed there is a run that comes first.
    first = len(lists["seeds"]) if lists.pop("first", None) else 0
    number = first + prod(map(len, lists.values()))
    assert len({job.name for job in jobs}) == len(jobs) == number
    # No run is listed twice under two names.
    assert len({job.hash() for job in jobs}) == len(jobs)


LONG = [
    "fl-simulator/readme",
    "fedacg/cifar",
    "fedrcl/readme",
    "fedwsq/fig-d",
    "fedwsq/bits",
    "niid-bench/table3",
    "pfllib/benchmark",
]


@pytest.mark.slow
@pytest.mark.parametrize("grid", LONG)
def test_three_rounds_of_every_method_of_a_grid_that_was_not_run(grid, tmp_path, write_images):
    """On 80 random images: that each method trains the grid's network, with the grid's rates, clips
    and parts.
    """
    tables = tomllib.loads((PAPERS / f"{grid}.toml").read_text())
    side, channels = (28, 1) if "mnist" in tables["data"]["source"] else (32, 3)
    write_images(tmp_path, 80, 10, pixels=channels * side**2, classes=10)
    few = {
        "train.num_rounds": 3,
        "train.clients_per_round": 2,
        "train.local_steps": 1,
        "train.batch_size": 5,
    }
    data = {
        "source": str(tmp_path / "data"),
        "shape": [channels, side, side],
        "partition": {"num_clients": 4},
    }
    here = {"ray.mode": "off", "output.path": str(tmp_path / "runs"), "grid.seeds": [0]}
    cells = expand(tables, {**few, **here, **{f"data.{key}": value for key, value in data.items()}})
    methods = [cell for cell in cells if cell.setting == cells[0].setting]
    assert len(methods) == len(tables["grid"]["method"])
    for cell in methods:
        result = rayfed.run(cell.job())
        assert result.rounds["round"].to_pylist() == [0, 1, 2, 3], cell.name
        assert all(weight.isfinite().all() for weight in result.weights.values()), cell.name


def test_the_deal_of_the_authors_code_is_hard_and_its_cohorts_are_those_of_the_file(monkeypatch):
    """64 of its clients have an animal and a vehicle; 48 are expected.

    The numbers of the classes alone decide that.
    """
    monkeypatch.syspath_prepend(PAPERS.parents[1] / "docs/reproduction/authors-deal")
    authors_deal = importlib.import_module("authors_deal")
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))
    deal = authors_deal.AuthorsDeal().split(labels, 10)
    classes = [sorted({*labels[deal.client(client)].tolist()}) for client in range(100)]
    assert set(deal.sizes) == {500}
    animals = {2, 3, 4, 5, 6, 7}
    assert sum(len({c in animals for c in held}) == 2 for held in classes) == 64
    assert classes[:4] == [[1, 4], [0, 2], [3, 8], [5, 8]]
    assert pq.read_table(authors_deal.COHORTS) == authors_deal.cohorts()
