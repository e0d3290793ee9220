"""Half precision: a sum over a batch of logits of size 1e3 leaves float16's range, and bfloat16's digits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Loss = TypeVar("Loss", bound=Callable[..., Tensor])


def in_float32(loss: Loss) -> Loss:
    """Compute in float32 what is given in half precision; the result has the type of the first argument again."""

    @functools.wraps(loss)
    def widened(*args: Any, **kwargs: Any) -> Tensor:
        first = args[0] if args else next(iter(kwargs.values()))
        if first.dtype not in (torch.float16, torch.bfloat16):
            return loss(*args, **kwargs)
        if args:
            return loss(first.float(), *args[1:], **kwargs).to(first.dtype)
        return loss(**{**kwargs, next(iter(kwargs)): first.float()}).to(first.dtype)

    return cast(Loss, widened)


def constant(x: Tensor, like: Tensor) -> Tensor:
    """A tensor that takes no gradient, in the type and on the device of another."""
    return x.detach().to(like)
