"""A signal stops a run, even where Python drops the exception that it raises."""

import os
import signal

import pytest
from ray._private import utils as ray_utils

from rayfed.methods import fedavg
from rayfed.runtime.internals import keeping_handlers
from rayfed.runtime.signals import refuse_to_go_on, stopping


class Dropping:
    """Python ignores what is raised while its instances are finalised."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(3):
            pass  # the handler runs here


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_whose_interrupt_was_dropped_stops_before_its_next_task(make_site, play):
    def run():
        with stopping("stopping"), stopping("stopping"):
            refuse_to_go_on()
            Dropping()
            play(make_site(fedavg()))

    with pytest.raises(KeyboardInterrupt):
        run()
    refuse_to_go_on()
    assert len(play(make_site(fedavg()))) == 4, "the next run is not stopped"


def test_ray_does_not_replace_our_handler():
    """Its own raises SystemExit at once, also while Ray is half started."""
    before = signal.getsignal(signal.SIGTERM)
    with keeping_handlers():
        ray_utils.set_sigterm_handler(lambda number, frame: None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_error_on_the_way_out_of_a_stopped_context_is_a_stop():
    """Else a start of Ray that fails because of the signal would be tried again by whoever resumes at code 75."""

    def start(told_to_stop):
        with stopping("stopping", at_the_end=True):
            if told_to_stop:
                os.kill(os.getpid(), signal.SIGTERM)
            raise ConnectionError

    with pytest.raises(KeyboardInterrupt):
        start(told_to_stop=True)
    with pytest.raises(ConnectionError):
        start(told_to_stop=False)
