"""A round's cohort: which clients are chosen, and which of them answer in time.

    the clients that are there -> some are chosen -> some drop out -> the first answers before the
    deadline count

The cohort is known before the round is played, so only the clients whose answers count are trained.
The Python time of these functions does not grow with the population.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rayfed.base.errors import InputError
from rayfed.base.seeds import Purpose, chances, cohort
from rayfed.clients.clock import images_trained, seconds, speeds
from rayfed.clients.participation import DROPS, Participation
from rayfed.clients.settings import Training
from rayfed.clients.trace import Trace


@dataclass(frozen=True)
class Cohort:
    """The clients of a round, in ascending order.

    A chosen client that neither answered nor dropped out was late.
    """

    chosen: Sequence[int]
    answered: Sequence[int]
    dropped: Sequence[int] = ()
    # These go into `rounds.parquet`. With the default settings there are none.
    notes: Mapping[str, float] = field(default_factory=dict)

    def refuse_absent(self, client: int, round: int) -> None:
        """Raise `InputError` if a client did not train in the round."""
        if client in self.answered:
            return
        clients = ", ".join(map(str, self.answered)) or "no client"
        if client not in self.chosen:
            raise InputError(f"client {client}: not in round {round}, which has {clients}")
        reason = "dropped out of" if client in self.dropped else "was late in"
        raise InputError(
            f"client {client}: it {reason} round {round}, and did not train; that round has "
            f"{clients}"
        )

    def __str__(self) -> str:
        if not self.chosen:
            return "no client was available"
        num_late = len(self.chosen) - len(self.answered) - len(self.dropped)
        return (
            f"of {len(self.chosen)} chosen clients, {len(self.dropped)} dropped out and {num_late} "
            "came late"
        )


def cohort_at(
    round: int,
    seed: int,
    settings: Participation,
    training: Training,
    trace: Trace | None,
    sizes: np.ndarray,
    num_bytes: int,
) -> Cohort:
    """Return the cohort of a round.

    `sizes` are the numbers of images of all clients, and `num_bytes` are the bytes of the model.
    """
    if settings == Participation():
        clients = cohort(seed, round, len(sizes), training.clients_per_round)
        return Cohort(chosen=clients, answered=clients)
    present, traced = _there(round, seed, settings, trace, len(sizes))
    number = min(settings.chosen(training.clients_per_round), len(present))
    places = np.array(cohort(seed, round, len(present), number), dtype=np.int64)
    chosen = present[places]
    traced = {name: values[places] for name, values in traced.items()}

    chance = chances(seed, Purpose.ANSWER, round, len(sizes))[chosen]
    drops = traced.get(DROPS, chance < settings.dropout)
    speed = speeds(settings, seed, chosen, len(sizes), traced)
    time = seconds(speed, images_trained(sizes[chosen], training), num_bytes)
    deadline = math.inf if settings.deadline is None else settings.deadline
    needed = min(training.clients_per_round, number)
    # The seed orders clients that answer at the same time.
    order = np.lexsort((chance, time))
    earliest = order[(~drops & (time <= deadline))[order]][:needed]

    num_dropped = int(drops.sum())
    notes = {
        "clients.available": float(len(present)),
        "clients.chosen": float(number),
        "clients.answered": float(len(earliest)),
        "clients.dropped": float(num_dropped),
        "clients.late": float(number - len(earliest) - num_dropped),
    }
    if speed:
        # With too few answers the server waits until the deadline.
        if deadline < math.inf and len(earliest) < max(needed, 1):
            notes["clients.virtual_seconds"] = deadline
        else:
            notes["clients.virtual_seconds"] = float(time[earliest].max(initial=0.0))
    return Cohort(
        chosen.tolist(), np.sort(chosen[earliest]).tolist(), chosen[drops].tolist(), notes
    )


def held_out(settings: Participation, seed: int, num_clients: int) -> np.ndarray:
    """Return the clients that never train, int64 (`settings.held_out`,), in ascending order.

    >>> held_out(Participation(held_out=2), seed=0, num_clients=5).size
    2
    """
    if not settings.held_out:
        return np.empty(0, np.int64)
    order = np.argsort(chances(seed, Purpose.HELD_OUT, 0, num_clients))
    return np.sort(order[: settings.held_out])


def _there(
    round: int, seed: int, settings: Participation, trace: Trace | None, num_clients: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the clients that are there, and what a trace says of them.

    The clients are int64 (A,), in ascending order. Each column of the trace has shape (A,).
    """
    absent = held_out(settings, seed, num_clients)
    if trace is not None:
        round_rows = np.arange(len(trace.clients))[trace.rows(round)]
        rows = round_rows[~np.isin(trace.clients[round_rows], absent)]
        return trace.clients[rows], {name: values[rows] for name, values in trace.columns.items()}
    is_there = chances(seed, Purpose.AVAILABLE, round, num_clients) < settings.available
    is_there[absent] = False
    return np.flatnonzero(is_there), {}
