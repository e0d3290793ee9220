"""`rayfed init`, and the jobs that come with rayfed: what one has without a clone."""

import subprocess
import sys
import tomllib
import zlib
from pathlib import Path

import pytest

from rayfed.job import EXAMPLES, read_job, read_toml
from rayfed.papers.tables import grids

ROOT = Path(__file__).resolve().parents[2]


def test_a_project_is_begun_in_a_new_or_empty_folder_alone(tmp_path, monkeypatch, rayfed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("new/project", "empty"):
        assert rayfed("init", name).exit_code == 0
        assert {file.name for file in Path(name).iterdir()} == {
            "README.md",
            "job.toml",
            "mine.py",
            "test_mine.py",
        }
        assert read_toml(Path(name) / "job.toml")["method"][1]["name"] == "mine:Pull"
    (tmp_path / "empty/job.toml").write_text("mine = 1")
    again = rayfed("init", "empty")
    assert (
        again.exit_code == 2
        and "'empty' is not an empty folder, and nothing in it is replaced" in again.stderr
    )
    assert (tmp_path / "empty/job.toml").read_text() == "mine = 1"


@pytest.mark.slow
def test_the_projects_own_test_passes(tmp_path, rayfed):
    assert rayfed("init", str(tmp_path / "project")).exit_code == 0
    subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=tmp_path / "project", check=True)


def test_the_example_is_found_by_its_name_where_there_is_no_clone(tmp_path, monkeypatch):
    here = read_job(EXAMPLES / "quickstart.toml")
    monkeypatch.chdir(tmp_path)
    assert read_job("quickstart") == here
    assert "fedntd/table1" in grids()
    Path("quickstart").write_text("seed = 7")
    assert read_toml("quickstart") == {"seed": 7}, "a file of the user's comes first"


def test_the_wheel_has_every_room_and_every_file_of_the_jobs():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for file in (ROOT / "rayfed").glob("*/**/__init__.py")
    }
    others = {"rayfed", "rayfed.examples", "rayfed.kubernetes"}
    assert {*setuptools["packages"]} == others | rooms
    jobs, patterns = (
        ROOT / setuptools["package-dir"]["rayfed.examples"],
        setuptools["package-data"]["rayfed.examples"],
    )
    packed = {file for pattern in patterns for file in jobs.glob(pattern)}
    assert packed == {file for file in jobs.rglob("*") if file.suffix in (".toml", ".csv", ".md")}
    beside = {
        file
        for pattern in setuptools["package-data"]["rayfed"]
        for file in (ROOT / "rayfed").glob(pattern)
    }
    ours = [
        file
        for file in (ROOT / "rayfed").rglob("*")
        if not {*file.parts} & {"__pycache__", "examples", "kubernetes"}
    ]
    code, parts = (
        {file for file in ours if file.suffix == ".py"},
        {file for file in ours if file.is_file()},
    )
    assert parts == beside | code, "of each file in rayfed/ it is said whether the wheel has it"
    assert sum(len(zlib.compress(file.read_bytes())) for file in packed | beside | code) < 8_000_000
