"""The virtual clock: how long a client would take for a round, whatever the machine that does the
work.
"""

from collections.abc import Mapping

import numpy as np

from rayfed.base.seeds import Purpose, seed_of
from rayfed.clients.participation import SPEEDS, Participation
from rayfed.clients.settings import Training


def images_trained(num_examples: np.ndarray, training: Training) -> np.ndarray:
    """How many images clients (n,) with so many examples take through all their steps, as `batches`
    cuts them.

    >>> images_trained(np.array([3, 8]), Training(batch_size=2, local_epochs=2)).tolist()
    [6, 16]
    >>> images_trained(np.array([3, 8]), Training(batch_size=2, local_steps=5)).tolist()
    [8, 10]
    >>> images_trained(np.array([3, 8]), Training(batch_size=2, local_epochs=0.5)).tolist()
    [2, 4]
    """
    taken = np.array([training.steps(n) for n in num_examples.tolist()], dtype=np.int64)
    epochs, steps = np.divmod(taken, -(-num_examples // training.batch_size))
    # The last batch of an epoch alone may be smaller.
    return epochs * num_examples + steps * training.batch_size


def speeds(
    settings: Participation,
    seed: int,
    clients: np.ndarray,
    num_clients: int,
    traced: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """By name, the `SPEEDS` (n,) of these clients; none where such work takes no time.

    What a trace gives is taken as it is. Else a speed is log-normal with the job's value as its
    median, and drawn once per client: the same in every round.
    """
    factors = np.ones((2, len(clients)))
    if settings.spread:
        normal = np.random.default_rng(seed_of(seed, Purpose.SPEED)).standard_normal(
            (num_clients, 2)
        )
        factors = np.exp(settings.spread * normal[clients].T)
    by_name = {}
    for name, factor in zip(SPEEDS, factors, strict=True):
        median = getattr(settings, name)
        if name in traced:
            by_name[name] = traced[name]
        elif median is not None:
            by_name[name] = median * factor
    return by_name


def seconds(speeds: Mapping[str, np.ndarray], images: np.ndarray, num_bytes: int) -> np.ndarray:
    """Virtual seconds (n,) to get the model, train it on so many images (n,) and send it back.

    The model's `num_bytes` count once each way, for every method: so which clients are late does
    not depend on the method, and methods are compared on the same clients.
    """
    total = np.zeros(len(images))
    if "seconds_per_example" in speeds:
        total += speeds["seconds_per_example"] * images
    if "bytes_per_second" in speeds:
        total += 2 * num_bytes / speeds["bytes_per_second"]
    return total
