"""Show the state of a run as gauges that Ray gives to Prometheus.

They are few series, from the driver, tagged with the run. Ray puts `ray_` before the names and
sends new values every ten seconds. Only gauges: Ray shows a counter only once it has counted, and
even after its run has ended.
"""

import logging
import threading
import time

import numpy as np
from ray.util.metrics import Gauge

from rayfed.measures.forgetting import dropped
from rayfed.rounds.round import Round

log = logging.getLogger(__name__)

# Seconds after which all values are sent again.
REFRESH = 3.0

SERIES = {
    "rayfed_round": "the last finished round; 0 is the initial model",
    "rayfed_rounds": "that the run has, unless its patience ends it before",
    "rayfed_seconds_left": (
        "an estimate: the rounds that are left, each as long as the mean since this driver began"
    ),
    "rayfed_seconds_since_client": (
        "since a client or a round of the run was done, or the run began"
    ),
    "rayfed_images_per_second": "trained in the last finished round, by all clients together",
    "rayfed_test_accuracy": (
        "of the global model, on the whole test set, after the last evaluated round"
    ),
    "rayfed_test_loss": (
        "of the global model, on the whole test set, after the last evaluated round"
    ),
    "rayfed_forgetting": (
        "each class's best accuracy in earlier evaluated rounds minus its last, averaged over "
        "classes"
    ),
    "rayfed_forgetting_round": (
        "what classes have lost since the evaluated round before, averaged over classes"
    ),
    "rayfed_round_seconds": "duration of the last finished round",
    "rayfed_bytes_down": "sent to clients, in all rounds since this driver began",
    "rayfed_bytes_up": "sent by clients, in all rounds since this driver began",
    "rayfed_clients_done": "clients of the current round that have trained",
    "rayfed_clients_in_round": "clients of the current round",
    "rayfed_idle_share": (
        "of the actors' time in the last finished round: the part in which they had no work"
    ),
    "rayfed_late_clients": (
        "that were chosen in the last finished round, and were late or dropped out"
    ),
    "rayfed_retries": "pieces of work that were lost and run again, since this driver began",
}


class Gauges:
    """Shows one run to Prometheus. Make it once Ray is connected, and close it before Ray is left.

    The run continues where gauges cannot be shown; the reason is logged once.
    """

    def __init__(self, run: str, num_rounds: int) -> None:
        tags = {"run": run}
        self._gauges = {
            name: Gauge(name, text, tuple(tags)).set_default_tags(tags)
            for name, text in SERIES.items()
        }
        self._values = dict.fromkeys(
            ("rayfed_bytes_down", "rayfed_bytes_up", "rayfed_retries"), 0.0
        )
        self._values["rayfed_rounds"] = num_rounds
        # The duration of each round in which clients trained.
        self._seconds: list[float] = []
        # When a client or a round was done last.
        self._heard = time.monotonic()
        # The class accuracies of the last evaluated round after round 0.
        self._before: np.ndarray | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        # Ray sends a value once, and forgets it twenty seconds later. Without this thread a long
        # round would have no values.
        threading.Thread(target=self._refresh, name="rayfed-gauges", daemon=True).start()

    def round(self, round: Round, images: int, idle: float) -> None:
        """Show a finished round, with its images and the idle share.

        Without evaluation, the last figures stay.
        """
        now = round.class_accuracy if round.round else None
        lost = None if now is None or self._before is None else dropped(self._before, now)
        self._heard = time.monotonic()
        if round.round:
            self._seconds.append(round.seconds)
        rounds_left = self._values["rayfed_rounds"] - round.round
        seconds_left = rounds_left * float(np.mean(self._seconds)) if self._seconds else None
        late = round.notes.get("clients.late", 0.0) + round.notes.get("clients.dropped", 0.0)
        self._show(
            rayfed_round=round.round,
            rayfed_seconds_left=seconds_left,
            rayfed_images_per_second=images / round.seconds if round.seconds else None,
            rayfed_test_accuracy=round.test_accuracy,
            rayfed_test_loss=round.test_loss,
            rayfed_forgetting=round.forgetting,
            rayfed_forgetting_round=lost,
            rayfed_round_seconds=round.seconds,
            rayfed_idle_share=idle,
            rayfed_late_clients=late,
            rayfed_bytes_down=self._values["rayfed_bytes_down"] + round.bytes_down,
            rayfed_bytes_up=self._values["rayfed_bytes_up"] + round.bytes_up,
        )
        if now is not None:
            self._before = now

    def clients(self, done: int, total: int) -> None:
        """Show that `done` clients of the round have trained, of `total`."""
        self._heard = time.monotonic()
        self._show(rayfed_clients_done=done, rayfed_clients_in_round=total)

    def retried(self) -> None:
        """Count a lost piece of work that is run again."""
        self._show(rayfed_retries=self._values["rayfed_retries"] + 1)

    def close(self) -> None:
        """End the series: twenty to thirty seconds later Ray does not show them any more."""
        with self._lock:
            self._closed.set()

    def _refresh(self) -> None:
        """Send all values again and again, until the series are closed."""
        while not self._closed.wait(REFRESH):
            self._show()

    def _show(self, **changed: float | None) -> None:
        """Note the values that have changed, and send all. None leaves a value as it was."""
        with self._lock:
            self._values |= {name: value for name, value in changed.items() if value is not None}
            self._values["rayfed_seconds_since_client"] = time.monotonic() - self._heard
            try:
                for name, value in self._values.items():
                    if not self._closed.is_set():
                        # Ray refuses numpy's numbers.
                        self._gauges[name].set(float(value))
            except Exception as error:
                log.warning("the run's gauges cannot be shown: %r", error)
                self._closed.set()
