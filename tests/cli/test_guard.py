"""The guard ends as the guarded process of the run ended, and explains an end without a message."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import psutil
import pytest

pytestmark = pytest.mark.slow

CODE = (
    "from rayfed.cli.guard import guarded; guarded(['run', 'a job.toml', '--force']); import "
    "ctypes, os, sys, time; "
)
SLEEP = "print(os.getpid(), flush=True); time.sleep(60)"
HOW_TO_CONTINUE = (
    "to continue from its last checkpoint, or from the start if there is none: rayfed run 'a "
    "job.toml' --resume\n"
)


@pytest.fixture
def start():
    """Starts a guarded process that runs the given code."""
    with ExitStack() as stack:

        def start(code, before=""):
            command, pipe = [sys.executable, "-c", before + CODE + code], subprocess.PIPE
            run = subprocess.Popen(
                command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
            )
            stack.enter_context(run)
            stack.callback(run.kill)
            return run

        yield start


def state(pid):
    """What psutil calls the state of a process; '' for a process that has ended."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ""


UNEXPLAINED = "ended without a message, with exit code "
# The code of the run -> the exit code of the guard, and words about it.
ENDS = {
    **{f"print('done'); sys.exit({code})": (code, "") for code in (0, 2, 130)},
    "os._exit(0)": (1, f"{UNEXPLAINED}0"),
    # As Ray ends a process whose node is lost.
    "os._exit(1)": (75, f"{UNEXPLAINED}1"),
    "os.kill(os.getpid(), 9)": (-signal.SIGKILL, "was ended by SIGKILL"),
    "ctypes.string_at(0)": (-signal.SIGSEGV, "was ended by SIGSEGV"),
}


@pytest.mark.parametrize("code", ENDS)
def test_a_normal_end_is_passed_on_and_one_without_a_message_is_explained_and_can_be_resumed(
    start, code
):
    shown, said = (run := start(code)).communicate(timeout=240)
    assert (run.returncode, ENDS[code][1] in said) == (ENDS[code][0], True)
    if ENDS[code][1]:
        assert said.endswith(HOW_TO_CONTINUE)
    else:
        assert (shown, said) == ("done\n", "")


@pytest.mark.parametrize(
    ("number", "to"),
    [
        (signal.SIGHUP, [os.kill]),
        (signal.SIGINT, [os.killpg]),
        (signal.SIGTERM, [os.kill, os.killpg]),
    ],
)
def test_a_signal_is_passed_on_once(start, number, to):
    """Also if the signal goes to the whole group, as from a terminal or Ray's jobs, or to both, as
    from `timeout`.
    """
    heard = (
        "import signal; got = []; signal.signal({0}, lambda *_: got.append(1)); print('ready', "
        "flush=True); "
    )
    # After the first, another would have come in these seconds.
    wait = "pass\nwhile not got: time.sleep(0.01)\ntime.sleep(2); print(len(got)); sys.exit(3)"
    # So long that on a busy machine too the second signal comes within it.
    again = "from rayfed.cli import guard; guard.AGAIN = 60; "
    run = start(heard.format(int(number)) + wait, again)
    assert run.stdout.readline() == "ready\n"
    for send in to:
        send(run.pid, number)
        time.sleep(0.3)
    assert (run.communicate(timeout=240)[0], run.returncode) == ("1\n", 3)


def test_a_crash_after_it_was_stopped_is_not_explained(start):
    """It has said that it is stopped. A Ray that was just starting crashes on its way out."""
    crash = (
        # It may be ignored where the tests run.
        "import signal; signal.signal(2, signal.default_int_handler); import atexit, os; me = "
        "os.getpid(); atexit.register(lambda: os.getpid() == me or os.kill(os.getpid(), 11)); "
    )
    # No long sleep, since Python would handle a signal that comes just before it only afterwards.
    work = "pass\ntry:\n  os.write(1, b'ready\\n')\n  while True: time.sleep(0.1)\n"
    run = start(f"{work}except KeyboardInterrupt: print('stopped', flush=True)", crash)
    run.stdout.readline()
    run.send_signal(signal.SIGINT)
    assert (*run.communicate(timeout=240), run.returncode) == ("stopped\n", "", 130)


def test_a_stop_before_the_run_has_begun_is_a_stop_like_others(start):
    run = start(SLEEP)
    run.stdout.readline()
    run.terminate()
    assert (*run.communicate(timeout=240), run.returncode) == ("", "", 130)


def test_the_guarded_process_ends_with_its_parent(start):
    run = start(SLEEP)
    child = int(run.stdout.readline())
    run.kill()
    run.wait()
    while state(child) not in ("", psutil.STATUS_ZOMBIE):
        time.sleep(0.01)


def test_ctrl_z_stops_both_processes_until_the_shell_continues_them(start):
    run = start(SLEEP)
    child = int(run.stdout.readline())
    run.send_signal(signal.SIGTSTP)
    while (state(run.pid), state(child)) != (psutil.STATUS_STOPPED, psutil.STATUS_STOPPED):
        time.sleep(0.01)
    run.send_signal(signal.SIGCONT)
    while psutil.STATUS_STOPPED in (state(run.pid), state(child)):
        time.sleep(0.01)


def test_a_run_goes_on_when_nobody_reads_its_output_any_more(start, tmp_path):
    write = "[print(i) or sys.stderr.write('x' * 999) for i in range(9999)]; "
    run = start(
        f"print('first', flush=True); {write} open({str(tmp_path / 'end')!r}, 'w'); sys.exit(3)"
    )
    assert run.stdout.readline() == "first\n"
    run.stdout.close()
    run.stderr.close()
    assert run.wait(timeout=240) == 3
    assert (tmp_path / "end").exists()


def test_closed_streams_take_what_is_printed_and_no_file_does(tmp_path):
    code = (
        f"file = open({str(tmp_path / 'file')!r}, 'w'); print('lost', flush=True); print('lost', "
        "file=sys.stderr); "
    )
    shell = [
        "sh",
        "-c",
        'exec "$0" "$@" <&- >&- 2>&-',
        sys.executable,
        "-c",
        CODE + code + "os._exit(1)",
    ]
    assert subprocess.run(shell, timeout=240).returncode == 75
    assert (tmp_path / "file").read_text() == ""


def test_a_command_that_ends_while_a_thread_computes_ends_with_its_message():
    """PyTorch's C++ would abort the process, were the interpreter ended under it."""
    work = (
        "import torch\n"
        "while True: torch.nn.Conv2d(3, 8, 3)(torch.ones(64, 3, 32, 32)).sum().backward()"
    )
    begun = f"from rayfed.base.aside import aside; aside(exec, {work!r}); import torch; "
    script = begun + "from rayfed.cli import command; command(['methods', 'nonsense'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1][:7]) == (2, "error: "), done.stderr
