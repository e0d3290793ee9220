"""How uneven a partition is: how far the clients' labels are from all labels, and how their sizes
differ.

A client's share of a class is `p`, the share of the class among all examples `q`. Of the cells of
clients by classes only the filled ones are given, each with its client, `p` and `q`: so a million
clients take no more than their cells. A client without examples has no distance: it is nan.

Shapes: `M` filled cells, `N` clients.
"""

import numpy as np


def hellinger(client: np.ndarray, p: np.ndarray, q: np.ndarray, num_clients: int) -> np.ndarray:
    """The Hellinger distance `sqrt(1 - sum_c sqrt(p q))` of each client (N,), from 0 to 1.

    >>> hellinger(np.array([0]), p=np.array([1.0]), q=np.array([0.25]), num_clients=1)
    array([0.70710678])
    """
    return np.sqrt(np.maximum(1 - _sums(client, np.sqrt(p * q), num_clients), 0))


def jensen_shannon(
    client: np.ndarray, p: np.ndarray, q: np.ndarray, num_clients: int
) -> np.ndarray:
    """The Jensen-Shannon distance of each client (N,): the root of the divergence in bits, from 0
    to 1.

    >>> jensen_shannon(np.array([0]), p=np.array([1.0]), q=np.array([1.0]), num_clients=1)
    array([0.])
    """
    both = (p + q) / 2
    of_cells = (p * np.log2(p / both) + q * np.log2(q / both) - q) / 2
    # Of a class not held, q / 2.
    return np.sqrt(np.maximum(_sums(client, of_cells, num_clients) + 0.5, 0))


def earth_mover(client: np.ndarray, p: np.ndarray, q: np.ndarray, num_clients: int) -> np.ndarray:
    """`sum_c |p - q|` of each client (N,), from 0 to 2, which Zhao et al. call the earth mover's
    distance.

    "Federated Learning with Non-IID Data" (arXiv 1806.00582, section 3). Where all classes are
    equally far from each other it is twice what has to be moved.

    >>> earth_mover(np.array([0, 0]), p=np.array([0.5, 0.5]), q=np.array([0.1, 0.1]), num_clients=1)
    array([1.6])
    """
    # Of a class not held, q.
    return np.maximum(_sums(client, np.abs(p - q) - q, num_clients) + 1, 0)


def gini(sizes: np.ndarray) -> float:
    """The Gini coefficient of the clients' sizes (N,): 0 where all are equal, 1 - 1/N where one
    client has all.

    >>> gini(np.array([0, 0, 8, 0]))
    0.75
    """
    ranks = np.arange(1, len(sizes) + 1)
    total = sizes.sum()
    return float(
        2 * (ranks * np.sort(sizes)).sum() / (len(sizes) * total) - (len(sizes) + 1) / len(sizes)
    )


def unevenness(
    client: np.ndarray, label: np.ndarray, count: np.ndarray, num_clients: int, num_classes: int
) -> dict[str, float]:
    """The measures of a partition by name, each distance as the mean over clients with examples,
    equally weighted.

    `client`, `label` and `count` (M,) are the filled cells. Classes without any example are not
    missing.
    """
    sizes = np.bincount(client, count, num_clients)
    of_class = np.bincount(label, count, num_classes)
    p, q = count / sizes[client], of_class[label] / count.sum()
    held = np.bincount(client, minlength=num_clients)
    there = sizes > 0
    measures = {
        "hellinger": hellinger,
        "jensen_shannon": jensen_shannon,
        "earth_mover": earth_mover,
    }
    means = {
        name: float(np.nanmean(of(client, p, q, num_clients))) for name, of in measures.items()
    }
    missing = float(((of_class > 0).sum() - held[there]).mean())
    return {**means, "size_gini": gini(sizes), "missing_classes": missing}


def in_words(measures: dict[str, float]) -> str:
    """A line with the measures of `unevenness`.

    >>> in_words({"hellinger": 0.5, "jensen_shannon": 0.25, "earth_mover": 1.5, "size_gini": 0, "missing_classes": 8})
    'Hellinger 0.500, Jensen-Shannon 0.250, earth mover 1.500; Gini of sizes 0.000; 8.0 classes
    missing per client'
    """
    return (
        f"Hellinger {measures['hellinger']:.3f}, Jensen-Shannon {measures['jensen_shannon']:.3f}, "
        f"earth mover {measures['earth_mover']:.3f}; Gini of sizes {measures['size_gini']:.3f}; "
        f"{measures['missing_classes']:.1f} classes missing per client"
    )


def _sums(client: np.ndarray, values: np.ndarray, num_clients: int) -> np.ndarray:
    """The sum over the cells of each client; nan for a client without any."""
    sums = np.bincount(client, values, num_clients)
    return np.where(np.bincount(client, minlength=num_clients) > 0, sums, np.nan)
