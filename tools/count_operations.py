"""Count the operations of every method's training.

They are what a GPU would have to launch, and the reads for which the driver would wait.

    python tools/count_operations.py --models cnn resnet8        # a table, as in docs/gpu.md
    python tools/count_operations.py fedavg --models cnn --names # with a step's most frequent ones

They are counted on a CPU, below autograd, forward and backward, in the layout that models have on
GPUs: views are left out, and a fused or `_foreach_` operation on all tensors counts once. A step's
count is what a round gains with one more step per client; a client's is what it gains with one more
client, less its steps. Waits are reads of a number, and sizes that depend on values; a copy to a
CPU is not seen.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rayfed
from rayfed.methods import RECIPES
from rayfed.methods.part import trains
from rayfed.models.convnets import MaxPool
from rayfed.rounds import engine
from rayfed.rounds.setup import Setup, open_setup
from rayfed.runtime.this_process import ThisProcess

# Of the larger round; the smaller ones have one less.
CLIENTS, STEPS = 3, 3
# What makes a CPU wait for its GPU: a number is read, or a size depends on values.
WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique",
    "unique",
    "repeat_interleave.Tensor",
    "equal",
)
WORKLOAD = {
    "train.num_rounds": 3,
    "train.clients_per_round": CLIENTS,
    "train.batch_size": 32,
    "train.eval_every": 100,
    "data.partition": {"name": "iid", "num_clients": 4},
    # The operations are as many for any size.
    "data.size": 8,
    "ray.mode": "off",
}


class Counted(TorchDispatchMode):
    """Counts operations while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = str(func).removeprefix("aten.")
        is_view = any(
            each.alias_info and not each.alias_info.is_write for each in func._schema.returns
        )
        if not is_view:
            self.operations[name] += 1
        by_mask = name.startswith("index") and any(_is_mask(each) for each in args)
        if name.startswith(WAITS) or by_mask:
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))


def _is_mask(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.bool
    return isinstance(value, list | tuple) and any(_is_mask(each) for each in value)


def counted(setup: Setup, clients: int, steps: int) -> Counted:
    """What the third round of a job does, with so many clients and steps; the same clients have
    trained before.
    """
    job = replace(setup.job, train=replace(setup.job.train, local_steps=steps))
    setup, counts = replace(setup, job=job), Counted()
    executor = ThisProcess(setup)
    last = engine.start(setup, executor)
    for _ in range(2):
        last = engine.play(setup, last, executor, [*range(CLIENTS)])
    # As on a GPU
    with counts, patch.object(MaxPool, "forward", torch.nn.MaxPool2d.forward):
        engine.play(setup, last, executor, [*range(clients)])
    return counts


def per_step(setup: Setup) -> tuple[Counter[str], Counter[str], int, int]:
    """Operations and waits per step, and the numbers of both per client beside its steps."""
    # As GPUs get it.
    setup.model.to(memory_format=torch.contiguous_format)
    more, less = counted(setup, CLIENTS, STEPS), counted(setup, CLIENTS, STEPS - 1)
    fewer = counted(setup, CLIENTS - 1, STEPS)
    step, waits = (
        _over(a, b, CLIENTS)
        for a, b in ((more.operations, less.operations), (more.waits, less.waits))
    )
    client = (more.operations.total() - fewer.operations.total()) - STEPS * step.total()
    waits_of_client = (more.waits.total() - fewer.waits.total()) - STEPS * waits.total()
    return step, waits, client, waits_of_client


def _over(more: Counter[str], less: Counter[str], clients: int) -> Counter[str]:
    difference = {name: more[name] - less[name] for name in more if more[name] != less[name]}
    return Counter({name: count // clients for name, count in difference.items()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", help="all that train clients, if none is given")
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet8"])
    parser.add_argument(
        "--names", action="store_true", help="also the most frequent operations of a step"
    )
    options = parser.parse_args()
    methods = options.methods or [name for name in RECIPES if trains(RECIPES[name]())]
    head = [
        f"{model}: {what}"
        for model in options.models
        for what in ("per step", "waits", "per client", "waits")
    ]
    print("| method |", " | ".join(head), "|")
    print("|---|" + "---|" * len(head))
    with tempfile.TemporaryDirectory() as runs:
        for method in methods:
            cells = []
            for model in options.models:
                if method == "fedbn" and model == "cnn":
                    # It has no BatchNorm, which FedBN is about.
                    cells += ["-"] * 4
                    continue
                changed = {**WORKLOAD, "model.name": model, "method": method, "output.path": runs}
                setup = open_setup(rayfed.read_job("jobs/quickstart.toml", changed))
                step, waits, client, waits_of_client = per_step(setup)
                cells += [step.total(), waits.total(), client, waits_of_client]
                if options.names:
                    print(f"{method}, {model}:", *step.most_common(12), "waits:", *waits.items())
            print(f"| {method} |", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
