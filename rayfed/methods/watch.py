"""A part of the user's own must not write to what its hooks are given: other parts and later hooks
get the same tensors.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rayfed.base.errors import BrokenContract, told
from rayfed.methods.part import Part
from rayfed.methods.views import Batch, ClientView, Fit, Outputs, ServerView, Step
from rayfed.tensors.trees import Tree, dotted, leaves


def call(
    part: Part, hook: str, *arguments: Any, watch: bool, client: ClientView | None = None
) -> Any:
    """What a hook gives.

    With `watch`, a part of the user's is refused if it has written to what it was given.

    `client` is the view that an earlier hook was given, where this hook may have got tensors out of
    it. Contents are compared, as `tensor.data` can be written to unseen. This copies all that the
    hook is given.
    """
    function = getattr(part, hook)
    if not watch or not is_users(part):
        return function(*arguments)
    given = dict(_given(arguments if client is None else (*arguments, client)))
    before = {name: tensor.detach().clone() for name, tensor in given.items()}
    values = function(*arguments)
    for name, tensor in given.items():
        if not _same(tensor.detach(), before[name]):
            raise BrokenContract(
                f"{told(type(part))}.{hook} wrote to {name}, which other parts and later hooks get "
                f"too; write to a copy ({name}.clone()), or compute a new tensor: x * 0.9 where "
                "x.mul_(0.9) stands"
            )
    return values


def is_users(part: Part) -> bool:
    """Whether a part is the user's, and not of this package."""
    return type(part).__module__.partition(".")[0] != "rayfed"


def _given(arguments: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a hook is given and may only read, by the names that it has for them."""
    for argument in arguments:
        if isinstance(argument, ClientView):
            yield from _of_client(argument, "client")
        elif isinstance(argument, ServerView):
            yield from _of_tree(argument.weights, "server.weights")
        elif isinstance(argument, Step):
            yield from _of_tree(argument.server.weights, "step.weights")
        elif isinstance(argument, Fit):
            yield from _of_tree(argument.weights, "fit.weights")
        elif isinstance(argument, Batch):
            yield from _of_batch(argument)


def _of_client(client: ClientView, name: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.label_counts", client.label_counts
    yield from _of_tree(client.weights, f"{name}.weights")
    yield from _of_tree(client.state, f"{name}.state")
    yield from _of_tree(client.payload, f"{name}.payload")
    yield from _of_tree(client.memory, f"{name}.memory")


def _of_batch(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    yield "batch.images", batch.images
    yield "batch.labels", batch.labels
    yield "batch.label_counts", batch.label_counts
    # Only where a part has asked for them before.
    outputs = batch.__dict__.get("_outputs")
    if outputs is not None:
        yield from _of_outputs(outputs, "batch")
    for known in batch._frozen.values():
        yield from _of_outputs(known, "batch.teacher")


def _of_outputs(outputs: Outputs, name: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.logits", outputs.logits
    if outputs.features is not None:
        yield f"{name}.features", outputs.features


def _of_tree(tree: Tree, name: str) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            keys = dotted(path) if path else ""
            yield (f"{name}['{keys}']" if keys else name), leaf


def _same(tensor: Tensor, before: Tensor) -> bool:
    """Whether a tensor has the values of before; a NaN is the same as a NaN."""
    if tensor.shape != before.shape or tensor.dtype != before.dtype:
        return False
    equal = tensor == before
    if tensor.is_floating_point():
        equal = equal | (tensor.isnan() & before.isnan())
    return bool(torch.all(equal))
