"""The figure of a model's features on test examples, in a plane.

Of runs, whose last models, or those of a round, stand side by side. `N` images, `D` features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from torch import nn

from rayfed.base.errors import InputError
from rayfed.base.seeds import Purpose, seed_of
from rayfed.experiment import last_model
from rayfed.folder.read import Run
from rayfed.methods.views import RUNS
from rayfed.papers.panels import MARKERS, SQUARE, in_rows, legend, shortened, single
from rayfed.papers.style import COLOURS, WIDTH
from rayfed.rounds.local import Site
from rayfed.rounds.measures import sampled, see

IMAGES = 1000  # of the test set: t-SNE takes some ten seconds
CLASSES = 20  # that can be told apart


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

    def features(self) -> tuple[np.ndarray, np.ndarray]:
        """Features (N, D) and labels (N,) of test images, those that the job's measures would take.

        Raises `InputError` for a model that gives none.
        """
        federation, job = self.site.federation, self.site.job
        rows = sampled(len(federation.test), IMAGES, seed_of(job.seed, Purpose.MEASURE))
        batches = federation.batches(federation.test, rows, self.site.device)
        seen = see(RUNS[job.train.precision], (), batches, self.model)
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
