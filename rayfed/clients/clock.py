"""The virtual clock: how long a client would take for a round, whatever the real machine."""

from collections.abc import Mapping

import numpy as np

from rayfed.base.seeds import Purpose, seed_of
from rayfed.clients.participation import SPEEDS, Participation
from rayfed.clients.settings import Training


def images_trained(num_examples: np.ndarray, training: Training) -> np.ndarray:
    """Return how many images each client (n,) takes through all its steps in a round.

    `num_examples` (n,) are the clients' numbers of images. `batches` cuts the images into steps.

    >>> images_trained(np.array([3, 8]), Training(batch_size=2, local_epochs=2)).tolist()
    [6, 16]
    >>> images_trained(np.array([3, 8]), Training(batch_size=2, local_steps=5)).tolist()
    [8, 10]
    >>> images_trained(np.array([3, 8]), Training(batch_size=2, local_epochs=0.5)).tolist()
    [2, 4]
    """
    num_steps = np.array([training.steps(n) for n in num_examples.tolist()], dtype=np.int64)
    epochs, steps = np.divmod(num_steps, -(-num_examples // training.batch_size))
    # Only the last batch of an epoch may be smaller than the others.
    return epochs * num_examples + steps * training.batch_size


def speeds(
    settings: Participation,
    seed: int,
    clients: np.ndarray,
    num_clients: int,
    traced: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Return the `SPEEDS` (n,) of these clients by name; a speed that is not set is left out.

    If the trace has a column for a speed, its values are taken as they are. Otherwise a speed is
    log-normal, and the job's value is its median. It is drawn once per client, so it is the same in
    every round.
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
    """Return the virtual seconds (n,) to get the model, train it on `images` (n,) and send it back.

    The model's `num_bytes` count once each way, for every method. So which clients are late does
    not depend on the method, and methods are compared on the same clients.

    >>> seconds({"seconds_per_example": np.array([0.5])}, np.array([10]), num_bytes=100).tolist()
    [5.0]
    """
    total = np.zeros(len(images))
    if "seconds_per_example" in speeds:
        total += speeds["seconds_per_example"] * images
    if "bytes_per_second" in speeds:
        total += 2 * num_bytes / speeds["bytes_per_second"]
    return total
