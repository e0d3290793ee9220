"""The loss around the weights of global models: under noise, and along eigenvectors of the Hessian.

The loss is the mean cross-entropy on test images. Shapes: `B` images, `P` parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import functional_call, grad

from rayfed.measures.clients import sampled
from rayfed.papers.models import SEED, opened
from rayfed.papers.panels import apart, legend, line, panels, single, span
from rayfed.report.measured import num_test_examples
from rayfed.report.read import Run
from rayfed.rounds.evaluation import batches_of_test, evaluating
from rayfed.rounds.setup import Setup
from rayfed.tensors.weights import Weights, in_evaluation, parameters_of, with_weights

# The deviations of the noise, as shares of the root mean square of a parameter's values.
LEVELS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
# How often noise is drawn at each level.
DRAWS = 5
# How far the picture of a loss reaches along an eigenvector of length 1, on both sides.
SPAN = 0.5
# A power iteration ends if the Hessian turns its vector by less than this, or after so many steps.
TOLERANCE = 1e-2
MOST_STEPS = 100

# A loss as a function of one vector with all parameters, (P,).
Loss = Callable[[Tensor], Tensor]

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LossSpace:
    """The loss of a model as a function of its parameters, on some test images."""

    # The parameters in one vector, (P,).
    origin: Tensor
    # The slices of the vector that are one parameter each.
    slices: list[slice]
    loss: Loss


def loss_space(setup: Setup, weights: Weights, images: int) -> LossSpace:
    """Return the loss of a model around some weights, on so many test images."""
    model = in_evaluation(with_weights(setup.model, weights))
    parameters = parameters_of(model)
    names, shapes, sizes = [], [], []
    for name, parameter in parameters.items():
        names.append(name)
        shapes.append(parameter.shape)
        sizes.append(parameter.numel())
    rows = sampled(len(setup.federation.test), images, SEED)
    batches = list(batches_of_test(setup, rows, 0))

    def loss(vector: Tensor) -> Tensor:
        """Return the mean loss of the model with these parameters."""
        pieces = [part.view(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)]
        entries = dict(zip(names, pieces, strict=True))
        total = vector.new_zeros(())
        for inputs, labels in batches:
            logits = functional_call(model, entries, (inputs,))
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        return total / len(rows)

    ends = np.cumsum(sizes).tolist()
    slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    flat = [parameter.detach().reshape(-1) for parameter in parameters.values()]
    return LossSpace(torch.cat(flat), slices, loss)


def images_of(runs: Sequence[Run], most: int) -> str:
    """Return on how many test images the loss is taken: `most`, or all if there are fewer."""
    return span(min(most, num_test_examples(run)) for run in runs)


def noise(
    runs: Sequence[Run], round: int | None = None, images: int = 1000, width: float | None = None
) -> Figure:
    """Draw how the loss of global models changes under Gaussian noise on the weights.

    FedNTD Fig. 14a. The deviation of the noise is a share of the root mean square of each
    parameter's values. A point is the mean over draws and seeds, with a band of the deviation.
    """
    groups = apart(runs)
    changes = {}
    for name, group in groups.items():
        of_runs = [changes_of(run, round, images) for run in group.runs]
        changes[name] = np.concatenate(of_runs)
    counts = span(len(values) for values in changes.values())
    caption = (
        f"Change of the loss on {images_of(runs, images)} test images under noise: mean and "
        f"standard deviation of n = {counts} draws"
    )
    width = width or 4.5
    figure, axes = panels(caption, 1, 1, 0.7 * width, width=width)
    levels = 100 * np.array(LEVELS)
    for number, (name, values) in enumerate(changes.items()):
        mean, deviation = values.mean(axis=0), values.std(axis=0)
        band = mean - deviation, mean + deviation
        line(axes[0, 0], number, levels, mean, band, name, len(changes))
    words = "noise (% of a parameter's root mean square)"
    axes[0, 0].set(xlabel=words, ylabel="change of the test loss", xticks=levels)
    legend(figure, axes[0, 0])
    return figure


def changes_of(run: Run, round: int | None, images: int) -> np.ndarray:
    """Return the change of a global model's loss in each draw of noise, (draws, levels)."""
    with opened(run) as again, evaluating(again.setup):
        space = loss_space(again.setup, again.global_model(round), images)
        return changes_under_noise(space)


def changes_under_noise(space: LossSpace) -> np.ndarray:
    """Return the change of a loss in each draw of noise, (draws, levels).

    A draw has one direction for all levels. Directions have a fixed seed.
    """
    generator = torch.Generator().manual_seed(SEED)
    changes = np.zeros((DRAWS, len(LEVELS)))
    with torch.no_grad():
        scale = torch.zeros_like(space.origin)
        for part in space.slices:
            scale[part] = space.origin[part].square().mean().sqrt()
        clean = float(space.loss(space.origin))
        for draw in range(DRAWS):
            direction = scale * torch.randn(space.origin.shape, generator=generator)
            for place, level in enumerate(LEVELS):
                changes[draw, place] = float(space.loss(space.origin + level * direction)) - clean
    return changes


def landscape(
    runs: Sequence[Run],
    round: int | None = None,
    images: int = 500,
    grid: int = 21,
    width: float | None = None,
) -> Figure:
    """Draw the loss of global models along the two leading eigenvectors of its Hessian.

    FedNTD Fig. 14b. Runs stand side by side, with one scale. Eigenvectors have the length 1.
    """
    by_name = single(runs, "a landscape")
    surfaces = {}
    for name, run in by_name.items():
        with opened(run) as again, evaluating(again.setup):
            space = loss_space(again.setup, again.global_model(round), images)
            values, vectors = leading(space.loss, space.origin, 2)
            axes_of_run = [uphill(space, vector) for vector in vectors]
            surfaces[name] = values, surface(space, axes_of_run, grid)
    low = min(float(losses.min()) for _, losses in surfaces.values())
    high = max(float(losses.max()) for _, losses in surfaces.values())
    caption = (
        f"The loss on {images_of(runs, images)} test images along the two leading eigenvectors of "
        "its Hessian, "
        f"from {-SPAN:g} to {SPAN:g}"
    )
    width = width or max(4.0, 3.4 * len(surfaces))
    options: dict[str, Any] = {"subplot_kw": {"projection": "3d"}}
    height = 0.85 * width / len(surfaces)
    figure, axes = panels(caption, 1, len(surfaces), height, width=width, **options)
    places = np.linspace(-SPAN, SPAN, grid)
    along, across = np.meshgrid(places, places, indexing="ij")
    for panel, (name, (values, losses)) in zip(axes[0], surfaces.items(), strict=True):
        scale = {"cmap": "viridis", "vmin": low, "vmax": high}
        panel.plot_surface(along, across, losses, rstride=1, cstride=1, linewidth=0.1, **scale)
        words = ", ".join(f"{value:.3g}" for value in values)
        panel.set_title(f"{name}\neigenvalues {words}")
        panel.set(xlabel="$\\epsilon_0$", ylabel="$\\epsilon_1$", zlabel="test loss")
        for axis in (panel.xaxis, panel.yaxis):
            axis.label.set_parse_math(True)
        panel.set_zlim(low, high)
        panel.grid(False)
        # Without it, the label of the last panel would be cut off.
        panel.set_box_aspect(None, zoom=0.78)
    return figure


def surface(space: LossSpace, vectors: Sequence[Tensor], grid: int) -> np.ndarray:
    """Return the loss at the points of a grid along two vectors, (grid, grid)."""
    places = np.linspace(-SPAN, SPAN, grid)
    losses = np.zeros((grid, grid))
    first, second = vectors
    with torch.no_grad():
        for row, one in enumerate(places):
            for column, two in enumerate(places):
                losses[row, column] = float(space.loss(space.origin + one * first + two * second))
    return losses


def uphill(space: LossSpace, vector: Tensor) -> Tensor:
    """Return a vector or its opposite: the one at whose end the loss is higher.

    So landscapes of several runs lie in the same way.
    """
    with torch.no_grad():
        ahead = float(space.loss(space.origin + SPAN * vector))
        behind = float(space.loss(space.origin - SPAN * vector))
    return vector if ahead >= behind else -vector


def leading(loss: Loss, origin: Tensor, count: int) -> tuple[list[float], list[Tensor]]:
    """Return the eigenvalues of a loss's Hessian that are largest in size, and their eigenvectors.

    Each comes from a power iteration on products of the Hessian with a vector, from which the
    eigenvectors before it are taken away. A warning says if one has not settled.

    >>> def bowl(x):
    ...     return 3 * x[0] ** 2 + x[1] ** 2 - x[2] ** 2 / 4
    >>> values, vectors = leading(bowl, torch.zeros(3), 2)
    >>> [round(value, 2) for value in values], [vector.abs().round() for vector in vectors]
    ([6.0, 2.0], [tensor([1., 0., 0.]), tensor([0., 1., 0.])])
    """
    generator = torch.Generator().manual_seed(SEED)
    values: list[float] = []
    vectors: list[Tensor] = []
    for _ in range(count):
        drawn = torch.randn(origin.shape, generator=generator, dtype=origin.dtype)
        value, vector = next_leading(loss, origin, drawn, vectors)
        values.append(value)
        vectors.append(vector)
    # Where two are nearly of one size, the smaller may have been found first.
    order = sorted(range(count), key=lambda place: -abs(values[place]))
    return [values[place] for place in order], [vectors[place] for place in order]


def next_leading(
    loss: Loss, origin: Tensor, begin: Tensor, found: Sequence[Tensor]
) -> tuple[float, Tensor]:
    """Return the largest eigenvalue apart from those that were found, and its eigenvector."""
    vector = without(begin, found)
    vector = vector / vector.norm()
    for _ in range(MOST_STEPS):
        product = without(hessian_times(loss, origin, vector), found)
        value, length = float(vector @ product), float(product.norm())
        # How far the vector is from an eigenvector. The value alone may stay as it is, where two
        # eigenvalues have one size and other signs.
        left = float((product - value * vector).norm())
        if left <= TOLERANCE * length:
            return value, vector
        vector = product / length
    log.warning(
        "an eigenvector of the loss's Hessian has not settled in %d steps; the eigenvalue is about "
        "%.3g",
        MOST_STEPS,
        value,
    )
    return value, vector


def hessian_times(loss: Loss, origin: Tensor, vector: Tensor) -> Tensor:
    """Return the product of a loss's Hessian with a vector, (P,).

    >>> hessian_times(lambda x: x[0] * x[1], torch.zeros(2), torch.tensor([3.0, 4.0]))
    tensor([4., 3.])
    """

    def along(point: Tensor) -> Tensor:
        """Return the derivative of the loss along the vector."""
        gradient: Tensor = grad(loss)(point)
        return gradient @ vector

    product: Tensor = grad(along)(origin)
    return product


def without(vector: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return the part of a vector that is orthogonal to others of length 1.

    >>> without(torch.tensor([3.0, 4.0]), [torch.tensor([1.0, 0.0])])
    tensor([0., 4.])
    """
    for other in others:
        vector = vector - (vector @ other) * other
    return vector
