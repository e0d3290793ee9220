"""The machine's other users: kept out of our Rays and of those that jobs go to; and what a killed
run leaves there.
"""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import ray
from shells import without_ray

from rayfed.runtime.private import RECIPE, TRUST, folder, way_in

ROOT = Path(__file__).resolve().parents[2]
RAYFED = Path(sys.executable).with_name("rayfed")
# A user who is not root.
ANOTHER = 65534
SMALL = [
    "jobs/quickstart.toml",
    "-s",
    "model.name=lenet",
    "-s",
    "train.local_steps=1",
    "-s",
    "ray.actors=1",
]
LONG = ["-s", "train.num_rounds=100000"]


@pytest.fixture
def entered(short_folder):
    """A folder with a short path, which other users may enter."""
    os.chmod(short_folder, 0o755)
    return Path(short_folder)


@pytest.mark.parametrize(
    ("outer", "inner", "way"),
    [
        (0o755, 0o755, None),
        (0o755, 0o777, "inner"),
        # The group.
        (0o711, 0o720 | 0o010, "inner"),
        # `inner` could be replaced.
        (0o777, 0o700, "outer"),
        # But not here, as in /tmp.
        (0o1777, 0o700, None),
        (0o700, 0o777, None),
    ],
)
@pytest.mark.parametrize("link", [False, True])
def test_others_come_in_through_a_folder_that_they_can_write_to_unless_one_above_it_is_closed(
    entered, outer, inner, way, link
):
    (path := entered / "outer" / "inner").mkdir(parents=True)
    path.chmod(inner)
    path.parent.chmod(outer)
    if link:
        (entered / "link").symlink_to(path)
    expected = {"inner": path, "outer": path.parent, None: None}[way]
    assert way_in(entered / "link" if link else path) == expected


def in_use(folder):
    """The processes that have a file below a folder open: the command line of each, by its
    number.
    """
    found = {}
    for descriptor in Path("/proc").glob("[1-9]*/fd/*"):
        try:
            if os.readlink(descriptor).startswith(f"{folder}/"):
                found[int(descriptor.parts[2])] = (descriptor.parents[1] / "cmdline").read_bytes()
        except OSError:
            pass
    found.pop(os.getpid(), None)
    return found


def test_what_a_dead_ray_left_has_ended_when_its_folder_is_removed_and_a_reader_of_its_logs_goes_on(
    monkeypatch, short_folder
):
    monkeypatch.setenv("RAY_TMPDIR", short_folder)
    old = Path(short_folder) / f"rayfed.{os.getuid()}" / "0"
    old.mkdir(parents=True)
    old.parent.chmod(0o700)
    worker = str(Path(ray.__file__).with_name("_private") / "workers" / "default_worker.py")
    asleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    with open(old / "ray.log", "w") as log:
        agent = subprocess.Popen(["ray::IDLE", *asleep[1:]], executable=sys.executable, stdout=log)
        starts = subprocess.Popen([*asleep, worker], stdout=log)
        elsewhere = subprocess.Popen(["ray::IDLE", *asleep[1:]], executable=sys.executable)
        reader = subprocess.Popen(["tail", "-f", "ray.log"], cwd=old, stdout=subprocess.DEVNULL)
    try:
        with folder() as own:
            assert own == old and sorted(path.name for path in own.iterdir()) == ["lock"]
            assert agent.poll() == starts.poll() == -signal.SIGKILL
            assert reader.poll() is elsewhere.poll() is None
    finally:
        for process in (agent, starts, elsewhere, reader):
            process.kill()
            process.wait()


def reached(paths):
    """What another user can do with these files and folders: read, list, write to or replace
    them.
    """

    def tries():
        for path in paths:
            for do in (
                lambda path: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)),
                lambda path: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)),
                os.listdir,
                lambda path: os.rename(path, f"{path}.taken"),
            ):
                try:
                    do(path)
                    yield path
                except OSError:
                    pass

    paths = [str(path) for path in paths]
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(ANOTHER)
            os.setuid(ANOTHER)
            os.write(write, json.dumps([*tries()][:100]).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        found = json.load(answer)
    os.waitpid(child, 0)
    return found


def environment(**more):
    return without_ray() | more


@contextmanager
def training(folder, name, *settings):
    """A run that has trained two rounds, on a Ray of its own below `folder`; killed in the end."""
    command = [
        RAYFED,
        "run",
        *SMALL,
        "-s",
        f"name={name}",
        "-s",
        f"output.path={folder}/runs",
        *settings,
    ]
    own = {
        "cwd": ROOT,
        "env": environment(RAY_TMPDIR=str(folder)),
        "stdout": subprocess.PIPE,
        "text": True,
    }
    heeding = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  # a shell may have told us to ignore it
    with subprocess.Popen(command, preexec_fn=heeding, **own) as run:
        try:
            assert any(re.match("round +2/", line) for line in run.stdout), "it has ended"
            yield run
        finally:
            run.kill()


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_reaches_nothing_of_a_ray_of_ours_nor_of_a_submission(entered, ray_head):
    # What others have there is not of our Ray.
    others = {*Path("/dev/shm").iterdir()}
    with training(entered, "own", *LONG):
        (home,) = entered.glob("ray*")
        own = [home, *home.rglob("*"), *({*Path("/dev/shm").iterdir()} - others)]
        assert any(path.name == "raylet" for path in own)
        assert reached(own) == []
    with ray_head(environment(), "--num-cpus=1", "--node-ip-address=127.0.0.1") as ports:
        at = ["--address", f"http://127.0.0.1:{ports['dashboard-port']}"]
        submit = [RAYFED, "submit", *SMALL, "-s", f"output.path={entered}/runs", *at]
        done = subprocess.run(
            [*submit, "--follow"], cwd=ROOT, env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        theirs = [ports["folder"], *Path(ports["folder"]).rglob("*")]
        assert any("working_dir_files" in str(path) for path in theirs)
        assert reached(theirs) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_ray_that_others_can_write_to_is_refused_unless_this_machine_is_trusted(
    entered, ray_head
):
    with ray_head(
        environment(), "--num-cpus=2", f"--temp-dir={entered}/ray", "--node-ip-address=127.0.0.1"
    ) as ports:
        submit = [
            "submit",
            *SMALL,
            "--address",
            f"http://127.0.0.1:{ports['dashboard-port']}",
            "--follow",
        ]
        join = ["run", *SMALL, "-s", f"ray.address=127.0.0.1:{ports['port']}"]
        for number, command in enumerate((submit, join)):
            command += [
                "-s",
                "train.num_rounds=1",
                "-s",
                f"output.path={entered}/runs",
                "-s",
                f"name=n{number}",
            ]
            how = {"cwd": ROOT, "env": environment(), "capture_output": True, "text": True}
            done = subprocess.run([RAYFED, *command], **how)
            assert done.returncode == 2, done.stdout + done.stderr
            message = done.stderr.splitlines()[-1]
            assert "other users of this machine can change what that Ray runs" in message
            assert f"through '{entered}/ray'" in message and RECIPE in message and TRUST in message
            done = subprocess.run([RAYFED, *command, "--trust-this-machine"], **how)
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_next_run_ends_what_a_killed_run_left_and_nothing_else(short_folder):
    home = Path(short_folder) / f"rayfed.{os.getuid()}"
    with training(short_folder, "lives", *LONG) as lives, ExitStack() as stack:
        with training(short_folder, "dies", *LONG):
            assert sorted(path.name for path in home.iterdir()) == ["0", "1", "lock"]
            # Ray's own processes may end a moment after the run: this one does not.
            with open(home / "1/left.log", "w") as log:
                left = subprocess.Popen(
                    ["ray::IDLE", "-c", "import time; time.sleep(1000)"],
                    executable=sys.executable,
                    stdout=log,
                )
            stack.callback(left.wait)
            stack.callback(left.kill)
        assert left.pid in in_use(home / "1")
        with training(short_folder, "next", "-s", "train.num_rounds=2") as after:
            assert after.wait() == 0
        assert not in_use(home / "1") and {*home.iterdir()} == {home / "0", home / "lock"}
        assert in_use(home / "0") and lives.poll() is None
        lives.send_signal(signal.SIGINT)
        try:
            lives.communicate(timeout=240)
        except subprocess.TimeoutExpired as error:
            pytest.fail(
                f"it was asked to stop four minutes ago, and has said since round 2: {error.output}"
            )
        assert lives.returncode == 130
