"""The commands for clusters, without a cluster: their output, refusals and exit codes."""

import json
import os
import signal
from datetime import UTC, datetime, timedelta

import pytest

from rayfed.base.errors import InputError
from rayfed.cli.exits import Failure
from rayfed.cli.status import runs_in
from rayfed.cli.submit import conclude, described, refuse_twins
from rayfed.folder.lock import locked
from rayfed.grid.cells import expand
from rayfed.runtime.jobs import Submission, no_token

# Nothing listens there.
NO_RAY = "127.0.0.1:1"


@pytest.fixture
def folder(folder, monkeypatch):
    """The current folder, without a variable or file that names a cluster or a token."""
    monkeypatch.setenv("HOME", str(folder))
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    # Otherwise this process would keep a token that it finds.
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    return folder


def write_run(path, status, accuracy=0.5):
    path.mkdir(parents=True)
    (path / "job.toml").write_text("[train]\nnum_rounds = 9\n")
    best = {"best": {"test_accuracy": accuracy}} if accuracy else {}
    (path / "summary.json").write_text(json.dumps({"status": status, "rounds": 4, **best}))


def test_the_error_names_the_variable_that_gave_the_address(folder, rayfed, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://{NO_RAY}")
    ended = rayfed("logs", "tiny")
    assert (
        f"no Ray cluster answers at http://{NO_RAY}, which RAY_API_SERVER_ADDRESS names, ("
        in ended.stderr
    )
    ended = rayfed("logs", "tiny", "--address", "http://127.0.0.1:3")
    assert "no Ray cluster answers at http://127.0.0.1:3 (" in ended.stderr, (
        "an option wins over a variable"
    )


def test_another_users_ray_at_the_usual_address_is_a_note_below_the_runs(
    folder, rayfed, monkeypatch
):
    def refused(*_):
        raise no_token("http://127.0.0.1:8265")

    monkeypatch.setattr("rayfed.runtime.jobs.Jobs.ask", refused)
    write_run(folder / "runs/mine", "done")
    ended = rayfed("status")
    assert ended.exit_code == 0 and "mine" in ended.stdout
    assert (
        "note: submitted jobs are not listed: the cluster at http://127.0.0.1:8265" in ended.stdout
    )
    named = rayfed("status", "--address", "http://127.0.0.1:8265")
    assert named.exit_code == 2 and "asks for a token" in named.stderr


def test_auto_is_the_ray_on_this_machine(folder, rayfed, cluster, monkeypatch):
    monkeypatch.setattr("rayfed.runtime.address.USUAL", cluster.url)
    asked = [rayfed("status"), rayfed("status", "--address", "auto")]
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    asked.append(rayfed("status"))
    assert [ended.exit_code for ended in asked] == [0, 0, 0] and len(
        {ended.stdout for ended in asked}
    ) == 1
    assert f"submitted to {cluster.url}: " in asked[0].stdout


def test_status_shows_the_runs_of_this_folder(folder, rayfed, monkeypatch):
    monkeypatch.setattr("rayfed.runtime.address.USUAL", f"http://{NO_RAY}")
    assert rayfed("status").stdout.startswith("runs in runs: none\n")
    write_run(folder / "runs/papers/b", "stopped", 0.25)
    write_run(folder / "runs/a", "failed", None)
    (folder / "runs/torn").mkdir()
    (folder / "runs/torn/summary.json").write_text("{")
    ended = rayfed("status")
    assert ended.exit_code == 0, ended.output
    lines = ended.stdout.splitlines()
    assert lines[0] == "runs in runs: 2"
    # Without day and time.
    rows = sorted(line.split()[:-2] for line in lines[2:4])
    assert rows == [["a", "failed", "4/9"], ["papers/b", "stopped", "4/9", "25.0%"]]
    assert lines[-1] == "no Ray answers on this machine, so there are no submitted jobs"
    nowhere = rayfed("status", "papers/c")
    assert nowhere.exit_code == 2
    assert (
        "'papers/c': no run of this name in runs (did you mean 'papers/b'?), and no Ray cluster "
        "answers on this machine\n`rayfed status` lists the runs of this folder\n" in nowhere.stderr
    )


def test_status_of_a_name_looks_at_the_runs_of_this_folder_first(folder, rayfed, cluster):
    write_run(folder / "runs/other/tiny", "stopped")
    ended = rayfed("status", "other/tiny", "--address", cluster.url)
    assert ended.exit_code == 0, ended.output
    assert [line.split()[0] for line in ended.stdout.splitlines()] == [
        "run",
        "status",
        "round",
        "best",
        "last",
        "to",
    ]
    assert ended.stdout.endswith("to continue it: rayfed resume runs/other/tiny\n")
    assert rayfed("status", "nothing", "--address", cluster.url).exit_code == 2


def test_runs_are_listed_from_the_newest_and_one_is_running_while_a_process_holds_its_lock(folder):
    for age, name in enumerate(("new", "old")):
        write_run(folder / "runs" / name, "running")
        os.utime(folder / "runs" / name / "summary.json", (10**9 - age, 10**9 - age))
    with locked(folder / "runs/old"):
        listed = [tuple(row[:2]) for row in runs_in(folder / "runs")]
    assert listed == [("new", "killed, or running elsewhere"), ("old", "running")]


# How a job ends
# ------------------------------------------------------------------------------------------


def submission(status, **more):
    return Submission("tiny", status, "tiny", {"rayfed_results": "/shared/runs/tiny"}, **more)


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        (
            submission("failed", exit_code=1),
            1,
            "error: tiny failed with exit code 1; more: `rayfed status tiny`",
        ),
        (submission("failed", exit_code=2), 2, "error: tiny failed with exit code 2"),
        (
            submission("failed", exit_code=75),
            75,
            "tiny can continue: submit it again with --resume",
        ),
        (
            submission("failed", exit_code=-signal.SIGKILL),
            137,
            "error: tiny failed with exit code 137",
        ),
        (submission("failed", message="no environment\n"), 1, "error: tiny failed: no environment"),
        (
            submission("stopped"),
            130,
            "tiny is stopped; its finished rounds lie in /shared/runs/tiny",
        ),
    ],
)
def test_the_command_ends_as_the_job_did(capsys, ended, code, said):
    with pytest.raises(Failure) as caught:
        conclude(ended, None)
    caught.value.show()
    assert caught.value.exit_code == code
    assert capsys.readouterr().err.startswith(said)


def test_a_run_is_refused_while_another_of_its_name_is_pending_or_running():
    over = submission("done", started=datetime.now(UTC) - timedelta(hours=1))
    refuse_twins("tiny", [over], None)
    refuse_twins("other", [submission("running")], None)
    for status in ("pending", "running"):
        with pytest.raises(
            InputError, match=f"'tiny' is {status} there already, as tiny; .*: `rayfed stop tiny`"
        ):
            refuse_twins("tiny", [over, submission(status)], None)


def test_the_cluster_gets_a_description_of_the_job_as_text():
    tables = {"name": "tiny", "method": "fedntd"}
    (cell,) = expand(tables)
    assert described([cell], [cell.job()], "/runs/tiny") == {
        "rayfed_method": "fedntd",
        "rayfed_results": "/runs/tiny",
    }
    cells = expand({**tables, "grid": {"seeds": [0, 1]}})
    assert (
        described(cells, [cell.job() for cell in cells], "/runs/tiny")["rayfed_method"]
        == "a grid of 2 runs"
    )
