"""Random numbers as a function of the seed, the purpose, and the place.

The place is the round and the client, as far as the purpose has them; of an evaluation, the first
image of a batch. They depend on nothing else, so they are the same on every actor and in every run.

Two choices have seeds of their own in the job: the partition (with the skews and the images of the
server), and the images held out for a test.
The data are opened with seed 0, so that all seeds of a job have the same (`rounds/setup.py`).
"""

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """The use of random numbers. Numbers for different purposes are independent."""

    MODEL = 0
    COHORT = 1
    # The order of a client's batches, and the augmentation of their images.
    BATCHES = 2
    # The server's hook `update`.
    UPDATE = 3
    MEASURE = 4
    # The virtual clock: which clients can be asked, which of them answer, and how fast each is.
    AVAILABLE = 5
    ANSWER = 6
    SPEED = 7
    # A client's hooks before the round.
    SURVEY = 8
    # A client's hooks in the round, and what its model draws (Dropout).
    TRAIN = 9
    # The server's hooks `init` and `tell`.
    INIT = 10
    TELL = 11
    # The clients that never train.
    HELD_OUT = 12
    # The tuning of a client's own model, after the run.
    TUNE = 13
    # What a model draws when it is evaluated or measured.
    EVALUATION = 14
    # What is drawn when the data are read, and when the model is built and checked.
    OPEN = 15
    # The batch on which a client that is asked measures its loss, and what its model draws.
    ASK = 16


def seed_of(seed: int, purpose: Purpose, *place: int) -> int:
    """Return a 63-bit seed for a generator, well mixed from all arguments.

    >>> seed_of(0, Purpose.BATCHES, 1, 2) == seed_of(0, Purpose.BATCHES, 1, 2)
    True
    >>> seed_of(0, Purpose.BATCHES, 1, 2) == seed_of(0, Purpose.BATCHES, 2, 1)
    False
    """
    sequence = np.random.SeedSequence([seed, purpose, *place])
    number = sequence.generate_state(1, np.uint64)[0]
    return int(number >> np.uint64(1))


def chances(seed: int, purpose: Purpose, round: int, num_clients: int) -> np.ndarray:
    """Return a number in [0, 1) for each client in a round, float64 (N,).

    The number of a client does not depend on how many other clients there are.

    >>> few, many = (chances(0, Purpose.ANSWER, 1, count) for count in (2, 1000))
    >>> few.tolist() == many[:2].tolist()
    True
    """
    return np.random.default_rng(seed_of(seed, purpose, round)).random(num_clients)


def cohort(seed: int, round: int, num_clients: int, size: int) -> list[int]:
    """Return the sampled clients of a round, ascending, drawn without replacement.

    Time and memory are proportional to `size`.
    """
    generator = np.random.default_rng(seed_of(seed, Purpose.COHORT, round))
    clients = generator.choice(num_clients, size, replace=False, shuffle=False)
    return sorted(clients.tolist())
