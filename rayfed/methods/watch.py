"""Checks that a user's part does not write to the tensors that its hooks receive.

Other parts and later hooks get the same tensors.
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
    """Call a hook, and return its result.

    With `watch`, raise `BrokenContract` if a user's part has written to a tensor that it received.
    `client` is the view that an earlier hook received, if this hook may have tensors from it.
    Contents are compared, because a write to `tensor.data` is not counted. This copies all tensors
    that the hook receives.
    """
    function = getattr(part, hook)
    if not watch or not is_users(part):
        return function(*arguments)
    tensors = dict(_tensors(*arguments))
    if client is not None:
        tensors.update(_of_client(client, "client"))
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    values = function(*arguments)
    for name, tensor in tensors.items():
        if not _same(tensor.detach(), before[name]):
            raise BrokenContract(
                f"{told(type(part))}.{hook} wrote to {name}, which other parts and later hooks get "
                f"too; write to a copy ({name}.clone()), or compute a new tensor: x * 0.9 where "
                "x.mul_(0.9) stands"
            )
    return values


def is_users(part: Part) -> bool:
    """Say whether a part is the user's, and not of this package."""
    return type(part).__module__.partition(".")[0] != "rayfed"


def _tensors(*arguments: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a hook may only read, by the names that the hook has for them."""
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
    """Yield the tensors of a client's view."""
    yield f"{name}.label_counts", client.label_counts
    yield from _of_tree(client.weights, f"{name}.weights")
    yield from _of_tree(client.state, f"{name}.state")
    yield from _of_tree(client.payload, f"{name}.payload")
    yield from _of_tree(client.memory, f"{name}.memory")


def _of_batch(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch, and the outputs that parts have asked for until now."""
    yield "batch.images", batch.images
    yield "batch.labels", batch.labels
    yield "batch.label_counts", batch.label_counts
    # The attribute `batch._outputs` would run the model now.
    outputs = batch.__dict__.get("_outputs")
    if outputs is not None:
        yield from _of_outputs(outputs, "batch")
    for teacher_outputs in batch._frozen.values():
        yield from _of_outputs(teacher_outputs, "batch.teacher")


def _of_outputs(outputs: Outputs, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the logits, and the features if there are any."""
    yield f"{name}.logits", outputs.logits
    if outputs.features is not None:
        yield f"{name}.features", outputs.features


def _of_tree(tree: Tree, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tree."""
    for path, leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            keys = dotted(path) if path else ""
            yield (f"{name}['{keys}']" if keys else name), leaf


def _same(tensor: Tensor, before: Tensor) -> bool:
    """Say whether a tensor has the same values as before; a NaN is the same as a NaN."""
    if tensor.shape != before.shape or tensor.dtype != before.dtype:
        return False
    equal = tensor == before
    if tensor.is_floating_point():
        equal = equal | (tensor.isnan() & before.isnan())
    return bool(torch.all(equal))
