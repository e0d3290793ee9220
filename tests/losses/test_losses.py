"""Every loss equals its formula in the oracle, value and gradient; and what all losses share."""

import math
from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import (
    ce,
    cosines,
    fedcsd,
    feddecorr,
    fedlmd,
    fedmr,
    fedrcl,
    fedssd,
    feduv_uniformity,
    feduv_variance,
    fedvls,
    gradient,
    kl,
    mean_of,
    soft_ce,
    without,
)  # fmt: skip

from rayfed import losses

C = 5
# N / C = 2.6, so classes 0 and 4 are the majority.
COUNTS = torch.tensor([7, 2, 0, 1, 3])
# The client has samples of every class.
HELD = torch.tensor([7, 2, 1, 1, 3])
VACANT = torch.tensor([1, 2, 4])
MAJORITY = torch.tensor([True, False, False, False, True])
# Of classes, where a loss takes them.
WEIGHTS = torch.tensor([0.3, 0.25, 0.5, 0.0, 1.0], dtype=torch.float64)
PROTOTYPES = torch.randn(C, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
# No client holds this class.
PROTOTYPES[2] = 0
KNOWN = torch.tensor([True, True, False, True, True])
CSD, SSD = losses.prototype_similarity_distill, losses.selective_distill
RCL = {"tau": 0.5, "threshold": -0.2, "penalty": 0.7}


def some(batch=10, scale=3.0, seed=0):
    """Logits of student and teacher, and labels that go through all classes in turn."""
    generator = torch.Generator().manual_seed(seed)
    z, t = scale * torch.randn(2, batch, C, dtype=torch.float64, generator=generator)
    return z, t, torch.arange(batch) % C


def csd(mask, prototypes=PROTOTYPES, released=False):
    given = {"mask": mask, "prototypes": prototypes, "released": released, "tau": 2.0}
    return lambda z, t, y: CSD(z, t, y, **given), lambda z, t, y: fedcsd(z, t, y, **given)


# A loss of (z, t, y), and its formula for a sample.
CASES = {
    "cross_entropy": (lambda z, t, y: losses.cross_entropy(z, y), lambda z, t, y: ce(z, y)),
    "cross_entropy, smoothed": (
        lambda z, t, y: losses.cross_entropy(z, y, smoothing=0.1),
        lambda z, t, y: ce(z, y, smoothing=0.1),
    ),
    "restricted_cross_entropy": (
        lambda z, t, y: losses.restricted_cross_entropy(z, y, COUNTS, alpha=0.5),
        lambda z, t, y: ce(z * (0.5 + 0.5 * (COUNTS > 0)), y),
    ),
    "restricted_cross_entropy, soft": (
        lambda z, t, y: losses.restricted_cross_entropy(z, y, COUNTS, alpha=0.5, soft=True),
        lambda z, t, y: ce(z * (0.5 + 0.5 * COUNTS.double() / 7), y),
    ),
    "calibrated_cross_entropy": (
        lambda z, t, y: losses.calibrated_cross_entropy(z, y, HELD, tau=2.0),
        lambda z, t, y: ce(z - 2 / HELD.double().sqrt().sqrt(), y),
    ),
    "adjusted_cross_entropy": (
        lambda z, t, y: losses.adjusted_cross_entropy(z, y, COUNTS),
        lambda z, t, y: ce(z + (COUNTS.double() / 13 + 1e-9).log(), y),
    ),
    "distill": (lambda z, t, y: losses.distill(z, t, tau=2.0), lambda z, t, y: kl(z, t, 2)),
    "squared_error": (
        lambda z, t, y: losses.squared_error(z, t),
        lambda z, t, y: ((z - t) ** 2).sum(),
    ),
    "not_true_distill": (
        lambda z, t, y: losses.not_true_distill(z, t, y, tau=2.0),
        lambda z, t, y: kl(without(z, y), without(t, y), 2),
    ),
    "not_true_squared_error": (
        losses.not_true_squared_error,
        lambda z, t, y: ((without(z, y) - without(t, y)) ** 2).mean(),
    ),
    "label_masked_distill": (
        lambda z, t, y: losses.label_masked_distill(z, t, y, MAJORITY, tau=2.0),
        lambda z, t, y: fedlmd(z, t, y, COUNTS, tau=2),
    ),
    "vacant_class_distill": (
        lambda z, t, y: losses.vacant_class_distill(z, t, VACANT),
        lambda z, t, y: kl(z[VACANT], t[VACANT]),
    ),
    "class_adaptive_distill": (
        lambda z, t, y: losses.class_adaptive_distill(z, t, y, WEIGHTS, tau=2.0),
        lambda z, t, y: (1 - WEIGHTS[y]) * ce(z, y) + WEIGHTS[y] * soft_ce(z, t, 2),
    ),
    "selective_distill": (
        lambda z, t, y: SSD(z, t, y, WEIGHTS, m_max=0.01, inside_norm=True),
        lambda z, t, y: fedssd(z, t, y, WEIGHTS, 0.01, inside=True),
    ),
    "selective_distill, outside": (
        lambda z, t, y: SSD(z, t, y, WEIGHTS, m_max=0.01, inside_norm=False),
        lambda z, t, y: fedssd(z, t, y, WEIGHTS, 0.01, inside=False),
    ),
    "prototype_similarity_distill": csd("adaptive"),
    "prototype_similarity_distill, forcible": csd("forcible"),
    "prototype_similarity_distill, no mask": csd("none"),
    "prototype_similarity_distill, no prototypes": csd("adaptive", None),
    "prototype_similarity_distill, released": csd("adaptive", released=True),
    "prototype_similarity_distill, released, forcible": csd("forcible", released=True),
    "prototype_similarity_distill, released, no mask": csd("none", released=True),
    "prototype_similarity_distill, released, no prototypes": csd("adaptive", None, released=True),
    "model_contrast": (
        lambda z, t, y: losses.model_contrast(z, t, t.flip(1), tau=0.5),
        lambda z, t, y: ce(cosines(z, [t, t.flip(0)]) / 0.5, 0),
    ),
    "feature_distill": (
        lambda z, t, y: losses.feature_distill(z, t),
        lambda z, t, y: ((z - t) ** 2).mean(),
    ),
    "prototype_contrast": (
        lambda z, t, y: losses.prototype_contrast(z, y, PROTOTYPES),
        lambda z, t, y: ce(cosines(z, PROTOTYPES), y),
    ),
    "prototype_distance": (
        lambda z, t, y: losses.prototype_distance(z, y, PROTOTYPES, KNOWN),
        lambda z, t, y: KNOWN[y] * ((z - PROTOTYPES[y]) ** 2).mean(),
    ),
}
# A loss of (z, t, y), and its formula for a batch.
OF_THE_BATCH = {
    "class_decorrelation": (
        lambda z, t, y: losses.class_decorrelation(z, y % 2),
        lambda z, t, y: fedmr(z, y % 2),
    ),
    "decorrelation": (lambda z, t, y: losses.decorrelation(z), lambda z, t, y: feddecorr(z)),
    "feature_uniformity": (
        lambda z, t, y: losses.feature_uniformity(z),
        lambda z, t, y: feduv_uniformity(z),
    ),
    "logit_suppression": (
        lambda z, t, y: losses.logit_suppression(z, y, COUNTS),
        lambda z, t, y: fedvls(z, y, COUNTS),
    ),
    "prediction_variance": (
        lambda z, t, y: losses.prediction_variance(z),
        lambda z, t, y: feduv_variance(z),
    ),
    "relaxed_contrast": (
        lambda z, t, y: losses.relaxed_contrast(z, y, **RCL),
        lambda z, t, y: fedrcl(z, y, **RCL),
    ),
}
EVERY = {name: (loss, mean_of(formula)) for name, (loss, formula) in CASES.items()} | OF_THE_BATCH
LOSSES = {name: loss for name, (loss, _) in EVERY.items()}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
few = settings(max_examples=25)


def test_every_loss_has_a_formula_here():
    others = {"majority_labels", "class_adaptive_weights", "trusted", "scaled", "softened"}
    assert {name.split(",")[0] for name in EVERY} | others == set(losses.__all__)


# Value and gradient.


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("loss", "formula"), EVERY.values(), ids=EVERY)
def test_value_and_gradient_are_those_of_the_formula(loss, formula, seed):
    # Two classes have two samples, and the others one; or more.
    z, t, y = some(7 + seed, seed=seed)
    assert loss(z, t, y).shape == ()
    torch.testing.assert_close(loss(z, t, y), formula(z, t, y).double(), rtol=1e-6, atol=1e-12)
    expected = gradient(lambda z: formula(z, t, y), z)
    assert expected.abs().max() > 1e-6
    torch.testing.assert_close(gradient(lambda z: loss(z, t, y), z), expected, rtol=1e-5, atol=1e-9)


@every_loss
def test_only_the_first_argument_gets_a_gradient(loss):
    z, t, y = some()
    found = torch.autograd.grad(
        loss(z.requires_grad_(), t.requires_grad_(), y), [z, t], allow_unused=True
    )
    assert found[0] is not None and found[1] is None


@pytest.mark.parametrize("factor", [1.0, 1, 0.5, 0.0])
def test_a_factor_has_the_bits_of_a_multiplication_and_a_division(factor):
    def bits(function):
        z = some()[0].float()
        return function(z).tolist(), gradient(lambda z: function(z).sum(), z).tolist()

    assert bits(lambda z: losses.scaled(factor, z.exp())) == bits(lambda z: factor * z.exp())
    tau = factor or 2.0
    assert bits(lambda z: losses.softened(z, tau).exp()) == bits(lambda z: (z / tau).exp())


def test_class_weights_and_prototypes_are_constants():
    z, t, y = some()
    constant = WEIGHTS.clone().requires_grad_(), PROTOTYPES.clone().requires_grad_()
    weighed = [losses.class_adaptive_distill(z, t, y, constant[0], tau=2.0)]
    weighed += [
        SSD(z, t, y, constant[0], m_max=0.01, inside_norm=inside) for inside in (True, False)
    ]
    weighed += [
        CSD(z, t, y, constant[1], tau=2.0, mask="none", released=released)
        for released in (True, False)
    ]
    weighed += [
        losses.prototype_contrast(z, y, constant[1]),
        losses.prototype_distance(z, y, constant[1], KNOWN),
    ]
    assert not any(value.requires_grad for value in weighed)


@every_loss
def test_float32_is_close_to_float64(loss):
    z, t, y = some()
    value = loss(z.float(), t.float(), y)
    assert value.dtype == torch.float32
    torch.testing.assert_close(
        value.double(), loss(z.float().double(), t.float().double(), y), rtol=1e-5, atol=1e-6
    )


@every_loss
@pytest.mark.parametrize("batch", [1, 2, 200])
@pytest.mark.parametrize("constant", [False, True])
def test_loss_and_gradient_are_finite_on_logits_of_size_1e3(loss, batch, constant):
    z, t, y = some(batch)
    # Student and teacher always disagree.
    z, t = 1e3 * z.sign().float(), -1e3 * z.sign().float()
    if constant:
        z[:, 0] = 1e3
    assert loss(z, t, y).isfinite()
    assert gradient(lambda z: loss(z, t, y), z).isfinite().all()


# Distillation.

Y = torch.arange(10) % C
SOFTENED = {
    "distill": losses.distill,
    "not_true_distill": partial(losses.not_true_distill, labels=Y),
    "label_masked_distill": partial(losses.label_masked_distill, labels=Y, majority=MAJORITY),
    "class_adaptive_distill": partial(
        losses.class_adaptive_distill, labels=Y, class_weights=torch.ones(C)
    ),
    "prototype_similarity_distill": partial(CSD, labels=Y, prototypes=PROTOTYPES, mask="none"),
}


@pytest.mark.parametrize("loss", SOFTENED.values(), ids=SOFTENED)
@few
@given(tau=st.floats(0.1, 20))
def test_tau_divides_all_logits_and_its_square_multiplies_the_loss(loss, tau):
    z, t, _ = some()
    torch.testing.assert_close(loss(tau * z, tau * t, tau=tau), tau**2 * loss(z, t, tau=1.0))


@pytest.mark.parametrize(
    "name", ["not_true_distill", "not_true_squared_error", "label_masked_distill"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_labels_logit_has_neither_gradient_nor_influence(name, dtype):
    z, t, y = some()
    z, t, loss = z.to(dtype), t.to(dtype), LOSSES[name]
    found = gradient(lambda z: loss(z, t, y), z)
    # Exactly
    assert (found.gather(1, y[:, None]) == 0).all()
    for student, teacher in ((5, 0), (0, 5)):
        moved = [
            v.scatter_add(1, y[:, None], torch.full_like(v, by))
            for v, by in ((z, student), (t, teacher))
        ]
        assert torch.equal(loss(*moved, y), loss(z, t, y))


@few
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
# 2 is the mean, and is no majority.
@example([6, 2, 0, 0])
# The mean is over all classes, also those without images.
@example([1, 0, 0, 0])
def test_a_majority_class_has_more_than_the_mean_of_all_classes(counts):
    majority = losses.majority_labels(torch.tensor(counts))
    assert majority.dtype == torch.bool
    assert majority.tolist() == [n * len(counts) > sum(counts) for n in counts]
    assert not majority.all()


def test_a_sample_without_an_unmasked_class_adds_nothing():
    z, t, _ = some(2)
    # Label 2 leaves no class.
    majority, y = (
        torch.tensor([True, True, False, True, True]),
        torch.tensor([2, 0]),
    )
    loss = partial(losses.label_masked_distill, majority=majority, tau=2.0)
    assert loss(z[:1], t[:1], y[:1]).item() == 0
    assert (gradient(lambda z: loss(z, t, y), z)[0] == 0).all()
    torch.testing.assert_close(loss(z, t, y), loss(z[1:], t[1:], y[1:]) / 2)


@pytest.mark.parametrize("seed", range(3))
def test_class_adaptive_weights_are_linear_in_the_papers_phi(seed):
    _, t, y = some(8, seed=seed)
    # Classes 3 and 4 have no sample.
    t, y = t[:7].requires_grad_(), y[:7] % 3
    weights = losses.class_adaptive_weights(t, y, C, low=0.2, high=0.9, tau=2.0)
    assert not weights.requires_grad and weights[3:].tolist() == pytest.approx([0.2, 0.2])
    for c in range(3):
        phi = torch.stack(
            [2 * (row / 2).softmax(0)[c] - 1 for row, label in zip(t, y, strict=True) if label == c]
        )
        assert weights[c].item() == pytest.approx(
            (0.7 / 2 * phi.mean() + 1.1 / 2).item(), abs=1e-12
        )


def test_cosine_with_a_zero_vector_is_zero():
    """No NaN: a class that no client holds has a zero prototype, and features after a ReLU may all
    be zero.
    """
    z, t, y = some()
    loss = CSD(z, t, y, torch.zeros(C, C), tau=1.0, mask="none")
    torch.testing.assert_close(loss, CSD(z, t / C, y, None, tau=1.0, mask="none"))
    for zero, near, far in ((0, 0.0, 0.0), (1, 0.0, 1.0), (2, 1.0, 0.0)):
        h = [torch.ones(1, C, dtype=torch.float64) for _ in range(3)]
        h[zero].zero_()
        torch.testing.assert_close(
            losses.model_contrast(*h, tau=0.5), ce(2 * torch.tensor([near, far]).double(), 0)
        )


def test_a_class_that_a_client_lacks_is_not_in_the_calibrated_softmax():
    z, _, _ = some(2)
    y = torch.tensor([0, 4])
    calibrated = partial(losses.calibrated_cross_entropy, labels=y, label_counts=COUNTS, tau=0.1)
    # Classes 0, 1, 3, 4.
    kept = (COUNTS > 0).nonzero()[:, 0]
    alone = losses.calibrated_cross_entropy(z[:, kept], torch.tensor([0, 3]), COUNTS[kept], tau=0.1)
    torch.testing.assert_close(calibrated(z), alone)
    found = gradient(calibrated, z)
    assert (found[:, COUNTS == 0] == 0).all() and (found[:, kept] != 0).all()


# Features.


def test_a_single_sample_and_a_single_feature_have_no_correlation():
    for x in (some(1)[0], some()[0][:, :1]):
        assert losses.decorrelation(x).item() == 0
        assert (gradient(losses.decorrelation, x) == 0).all()


@pytest.mark.parametrize("first", [2, 3])
def test_correlations_within_classes_are_those_of_each_class_alone(first):
    x, alone = some(8)[0], torch.arange(8)
    # No class has two samples.
    assert losses.class_decorrelation(x, alone).item() == 0
    assert (gradient(lambda x: losses.class_decorrelation(x, alone), x) == 0).all()
    torch.testing.assert_close(losses.class_decorrelation(x, 0 * alone), losses.decorrelation(x))
    one, other = x[:first], x[first:]
    mean = (first * losses.decorrelation(one) + (8 - first) * losses.decorrelation(other)) / 8
    labels = (alone >= first).long()
    # Classes far apart correlate all features.
    moved = x + torch.tensor([9.0, -2.0])[labels, None]
    assert losses.decorrelation(moved) > 2 * losses.decorrelation(x)
    torch.testing.assert_close(losses.class_decorrelation(moved, labels), mean)


@pytest.mark.parametrize(("angle", "pushed"), [(30, True), (60, False)])
def test_samples_of_one_class_are_pushed_apart_only_beyond_the_threshold(angle, pushed):
    """Two samples of one class and none of another: nothing is left but the penalty."""
    x = torch.tensor(
        [[1.0, 0.0], [math.cos(math.radians(angle)), math.sin(math.radians(angle))]],
        dtype=torch.float64,
    )
    found = gradient(
        lambda x: losses.relaxed_contrast(x, torch.tensor([0, 0]), tau=0.5, threshold=0.7), x
    )
    assert (found[1, 1] < -1e-3) if pushed else found.abs().max() < 1e-12


def test_a_cosine_exactly_at_the_threshold_is_pushed():
    """The two samples of one class are orthogonal: their cosine is 0 without rounding."""
    x, labels = torch.eye(2, dtype=torch.float64), torch.tensor([0, 0])
    for threshold, pushed in ((0.0, True), (0.1, False)):
        found = gradient(
            lambda x, threshold=threshold: losses.relaxed_contrast(
                x, labels, tau=0.5, threshold=threshold
            ),
            x,
        )
        assert (found.abs().max() > 1e-3) == pushed


def test_features_that_are_equal_do_not_count_in_the_median_of_the_distances():
    """Of six distances three are 0, and three are 4."""
    x = torch.tensor([[0.0], [0.0], [0.0], [2.0]], dtype=torch.float64)
    expected = (3 + 3 * math.exp(-1)) / 6
    assert losses.feature_uniformity(x).item() == pytest.approx(expected)
    assert losses.feature_uniformity(x[:3]).item() == 0


def test_a_teacher_that_gives_the_label_exactly_one_in_c_is_not_trusted():
    """Equal logits: 1/4 without rounding. The mask keeps what is above 1/C."""
    logits, labels = torch.zeros(4, 4), torch.arange(4)
    assert not losses.trusted(logits, labels, "adaptive").any()
    assert losses.trusted(logits + 0.1 * torch.eye(4), labels, "adaptive").all()
