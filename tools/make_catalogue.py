"""Write rayfed/cli/methods.json anew: every method and part, with its parameters, and the bytes that a method sends.

    python tools/make_catalogue.py

`rayfed methods` and the shell's completion read that file, since importing the methods takes seconds. A test holds it
against the code. The bytes are measured: some rounds of each method on a federation of noise.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import rayfed
from rayfed.cli.describe import default_text
from rayfed.clients.settings import Training
from rayfed.data.federation import Federation
from rayfed.data.partition import Iid
from rayfed.data.samples import Samples
from rayfed.job import Job
from rayfed.methods.part import Method
from rayfed.methods.registry import PARTS, RECIPES, parameters
from rayfed.models.classifier import Classifier
from rayfed.rounds.engine import rounds
from rayfed.rounds.local import Site
from rayfed.runtime.here import Here
from rayfed.tensors.trees import num_bytes

CATALOGUE = Path(rayfed.__file__).parent / "cli" / "methods.json"
CLIENTS = 2


def cost(method: Method) -> tuple[float, float]:
    """Bytes per client and round, down and up, in models: FedAvg sends 1 down and 1 up.

    Measured in the third round, when everything that the method sends is there to be sent. Messages that grow with the
    classes or features alone are next to nothing here, as they are for a real model.
    """
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (12, 1, 4, 4), dtype=np.uint8), np.arange(12) % 2
    samples = Samples(images, labels, ("a", "b"))
    dealt = Iid(num_clients=CLIENTS).split(labels, 2)
    federation = Federation(samples, samples, dealt, dealt, (0.5,), (0.5,), auxiliary=np.arange(2))
    with torch.random.fork_rng(devices=[]):
        hidden = [nn.Flatten(), nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 16), nn.ReLU()]
        model = Classifier(nn.Sequential(*hidden), nn.Linear(16, 2))
    training = Training(num_rounds=3, clients_per_round=CLIENTS, local_steps=1, lr=0.001)
    site = Site(model, federation, Job("cost", method=method, train=training), torch.device("cpu"))
    *_, last = rounds(site, Here(site))
    unit = CLIENTS * num_bytes(last.weights)
    return last.bytes_down / unit, last.bytes_up / unit


def entries() -> list[dict[str, Any]]:
    """Every recipe, then every part."""
    found = []
    for kind, makers in (("recipe", RECIPES), ("part", PARTS)):
        for name, maker in makers.items():
            taken = [[parameter, default_text(default), text] for parameter, default, text in parameters(name)]
            entry = {"name": name, "kind": kind, "doc": inspect.getdoc(maker), "parameters": taken}
            if kind == "recipe":
                entry |= dict(zip(("down", "up"), (f"{models:.1f}" for models in cost(RECIPES[name]())), strict=True))
            found.append(entry)
    return found


def text() -> str:
    """The content of the file."""
    return json.dumps(entries(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    CATALOGUE.write_text(text(), encoding="utf-8")
