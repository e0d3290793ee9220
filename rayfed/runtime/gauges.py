"""What a run has come to, as gauges that Ray hands to Prometheus: few series, from the driver, tagged with the run.

Ray puts `ray_` before the names and passes new values on every ten seconds. Only gauges: a counter of Ray's cannot be
seen before it is first counted up, and outlives its run.
"""

from __future__ import annotations

import logging
import threading

from ray.util.metrics import Gauge

from rayfed.rounds import Round

log = logging.getLogger(__name__)

REFRESH = 3.0  # seconds

SERIES = {
    "rayfed_round": "the last finished round; 0 is the initial model",
    "rayfed_test_accuracy": "of the global model, on the whole test set",
    "rayfed_test_loss": "of the global model, on the whole test set",
    "rayfed_forgetting": "what is lost of each class's best accuracy so far, averaged over classes",
    "rayfed_round_seconds": "what the last finished round took",
    "rayfed_bytes_down": "sent to clients, in all rounds since this driver began",
    "rayfed_bytes_up": "sent by clients, in all rounds since this driver began",
    "rayfed_clients_done": "clients of the round under way that have trained",
    "rayfed_clients_in_round": "clients of the round under way",
    "rayfed_retries": "pieces of work run again because they were lost, since this driver began",
}


class Gauges:
    """Shows one run to whoever watches the cluster; made once Ray is connected, and closed before it is left.

    What cannot be shown is said once in the log, and is no reason for a run to fail.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._gauges: dict[str, Gauge] = {}
        self._values = {"rayfed_bytes_down": 0.0, "rayfed_bytes_up": 0.0, "rayfed_retries": 0.0}
        self._lock = threading.Lock()
        self._complained = False
        self._closed = threading.Event()
        # Ray passes a value on once, and forgets it twenty seconds later: in a long round they would all be gone.
        threading.Thread(target=self._refresh, name="rayfed-gauges", daemon=True).start()

    def round(self, round: Round) -> None:
        """A round is finished."""
        self._show(
            rayfed_round=round.round,
            rayfed_test_accuracy=round.test_accuracy,
            rayfed_test_loss=round.test_loss,
            rayfed_forgetting=round.forgetting,
            rayfed_round_seconds=round.seconds,
            rayfed_bytes_down=self._values["rayfed_bytes_down"] + round.bytes_down,
            rayfed_bytes_up=self._values["rayfed_bytes_up"] + round.bytes_up,
        )

    def clients(self, done: int, total: int) -> None:
        """So many clients of the round have trained, of so many."""
        self._show(rayfed_clients_done=done, rayfed_clients_in_round=total)

    def retried(self) -> None:
        """A piece of work was lost, and is run again."""
        self._show(rayfed_retries=self._values["rayfed_retries"] + 1)

    def close(self) -> None:
        """Let the series end: twenty to thirty seconds later Ray shows them no more."""
        with self._lock:
            self._closed.set()

    def _refresh(self) -> None:
        while not self._closed.wait(REFRESH):
            self._show()

    def _show(self, **changed: float) -> None:
        with self._lock:
            self._values |= changed
            try:
                for name, value in self._values.items():
                    if not self._closed.is_set():
                        self._gauge(name).set(float(value))  # Ray takes no number of numpy's
            except Exception as error:
                if not self._complained:
                    log.warning("the run's gauges cannot be shown: %r", error)
                self._complained = True

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, SERIES[name], ("run",)).set_default_tags({"run": self._run})
        return self._gauges[name]
