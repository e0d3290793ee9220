"""Summands (trees that can be added up), and their sum in a fixed order."""

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
    """Return the layout of a summand.

    Raise ValueError, with the place, for a NaN or an infinity. Raise `NotSummable` for a value that
    is neither a tensor nor a number.
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
    """Return why a leaf is of a kind that cannot be added to a sum; None if it can be added."""
    # A leaf that is a container is an empty one, which a sum may hold.
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
    """Say whether a leaf and its weight are finite.

    With `all_finite`, all tensors are known to be finite, and the leaf's values are not read again.
    """
    if not math.isfinite(weight_of(path) or 0):
        return False
    if isinstance(leaf, Tensor):
        return all_finite or _is_finite(leaf)
    return not isinstance(leaf, int | float) or math.isfinite(leaf)


def _are_finite(values: list[Any]) -> bool:
    """Say whether the sums of all dense tensors of real numbers are finite.

    All sums are read from a GPU at once, because each read waits for the GPU.
    """
    dense = [
        value for value in values if isinstance(value, Tensor) and value.layout == torch.strided
    ]
    sums = [value.sum() for value in dense if value.is_floating_point()]
    if not sums:
        return True
    together = torch.stack([total.to(sums[0]) for total in sums])
    return bool(together.isfinite().all())


def _is_finite(tensor: Tensor) -> bool:
    """Say whether all values of a tensor are finite.

    Their sum is read first, which is a tenth of the work. If values are very large, it is infinite
    although they are finite, so then each value is read.
    """
    return bool(torch.isfinite(tensor.sum()) or torch.isfinite(tensor).all())


def weight_of(path: Path) -> float | None:
    """Return how many times a leaf counts in a sum; None if it is in no `Scaled`.

    >>> weight_of((("scaled", 3), ("dict", "w")))
    3
    """
    weights = [weight for kind, weight in path if kind == "scaled"]
    return math.prod(weights) if weights else None


class OrderedSum:
    """Adds trees in the given order, in float64; integers stay exact integers.

    The sum of floats depends on their order. The caller fixes it, so the bits of the sum do not
    depend on which client was ready first. The product of a float32 weight and a number of samples
    is exact in float64.

    >>> from rayfed.tensors.trees import Scaled
    >>> total = OrderedSum()
    >>> total.add({"n": 2, "w": Scaled(2, torch.tensor([1.0]))})
    >>> total.add({"n": 1, "w": Scaled(1, torch.tensor([4.0]))})
    >>> total.value
    {'n': 3, 'w': tensor([6.], dtype=torch.float64)}
    """

    def __init__(self) -> None:
        # The layout that all summands have.
        self.layout: Layout | None = None
        # The sums, by the path of a leaf without its weights.
        self._totals: dict[Path, Any] = {}
        # The places in the buffers of the sums that are tensors.
        self._spans: dict[Path, Span] = {}
        # By dtype, (n,).
        self._buffers: dict[str, Tensor] = {}

    @property
    def value(self) -> Tree:
        """Return the sum, without any `Scaled`; None before the first summand."""
        return tree_of(self._totals.items()) if self._totals else None

    def packed(self) -> Packed:
        """Return the sum as `pack` would return it, without a copy."""
        skeleton = [(path, self._spans.get(path, total)) for path, total in self._totals.items()]
        buffers = {dtype: bytes_of(buffer) for dtype, buffer in self._buffers.items()}
        return Packed(skeleton, buffers)

    def add(self, summand: Tree, layout: Layout | None = None) -> None:
        """Add a summand to the sum.

        A summand that was checked elsewhere comes with its layout. A sum comes with the layout of
        its summands. Without a layout, raise ValueError as `checked` does. Raise `Unlike` if the
        layout differs from the layout of the first summand.
        """
        layout = checked(summand) if layout is None else layout
        is_first = self.layout is None
        if self.layout is None:
            self._lay_out(summand)
        else:
            unlike = difference(layout, self.layout)
            if unlike is not None:
                raise Unlike(unlike)
        self.layout = layout
        for path, leaf in leaves(summand):
            place, weight = _unscaled(path), weight_of(path)
            factor = 1 if weight is None else weight
            total = self._totals[place]
            if isinstance(total, Tensor):
                _add(total, leaf, factor, is_first)
            elif isinstance(leaf, int | float):
                self._totals[place] = leaf * factor if is_first else total + leaf * factor
            else:
                self._totals[place] = leaf

    def _lay_out(self, summand: Tree) -> None:
        """Make room for the tensors of the first summand; `add` fills it."""
        ends: dict[str, int] = {}
        for path, leaf in leaves(summand):
            place = _unscaled(path)
            # The keys are set in the order of the leaves, which the sum keeps.
            self._totals[place] = None
            if isinstance(leaf, Tensor):
                # The mean of weighted integers, for example of BatchNorm's count of batches, need
                # not be an integer.
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
    """Return a path without its weights."""
    return tuple(step for step in path if step[0] != "scaled")


def _add(total: Tensor, leaf: Tensor, factor: float, is_first: bool) -> None:
    """Add `factor * leaf` to `total` in place; the first summand overwrites it."""
    leaf = leaf.detach()
    # Torch converts float32 while it adds, without a copy in float64; other types are converted.
    if leaf.dtype not in (torch.float32, torch.float64) or leaf.device != total.device:
        leaf = leaf.to(total)
    if is_first:
        total.copy_(leaf).mul_(factor)
    else:
        total.add_(leaf, alpha=factor)
