"""What a method sends, measured: some rounds of it on a federation of noise."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from rayfed.data.augment import Augment
from rayfed.data.federation import Federation
from rayfed.data.partition import Iid
from rayfed.data.samples import Samples
from rayfed.local import Site, Training
from rayfed.methods.part import Method
from rayfed.models import Classifier
from rayfed.rounds import rounds, start
from rayfed.runtime.here import Here
from rayfed.weights import num_bytes, state_of

CLIENTS = 2


@dataclass(frozen=True)
class Cost:
    """Bytes a client and round, in models: FedAvg sends 1 down and 1 up."""

    down: float
    up: float


def cost(method: Method) -> Cost:
    """A method's cost in its third round, when all that it sends is there to be sent.

    What grows with the classes or features alone is next to nothing here, as it is in a real model.
    """
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (12, 1, 4, 4), dtype=np.uint8), np.arange(12) % 2
    samples = Samples(images, labels, ("a", "b"))
    dealt = Iid(num_clients=CLIENTS).split(labels, 2)
    federation = Federation(samples, samples, dealt, (0.5,), (0.5,), auxiliary=np.arange(2))
    with torch.random.fork_rng(devices=[]):
        hidden = [nn.Flatten(), nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 16), nn.ReLU()]
        model = Classifier(nn.Sequential(*hidden), nn.Linear(16, 2))
    training = Training(num_rounds=3, clients_per_round=CLIENTS, local_steps=1, lr=0.001)
    site = Site(model, federation, Augment(), training, method, 0, torch.device("cpu"))
    weights = state_of(model)
    *_, last = rounds(site, start(site, weights, Here(site)), Here(site))
    unit = CLIENTS * num_bytes(weights)
    return Cost(last.bytes_down / unit, last.bytes_up / unit)
