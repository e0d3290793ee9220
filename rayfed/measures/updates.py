"""Measures of a round: how much its clients' updates agree. `P` parameters."""

from __future__ import annotations

import math

import torch
from torch import nn

from rayfed.measures import metrics
from rayfed.measures.failing import warn_of_failure
from rayfed.tensors.trees import Scaled, Tree
from rayfed.tensors.weights import Weights, parameters_of

# The slot of `summand`: beside those of the parts, and none of them.
UPDATES = "updates, to be measured"


def summand(before: Weights, after: nn.Module) -> Tree:
    """A client's update, for `of_round`: as it is, scaled to length 1, and its squared length;
    parameters only.

    Where this fails, it is a summand of zeros, as summands must be alike, with a warning.
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


def of_round(total: Tree, clients: int) -> dict[str, float]:
    """How much the updates of a round's clients agree, from the total of their summands; nothing if
    one has failed.

    FedNTD section 2.3, eq. 8. Every client counts once, whatever its number of images.
    """
    if total is None or total["clients"] < clients:
        return {}
    diversity = metrics.gradient_diversity(total["updates"].numpy(), total["squares"], clients)
    cosine = metrics.mean_pairwise_cosine(total["units"].numpy(), total["moved"], clients)
    return {"drift.gradient_diversity": diversity, "drift.update_cosine": cosine}
