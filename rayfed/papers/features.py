"""Figures of a model on test examples: its features in a plane or on a circle, and the loss around its weights.

Each is a function of runs, whose last models, or those of a round, stand side by side. Raises `InputError` where a run
has no such checkpoint. `N` images, `C` classes, `D` features, `G` steps to a side.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from matplotlib.patheffects import Normal, Stroke
from torch import Tensor, nn

from rayfed.base.errors import InputError
from rayfed.base.seeds import Purpose, seed_of
from rayfed.experiment import last_model
from rayfed.folder.read import Run
from rayfed.methods.views import RUNS
from rayfed.papers.panels import MARKERS, SQUARE, bar_of, in_rows, legend, looks, panels, shortened, single
from rayfed.papers.style import COLOURS, INK, WIDTH
from rayfed.rounds.local import Site
from rayfed.rounds.measures import sampled, see
from rayfed.tensors.weights import Weights, add, load, parameters_of, state_of, with_weights

IMAGES = 1000  # of the test set: t-SNE takes some ten seconds
CLASSES = 20  # that can be told apart
KERNEL = 0.1  # radians, the width of the density's kernel
RING = 0.05  # radii, between the rings of two classes
STEPS, REACH = 21, 1.0  # of the loss landscape: to a side, and its half, in lengths of the weights
LANDSCAPE_IMAGES = 500  # the loss is taken STEPS^2 times


@dataclass(frozen=True, eq=False)
class Trained:
    """A run's global model after a round, in eval mode, with the site that it was trained at."""

    name: str
    site: Site
    round: int
    model: nn.Module

    @property
    def classes(self) -> tuple[str, ...]:
        return self.site.federation.train.classes

    @property
    def title(self) -> str:
        return f"{self.name}\nround {self.round}"

    def batches(self, images: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Test images, those that the job's measures would take, as the evaluation has them, and their labels."""
        federation, seed = self.site.federation, seed_of(self.site.job.seed, Purpose.MEASURE)
        rows = sampled(len(federation.test), images, seed)
        return federation.batches(federation.test, rows, self.site.device)

    def features(self) -> tuple[np.ndarray, np.ndarray]:
        """Features (N, D) and labels (N,). Raises `InputError` for a model that gives none."""
        seen = see(RUNS[self.site.job.train.precision], (), self.batches(IMAGES), self.model)
        if seen.features is None:
            raise InputError(f"the model of '{self.name}' gives no features: it has no `features` and `head`")
        return seen.features, seen.labels


def trained(runs: Sequence[Run], round: int | None) -> list[Trained]:
    """The global models of runs after a round, or after the last one."""
    return [Trained(name, *last_model(run.folder, round)) for name, run in single(runs, "a checkpoint").items()]


def tsne(runs: Sequence[Run], round: int | None = None) -> Figure:
    """The features of test examples in a plane, by t-SNE, coloured by class (FedNTD appendix O, FedCSD Fig. 7).

    Each model has a map of its own, so neighbourhoods can be compared, but not places. The models are global models,
    because a run keeps no clients' models.
    """
    try:
        import sklearn.manifold  # noqa: F401
    except ImportError:  # before the data are opened, which takes seconds
        raise InputError("t-SNE needs scikit-learn: pip install 'rayfed-distill[figures]'") from None
    models = trained(runs, round)
    figure, axes = squares("Features of test examples (t-SNE)", len(models))
    for place, model in zip(axes.flat, models, strict=False):
        features, labels = model.features()
        plane = embedded(features)
        by_class(place, plane, labels, model.classes)
        place.set(title=model.title, xticks=[], yticks=[], xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)")
        place.set_aspect("equal", adjustable="datalim")
        name_clouds(place, plane, labels, model.classes)
    name_all(figure, axes.flat[0], models)
    return figure


def embedded(features: np.ndarray) -> np.ndarray:
    """Features (N, D) in a plane (N, 2) (van der Maaten and Hinton, JMLR 2008)."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
    return TSNE(init="pca", perplexity=perplexity, random_state=0, n_jobs=1).fit_transform(features)


def hypersphere(runs: Sequence[Run], round: int | None = None) -> Figure:
    """The directions of two-dimensional features on the unit circle, and their density (FedNTD appendix N, Fig. 18).

    Only of a model with two features, which `project = 2` gives: a projection of more would not be what its head sees.
    FedNTD normalises features in the network; here they are normalised to be drawn.
    """
    for name, run in single(runs, "a checkpoint").items():  # before the data are opened, which takes seconds
        model = run.job["model"]
        if ":" not in model["name"] and model.get("project") != 2:  # a model of the user's may have two by itself
            raise not_two(name, model["name"])
    models = trained(runs, round)
    options = {"width_ratios": [1, 1.4]}
    figure, axes = panels("Features of test examples on the unit circle", len(models), 2, 3.9, gridspec_kw=options)
    for (circle, curve), model in zip(axes, models, strict=True):
        features, labels = model.features()
        if features.shape[1] != 2:
            raise not_two(model.name, model.site.job.model.name)
        angles = np.arctan2(features[:, 1], features[:, 0])
        draw_circle(circle, angles, labels, model.classes)
        circle.set_title(model.title)
        draw_densities(curve, angles, labels, model.classes)
    name_all(figure, axes[0, 1], models)
    return figure


def not_two(run: str, model: str) -> InputError:
    return InputError(
        f"a circle shows two features, and the model of '{run}' has another number: "
        f'put model = {{ name = "{model}", project = 2 }} into its job and run it again'
    )


def draw_circle(axes: Axes, angles: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> None:
    """The unit circle, and a ring of points for each class."""
    rings = (1 + RING * (1 + labels))[:, None]
    edge = 1 + RING * (min(len(classes), CLASSES) + 1)
    axes.add_patch(Circle((0, 0), 1, fill=False, edgecolor=INK, linewidth=0.8))
    by_class(axes, rings * np.stack([np.cos(angles), np.sin(angles)], axis=1), labels, classes)
    axes.set(xlabel="direction of the features (the\nunit circle, and a ring for each class)", aspect="equal")
    axes.set(xticks=[], yticks=[], xlim=(-edge, edge), ylim=(-edge, edge))
    axes.spines[:].set_visible(False)


def draw_densities(axes: Axes, angles: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> None:
    """The density of each class over the angle."""
    grid = np.linspace(-np.pi, np.pi, 361)
    for c in range(min(len(classes), CLASSES)):
        if (labels == c).any():
            look = {**looks(c), "markevery": (c * 4, 40), "markersize": 4}
            axes.plot(np.degrees(grid), density(angles[labels == c], grid), label=shortened(classes[c]), **look)
    axes.set(title="density of each class", xlabel="angle (degrees)", ylabel="density (per radian)")
    axes.set_xticks(range(-180, 181, 90))


def density(angles: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The density of angles (N,) per radian, by a von Mises kernel, which is the circle's normal distribution."""
    narrow = 1 / KERNEL**2
    kernels = np.exp(narrow * np.cos(at[:, None] - angles))
    return kernels.mean(axis=1) / (2 * np.pi * np.i0(narrow))


def landscape(runs: Sequence[Run], round: int | None = None) -> Figure:
    """The loss on test examples around the weights, along two random directions (Li et al., NeurIPS 2018).

    FedNTD's Fig. 14b is along the Hessian's eigenvectors, which are another pair in each model; here the same random
    pair is scaled to each model's filters, so that models can be compared.
    """
    models = trained(runs, round)
    steps = np.linspace(-REACH, REACH, STEPS)
    losses = [around(model, steps) for model in models]
    known = np.concatenate([loss[np.isfinite(loss)] for loss in losses])
    low, high = max(known.min(initial=np.inf), 1e-6), max(known.max(initial=0), 1e-5)
    levels = np.geomspace(low, high * 1.0001, 13)
    figure, axes = squares("Loss around the weights", len(models))
    for place, model, loss in zip(axes.flat, models, losses, strict=False):
        inks = ["white"] * 6 + ["black"] * 7  # on dark and on light
        options = {"levels": levels, "norm": LogNorm(low, high * 1.0001)}
        drawn = place.contourf(steps, steps, np.ma.masked_invalid(loss), cmap="cividis", **options)
        lines = place.contour(steps, steps, np.ma.masked_invalid(loss), colors=inks, linewidths=0.6, **options)
        for text in place.clabel(lines, fmt=two_digits, fontsize=6, inline=False, colors="white"):
            text.set(path_effects=[Stroke(linewidth=1.5, foreground="black"), Normal()])
            if max(map(abs, text.get_position())) > 0.9 * REACH:  # the edge would cut it
                text.remove()
        place.plot(0, 0, "+", color="white", markersize=9, markeredgewidth=1.5)
        place.set(title=model.title, xlabel="direction 1 (filter norms)", ylabel="direction 2 (filter norms)")
        place.set(aspect="equal", xticks=np.linspace(-REACH, REACH, 5), yticks=np.linspace(-REACH, REACH, 5))
        place.grid(False)
    options = {"format": lambda value, _: two_digits(value), "ticks": levels[::2]}
    bar_of(figure, drawn, axes, "mean loss per example (nats, steps of equal ratio)", **options)
    return figure


def two_digits(value: float) -> str:
    """
    >>> two_digits(2.04), two_digits(0.0501), two_digits(123.4)
    ('2.0', '0.050', '120')
    """
    return np.format_float_positional(value, 2, unique=False, fractional=False, trim="k").removesuffix(".")


def around(trained: Trained, steps: np.ndarray) -> np.ndarray:
    """The mean cross-entropy (G, G) of the test examples at the weights plus steps along two directions."""
    start = state_of(trained.model)
    first, second = (direction(start, trained.model, seed) for seed in (0, 1))
    moved = {name: start[name] for name in first}  # not all: a BatchNorm counts batches, in whole numbers
    known = [*trained.batches(LANDSCAPE_IMAGES)]
    model, run = with_weights(trained.model, start).eval(), RUNS[trained.site.job.train.precision]
    losses = np.empty((len(steps), len(steps)))
    for row, column in np.ndindex(losses.shape):
        load(model, {**start, **add(add(moved, first, float(steps[column])), second, float(steps[row]))})
        seen = see(run, (), known, model)
        logits, labels = torch.from_numpy(seen.logits), torch.from_numpy(seen.labels)
        losses[row, column] = nn.functional.cross_entropy(logits, labels)
    return losses


def direction(weights: Weights, model: nn.Module, seed: int) -> Weights:
    """A random direction in which each filter has the length of the model's own, without biases, norms and buffers."""
    generator = torch.Generator().manual_seed(seed)
    drawn: Weights = {}
    for name in (name for name, parameter in parameters_of(model).items() if parameter.ndim > 1):
        filters = torch.randn(weights[name].shape, generator=generator).flatten(1)
        lengths = weights[name].flatten(1).norm(dim=1) / filters.norm(dim=1).clamp_min(1e-12)
        drawn[name] = (filters * lengths[:, None]).view(weights[name].shape)
    return drawn


def by_class(axes: Axes, points: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> None:
    """Points (N, 2) in the look of their class, of the first 20 classes."""
    for c in range(min(len(classes), CLASSES)):
        look: dict[str, Any] = {"color": COLOURS[c % len(COLOURS)], "marker": MARKERS[c % len(MARKERS)], "s": 12}
        x, y = points[labels == c].T
        axes.scatter(x, y, alpha=0.7, linewidths=0, rasterized=True, label=shortened(classes[c]), **look)


def squares(title: str, count: int) -> tuple[Figure, np.ndarray]:
    """Panels whose axes are as long as each other."""
    return in_rows(title, count, 4.0 if count < 3 else 3.0, width=SQUARE if count == 1 else WIDTH)


def name_clouds(axes: Axes, points: np.ndarray, labels: np.ndarray, classes: Sequence[str]) -> None:
    """The name of each class in the middle of its points (N, 2), for readers without colours."""
    halo = [Stroke(linewidth=2.5, foreground="white"), Normal()]
    for c in (c for c in range(min(len(classes), CLASSES)) if (labels == c).any()):
        x, y = np.median(points[labels == c], axis=0)
        axes.text(x, y, shortened(classes[c]), ha="center", va="center", fontweight="bold", path_effects=halo)


def name_all(figure: Figure, axes: Axes, models: Sequence[Trained]) -> None:
    """The legend of the classes, as a panel has them, which says which are drawn."""
    number = max(len(model.classes) for model in models)
    if number > CLASSES:
        figure.supxlabel(f"the first {CLASSES} of {number} classes", fontsize="small")
    legend(figure, axes)
