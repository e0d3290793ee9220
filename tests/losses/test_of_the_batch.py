"""Losses of a batch as a whole: each equals its formula, written here again in float64 numpy, value and gradient."""

import math

import numpy as np
import pytest
import torch

from rayfed import losses

COUNTS = torch.tensor([7, 2, 0, 3])
C, B = 4, 6
Y = torch.arange(B) % C  # classes 0 and 1 twice


def some(batch=B, scale=3.0, seed=0):
    return scale * torch.randn(batch, C, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def feddecorr(x):
    """From the correlation matrix, which numpy computes; as many times as large as in the authors' code."""
    correlations = np.corrcoef(x, rowvar=False)
    others = correlations[~np.eye(C, dtype=bool)]
    return (len(x) - 1) ** 2 / len(x) * np.mean(others**2)


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


CASES = {"decorrelation": (losses.decorrelation, feddecorr), "logit_suppression": (suppression, fedvls)}
every_loss = pytest.mark.parametrize(("loss", "formula"), CASES.values(), ids=CASES)


def gradient(function, z):
    z = z.clone().requires_grad_()
    return torch.autograd.grad(function(z), z)[0]


@every_loss
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_are_those_of_the_formula(loss, formula, seed):
    z, step = some(seed=seed), 1e-5
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


def test_features_that_are_uncorrelated_have_no_loss_and_copies_have_the_largest():
    signs = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    assert losses.decorrelation(signs).item() == pytest.approx(0, abs=1e-12)
    copies = signs[:, :1] * torch.tensor([1.0, -3.0])
    assert losses.decorrelation(copies).item() == pytest.approx(3**2 / 4, rel=1e-6)


def test_a_single_sample_and_a_single_feature_have_no_correlation():
    for x in (some(1), some()[:, :1]):
        assert losses.decorrelation(x).item() == 0
        assert (gradient(losses.decorrelation, x) == 0).all()


def test_scale_and_shift_of_a_feature_change_nothing():
    x = some()
    moved = x * torch.tensor([1.0, 2.0, 5.0, -3.0]) + torch.tensor([0.0, 7.0, -2.0, 1.0])
    torch.testing.assert_close(losses.decorrelation(moved), losses.decorrelation(x), rtol=1e-6, atol=0)


def test_suppression_pushes_down_the_logits_of_held_classes_on_samples_of_others_only():
    found = gradient(suppression, some())
    own, vacant = torch.nn.functional.one_hot(Y, C).bool(), COUNTS == 0
    assert (found[own] == 0).all() and (found[:, vacant] == 0).all()
    assert (found[:, ~vacant][~own[:, ~vacant]] > 0).all()
