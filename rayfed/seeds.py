"""Random numbers as a function of seed, purpose, round and client alone: the same on every actor, and in every run."""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """The use of random numbers. Numbers for different purposes are independent."""

    MODEL = 0
    COHORT = 1
    CLIENT = 2
    SERVER = 3
    MEASURE = 4


def seed_of(seed: int, purpose: Purpose, *place: int) -> int:
    """A 63-bit seed for a generator, well mixed from all arguments.

    >>> seed_of(0, Purpose.CLIENT, 1, 2) == seed_of(0, Purpose.CLIENT, 1, 2) != seed_of(0, Purpose.CLIENT, 2, 1)
    True
    """
    return int(np.random.SeedSequence([seed, purpose, *place]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def cohort(seed: int, round: int, num_clients: int, size: int) -> list[int]:
    """The clients of a round, ascending, drawn without replacement; in time and memory proportional to `size`."""
    generator = np.random.default_rng(seed_of(seed, Purpose.COHORT, round))
    return sorted(generator.choice(num_clients, size, replace=False, shuffle=False).tolist())
