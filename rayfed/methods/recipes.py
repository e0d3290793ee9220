"""Methods by the names of their papers: one line and one citation each.

>>> compose(fedlmd(), Proximal(mu=0.01), ServerMomentum(beta=0.9))  # doctest: +NORMALIZE_WHITESPACE
(Average(by='samples'), ServerMomentum(beta=0.9), CrossEntropy(weight=1.0, smoothing=0.0),
 LabelMaskedDistill(beta=1.0, tau=1.0, teacher=True), Proximal(mu=0.01))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from rayfed.methods.anchors import ControlVariates, Curvature, Proximal
from rayfed.methods.distill import (
    Distill,
    LabelMaskedDistill,
    NotTrueDistill,
    PastTeachersDistill,
    PrototypeSimilarityDistill,
    SelectiveDistill,
)
from rayfed.methods.features import ModelContrast, Prototypes, SlimAlign
from rayfed.methods.part import Part, Parts, arrange
from rayfed.methods.server import Average, DynamicRegularizer, NormalizedAverage, ServerMomentum
from rayfed.methods.supervise import ClassAdaptiveDistill, CrossEntropy, RestrictedCrossEntropy


def compose(*parts: Part | Iterable[Part]) -> Parts:
    """One method of parts and of other methods, flattened, in the order in which they act.

    Where no part fills the slot `supervise`, cross-entropy does; where none fills `average`, the mean by samples does.
    So `compose()` is FedAvg. Raises `InputError` where two parts fill one slot.
    """
    flat = [part for group in parts for part in (group if isinstance(group, Iterable) else (group,))]
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
    """Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Visual Classification" (2019)."""
    return compose(ServerMomentum(beta))


def fedntd(
    beta: float = 1.0, tau: float = 1.0, mix: float = 1.0, form: Literal["kl", "mse"] = "kl", teacher: bool = True
) -> Parts:
    """Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning" (2022)."""
    return compose(NotTrueDistill(beta, tau, mix, form, teacher))


def fedlmd(beta: float = 1.0, tau: float = 1.0, teacher: bool = True) -> Parts:
    """Lu et al., "Federated Learning with Label-Masking Distillation" (ACM MM 2023)."""
    return compose(LabelMaskedDistill(beta, tau, teacher))


def fedlmd_tf(beta: float = 1.0, tau: float = 1.0) -> Parts:
    """FedLMD without a teacher: uniform over the classes that remain (the same paper, eq. 7 and 8)."""
    return compose(LabelMaskedDistill(beta, tau, teacher=False))


def kd(beta: float = 1.0, tau: float = 1.0, form: Literal["kl", "mse"] = "kl") -> Parts:
    """Hinton et al., "Distilling the Knowledge in a Neural Network" (2015), from the global model."""
    return compose(Distill(beta, tau, form))


def fedlsd(beta: float = 0.5, tau: float = 1.0) -> Parts:
    """Local self-distillation: `(1 - beta)` cross-entropy, `beta` distillation (FedNTD, eq. 3; FedCAD's baseline)."""
    return compose(CrossEntropy(weight=1 - beta), Distill(beta, tau))


def fedcad(low: float = 0.25, high: float = 0.5, tau: float = 1.0) -> Parts:
    """He et al., "Class-Wise Adaptive Self Distillation for Federated Learning on Non-IID Data" (AAAI 2022)."""
    return compose(ClassAdaptiveDistill(low, high, tau))


def fedssd(m_max: float = 0.01, inside_norm: bool = True, auxiliary_per_class: int = 64) -> Parts:
    """He et al., "Learning Critically: Selective Self-Distillation in Federated Learning on Non-IID Data" (2022)."""
    return compose(SelectiveDistill(m_max, inside_norm, auxiliary_per_class))


def fedcsd(
    mu: float = 0.001,
    tau: float = 10.0,
    mask: Literal["adaptive", "forcible", "none"] = "adaptive",
    similarity: bool = True,
    decay: float = 0.9,
) -> Parts:
    """Yan et al., "Rethinking Client Drift in Federated Learning: A Logit Perspective" (2023)."""
    return compose(PrototypeSimilarityDistill(mu, tau, mask, similarity, decay))


def label_smoothing(smoothing: float = 0.1) -> Parts:
    """Szegedy et al., "Rethinking the Inception Architecture for Computer Vision" (CVPR 2016), at every client."""
    return compose(CrossEntropy(smoothing=smoothing))


def fedgkd(beta: float = 0.1, tau: float = 1.0, buffer: int = 5) -> Parts:
    """Yao et al., "FedGKD: Local-Global Knowledge Distillation in Heterogeneous Federated Learning" (2021)."""
    return compose(PastTeachersDistill(beta, tau, buffer))


def fedrs(alpha: float = 0.5, soft: bool = False) -> Parts:
    """Li and Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data" (2021)."""
    return compose(RestrictedCrossEntropy(alpha, soft))


def moon(mu: float = 1.0, tau: float = 0.5) -> Parts:
    """Li et al., "Model-Contrastive Federated Learning" (CVPR 2021)."""
    return compose(ModelContrast(mu, tau))


def fedproto(mu: float = 1.0) -> Parts:
    """Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients" (AAAI 2022), on averaging."""
    return compose(Prototypes(mu))


def fedcurv(strength: float = 1.0) -> Parts:
    """Shoham et al., "Overcoming Forgetting in Federated Learning on Non-IID Data" (2019)."""
    return compose(Curvature(strength))


def scaffold() -> Parts:
    """Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (ICML 2020)."""
    return compose(ControlVariates())


def fednova() -> Parts:
    """Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization" (2020)."""
    return compose(NormalizedAverage())


def feddyn(alpha: float = 0.01) -> Parts:
    """Acar et al., "Federated Learning Based on Dynamic Regularization" (ICLR 2021)."""
    return compose(DynamicRegularizer(alpha))


def fedalign(mu: float = 0.45, width: float = 0.25) -> Parts:
    """Mendieta et al., "Local Learning Matters: Rethinking Data Heterogeneity in Federated Learning" (CVPR 2022)."""
    return compose(SlimAlign(mu, width))
