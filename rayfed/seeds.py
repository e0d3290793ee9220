"""Randomness as a function of place: the run's seed, a purpose, a round and a client, and nothing else.

So a client draws the same numbers on whichever actor it trains, whoever trained before it, and when it is run again.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a stream of random numbers is for; streams of two purposes are independent."""

    MODEL = 0
    COHORT = 1
    CLIENT = 2


def seed_of(seed: int, purpose: Purpose, *place: int) -> int:
    """A 63-bit seed for a generator, well mixed from all its arguments.

    >>> seed_of(0, Purpose.CLIENT, 1, 2) == seed_of(0, Purpose.CLIENT, 1, 2) != seed_of(0, Purpose.CLIENT, 2, 1)
    True
    """
    return int(np.random.SeedSequence([seed, purpose, *place]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def cohort(seed: int, round: int, num_clients: int, size: int) -> list[int]:
    """The clients of a round, in ascending order: drawn without replacement, whoever is ready.

    Costs memory and time in proportion to `size`, not to `num_clients`.
    """
    generator = np.random.default_rng(seed_of(seed, Purpose.COHORT, round))
    return sorted(generator.choice(num_clients, size, replace=False, shuffle=False).tolist())
