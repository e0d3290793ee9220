"""Parts that hold the parameters themselves: near an anchor, or on a corrected course."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from rayfed.methods.part import Batch, ClientView, Part
from rayfed.values import Ge
from rayfed.weights import Weights, squared_distance


@dataclass(frozen=True)
class Proximal(Part):
    """`mu / 2 ||w_local - w||^2` over the parameters. FedProx (Li et al., MLSys 2020), eq. 2."""

    mu: Annotated[float, Ge(0), "pull towards the round's global weights; 0 is FedAvg"] = 0.01

    def begin(self, client: ClientView) -> Weights:
        return client.weights

    def loss(self, batch: Batch, anchor: Weights) -> Tensor:
        return self.mu / 2 * squared_distance(batch.parameters, anchor)
