"""Methods by the names of their papers: one line and one citation each.

>>> compose(fedlmd(), Proximal(mu=0.01), ServerMomentum(beta=0.9))  # doctest: +NORMALIZE_WHITESPACE
(Average(by='samples'), ServerMomentum(beta=0.9), CrossEntropy(weight=1.0, smoothing=0.0),
 LabelMaskedDistill(beta=1.0, tau=1.0, teacher=True), Proximal(mu=0.01))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from rayfed.methods.anchors import Proximal
from rayfed.methods.distill import LabelMaskedDistill, NotTrueDistill
from rayfed.methods.part import Part, Parts, arrange
from rayfed.methods.server import Average, ServerMomentum
from rayfed.methods.supervise import CrossEntropy


def compose(*parts: Part | Iterable[Part]) -> Parts:
    """One method of parts and of other methods, flattened, in the order in which they act.

    Where no part fills the slot `supervise`, cross-entropy does; where none fills `average`, the mean by samples does.
    So `compose()` is FedAvg. Raises `InputError` where two parts fill one slot.
    """
    flat = [part for group in parts for part in ((group,) if isinstance(group, Part) else group)]
    slots = {part.slot for part in flat if isinstance(part, Part)}
    defaults = [part for part in (Average(), CrossEntropy()) if part.slot not in slots]
    return arrange((*defaults, *flat))


def fedavg() -> Parts:
    """McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017)."""
    return compose()


def fedprox(mu: float = 0.01) -> Parts:
    """Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020)."""
    return compose(Proximal(mu))


def fedavgm(beta: float = 0.9) -> Parts:
    """Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification" (2019)."""
    return compose(ServerMomentum(beta))


def fedntd(
    beta: float = 1.0, tau: float = 1.0, mix: float = 1.0, form: Literal["kl", "mse"] = "kl", teacher: bool = True
) -> Parts:
    """Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning" (NeurIPS 2022)."""
    return compose(NotTrueDistill(beta, tau, mix, form, teacher))


def fedlmd(beta: float = 1.0, tau: float = 1.0, teacher: bool = True) -> Parts:
    """Lu et al., "Federated Learning with Label-Masking Distillation" (ACM MM 2023)."""
    return compose(LabelMaskedDistill(beta, tau, teacher))


def fedlmd_tf(beta: float = 1.0, tau: float = 1.0) -> Parts:
    """FedLMD without a teacher: uniform over the classes that remain (the same paper, eq. 7 and 8)."""
    return compose(LabelMaskedDistill(beta, tau, teacher=False))
