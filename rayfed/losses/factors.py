"""Factors of losses and temperatures of logits, which cost nothing where they are 1.

Multiplied by 1, every number stays as it is. But each multiplication is one more operation of a
step, and its gradient another.
"""

from torch import Tensor


def scaled(factor: float, term: Tensor) -> Tensor:
    """Return `factor * term`; if the factor is 1, the term itself.

    The term is a scalar, or has a number for each sample, (B,).

    >>> import torch
    >>> term = torch.tensor(3.0)
    >>> scaled(2.0, term), scaled(1.0, term) is term
    (tensor(6.), True)
    """
    return term if factor == 1 else factor * term


def softened(logits: Tensor, tau: float) -> Tensor:
    """Return `logits / tau`, (B, C), for a softmax; if the temperature is 1, the logits themselves.

    >>> import torch
    >>> softened(torch.tensor([3.0, 6.0]), tau=3.0)
    tensor([1., 2.])
    """
    return logits if tau == 1 else logits / tau
