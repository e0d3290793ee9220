"""However a run's process ends, its parent ends so too, and says what Ray has left unsaid."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

CODE = "from rayfed.cli.guard import guarded; guarded(['run', 'a job.toml', '--force']); import ctypes, os, sys, time; "
GO_ON = "to go on from its last checkpoint: rayfed run 'a job.toml' --resume\n"


@pytest.fixture
def start():
    """Starts a guarded process that does what some code says."""
    with ExitStack() as stack:

        def start(code):
            run = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", CODE + code],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
            stack.callback(run.kill)
            return run

        yield start


def state(pid):
    """The letter that `ps` shows; none if it is gone."""
    file = Path(f"/proc/{pid}/stat")
    return file.read_text().rpartition(")")[2].split()[0] if file.exists() else ""


@pytest.mark.parametrize("code", [0, 2, 130])
def test_one_that_ends_of_itself_has_said_why(start, code):
    run = start(f"print('done'); sys.exit({code})")
    assert (*run.communicate(timeout=60), run.returncode) == ("done\n", "", code)


@pytest.mark.parametrize("code", [0, 1])
def test_one_that_is_ended_without_a_word_can_be_resumed(start, code):
    _, said = (run := start(f"os._exit({code})")).communicate(timeout=60)
    assert run.returncode == 75
    assert f"ended without a word, with exit code {code}" in said and said.endswith(GO_ON)


@pytest.mark.parametrize(
    ("what", "number"), [("os.kill(os.getpid(), 9)", signal.SIGKILL), ("ctypes.string_at(0)", signal.SIGSEGV)]
)
def test_one_that_a_signal_ends_has_the_signal_named(start, what, number):
    _, said = (run := start(what)).communicate(timeout=60)
    assert run.returncode == -number
    assert f"was ended by {number.name}" in said and said.endswith(GO_ON)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("to", [[os.kill], [os.killpg], [os.kill, os.killpg]], ids=["alone", "group", "both"])
def test_a_signal_is_handed_on_once(start, number, to):
    """Also where it is sent to the whole group, as a terminal and Ray's jobs do, or both, as `timeout` does."""
    heard = "import signal; got = []; signal.signal({0}, lambda *_: got.append(1)); print('ready', flush=True); "
    wait = "time.sleep(0.5); time.sleep(0.5); print(len(got)); sys.exit(3)"
    run = start(heard.format(int(number)) + wait)
    assert run.stdout.readline() == "ready\n"
    for send in to:
        send(run.pid, number)
        time.sleep(0.05)
    assert (run.communicate(timeout=60)[0], run.returncode) == ("1\n", 3)


def test_a_signal_that_ends_it_needs_no_words(start):
    run = start("print('ready', flush=True); time.sleep(60)")
    assert run.stdout.readline() == "ready\n"
    run.terminate()
    assert (*run.communicate(timeout=60), run.returncode) == ("", "", -signal.SIGTERM)


def test_it_does_not_outlive_its_parent(start):
    run = start("print(os.getpid(), flush=True); time.sleep(60)")
    child = int(run.stdout.readline())
    run.kill()
    run.wait()
    while state(child) not in ("", "Z"):
        time.sleep(0.01)


def test_ctrl_z_stops_both_until_the_shell_goes_on(start):
    run = start("print(os.getpid(), flush=True); time.sleep(60)")
    child = int(run.stdout.readline())

    run.send_signal(signal.SIGTSTP)
    while (state(run.pid), state(child)) != ("T", "T"):
        time.sleep(0.01)
    run.send_signal(signal.SIGCONT)
    while "T" in (state(run.pid), state(child)):
        time.sleep(0.01)
