"""Many runs at once, each a task of one process: their bits, and what the end of a process, node or
driver does.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

import rayfed
from rayfed.base.errors import InputError
from rayfed.base.storage import Folder
from rayfed.folder.checkpoint import newest
from rayfed.folder.lock import is_locked
from rayfed.folder.lock import locked as held_lock
from rayfed.folder.places import folder_of
from rayfed.folder.summary import read_summary
from rayfed.folder.tables import read_table
from rayfed.grid.cells import expand
from rayfed.grid.many import run_many
from rayfed.job import read_job
from rayfed.methods import Part, compose, fedavg
from rayfed.runtime.gpus import PRETENDED

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Dies(Part):
    """Ends its process in a round, as often as `times` says; the length of a file counts."""

    file: str
    times: int

    def begin(self, client):
        file = Path(self.file)
        if (
            client.round == 2
            and (seen := file.read_text() if file.exists() else "").count("x") < self.times
        ):
            file.write_text(seen + "x")
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)


@dataclass(frozen=True)
class Tell(Part):
    """Writes to a file in which process a run is, and which GPU it has.

    It waits until so many processes have: else the first that is up might do the work of all.
    """

    file: str
    processes: int

    def begin(self, client):
        with open(self.file, "a") as file:
            file.write(f"{os.getpid()} {os.environ['CUDA_VISIBLE_DEVICES']}\n")
        for _ in range(2400):
            if len({process for process, _ in told(self.file)}) >= self.processes:
                return
            time.sleep(0.1)
        raise TimeoutError(f"fewer than {self.processes} processes have begun a run")


def told(file):
    """What `Tell` has written: pairs of a process and its GPU."""
    return {tuple(line.split()) for line in Path(file).read_text().splitlines()}


@pytest.fixture
def tables(tmp_path, monkeypatch, write_images):
    """A grid of four runs on 64 random images, written below a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path, 64, 64)
    return {
        "name": "g",
        "data": {"source": "data", "partition": {"name": "shards", "s": 2, "num_clients": 8}},
        "model": "lenet",
        "train": {"num_rounds": 3, "clients_per_round": 3, "lr": 0.05},
        "grid": {"seeds": [0, 1], "method": ["fedavg", "scaffold"]},
    }


def jobs_of(tables, **overrides):
    return [
        cell.job()
        for cell in expand(
            tables, {key.replace("__", "."): value for key, value in overrides.items()}
        )
    ]


@pytest.fixture
def jobs(tables, cluster):
    return jobs_of(tables, ray__address=ray.get_runtime_context().gcs_address)


def outcome(job):
    """All that a run has found, but for its times and places."""
    tables = [
        read_table(folder_of(job), name).to_pylist() for name in ("rounds", "clients", "classes")
    ]
    rows = [
        {key: value for key, value in row.items() if key not in ("seconds", "node")}
        for t in tables
        for row in t
    ]
    return rows, (
        folder_of(job) / f"checkpoints/round-{job.train.num_rounds:05d}.safetensors"
    ).read_bytes()


def alone(job):
    """The same run in this process."""
    rayfed.run(job, {"ray.mode": "off", "output.path": "alone"}, force=True)
    return outcome(read_job(job.table(), {"output.path": "alone"}))


def codes(ended):
    return {one.job.name: one.exit_code for one in ended}


def test_runs_at_once_have_the_bits_of_each_run_alone(jobs):
    seen = set()
    ended = list(run_many(jobs, lambda under_way: seen.update(job.name for job in under_way)))
    assert codes(ended) == {job.name: 0 for job in jobs}
    assert [outcome(job) for job in jobs] == [alone(job) for job in jobs]
    assert [read_summary(folder_of(job))["status"] for job in jobs] == ["done"] * 4
    assert read_job(folder_of(jobs[0]) / "job.toml") == jobs[0]
    log = folder_of(jobs[0]) / "log.txt"
    said = log.read_text().splitlines() if log.exists() else []
    assert [line for line in said if "no better than a guess" not in line] == []


@pytest.fixture
def dying(jobs, tmp_path):
    """Make the first job one whose process ends some times."""

    def dying(times, overrides=None):
        method = compose(fedavg(), Dies(str(tmp_path / "times"), times))
        return rayfed.experiment.read(jobs[0].table(), overrides, method)

    return dying


def test_a_run_whose_process_ends_continues_from_its_checkpoint(jobs, dying, tmp_path, caplog):
    job = dying(2)
    assert codes(run_many([job, *jobs[1:]])) == {job.name: 0 for job in jobs}
    assert (tmp_path / "times").read_text() == "xx"
    assert outcome(job) == alone(jobs[0])
    assert f"the process of {job.name} is lost or locked out" in caplog.text
    assert "continues from its last checkpoint, attempt 3 of 4" in caplog.text


def test_runs_that_fail_say_why_as_their_commands_would_and_the_others_are_done(
    jobs, dying, caplog
):
    """A process that always ends, a loss that diverges, a folder that another process has, and a
    run without fault.
    """
    few = {"ray.max_retries": 1}
    ends = [dying(9, few), read_job(jobs[1].table(), {**few, "train.lr": 1e30})]
    ends += [read_job(job.table(), few) for job in jobs[2:]]
    folder_of(jobs[2]).mkdir(parents=True)
    with held_lock(folder_of(jobs[2])):
        ended = {one.job.name: one for one in run_many(ends)}
    assert [ended[job.name].exit_code for job in ends] == [75, 1, 75, 0]
    lost, diverged, locked, _ = (ended[job.name].message for job in ends)
    assert "the process of the run was lost or locked out 2 times" in lost
    assert (
        diverged.startswith("error: the loss became ")
        and "rounds up to 1 are recorded in" in diverged
    )
    assert "is being written to by process" in locked and "attempt 2 of 2" in caplog.text


def test_a_process_has_one_gpu_for_all_its_life(tables, a_cluster, tmp_path):
    """CUDA stays on the first one that a process has used, whichever Ray shows it afterwards."""
    tables["grid"] = {"seeds": [*range(8)]}
    with a_cluster({PRETENDED: "1"}, num_cpus=1, num_gpus=4) as cluster:
        options = {
            "ray__address": cluster.address,
            "ray__num_cpus": 0.25,
            "train__clients_per_round": 2,
        }
        method = compose(fedavg(), Tell(str(tmp_path / "tell"), processes=4))
        jobs = [
            rayfed.experiment.read(job.table(), None, method) for job in jobs_of(tables, **options)
        ]
        for ended in run_many(jobs):
            assert ended.exit_code == 0, ended.message
            # While the caller looks at a run, other processes become idle.
            time.sleep(1.0)
    seen = told(tmp_path / "tell")
    assert {gpu for _, gpu in seen} == {"0", "1", "2", "3"}
    assert len({process for process, _ in seen}) == len(seen)
    assert [outcome(job) for job in jobs[:2]] == [
        alone(job) for job in jobs_of(tables, **options)[:2]
    ]


def test_fewer_runs_than_actors_are_done_one_after_the_other(jobs, monkeypatch):
    ways = []

    def run(job, observers, options, *, resume):
        ways.append(options)

    monkeypatch.setattr(rayfed.experiment, "run", run)
    # A cohort of 3 has more actors.
    few = jobs[:2]
    without_ray = [read_job(job.table(), {"ray.mode": "off"}) for job in jobs]
    unlike = [jobs[0], read_job(jobs[1].table(), {"ray.num_cpus": 2.0}), *jobs[2:]]
    for chosen in (few, without_ray, unlike):
        assert [ended.job for ended in run_many(chosen)] == chosen
    assert len(ways) == 2 + 4 + 4 and all(way.on_ray for way in ways)


def test_runs_that_are_left_stop_with_a_checkpoint(tables, cluster):
    jobs = jobs_of(
        tables, ray__address=ray.get_runtime_context().gcs_address, train__num_rounds=10_000
    )
    begun = lambda: [job for job in jobs if read_summary(folder_of(job)).get(("rounds"), 0) > 1]  # noqa: E731

    def watch(under_way):
        if len(begun()) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_many(jobs, watch))
    for job in jobs:
        summary = read_summary(folder_of(job))
        assert summary["status"] == "stopped"
        assert newest(Folder(str(folder_of(job) / "checkpoints"))).round == summary["rounds"]


def test_a_node_that_does_not_see_the_results_is_refused_and_named(
    tables, a_cluster, free_ports, tmp_path
):
    """A node whose mount of the folder is another: a tmpfs, in a namespace of its own."""
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("needs the right to mount")
    with a_cluster(num_cpus=2) as cluster:
        start = (
            f"{Path(sys.executable).parent / 'ray'} start --address={cluster.address} --num-cpus=2 "
            f"--block {' '.join(free_ports)}"
        )
        command = ["unshare", "-m", "sh", "-c", f"mount -t tmpfs none {tmp_path} && exec {start}"]
        other = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, cwd="/"
        )
        try:
            while len([node for node in ray.nodes() if node["Alive"]]) < 2:
                assert other.poll() is None
                time.sleep(0.2)
            with pytest.raises(
                InputError,
                match=r"^node [\d.]+ does not see 'runs' \(output.path\), where each run of",
            ):
                list(run_many(jobs_of(tables, ray__address=cluster.address)))
        finally:
            os.killpg(other.pid, signal.SIGTERM)
            other.wait(240)


def test_a_grid_whose_command_was_killed_goes_on_when_it_is_given_again(tables, tmp_path):
    """With a Ray of its own, which ends with the command.

    The killed runs ask for so many rounds that no machine has made them when they are killed. When
    the command is given again, they ask for a few more than they have.
    """
    import tomli_w

    def ask_for(num_rounds):
        tables["train"]["num_rounds"] = num_rounds
        Path("g.toml").write_text(tomli_w.dumps(tables))

    tables["ray"] = {"actors": 2}
    ask_for(100_000)
    command = [sys.executable, "-m", "rayfed", "run", "g.toml"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    runs = [folder_of(job) for job in jobs_of(tables)]
    while not any(read_summary(run).get("rounds", 0) > 2 for run in runs):
        assert first.poll() is None
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    # Ray's processes end a moment after the command, and play on until then.
    while any(is_locked(run) for run in runs):
        time.sleep(0.1)
    played = {run: read_summary(run).get("rounds", 0) for run in runs}
    cut_off = [run for run in runs if played[run] > 2]
    ask_for(max(played.values()) + 2)
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "4 of 4 runs done;" in again.stdout
    assert [outcome(job) for job in jobs_of(tables)] == [alone(job) for job in jobs_of(tables)]
    assert all(json.loads((run / "environment.json").read_text())["resumed"] for run in cut_off)
    shutil.rmtree("runs")
