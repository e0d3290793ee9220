"""A round's cohort: which clients are chosen, and which of them answer in time.

    the clients that are there (`choice_at`) -> some are chosen (`sampling.py`) -> some drop out ->
    the first answers before the deadline count (`answers_of`)

The cohort is known before the round is played, so only the clients whose answers count are trained.
With the rule `uniform`, the Python time of these functions does not grow with the population.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rayfed.base.errors import InputError
from rayfed.base.seeds import Purpose, chances, cohort, seed_of
from rayfed.clients.clock import images_trained, seconds, speeds
from rayfed.clients.participation import DROPS, Participation
from rayfed.clients.sampling import Choice, State, Uniform, refuse_choice
from rayfed.clients.settings import Training
from rayfed.clients.trace import Trace

# A loss is sent as a float64.
BYTES_OF_LOSS = 8


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
    # The clients that the server asked for a loss before it chose.
    asked: Sequence[int] = ()
    # The virtual seconds of each client that answered, in order; none without a clock.
    seconds: Sequence[float] = ()

    @property
    def bytes_of_losses(self) -> int:
        """Return the bytes of the losses that clients sent before the choice."""
        return BYTES_OF_LOSS * len(self.asked)

    @property
    def num_only_asked(self) -> int:
        """Return how many clients were asked for a loss, and not chosen."""
        return len(set(self.asked) - set(self.chosen))

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


@dataclass(frozen=True, eq=False)
class Circumstances:
    """What all draws of a round's cohort have in common."""

    round: int
    seed: int
    settings: Participation
    training: Training
    trace: Trace | None
    # The numbers of examples of all clients, int64 (N,).
    sizes: np.ndarray
    # The bytes of the model.
    num_bytes: int

    def simple_cohort(self) -> Cohort | None:
        """Return the cohort if all clients are there, the rule is uniform, and all answer.

        Otherwise return None. The time does not grow with the population.
        """
        if self.settings != Participation():
            return None
        number = self.training.clients_per_round
        clients = cohort(self.seed, self.round, len(self.sizes), number)
        return Cohort(chosen=clients, answered=clients)

    def seconds(self, clients: np.ndarray, traced: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the virtual seconds (n,) of these clients; 0 without a clock.

        `traced` is what the trace says of them.
        """
        speed = speeds(self.settings, self.seed, clients, len(self.sizes), traced)
        images = images_trained(self.sizes[clients], self.training)
        return seconds(speed, images, self.num_bytes)


def choice_at(of: Circumstances, state: State) -> Choice:
    """Return what the rule of `clients.sampling` may know when it chooses."""
    settings = of.settings
    present, traced = _there(of)
    time = None
    if settings.has_clock(traced) and settings.sampling != Uniform():
        time = of.seconds(present, traced)
    return Choice(
        round=of.round,
        number=min(settings.chosen(of.training.clients_per_round), len(present)),
        there=present,
        sizes=of.sizes,
        seconds=time,
        state=state,
        generator=np.random.default_rng(seed_of(of.seed, Purpose.COHORT, of.round)),
    )


def cohort_at(of: Circumstances, choice: Choice) -> Cohort:
    """Return the cohort of a round, with the clients that the rule chooses."""
    rule = of.settings.sampling
    chosen = refuse_choice(rule, choice, rule.choose(choice), "choose")
    if replace(of.settings, sampling=Uniform()) == Participation():
        clients = chosen.tolist()
        answered = Cohort(chosen=clients, answered=clients)
    else:
        answered = answers_of(of, choice, chosen)
    if not rule.asks:
        return answered
    notes = {**answered.notes, "clients.asked": float(len(choice.asked))}
    return replace(answered, notes=notes, asked=choice.asked.tolist())


def answers_of(of: Circumstances, choice: Choice, chosen: np.ndarray) -> Cohort:
    """Return the cohort of the clients (K,) that were chosen: some drop out or are late."""
    settings = of.settings
    present, traced = _there(of)
    places = np.searchsorted(present, chosen)
    traced = {name: values[places] for name, values in traced.items()}

    chance = chances(of.seed, Purpose.ANSWER, of.round, len(of.sizes))[chosen]
    drops = traced.get(DROPS, chance < settings.dropout)
    has_clock = settings.has_clock(traced)
    time = of.seconds(chosen, traced)
    deadline = math.inf if settings.deadline is None else settings.deadline
    needed = min(of.training.clients_per_round, len(chosen))
    # The seed orders clients that answer at the same time.
    order = np.lexsort((chance, time))
    earliest = np.sort(order[(~drops & (time <= deadline))[order]][:needed])

    num_dropped = int(drops.sum())
    notes = {
        "clients.available": float(len(present)),
        "clients.chosen": float(len(chosen)),
        "clients.answered": float(len(earliest)),
        "clients.dropped": float(num_dropped),
        "clients.late": float(len(chosen) - len(earliest) - num_dropped),
    }
    if has_clock:
        # With too few answers the server waits until the deadline.
        if deadline < math.inf and len(earliest) < max(needed, 1):
            notes["clients.virtual_seconds"] = deadline
        else:
            notes["clients.virtual_seconds"] = float(time[earliest].max(initial=0.0))
    return Cohort(
        chosen.tolist(),
        chosen[earliest].tolist(),
        chosen[drops].tolist(),
        notes,
        seconds=time[earliest].tolist() if has_clock else (),
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


def _there(of: Circumstances) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the clients that are there, and what a trace says of them.

    The clients are int64 (A,), in ascending order. Each column of the trace has shape (A,).
    """
    settings, trace, num_clients = of.settings, of.trace, len(of.sizes)
    absent = held_out(settings, of.seed, num_clients)
    if trace is not None:
        round_rows = np.arange(len(trace.clients))[trace.rows(of.round)]
        rows = round_rows[~np.isin(trace.clients[round_rows], absent)]
        return trace.clients[rows], {name: values[rows] for name, values in trace.columns.items()}
    is_there = chances(of.seed, Purpose.AVAILABLE, of.round, num_clients) < settings.available
    is_there[absent] = False
    return np.flatnonzero(is_there), {}
