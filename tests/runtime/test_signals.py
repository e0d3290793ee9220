"""A signal stops a run, even where Python drops the exception that it raises."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ray._private import utils as ray_utils

from rayfed.methods import fedavg
from rayfed.runtime.internals import keeping_handlers
from rayfed.runtime.signals import ending_in_time, refuse_to_go_on, stopping


class Dropping:
    """Python ignores what is raised while its instances are finalised."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(3):
            # The handler runs here.
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_whose_interrupt_was_dropped_stops_before_its_next_task(make_setup, play):
    def run():
        with stopping("stopping"), stopping("stopping"):
            refuse_to_go_on()
            Dropping()
            play(make_setup(fedavg()))

    with pytest.raises(KeyboardInterrupt):
        run()
    refuse_to_go_on()
    assert len(play(make_setup(fedavg()))) == 4, "the next run is not stopped"


def test_ray_does_not_replace_our_handler():
    """Its own raises SystemExit at once, also while Ray is half started."""
    before = signal.getsignal(signal.SIGTERM)
    with keeping_handlers():
        ray_utils.set_sigterm_handler(lambda number, frame: None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_error_on_the_way_out_of_a_stopped_context_is_a_stop():
    """Else a start of Ray that fails because of the signal would be tried again by whoever resumes
    at code 75.
    """

    def start(told_to_stop):
        with stopping("stopping", at_the_end=True):
            if told_to_stop:
                os.kill(os.getpid(), signal.SIGTERM)
            raise ConnectionError

    with pytest.raises(KeyboardInterrupt):
        start(told_to_stop=True)
    with pytest.raises(ConnectionError):
        start(told_to_stop=False)


def until_taken(run):
    """Wait until a process has taken the signals that it was sent: two that wait would be one."""
    status = Path(f"/proc/{run.pid}/status")
    if not status.exists():
        # Only Linux tells.
        time.sleep(0.5)
        return
    while re.search(r"^ShdPnd:\s*0*[1-9a-f]", status.read_text(), re.MULTILINE):
        time.sleep(0.01)


BLOCKED = """
import ctypes, sys
from rayfed.runtime import signals
signals.GRACE = float(sys.argv[1])
end = lambda: print("ended", flush=True)
with signals.stopping("stopping", at_the_end=True), signals.ending_in_time(end):
    print("ready", flush=True)
    while True:
        ctypes.CDLL(None).sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("grace", "signals"), [(0.1, 1), (600, 2)])
def test_a_start_that_waits_in_c_ends_after_a_while_or_with_the_second_signal(
    number, grace, signals
):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    # A shell, or nohup, may have told this process to ignore them.
    def heeding():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    command = [sys.executable, "-c", BLOCKED, str(grace)]
    with subprocess.Popen(command, preexec_fn=heeding, **pipes) as run:
        try:
            assert run.stdout.readline() == "ready\n"
            for _ in range(signals):
                run.send_signal(number)
                until_taken(run)
            shown, said = run.communicate(timeout=240)
        finally:
            run.kill()
    assert (run.returncode, shown) == (130, "ended\n")
    assert said.endswith("stopped while Ray was starting\n")


def test_a_start_that_ends_in_time_is_stopped_in_order_and_leaves_nothing():
    def start(told_to_stop):
        with stopping("stopping", at_the_end=True), ending_in_time(lambda: None):
            if told_to_stop:
                os.kill(os.getpid(), signal.SIGTERM)

    before, threads = signal.set_wakeup_fd(-1), threading.active_count()
    signal.set_wakeup_fd(before)
    with pytest.raises(KeyboardInterrupt):
        start(told_to_stop=True)
    start(told_to_stop=False)
    assert (signal.set_wakeup_fd(before), threading.active_count()) == (before, threads)
