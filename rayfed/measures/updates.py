"""Measures of a round: how much its clients' updates agree. `P` parameters."""

from __future__ import annotations

import math

import torch
from torch import nn

from rayfed.measures import metrics
from rayfed.measures.failing import warn_of_failure
from rayfed.tensors.trees import Scaled, Tree
from rayfed.tensors.weights import Weights, parameters_of

# The slot of `update_summand`, beside the slots of the parts. No part can have this name.
UPDATES = "updates, to be measured"


def update_summand(before: Weights, after: nn.Module) -> Tree:
    """Return a client's update as a summand for `agreement`.

    It holds the update of the parameters, the update scaled to length 1, and its squared length. If
    this fails, a warning is logged and the summand is zero, because all clients' summands must have
    the same layout.
    """
    parameters = parameters_of(after)
    try:
        update = torch.cat(
            [(p.detach() - before[name]).flatten() for name, p in parameters.items()]
        )
        length = float(torch.linalg.vector_norm(update, dtype=torch.float64))
        if not math.isfinite(length):
            raise ValueError("an update is not finite")
        clients = 1
    except Exception as error:
        warn_of_failure("drift", error)
        update = torch.cat([torch.zeros(p.numel(), dtype=p.dtype) for p in parameters.values()])
        clients, length = 0, 0.0
    unit = Scaled(1 / length if length else 0.0, update)
    return {
        "clients": clients,
        "moved": int(length > 0),
        "squares": length**2,
        "updates": update,
        "units": unit,
    }


def agreement(total: Tree, clients: int) -> dict[str, float]:
    """Return how much the updates of a round's clients agree, from the sum of their summands.

    It is empty if the summand of a client has failed. Every client counts once, whatever its number
    of images (FedNTD section 2.3, eq. 8).
    """
    if total is None or total["clients"] < clients:
        return {}
    diversity = metrics.gradient_diversity(total["updates"].numpy(), total["squares"], clients)
    cosine = metrics.mean_pairwise_cosine(total["units"].numpy(), total["moved"], clients)
    return {"drift.gradient_diversity": diversity, "drift.update_cosine": cosine}
