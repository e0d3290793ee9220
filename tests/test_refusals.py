"""What is refused, as tables: what a user gives, and words of the message, in
tests/refusals/*.toml.

    [[refused]]
    job = { "train.lr" = -1 }            # overrides of the quickstart; `site = true`: refused as
                                         the data are opened
    says = "train.lr = -1.0: ..."        # words of the message, as they are

    [[refused]]
    command = "run job.toml --force --resume"     # in a folder with job.toml, the quickstart
                                                  without Ray,
    files = { "runs/x/job.toml" = "name = 'x'" }  # and these files
    says = "give one of the two"
    needs = ["timm"]                     # packages without which the row is skipped

A message is an `InputError`, exit code 2, of one line, unless `lines = true`. Nothing is written,
and Ray stays off.
"""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from extras import missing

from rayfed import read_job
from rayfed.base.errors import InputError
from rayfed.cli import main
from rayfed.job import read_toml
from rayfed.rounds.setup import open_setup

ROOT = Path(__file__).parents[1]
TABLES = sorted((Path(__file__).parent / "refusals").glob("*.toml"))
ROWS = [(file.stem, row) for file in TABLES for row in tomllib.loads(file.read_text())["refused"]]


def name_of(pair):
    return f"{pair[0]}: {pair[1].get('command') or pair[1]['job']}"


def opened(overrides, setup):
    job = read_job(read_toml(ROOT / "jobs/quickstart.toml"), overrides)
    return open_setup(job) if setup else job


@pytest.mark.parametrize("pair", ROWS, ids=name_of)
def test_it_is_refused_in_words_and_nothing_is_written(pair, tmp_path, monkeypatch):
    row = pair[1]
    if reason := missing(*row.get("needs", [])):
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    if "command" in row:
        quickstart = (
            (ROOT / "jobs/quickstart.toml").read_text().replace('mode = "on"', 'mode = "off"')
        )
        before = {
            Path(name): text
            for name, text in {"job.toml": quickstart, **row.get("files", {})}.items()
        }
        for path, text in before.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr("ray.init", None)
        # Another test may have joined a Ray in this process.
        monkeypatch.setattr("ray.is_initialized", lambda: False)
        result = CliRunner().invoke(main, shlex.split(row["command"]))
        message = (
            result.stderr
            if result.exception is None or isinstance(result.exception, SystemExit)
            else ""
        )
        assert (result.exit_code, row["says"] in message) == (2, True), result.output or repr(
            result.exception
        )
        after = [path for path in Path().rglob("*") if path.is_file() and path.suffix != ".pyc"]
        assert {path: path.read_text() for path in after} == before
        return
    with pytest.raises(InputError, match=re.escape(row["says"])) as refused:
        opened(row["job"], row.get("site", False))
    assert row.get("lines") or "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())
