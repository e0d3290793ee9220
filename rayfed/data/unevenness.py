"""How uneven a partition is: how far labels and sizes of the clients differ.

A client's share of a class is `p`, and the share of the class among all examples is `q`. Only the
filled cells of clients by classes are given, each with its client, `p` and `q`. So a million
clients take no more memory than their cells. A client without examples has no distance: it is nan.

Shapes: `M` filled cells, `N` clients.
"""

import numpy as np


def hellinger(client: np.ndarray, p: np.ndarray, q: np.ndarray, num_clients: int) -> np.ndarray:
    """Return the Hellinger distance `sqrt(1 - sum_c sqrt(p q))` of each client (N,), from 0 to 1.

    >>> hellinger(np.array([0]), p=np.array([1.0]), q=np.array([0.25]), num_clients=1)
    array([0.70710678])
    """
    return np.sqrt(np.maximum(1 - _sums(client, np.sqrt(p * q), num_clients), 0))


def jensen_shannon(
    client: np.ndarray, p: np.ndarray, q: np.ndarray, num_clients: int
) -> np.ndarray:
    """Return the Jensen-Shannon distance of each client (N,), from 0 to 1.

    It is the root of the divergence in bits.

    >>> jensen_shannon(np.array([0]), p=np.array([1.0]), q=np.array([1.0]), num_clients=1)
    array([0.])
    """
    middle = (p + q) / 2
    terms = (p * np.log2(p / middle) + q * np.log2(q / middle) - q) / 2
    # A class that a client does not hold adds q / 2: in all 1/2 less the q / 2 of held classes.
    return np.sqrt(np.maximum(_sums(client, terms, num_clients) + 0.5, 0))


def earth_mover(client: np.ndarray, p: np.ndarray, q: np.ndarray, num_clients: int) -> np.ndarray:
    """Return `sum_c |p - q|` of each client (N,), from 0 to 2.

    Zhao et al. call it the earth mover's distance: "Federated Learning with Non-IID Data" (arXiv
    1806.00582, section 3). If all classes are equally far from each other, it is twice what has to
    be moved.

    >>> earth_mover(np.array([0, 0]), p=np.array([0.5, 0.5]), q=np.array([0.1, 0.1]), num_clients=1)
    array([1.6])
    """
    # A class that a client does not hold adds q: in all 1 less the q of held classes.
    return np.maximum(_sums(client, np.abs(p - q) - q, num_clients) + 1, 0)


def gini(sizes: np.ndarray) -> float:
    """Return the Gini coefficient of the clients' sizes (N,).

    It is 0 if all sizes are equal, and 1 - 1/N if one client has all examples.

    >>> gini(np.array([0, 0, 8, 0]))
    0.75
    """
    ranks = np.arange(1, len(sizes) + 1)
    count, total = len(sizes), sizes.sum()
    weighted = 2 * (ranks * np.sort(sizes)).sum() / (count * total)
    return float(weighted - (count + 1) / count)


def unevenness(
    client: np.ndarray, label: np.ndarray, count: np.ndarray, num_clients: int, num_classes: int
) -> dict[str, float]:
    """Return the measures of a partition by name.

    Each distance is the mean over clients with examples, equally weighted. `client`, `label` and
    `count` (M,) are the filled cells. Classes without any example are not counted as missing.
    """
    sizes = np.bincount(client, count, num_clients)
    class_sizes = np.bincount(label, count, num_classes)
    p, q = count / sizes[client], class_sizes[label] / count.sum()
    num_held = np.bincount(client, minlength=num_clients)
    missing = (class_sizes > 0).sum() - num_held[sizes > 0]
    return {
        "hellinger": float(np.nanmean(hellinger(client, p, q, num_clients))),
        "jensen_shannon": float(np.nanmean(jensen_shannon(client, p, q, num_clients))),
        "earth_mover": float(np.nanmean(earth_mover(client, p, q, num_clients))),
        "size_gini": gini(sizes),
        "missing_classes": float(missing.mean()),
    }


def in_words(measures: dict[str, float]) -> str:
    """Return a line with the measures of `unevenness`.

    >>> measures = {"hellinger": 0.5, "jensen_shannon": 0.25, "earth_mover": 1.5}
    >>> in_words({**measures, "size_gini": 0, "missing_classes": 8})
    'Hellinger 0.500, Jensen-Shannon 0.250, earth mover 1.500; Gini of sizes 0.000; 8.0 classes
    missing per client'
    """
    return (
        f"Hellinger {measures['hellinger']:.3f}, Jensen-Shannon {measures['jensen_shannon']:.3f}, "
        f"earth mover {measures['earth_mover']:.3f}; Gini of sizes {measures['size_gini']:.3f}; "
        f"{measures['missing_classes']:.1f} classes missing per client"
    )


def _sums(client: np.ndarray, values: np.ndarray, num_clients: int) -> np.ndarray:
    """Return the sum over the cells of each client; nan for a client without any."""
    sums = np.bincount(client, values, num_clients)
    return np.where(np.bincount(client, minlength=num_clients) > 0, sums, np.nan)
