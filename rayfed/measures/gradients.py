"""Measures of the clients' gradients at the global model: how much they disagree.

`C` classes, `K` clients, `P` parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from rayfed.measures import metrics
from rayfed.tensors.trees import Scaled, Tree

# The slot of a client's summand, beside the slots of the parts. No part can have this name.
GRADIENTS = "gradients, to be measured"


class ClassGradients:
    """A client's gradient, as the sum of its gradients by class, weighed by its labels.

    FedNTD section 2.3: the gradient is `sum_c p_c g_c`, with `g_c` the mean gradient of the images
    of class `c`. The gradients by class are not kept: each has P numbers.

    >>> one, other = torch.tensor([2.0, 0.0]), torch.tensor([0.0, 4.0])
    >>> found = ClassGradients(np.array([0.75, 0.25]), [one, other])
    >>> found.gradient, found.lengths, found.cosine()
    (tensor([1.5000, 1.0000]), [2.0, 4.0], 0.0)
    """

    def __init__(self, p: np.ndarray, by_class: Iterable[Tensor]) -> None:
        """Add up the gradients of the classes that a client holds, in the order of the classes.

        `p` (C,) is the client's label distribution.
        """
        self.p = p
        self.lengths: list[float] = []
        total: Tensor | None = None
        units: Tensor | None = None
        for share, of_class in zip(p[p > 0], by_class, strict=True):
            gradient = of_class.double()
            length = float(torch.linalg.vector_norm(gradient))
            self.lengths.append(length)
            unit = gradient / length if length else gradient
            total = share * gradient if total is None else total + share * gradient
            units = unit if units is None else units + unit
        if total is None or units is None or not total.isfinite().all():
            raise ValueError("a gradient is not finite")
        self.gradient = total.float()
        self._units = units

    def cosine(self) -> float:
        """Return the cosine of two classes' gradients, averaged over all pairs; nan for one class.

        FedNTD's Proposition 1 assumes that it is 0.
        """
        moved = sum(length > 0 for length in self.lengths)
        return metrics.mean_pairwise_cosine(self._units.cpu().numpy(), moved, len(self.lengths))

    def spread(self) -> float:
        """Return the deviation of the lengths of the classes' gradients over their mean.

        FedNTD's Proposition 1 assumes that it is 0.
        """
        mean = float(np.mean(self.lengths))
        return float(np.std(self.lengths)) / mean if mean else math.nan

    def notes(self) -> Iterator[tuple[str, float]]:
        """Yield what is noted of the client: of its classes only what its classes define."""
        yield "length", float(torch.linalg.vector_norm(self.gradient, dtype=torch.float64))
        for name, value in (("class_cosine", self.cosine()), ("class_spread", self.spread())):
            if not math.isnan(value):
                yield name, value


def gradient_summand(
    gradients: ClassGradients | None, num_parameters: int, num_examples: int
) -> Tree:
    """Return what a client adds for `dissimilarity`.

    It is zero if the client's gradients could not be measured, because all clients' summands must
    have the same layout.
    """
    gradient = torch.zeros(num_parameters)
    clients, squares, variance = 0, 0.0, 0.0
    if gradients is not None:
        gradient = gradients.gradient
        clients = 1
        squares = float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
        variance = float(np.var(gradients.p))
    return {
        "clients": clients,
        "examples": num_examples,
        "squares": squares,
        "squares_by_examples": num_examples * squares,
        "gradients": gradient,
        "gradients_by_examples": Scaled(float(num_examples), gradient),
        "variance": variance,
    }


def dissimilarity(total: Tree, clients: int, num_classes: int) -> dict[str, float]:
    """Return how much the gradients of a round's clients differ, from the sum of their summands.

    It is empty if a client's gradients could not be measured.
    """
    if total is None or total["clients"] < clients:
        return {}
    diversity = metrics.gradient_diversity(total["gradients"].numpy(), total["squares"], clients)
    b_squared = metrics.gradient_diversity(
        total["gradients_by_examples"].numpy(), total["squares_by_examples"], total["examples"]
    )
    return {
        "gradients.diversity": diversity,
        "gradients.dissimilarity": math.sqrt(b_squared),
        "gradients.bound": diversity_bound(total["variance"], clients, num_classes),
    }


def diversity_bound(variance: float, clients: int, num_classes: int) -> float:
    """Return M of FedNTD's Proposition 1, from the sum of the variances of K clients' labels.

    The variance is that of a client's label distribution over the C classes. The proposition says
    that the diversity of the gradients falls by at least `M / (1 + beta)^2`, if knowledge of the
    other classes is kept with the weight `beta`.

    `M = 2 C^3 / (K (C - 1)^2) sum_k Var_c[p_k]`. The paper prints `K^3` for `K`: its eq. 20 lacks
    the `1 / K` of the mean gradient, which the definition of the diversity has (eq. 8).

    >>> diversity_bound(variance=2 * 0.25, clients=2, num_classes=2)  # two clients of one class
    4.0
    """
    if num_classes < 2:
        return math.nan
    return 2 * num_classes**3 / (clients * (num_classes - 1) ** 2) * variance
