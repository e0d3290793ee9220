"""The order in which a client sees its images."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rayfed.clients.settings import Training


def batches(num_examples: int, training: Training, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield the indices of each step's batch, shuffled again in every epoch.

    The last batch of an epoch may be smaller. A part of an epoch is its first batches, so a random
    part of the images.

    >>> [b.tolist() for b in batches(3, Training(batch_size=2), torch.Generator().manual_seed(0))]
    [[2, 0], [1]]
    """
    per_epoch = -(-num_examples // training.batch_size)
    for step in range(training.steps(num_examples)):
        if step % per_epoch == 0:
            order = torch.randperm(num_examples, generator=rng)
        start = step % per_epoch * training.batch_size
        yield order[start : start + training.batch_size]
