"""The commands for clusters, as far as they need none: what they print, how they end, what they refuse."""

import fcntl
import json
import os
import re
import shlex
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from rayfed.cli import main
from rayfed.cli.cluster import conclude, described, hint, refuse_twins
from rayfed.cli.status import progress, runs_in, status_text
from rayfed.display import round_line
from rayfed.grid import expand
from rayfed.local import Training
from rayfed.runtime.jobs import Submission
from rayfed.values import InputError

NOBODY = "127.0.0.1:1"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to stand in, without anything that names a cluster or a token."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # or this process would keep what it finds
    return tmp_path


def rayfed(*arguments):
    return CliRunner().invoke(main, arguments, prog_name="rayfed")


def write_run(path, status, accuracy=0.5):
    path.mkdir(parents=True)
    (path / "job.toml").write_text("[train]\nnum_rounds = 9\n")
    best = {"best": {"test_accuracy": accuracy}} if accuracy else {}
    (path / "summary.json").write_text(json.dumps({"status": status, "rounds": 4, **best}))


@pytest.mark.parametrize("command", ["submit", "status", "logs", "stop"])
def test_a_cluster_that_is_not_there_is_one_error(folder, command):
    (folder / "job.toml").write_text('name = "tiny"')
    given = [] if command == "status" else ["job.toml" if command == "submit" else "tiny"]
    ended = rayfed(command, *given, "--address", f"http://{NOBODY}")
    assert ended.exit_code == 2
    (error,) = ended.stderr.splitlines()
    assert error.startswith(f"error: no Ray answers at http://{NOBODY} (")
    assert "--address names another by its dashboard, such as http://127.0.0.1:8265" in error


def test_the_variable_that_named_the_cluster_is_told(folder, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://{NOBODY}")
    ended = rayfed("logs", "tiny")
    assert f"error: no Ray answers at http://{NOBODY}, which RAY_API_SERVER_ADDRESS names, (" in ended.stderr
    ended = rayfed("logs", "tiny", "--address", "http://127.0.0.1:3")
    assert "error: no Ray answers at http://127.0.0.1:3 (" in ended.stderr, "what is typed goes before what is set"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["-s", "train.num_round=2"], "unknown key 'num_round'; did you mean 'num_rounds'?"),
        (["-s", "train"], "'train': write an override as key.sub=value"),
        (["--address", "http://nobody.invalid", "-s", "method=fedntdd"], "did you mean 'fedntd'?"),
    ],
)
def test_a_job_is_checked_as_run_checks_it_before_anybody_is_spoken_to(folder, given, message):
    (folder / "job.toml").write_text('name = "tiny"')
    ended = rayfed("submit", "job.toml", *given)
    assert ended.exit_code == 2
    assert message in ended.stderr


def test_every_run_of_a_grid_is_checked(folder):
    (folder / "grid.toml").write_text('name = "g"\n[[grid.method]]\nname = "a"\nmethod = "fedavgg"')
    ended = rayfed("submit", "grid.toml")
    assert ended.exit_code == 2
    assert ended.stderr.startswith("error: g/a/seed-0: unknown method 'fedavgg'; did you mean 'fedavg'?")


def test_status_shows_the_runs_of_this_folder(folder, monkeypatch):
    monkeypatch.setattr("rayfed.runtime.jobs.USUAL", f"http://{NOBODY}")
    assert rayfed("status").stdout.startswith("runs in runs: none\n")
    write_run(folder / "runs/papers/b", "stopped", 0.25)
    write_run(folder / "runs/a", "failed", None)
    (folder / "runs/torn").mkdir()
    (folder / "runs/torn/summary.json").write_text("{")
    ended = rayfed("status")
    assert ended.exit_code == 0, ended.output
    lines = ended.stdout.splitlines()
    assert lines[0] == "runs in runs: 2"
    rows = sorted(line.split()[:-2] for line in lines[2:4])  # without day and time
    assert rows == [["a", "failed", "4/9"], ["papers/b", "stopped", "4/9", "0.250"]]
    assert lines[-1] == "no Ray answers on this machine, so nothing is submitted to it"


def test_runs_are_listed_from_the_last_written_on(folder):
    for age, name in enumerate(("new", "old", "older")):
        write_run(folder / "runs" / name, "done")
        os.utime(folder / "runs" / name / "summary.json", (10**9 - age, 10**9 - age))
    assert [row[0] for row in runs_in(folder / "runs")] == ["new", "old", "older"]


def test_a_run_that_says_that_it_runs_is_held_against_who_writes_to_it(folder):
    write_run(folder / "runs/one", "running")
    lock = os.open(folder / "runs/one", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert [row[1] for row in runs_in(folder / "runs")] == ["running"]
    os.close(lock)
    assert [row[1] for row in runs_in(folder / "runs")] == ["killed, or running elsewhere"]


def test_progress_reads_what_a_run_prints():
    def line(number):
        figures = {"test_accuracy": number / 100, "forgetting": 0.0, "train_loss": 1.0, "seconds": 1.0}
        return round_line(SimpleNamespace(round=number, **figures), Training(num_rounds=40)) + "\n"

    assert progress("") == ("", "")
    assert progress(line(0)) == ("0/40", "0.000")
    assert progress(f"header\n{line(8)}{line(9)}{line(10)}error: a client failed\n") == ("10/40", "0.100")
    assert progress(f"\nrun 1 of 3\n{line(40)}\nrun 2 of 3\n{line(7)}") == ("7/40, run 2 of 3", "0.070")


# How a job ends ------------------------------------------------------------------------------------------------------


def submission(status, **more):
    return Submission("tiny", status, "tiny", {"rayfed_results": "/shared/runs/tiny"}, **more)


def test_a_job_that_is_done_is_no_failure():
    conclude(submission("done", exit_code=0), None)


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        (submission("failed", exit_code=1), 1, "error: tiny failed with exit code 1; more: `rayfed status tiny`"),
        (submission("failed", exit_code=2), 2, "error: tiny failed with exit code 2"),
        (submission("failed", exit_code=75), 75, "tiny can go on: submit it again with --resume"),
        (submission("failed", exit_code=-signal.SIGKILL), 137, "error: tiny failed with exit code 137"),
        (submission("failed", message="no environment\n"), 1, "error: tiny failed: no environment"),
        (submission("stopped"), 130, "tiny is stopped; what is finished lies in /shared/runs/tiny"),
    ],
)
def test_the_command_ends_as_the_job_did(capsys, ended, code, said):
    with pytest.raises(click.exceptions.Exit) as caught:
        conclude(ended, None)
    assert caught.value.exit_code == code
    assert capsys.readouterr().err.startswith(said)


def test_a_job_that_can_be_resumed_is_listed_as_such():
    assert status_text(submission("failed", exit_code=75)) == "can be resumed"
    assert status_text(submission("failed", exit_code=1)) == "failed"


def test_a_run_that_goes_on_has_no_twin():
    over = submission("done", started=datetime.now(UTC) - timedelta(hours=1))
    refuse_twins("tiny", [over], None)
    refuse_twins("other", [submission("running")], None)
    for status in ("pending", "running"):
        with pytest.raises(InputError, match=f"'tiny' is {status} there already, as tiny; .*: `rayfed stop tiny`"):
            refuse_twins("tiny", [over, submission(status)], None)


def test_what_is_to_be_typed_next_names_the_same_cluster():
    assert hint("logs -f", "a/b", "http://x:1") == "`rayfed logs -f a/b --address http://x:1`"


def test_what_the_cluster_keeps_is_text():
    from rayfed import __version__, read_job

    tables = {"name": "tiny", "method": "fedntd"}
    (cell,) = expand(tables)
    kept = described([cell], [cell.job()], "/runs/tiny")
    assert kept["rayfed_job"] == read_job(tables).hash()
    assert (kept["rayfed_version"], kept["rayfed_results"]) == (__version__, "/runs/tiny")
    cells = expand({**tables, "grid": {"seeds": [0, 1]}})
    of_grid = described(cells, [cell.job() for cell in cells], "/runs/tiny")
    assert of_grid["rayfed_method"] == "a grid of 2 runs"
    assert of_grid["rayfed_job"] != kept["rayfed_job"]
    assert all(isinstance(value, str) for value in (*kept.values(), *of_grid.values()))


def test_the_commands_of_the_page_can_be_typed():
    page = (Path(__file__).parents[1] / "docs/jobs.md").read_text()
    lines = re.findall(r"^\$ rayfed (.*)$", page, re.MULTILINE)
    for line in lines:
        name, *given = shlex.split(line)
        main.commands[name].make_context(name, given)  # refuses unknown options
    assert len(lines) >= 4
