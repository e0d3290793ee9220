"""Definitions of forgetting, by name: pure functions of class accuracies.

docs/forgetting.md compares them.

Shapes: `C` classes, `K` clients of a round. Accuracies are fractions of 1. A class without test
samples is nan, and every average over classes leaves it out.

The initial model does not count. Without training, it may predict a single class for every image,
and so have an accuracy of 1 on this class, which no training has forgotten.
"""

import math

import numpy as np

from rayfed.measures.metrics import Array


def peak(best_earlier: Array, now: Array) -> float:
    """Return each class's best earlier accuracy (C,) minus its accuracy now, averaged over classes.

    FedNTD eq. 5, of the global model. It is negative if the last model is the best. A class without
    an earlier accuracy is nan. A run starts with nan for all classes, which gives 0.

    >>> best = np.full(2, np.nan)
    >>> for now in np.array([[1.0, 0.25], [0.75, 0.5], [0.5, 0.75]]):
    ...     print(peak(best, now))
    ...     best = np.fmax(best, now)
    0.0
    0.0
    0.125
    """
    lost = mean_of(best_earlier - now)
    return 0.0 if math.isnan(lost) else lost


def dropped(before: Array, after: Array) -> float:
    """Return what classes have lost from a model (C,) to the next, averaged over classes.

    The gains of other classes do not count.

    Aljahdali et al., "Flashback: Understanding and Mitigating Forgetting in Federated Learning"
    (arXiv 2402.05558): `-1/C sum_c min(0, A_c^t - A_c^(t-1))`. From one global model to the next it
    is the forgetting that is called `round`. On the way through the clients' models it has two
    parts, `local` and `aggregation`, and is at most their sum.

    >>> dropped(np.array([1.0, 0.25, 0.5]), np.array([0.4, 0.75, 0.5])).__round__(6)
    0.2
    """
    return mean_of(np.maximum(before - after, 0.0))


def local(before: Array, clients: Array) -> float:
    """Return what is `dropped` from the global model (C,) to the clients' models (K, C), averaged.

    The mean is over the clients of the round.

    >>> local(np.array([1.0, 0.5]), clients=np.array([[0.5, 0.5], [1.0, 0.5]]))
    0.125
    """
    drops = [dropped(before, client) for client in clients]
    return mean_of(np.array(drops))


def aggregation(clients: Array, after: Array) -> float:
    """Return what is `dropped` from the clients' models (K, C) to the next global model (C,).

    The mean is over the clients of the round.
    """
    drops = [dropped(client, after) for client in clients]
    return mean_of(np.array(drops))


def continual(best_earlier: Array, now: Array, trained: Array) -> float:
    """Return the `peak` of the classes that no client of the round has `trained` (C,).

    It is nan if there is no such class.

    Chaudhry et al., "Riemannian Walk for Incremental Learning" (ECCV 2018, section 4), average over
    the tasks before the task that is being learnt. Here a class is a task, and a round learns the
    classes that its clients hold.

    >>> continual(np.array([0.5, 1.0]), np.array([0.75, 0.25]), trained=np.array([True, False]))
    0.75
    """
    return mean_of((best_earlier - now)[~trained])


def mean_of(values: Array) -> float:
    """Return the mean of the values that are not nan; nan if all are."""
    known = values[~np.isnan(values)]
    if known.size == 0:
        return math.nan
    return float(known.mean())
