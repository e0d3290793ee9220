"""Losses of a batch as a whole: each equals its formula, written here again in float64 numpy, value and gradient."""

import math

import numpy as np
import pytest
import torch

from rayfed import losses

COUNTS = torch.tensor([7, 2, 0, 3])
C, B = 4, 6
Y = torch.arange(B) % C  # classes 0 and 1 twice
Y3 = torch.tensor([0, 1, 0, 1, 1, 0, 2, 0])  # four, three samples, and one


def some(batch=B, scale=3.0, seed=0):
    return scale * torch.randn(batch, C, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def feddecorr(x):
    """From the correlation matrix, which numpy computes; as many times as large as in the authors' code."""
    correlations = np.corrcoef(x, rowvar=False)
    others = correlations[~np.eye(C, dtype=bool)]
    return (len(x) - 1) ** 2 / len(x) * np.mean(others**2)


def fedmr(x):
    """As the authors' code has it, class by class, from its sums: of classes 0 and 1, which have several samples."""
    total = 0.0
    for y in (0, 1):
        rows = x[Y3.numpy() == y]
        scaled = (rows - rows.mean(axis=0)) / np.sqrt(rows.var(axis=0, ddof=1) + 1e-8)
        products = scaled.T @ scaled
        total += np.mean(products[~np.eye(C, dtype=bool)] ** 2)
    return total / 7


def within(x):
    return losses.class_decorrelation(x, Y3 if len(x) == len(Y3) else torch.arange(len(x)) // 2)


def fedvls(z):
    """Class by class, as the authors' code has it: a sample of the class itself counts with a logit of 0."""
    total = 0.0
    for c, count in enumerate(COUNTS.tolist()):
        share = count / 12
        shifted = [0.0 if y == c else z[i, c] - math.log(share + 1e-9) + math.log(1 / C) for i, y in enumerate(Y)]
        total += share * math.log(np.mean(np.exp(shifted)))
    return total


def suppression(z):
    return losses.logit_suppression(z, Y[: len(z)] if len(z) <= B else torch.arange(len(z)) % C, COUNTS)


def feduv_variance(z):
    """The deviation that is asked for is that of the columns of the identity, as in the authors' code."""
    softmax = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    wanted = np.eye(C).std(axis=0, ddof=1)
    return np.mean([max(0.0, gap) for gap in wanted - softmax.std(axis=0, ddof=1)])


def feduv_uniformity(x):
    """Pair by pair; of 15 pairs the eighth is the median."""
    squares = [((x[i] - x[j]) ** 2).sum() for i in range(len(x)) for j in range(i)]
    return np.mean([math.exp(-d / sorted(squares)[7]) for d in squares])


def fedrcl(x):
    """Sample by sample. Classes 0 and 1 have two samples, 2 and 3 have one, which is its own nearest and farthest."""
    rows, total = x / np.linalg.norm(x, axis=1, keepdims=True), 0.0
    for i, y in enumerate(Y.tolist()):
        cosines = (rows[i] @ rows.T) / TAU
        own = [cosines[j] for j in range(B) if Y[j] == y and j != i]
        wrong = sorted(cosines[j] for j in range(B) if Y[j] != y)[-2:]
        pull = min(own, default=cosines[i])
        total += math.log(sum(math.exp(c - pull) for c in (pull, *wrong)))
        push = min(own) if own and min(own) >= THRESHOLD / TAU else -1 / TAU
        total += PENALTY * math.log(1 + math.exp(push - cosines[i]))
    return total / B


def relaxed(x):
    labels = Y if len(x) == B else torch.arange(len(x)) % C
    return losses.relaxed_contrast(x, labels, tau=TAU, threshold=THRESHOLD, penalty=PENALTY)


TAU, THRESHOLD, PENALTY = 0.5, -0.2, 0.7
CASES = {
    "class_decorrelation": (within, fedmr),
    "decorrelation": (losses.decorrelation, feddecorr),
    "feature_uniformity": (losses.feature_uniformity, feduv_uniformity),
    "logit_suppression": (suppression, fedvls),
    "prediction_variance": (losses.prediction_variance, feduv_variance),
    "relaxed_contrast": (relaxed, fedrcl),
}
every_loss = pytest.mark.parametrize(("loss", "formula"), CASES.values(), ids=CASES)


def gradient(function, z):
    z = z.clone().requires_grad_()
    return torch.autograd.grad(function(z), z)[0]


@every_loss
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_are_those_of_the_formula(loss, formula, seed):
    z, step = some(len(Y3) if loss is within else B, seed=seed), 1e-5
    assert loss(z).shape == ()
    np.testing.assert_allclose(loss(z).item(), formula(z.numpy()), rtol=1e-6)
    derivative = np.zeros(z.shape)
    for at in np.ndindex(*z.shape):
        shift = np.zeros(z.shape)
        shift[at] = step
        derivative[at] = (formula(z.numpy() + shift) - formula(z.numpy() - shift)) / (2 * step)
    assert np.abs(derivative).max() > 1e-3
    np.testing.assert_allclose(gradient(loss, z), derivative, rtol=1e-5, atol=1e-7)


@every_loss
@pytest.mark.parametrize("batch", [1, 2, 200])
def test_value_and_gradient_are_finite_on_large_values_and_on_constant_columns(loss, formula, batch):
    z = 1e3 * some(batch).sign().float()
    z[:, 0] = 1e3
    assert loss(z).isfinite() and loss(z).dtype == torch.float32
    assert gradient(loss, z).isfinite().all()


@every_loss
def test_float32_is_close_to_float64(loss, formula):
    z = some().float()
    torch.testing.assert_close(loss(z).double(), loss(z.double()), rtol=1e-5, atol=1e-6)


def test_a_single_sample_and_a_single_feature_have_no_correlation():
    for x in (some(1), some()[:, :1]):
        assert losses.decorrelation(x).item() == 0
        assert (gradient(losses.decorrelation, x) == 0).all()


def test_correlations_within_classes_are_those_of_each_class_alone():
    x, alone = some(8), torch.arange(8)
    assert losses.class_decorrelation(x, alone).item() == 0  # no class has two samples
    assert (gradient(lambda x: losses.class_decorrelation(x, alone), x) == 0).all()
    torch.testing.assert_close(losses.class_decorrelation(x, 0 * alone), losses.decorrelation(x))
    halves = (3 * losses.decorrelation(x[:3]) + 5 * losses.decorrelation(x[3:])) / 8
    torch.testing.assert_close(losses.class_decorrelation(x, (alone >= 3).long()), halves)
    moved = x + torch.tensor([9.0, -2.0])[(alone >= 3).long(), None]  # classes far apart correlate all features
    assert losses.decorrelation(moved) > 2 * losses.decorrelation(x)
    torch.testing.assert_close(losses.class_decorrelation(moved, (alone >= 3).long()), halves)


@pytest.mark.parametrize(("angle", "pushed"), [(30, True), (60, False)])
def test_samples_of_one_class_are_pushed_apart_only_beyond_the_threshold(angle, pushed):
    """Two samples of one class and none of another: nothing is left but the penalty."""
    x = torch.tensor([[1.0, 0.0], [math.cos(math.radians(angle)), math.sin(math.radians(angle))]], dtype=torch.float64)
    found = gradient(lambda x: losses.relaxed_contrast(x, torch.tensor([0, 0]), tau=0.5, threshold=0.7), x)
    assert (found[1, 1] < -1e-3) if pushed else found.abs().max() < 1e-12
