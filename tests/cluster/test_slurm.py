"""cluster/slurm.sh, run on two network namespaces as nodes; only `srun` and `scontrol` are small
scripts of our own.
"""

import os
import re
import shutil
import stat
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from shells import without_ray

from rayfed.folder.summary import read_summary
from rayfed.folder.tables import read_table

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "cluster" / "slurm.sh"
TINY = [
    "-s",
    "train.clients_per_round=2",
    "-s",
    "train.local_steps=1",
    "-s",
    "data.partition.num_clients=4",
]

JOB_ID = 7_000_000 + os.getpid()
TEMPORARY = Path(f"/tmp/rayfed-{JOB_ID}")

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and `ip`"
)

# Runs a step on the nodes of its --nodelist, or on all nodes, and ignores its other options.
SRUN = """#!/bin/bash
nodes=$SLURM_JOB_NODELIST
while [[ $1 == --* ]]; do
    [[ $1 == --nodelist=* ]] && nodes=${1#*=}
    shift
done
echo "$@" >>"$STEPS"
nodes=(${nodes//,/ })
((${#nodes[@]} > 1)) || exec ip netns exec "$nodes" "$@"
for node in "${nodes[@]}"; do ip netns exec "$node" "$@"; done
"""
SCONTROL = """#!/bin/bash
[[ "$1 $2" == "show hostnames" ]] && tr , "\\n" <<<"$3"
"""


@pytest.fixture
def nodes():
    """The names of two network namespaces, each with an address of its own and a cable between
    them.
    """
    nodes = [f"rf{os.getpid()}{side}" for side in "ab"]
    try:
        for node in nodes:
            ip("netns", "add", node)
            ip("-n", node, "link", "set", "lo", "up")
        ip(
            "-n",
            nodes[0],
            "link",
            "add",
            "cable",
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            nodes[1],
        )
        for number, node in enumerate(nodes, start=1):
            ip("-n", node, "address", "add", f"10.77.0.{number}/24", "dev", "cable")
            ip("-n", node, "link", "set", "cable", "up")
        yield nodes
    finally:
        for node in nodes:
            subprocess.run(["ip", "netns", "delete", node], check=False)


def ip(*words):
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def start(tmp_path, nodes):
    """Starts the script in a checkout, in the environment that Slurm would give a job on these
    nodes.
    """
    for part in ("jobs", ".venv"):
        (tmp_path / part).symlink_to(ROOT / part)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = without_ray("SLURM_")
    environment |= {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "STEPS": str(tmp_path / "steps.txt"),
        "SLURM_JOB_ID": str(JOB_ID),
        "SLURM_JOB_NODELIST": ",".join(nodes),
        "SLURM_CPUS_PER_TASK": "1",
    }

    def start(*words, **more):
        command = ["ip", "netns", "exec", nodes[0], "bash", SCRIPT, *words]
        with (tmp_path / "log.txt").open("w") as log:
            return subprocess.Popen(
                command, cwd=tmp_path, env=environment | more, stdout=log, stderr=subprocess.STDOUT
            )

    yield start
    shutil.rmtree(TEMPORARY, ignore_errors=True)


def processes_in(node):
    """The commands of the processes in a node."""
    listed = subprocess.run(
        ["ip", "netns", "pids", node], capture_output=True, text=True, check=True
    )
    commands = []
    for pid in listed.stdout.split():
        # It may have just ended.
        with suppress(FileNotFoundError, ProcessLookupError):
            commands.append(Path(f"/proc/{pid}/cmdline").read_text())
    return commands


def wait_until(true, process, seconds=240):
    end = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, "the script has ended"
        assert time.monotonic() < end
        time.sleep(0.2)


def assert_nothing_is_left(folder, nodes):
    assert not list(folder.glob(".rayfed-*"))
    assert not TEMPORARY.exists()
    # The dashboard's children end a moment later. An agent that was just starting looks for Ray's
    # GCS for 60 s first (gcs_rpc_server_reconnect_timeout_s). Slurm would end them with the job.
    end = time.monotonic() + 90
    while any(left := [processes_in(node) for node in nodes]) and time.monotonic() < end:
        time.sleep(0.2)
    assert left == [[], []]


def test_outside_of_slurm_the_script_says_how_to_start_it():
    environment = {key: value for key, value in os.environ.items() if key != "SLURM_JOB_ID"}
    ended = subprocess.run(["bash", SCRIPT, "run"], env=environment, capture_output=True, text=True)
    assert ended.returncode != 0 and "start this with sbatch" in ended.stderr


OURS = {
    "absent": (lambda path: None, True),
    "ours": (lambda path: path.mkdir(mode=0o700), True),
    "a link": (lambda path: path.symlink_to(path.parent), False),
    "a file": (lambda path: path.touch(), False),
    "another user's": (lambda path: (path.mkdir(), os.chown(path, 65534, 65534)), False),
}


@pytest.mark.parametrize("there", OURS)
def test_rays_folder_in_tmp_is_never_another_users(tmp_path, there):
    make, starts = OURS[there]
    if there == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    make(folder := tmp_path / "folder")
    (tmp_path / "ray").write_text("#!/bin/sh\necho started\n")
    (tmp_path / "ray").chmod(0o755)
    command = re.search(r"bash -c '(.*?)' \"\$temporary\"", SCRIPT.read_text(), re.DOTALL)[1]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", "-c", command, folder], env=environment, capture_output=True, text=True
    )
    assert (ended.stdout, ended.returncode) == (("started\n", 0) if starts else ("", 1))
    if starts:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    else:
        assert "cannot be made, or is not our folder" in ended.stderr


@pytest.mark.slow
@needs_namespaces
def test_a_job_runs_on_two_nodes_and_leaves_nothing_behind(tmp_path, nodes, start):
    script = start(
        "run", "jobs/quickstart.toml", "-s", "train.num_rounds=1", *TINY, "-s", "ray.actors=2"
    )
    token = tmp_path / f".rayfed-{JOB_ID}" / "token"
    wait_until(lambda: token.exists() and TEMPORARY.exists(), script)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (token.parent, token, TEMPORARY)] == [
        0o700,
        0o600,
        0o700,
    ]
    assert script.wait(timeout=800) == 0, (tmp_path / "log.txt").read_text()
    assert_nothing_is_left(tmp_path, nodes)
    assert "Ray runs on 2 nodes" in (tmp_path / "log.txt").read_text()
    run = tmp_path / "runs/quickstart"
    assert read_summary(run)["status"] == "done"
    assert (run / "summary.json").stat().st_mode & 0o044, (
        "the umask of the token is for the token only"
    )


@pytest.mark.slow
@needs_namespaces
def test_a_job_whose_time_is_up_stops_cleanly_and_can_be_resumed(tmp_path, nodes, start):
    run = tmp_path / "runs/quickstart"
    script = start(
        "run", "jobs/quickstart.toml", "-s", "train.num_rounds=100000", *TINY, "-s", "ray.actors=2"
    )
    # The node whose actor is up first may serve both clients of many rounds.
    wait_until(
        lambda: set(read_table(run, "clients")["node"].to_pylist()) == {"10.77.0.1", "10.77.0.2"},
        script,
    )
    script.terminate()
    assert script.wait(timeout=800) == 130, (tmp_path / "log.txt").read_text()
    assert_nothing_is_left(tmp_path, nodes)
    summary = read_summary(run)
    assert summary["status"] == "stopped"

    again = start("resume", "runs/quickstart", "-s", f"train.num_rounds={summary['rounds'] + 1}")
    assert again.wait(timeout=800) == 0, (tmp_path / "log.txt").read_text()
    assert_nothing_is_left(tmp_path, nodes)
    assert read_table(run, "rounds")["round"].to_pylist() == list(range(summary["rounds"] + 2))


@pytest.mark.slow
@needs_namespaces
def test_a_ray_that_does_not_start_ends_the_job_with_a_message(tmp_path, nodes, start):
    script = start("run", "jobs/quickstart.toml", SLURM_CPUS_PER_TASK="some")
    assert script.wait(timeout=800) == 1
    assert_nothing_is_left(tmp_path, nodes)
    assert "error: Ray ended on a node, see above" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
@needs_namespaces
def test_a_node_that_cannot_reach_the_head_ends_the_job_with_a_message(tmp_path, nodes, start):
    ip("-n", nodes[1], "link", "set", "cable", "down")
    script = start("run", "jobs/quickstart.toml", HEAD_ADDRESS="10.77.0.1", JOIN_LIMIT="20")
    assert script.wait(timeout=800) == 1
    assert_nothing_is_left(tmp_path, nodes)
    said = f"error: not all of {' '.join(nodes)} had joined after 20 s: can they reach 10.77.0.1:"
    assert said in (tmp_path / "log.txt").read_text()
