"""Summands: what can be added, and sums of them in a fixed order."""

import math
from typing import Any

import torch
from torch import Tensor

from rayfed.base.errors import NotSummable, Unlike
from rayfed.tensors.trees import (
    Layout,
    Path,
    Tree,
    difference,
    dotted,
    is_container,
    layout_of,
    leaves,
    tree_of,
)
from rayfed.tensors.wire import Packed, Span, bytes_of, within


def checked(summand: Tree) -> Layout:
    """The layout of a summand. Raises ValueError, naming the place, for a NaN or an infinity.

    For a value of another kind than tensors and numbers the error is a `NotSummable`.
    """
    all_finite = _are_finite([leaf for _, leaf in leaves(summand)])
    for path, leaf in leaves(summand):
        wrong_kind = _wrong_kind(leaf)
        if wrong_kind is not None:
            raise NotSummable(f"{wrong_kind} at {dotted(path)}")
        if not _is_number(path, leaf, all_finite):
            raise ValueError(f"holds a NaN or an infinity at {dotted(path)}")
    return layout_of(summand)


def _wrong_kind(leaf: Any) -> str | None:
    """Why a leaf is of a kind that cannot be added to a sum; None where it can."""
    # Of the containers, only empty ones.
    if not (isinstance(leaf, Tensor | int | float | None) or is_container(leaf)):
        return f"holds a {type(leaf).__name__}, which is neither a tensor nor a number,"
    if isinstance(leaf, Tensor) and (
        leaf.is_complex() or leaf.layout != torch.strided or leaf.is_quantized
    ):
        return (
            f"holds a tensor ({leaf.dtype}, {leaf.layout}) that is neither of real numbers nor "
            "dense,"
        )
    return None


def _is_number(path: Path, leaf: Any, all_finite: bool) -> bool:
    """Whether a leaf is finite; its tensor needs no look where it is known that all are finite."""
    numbers = [weight_of(path) or 0, leaf if isinstance(leaf, int | float) else 0]
    return all(map(math.isfinite, numbers)) and (
        all_finite or not isinstance(leaf, Tensor) or _is_finite(leaf)
    )


def _are_finite(values: list[Any]) -> bool:
    """Whether the sums of all tensors are finite: by one look, as each waits for a GPU."""
    dense = [
        value for value in values if isinstance(value, Tensor) and value.layout == torch.strided
    ]
    sums = [value.sum() for value in dense if value.is_floating_point()]
    return not sums or bool(torch.stack([each.to(sums[0]) for each in sums]).isfinite().all())


def _is_finite(tensor: Tensor) -> bool:
    """A sum is a tenth of the work; it is infinite too where finite values are too large."""
    return bool(torch.isfinite(tensor.sum()) or torch.isfinite(tensor).all())


def weight_of(path: Path) -> float | None:
    """How many times a leaf counts in a sum; None where it is in no `Scaled`."""
    weights = [weight for kind, weight in path if kind == "scaled"]
    return math.prod(weights) if weights else None


class OrderedSum:
    """Adds trees in the given order, in float64; integers stay exact integers.

    The order is the caller's, so the bits of the sum do not depend on which client was ready first.
    The product of a float32 weight and a number of samples is exact in float64.

    >>> from rayfed.tensors.trees import Scaled
    >>> total = OrderedSum()
    >>> total.add({"n": 2, "w": Scaled(2, torch.tensor([1.0]))})
    >>> total.add({"n": 1, "w": Scaled(1, torch.tensor([4.0]))})
    >>> total.value
    {'n': 3, 'w': tensor([6.], dtype=torch.float64)}
    """

    def __init__(self) -> None:
        # Of each summand.
        self.layout: Layout | None = None
        # By the path of a leaf without its weights.
        self._totals: dict[Path, Any] = {}
        # Where the tensors among them lie in the buffers.
        self._spans: dict[Path, Span] = {}
        # Dtype -> (n,).
        self._buffers: dict[str, Tensor] = {}

    @property
    def value(self) -> Tree:
        """The sum, without any `Scaled`; None before the first summand."""
        return tree_of(self._totals.items()) if self._totals else None

    def packed(self) -> Packed:
        """The sum as `pack` would give it, without a copy."""
        skeleton = [(path, self._spans.get(path, total)) for path, total in self._totals.items()]
        return Packed(
            skeleton, {dtype: bytes_of(buffer) for dtype, buffer in self._buffers.items()}
        )

    def add(self, summand: Tree, layout: Layout | None = None) -> None:
        """Raises ValueError as `checked` does, and `Unlike` for another layout than before.

        A summand that was checked elsewhere comes with its layout, and so does a sum, with that of
        its summands.
        """
        layout = checked(summand) if layout is None else layout
        first = self.layout is None
        if first:
            self._lay_out(summand)
        elif (unlike := difference(layout, self.layout or {})) is not None:
            raise Unlike(unlike)
        self.layout = layout
        for path, leaf in leaves(summand):
            place, weight = _unscaled(path), weight_of(path)
            total, factor = self._totals[place], 1 if weight is None else weight
            if isinstance(total, Tensor):
                _add(total, leaf, factor, first)
            elif isinstance(leaf, int | float):
                self._totals[place] = leaf * factor if first else total + leaf * factor
            else:
                self._totals[place] = leaf

    def _lay_out(self, summand: Tree) -> None:
        """Make room for the tensors of the first summand, which fills it."""
        ends: dict[str, int] = {}
        for path, leaf in leaves(summand):
            place = _unscaled(path)
            # For the order.
            self._totals[place] = None
            if isinstance(leaf, Tensor):
                # A weighted integer, such as BatchNorm's count of batches, has a mean that is none.
                is_integer = weight_of(path) is None and not leaf.is_floating_point()
                dtype = "int64" if is_integer else "float64"
                self._spans[place] = Span(dtype, ends.get(dtype, 0), tuple(leaf.shape))
                ends[dtype] = self._spans[place].start + leaf.numel()
                device = leaf.device
        for dtype, end in ends.items():
            self._buffers[dtype] = torch.empty(end, dtype=getattr(torch, dtype), device=device)
        for place, span in self._spans.items():
            self._totals[place] = within(self._buffers[span.dtype], span)


def _unscaled(path: Path) -> Path:
    return tuple(step for step in path if step[0] != "scaled")


def _add(total: Tensor, leaf: Tensor, factor: float, first: bool) -> None:
    """`total += factor * leaf`, the `first` time `=`."""
    leaf = leaf.detach()
    if leaf.dtype not in (torch.float32, torch.float64) or leaf.device != total.device:
        # Torch itself converts float32 while it adds, without a copy in float64.
        leaf = leaf.to(total)
    if first:
        total.copy_(leaf).mul_(factor)
    else:
        total.add_(leaf, alpha=factor)
