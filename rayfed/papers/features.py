"""Figures of a model on test examples: its features in a plane or on a circle, and the loss around its weights.

Each is a function of models that stand side by side. `N` images, `C` classes, `D` features, `G` steps to a side.
"""

from collections.abc import Iterator, Mapping, Sequence
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
from rayfed.folder.read import Run
from rayfed.methods.views import RUNS
from rayfed.papers.panels import MARKERS, SQUARE, bar_of, in_rows, legend, looks, panels, shortened
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


def tsne(models: Sequence[Trained]) -> Figure:
    """The features of test examples in a plane, by t-SNE, coloured by class (FedNTD appendix O, FedCSD Fig. 7).

    Each model has a map of its own, so neighbourhoods can be compared, but not places. The models are global models,
    because a run keeps no clients' models.
    """
    planes = [(embedded(features), labels) for features, labels in (trained.features() for trained in models)]
    figure, axes = squares("Features of test examples (t-SNE)", len(models))
    for place, trained, (plane, labels) in zip(axes.flat, models, planes, strict=False):
        by_class(place, plane, labels, trained.site.federation.train.classes)
        place.set(title=trained.title, xticks=[], yticks=[], xlabel="t-SNE 1 (no unit)", ylabel="t-SNE 2 (no unit)")
        place.set_aspect("equal", adjustable="datalim")
        name_clouds(place, plane, labels, trained.site.federation.train.classes)
    name_all(figure, axes.flat[0], models)
    return figure


def refuse_without_sklearn(runs: Mapping[str, Run]) -> None:
    """Raises `InputError`: before the data are opened, which takes seconds."""
    try:
        import sklearn.manifold  # noqa: F401
    except ImportError:
        raise InputError("t-SNE needs scikit-learn: pip install 'rayfed-distill[figures]'") from None


def embedded(features: np.ndarray) -> np.ndarray:
    """Features (N, D) in a plane (N, 2) (van der Maaten and Hinton, JMLR 2008)."""
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
    return TSNE(init="pca", perplexity=perplexity, random_state=0, n_jobs=1).fit_transform(features)


def hypersphere(models: Sequence[Trained]) -> Figure:
    """The directions of two-dimensional features on the unit circle, and their density (FedNTD appendix N, Fig. 18).

    Only of a model with two features, which `project = 2` gives: a projection of more would not be what its head sees.
    FedNTD normalises features in the network; here they are normalised to be drawn.
    """
    seen = [trained.features() for trained in models]
    for trained, (features, _) in zip(models, seen, strict=True):
        if features.shape[1] != 2:
            raise not_two(trained.name, trained.site.job.model.name)
    options = {"width_ratios": [1, 1.4]}
    figure, axes = panels("Features of test examples on the unit circle", len(models), 2, 3.9, gridspec_kw=options)
    for (circle, curve), trained, (features, labels) in zip(axes, models, seen, strict=True):
        angles = np.arctan2(features[:, 1], features[:, 0])
        classes = trained.site.federation.train.classes
        rings = (1 + RING * (1 + labels))[:, None]
        edge = 1 + RING * (min(len(classes), CLASSES) + 1)
        circle.add_patch(Circle((0, 0), 1, fill=False, edgecolor=INK, linewidth=0.8))
        by_class(circle, rings * np.stack([np.cos(angles), np.sin(angles)], axis=1), labels, classes)
        circle.set(
            title=trained.title, xlabel="direction of the features (the\nunit circle, and a ring for each class)"
        )
        circle.set(xticks=[], yticks=[], xlim=(-edge, edge), ylim=(-edge, edge), aspect="equal")
        circle.spines[:].set_visible(False)
        grid = np.linspace(-np.pi, np.pi, 361)
        for c in [c for c in range(min(len(classes), CLASSES)) if (labels == c).any()]:
            look = {**looks(c), "markevery": (c * 4, 40), "markersize": 4}
            curve.plot(np.degrees(grid), density(angles[labels == c], grid), label=shortened(classes[c]), **look)
        curve.set(title="density of each class", xlabel="angle (degrees)", ylabel="density (per radian)")
        curve.set_xticks(range(-180, 181, 90))
    name_all(figure, axes[0, 1], models)
    return figure


def refuse_other_features(runs: Mapping[str, Run]) -> None:
    """Raises `InputError` for a model of rayfed's without `project = 2`: before the data are opened."""
    for name, run in runs.items():
        model = run.job["model"]
        if ":" not in model["name"] and model.get("project") != 2:  # a model of the user's may have two by itself
            raise not_two(name, model["name"])


def not_two(run: str, model: str) -> InputError:
    wanted = f'model = {{ name = "{model}", project = 2 }}'
    what = f"a circle shows two features, and the model of '{run}' has another number"
    return InputError(f"{what}: put {wanted} into its job and run it again")


REFUSALS = {"tsne": refuse_without_sklearn, "hypersphere": refuse_other_features}  # before the data are opened


def density(angles: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The density of angles (N,) per radian, by a von Mises kernel, which is the circle's normal distribution."""
    narrow = 1 / KERNEL**2
    kernels = np.exp(narrow * np.cos(at[:, None] - angles))
    return kernels.mean(axis=1) / (2 * np.pi * np.i0(narrow))


def landscape(models: Sequence[Trained]) -> Figure:
    """The loss on test examples around the weights, along two random directions (Li et al., NeurIPS 2018).

    FedNTD's Fig. 14b is along the Hessian's eigenvectors, which are another pair in each model; here the same random
    pair is scaled to each model's filters, so that models can be compared.
    """
    steps = np.linspace(-REACH, REACH, STEPS)
    losses = [around(trained, steps) for trained in models]
    known = np.concatenate([loss[np.isfinite(loss)] for loss in losses])
    low, high = max(known.min(initial=np.inf), 1e-6), max(known.max(initial=0), 1e-5)
    levels = np.geomspace(low, high * 1.0001, 13)
    figure, axes = squares("Loss around the weights", len(models))
    for place, trained, loss in zip(axes.flat, models, losses, strict=False):
        inks = ["white"] * 6 + ["black"] * 7  # on dark and on light
        options = {"levels": levels, "norm": LogNorm(low, high * 1.0001)}
        drawn = place.contourf(steps, steps, np.ma.masked_invalid(loss), cmap="cividis", **options)
        lines = place.contour(steps, steps, np.ma.masked_invalid(loss), colors=inks, linewidths=0.6, **options)
        for text in place.clabel(lines, fmt=two_digits, fontsize=6, inline=False, colors="white"):
            text.set(path_effects=[Stroke(linewidth=1.5, foreground="black"), Normal()])
            if max(map(abs, text.get_position())) > 0.9 * REACH:  # the edge would cut it
                text.remove()
        place.plot(0, 0, "+", color="white", markersize=9, markeredgewidth=1.5)
        place.set(title=trained.title, xlabel="direction 1 (filter norms)", ylabel="direction 2 (filter norms)")
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
        own = points[labels == c]
        axes.scatter(
            own[:, 0], own[:, 1], alpha=0.7, linewidths=0, rasterized=True, label=shortened(classes[c]), **look
        )


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
    number = max(len(trained.site.federation.train.classes) for trained in models)
    if number > CLASSES:
        figure.supxlabel(f"the first {CLASSES} of {number} classes", fontsize="small")
    legend(figure, axes)
