"""Random numbers as a function of seed, purpose, round and client alone: the same on every actor,
and in every run.
"""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """The use of random numbers. Numbers for different purposes are independent."""

    MODEL = 0
    COHORT = 1
    # Of a client: their order, and the augmentation of their images.
    BATCHES = 2
    # The server's hooks, each in a stream of its own.
    UPDATE = 3
    MEASURE = 4
    AVAILABLE = 5
    ANSWER = 6
    SPEED = 7
    # A client's hooks before the round.
    SURVEY = 8
    # Its hooks in the round, and what its model draws (Dropout).
    TRAIN = 9
    INIT = 10
    TELL = 11
    HELD_OUT = 12
    # A client's own model, after the run.
    TUNE = 13
    # What a model draws when it is evaluated or measured.
    EVALUATION = 14
    # What reading the data, and building and checking the model, draw.
    OPEN = 15


def seed_of(seed: int, purpose: Purpose, *place: int) -> int:
    """A 63-bit seed for a generator, well mixed from all arguments.

    >>> seed_of(0, Purpose.BATCHES, 1, 2) == seed_of(0, Purpose.BATCHES, 1, 2) != seed_of(0, Purpose.BATCHES, 2, 1)
    True
    """
    return int(
        np.random.SeedSequence([seed, purpose, *place]).generate_state(1, np.uint64)[0]
        >> np.uint64(1)
    )


def chances(seed: int, purpose: Purpose, round: int, num_clients: int) -> np.ndarray:
    """A number in [0, 1) for each client in a round, float64 (N,): a client's does not depend on
    the other clients.

    >>> chances(0, Purpose.ANSWER, 1, 2).tolist() == chances(0, Purpose.ANSWER, 1, 1000)[:2].tolist()
    True
    """
    return np.random.default_rng(seed_of(seed, purpose, round)).random(num_clients)


def cohort(seed: int, round: int, num_clients: int, size: int) -> list[int]:
    """The clients of a round, ascending, drawn without replacement; in time and memory proportional
    to `size`.
    """
    generator = np.random.default_rng(seed_of(seed, Purpose.COHORT, round))
    return sorted(generator.choice(num_clients, size, replace=False, shuffle=False).tolist())
