"""Every loss equals its formula, written here again for one sample in float64 numpy; and what all losses share."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rayfed import losses

C = 5
COUNTS = torch.tensor([7, 2, 0, 1, 3])  # n / C = 2.6, so classes 0 and 4 are the majority
HELD = torch.tensor([7, 2, 1, 1, 3])  # the client has samples of every class
VACANT = torch.tensor([1, 2, 4])
MAJORITY = torch.tensor([True, False, False, False, True])
WEIGHTS = torch.tensor([0.3, 0.25, 0.5, 0.0, 1.0], dtype=torch.float64)  # of classes, where a loss takes them
PROTOTYPES = torch.from_numpy(np.random.default_rng(1).normal(size=(C, C)))
PROTOTYPES[2] = 0  # no client holds this class
KNOWN = torch.tensor([True, True, False, True, True])


# The formulas for one sample: `z` student's logits (C,), `t` teacher's logits (C,), `y` label.


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def log_softmax(z):
    return z - z.max() - math.log(np.exp(z - z.max()).sum())


def cosine(a, b):
    norm = np.linalg.norm(a) * np.linalg.norm(b)
    return a @ b / norm if norm > 0 else 0.0


def ce(z, t, y, *, smoothing=0.0):
    target = np.full(C, smoothing / C)
    target[y] += 1 - smoothing
    return -target @ log_softmax(z)


def soft_ce(z, t, tau):
    return -(tau**2) * softmax(t / tau) @ log_softmax(z / tau)


def kl(z, t, tau):
    return tau**2 * softmax(t / tau) @ (log_softmax(t / tau) - log_softmax(z / tau))


def fedrs(z, t, y, *, soft):
    held = COUNTS.numpy() / COUNTS.max().item() if soft else COUNTS.numpy() > 0
    return -log_softmax(z * (0.5 + 0.5 * held))[y]


def fedlc(z, t, y):
    return -log_softmax(z - 2 / np.sqrt(np.sqrt(HELD.numpy())))[y]


def adjusted(z, t, y):
    return -log_softmax(z + np.log(COUNTS.numpy() / 13 + 1e-9))[y]


def vacant(z, t, y):
    return kl(z[VACANT.numpy()], t[VACANT.numpy()], 1)


def fedntd(z, t, y):
    return kl(np.delete(z, y), np.delete(t, y), 2)


def fedntd_mse(z, t, y):
    return np.mean((np.delete(z, y) - np.delete(t, y)) ** 2)


def fedlmd(z, t, y):
    others = [c for c in range(C) if c != y]
    taught = [c for c in others if COUNTS[c] <= COUNTS.sum() / C]
    q = dict(zip(others, log_softmax(z[others] / 2), strict=True))
    p = dict(zip(taught, log_softmax(t[taught] / 2), strict=True))
    return 4 * sum(math.exp(p[c]) * (p[c] - q[c]) for c in taught)


def fedcad(z, t, y):
    a = WEIGHTS[y].item()
    return (1 - a) * ce(z, t, y) + a * soft_ce(z, t, 2)


def fedssd(z, t, y, *, inside):
    m = 0.01 * np.maximum(0, WEIGHTS.numpy() * (1 - math.sqrt(1 - softmax(t)[y])) - 0.1)
    return ((m * (t - z)) ** 2).sum() if inside else (m * (t - z) ** 2).sum()


def fedcsd(z, t, y, *, mask, prototypes=PROTOTYPES, seen=None):
    """`seen`: the student's logits from which the target is made; constant while the derivative is taken."""
    kept = {"adaptive": softmax(t)[y] > 1 / C, "forcible": t.argmax() == y, "none": True}[mask]
    student = z if seen is None else seen
    delta = 1 if prototypes is None else softmax(np.array([cosine(student, p) for p in prototypes.numpy()]))
    return kept * soft_ce(z, delta * t, 2)


def fedcsd_released(z, t, y, *, mask, prototypes=PROTOTYPES):
    """As train_ours.py of IAMJackYan/FedCSD has it: delta moves with `z`, KL, and the mask on the refined logits."""
    delta = 1 if prototypes is None else softmax(np.array([cosine(z, p) for p in prototypes.numpy()]))
    refined = delta * t
    kept = {"adaptive": softmax(refined)[y] > 1 / C, "forcible": refined.argmax() == y, "none": True}[mask]
    return kept * kl(z, refined, 2)


def moon(z, t, y):
    return -log_softmax(np.array([cosine(z, t), cosine(z, t[::-1])]) / 0.5)[0]


def fedproc(z, t, y):
    return -log_softmax(np.array([cosine(z, p) for p in PROTOTYPES.numpy()]))[y]


def fedproto(z, t, y):
    return KNOWN[y].item() * np.mean((z - PROTOTYPES[y].numpy()) ** 2)


def fedmr(z, t, y):
    if not KNOWN[y]:
        return 0.0
    h, *points = (x / max(np.linalg.norm(x), 1e-12) for x in (z, *PROTOTYPES.numpy()))
    others = [c for c in range(C) if c != y and KNOWN[c]]
    return np.mean([max(0, math.dist(points[y], points[c]) - math.dist(h, points[c])) for c in others])


@dataclass(frozen=True)
class Case:
    """`call(z, t, y)` on a batch is the mean of `formula(z, t, y)` over its samples."""

    call: Callable[..., torch.Tensor]
    formula: Callable[..., float]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)  # further arguments of `call`, without gradient
    sees_student: bool = False  # whether the target depends on the student

    def __call__(self, z, t, y):
        return self.call(z, t, y, **self.constants)


def csd(mask, released=False):
    def call(z, t, y, prototypes):
        return losses.prototype_similarity_distill(z, t, y, prototypes, tau=2.0, mask=mask, released=released)

    formula = partial(fedcsd_released if released else fedcsd, mask=mask)
    return Case(call, formula, {"prototypes": PROTOTYPES}, sees_student=not released)


def ssd(inside):
    def call(z, t, y, credibility):
        return losses.selective_distill(z, t, y, credibility, m_max=0.01, inside_norm=inside)

    return Case(call, partial(fedssd, inside=inside), {"credibility": WEIGHTS})


CASES = {
    "cross_entropy": Case(lambda z, t, y: losses.cross_entropy(z, y), ce),
    "cross_entropy, smoothed": Case(
        lambda z, t, y: losses.cross_entropy(z, y, smoothing=0.1), partial(ce, smoothing=0.1)
    ),
    "restricted_cross_entropy": Case(
        lambda z, t, y: losses.restricted_cross_entropy(z, y, COUNTS, alpha=0.5), partial(fedrs, soft=False)
    ),
    "restricted_cross_entropy, soft": Case(
        lambda z, t, y: losses.restricted_cross_entropy(z, y, COUNTS, alpha=0.5, soft=True), partial(fedrs, soft=True)
    ),
    "calibrated_cross_entropy": Case(lambda z, t, y: losses.calibrated_cross_entropy(z, y, HELD, tau=2.0), fedlc),
    "adjusted_cross_entropy": Case(lambda z, t, y: losses.adjusted_cross_entropy(z, y, COUNTS), adjusted),
    "distill": Case(lambda z, t, y: losses.distill(z, t, tau=2.0), lambda z, t, y: kl(z, t, 2)),
    "squared_error": Case(lambda z, t, y: losses.squared_error(z, t), lambda z, t, y: ((z - t) ** 2).sum()),
    "not_true_distill": Case(partial(losses.not_true_distill, tau=2.0), fedntd),
    "not_true_squared_error": Case(losses.not_true_squared_error, fedntd_mse),
    "label_masked_distill": Case(partial(losses.label_masked_distill, tau=2.0), fedlmd, {"majority": MAJORITY}),
    "vacant_class_distill": Case(lambda z, t, y: losses.vacant_class_distill(z, t, VACANT), vacant),
    "class_adaptive_distill": Case(partial(losses.class_adaptive_distill, tau=2.0), fedcad, {"class_weights": WEIGHTS}),
    "selective_distill": ssd(inside=True),
    "selective_distill, outside": ssd(inside=False),
    "prototype_similarity_distill": csd("adaptive"),
    "prototype_similarity_distill, forcible": csd("forcible"),
    "prototype_similarity_distill, no mask": csd("none"),
    "prototype_similarity_distill, no prototypes": Case(
        lambda z, t, y: losses.prototype_similarity_distill(z, t, y, None, tau=2.0, mask="adaptive"),
        partial(fedcsd, mask="adaptive", prototypes=None),
    ),
    "prototype_similarity_distill, released": csd("adaptive", released=True),
    "prototype_similarity_distill, released, forcible": csd("forcible", released=True),
    "prototype_similarity_distill, released, no mask": csd("none", released=True),
    "prototype_similarity_distill, released, no prototypes": Case(
        lambda z, t, y: losses.prototype_similarity_distill(z, t, y, None, tau=2.0, mask="adaptive", released=True),
        partial(fedcsd_released, mask="adaptive", prototypes=None),
    ),
    "model_contrast": Case(lambda z, t, y: losses.model_contrast(z, t, t.flip(1), tau=0.5), moon),
    "prototype_contrast": Case(
        lambda z, t, y, prototypes: losses.prototype_contrast(z, y, prototypes), fedproc, {"prototypes": PROTOTYPES}
    ),
    "prototype_distance": Case(
        lambda z, t, y, prototypes: losses.prototype_distance(z, y, prototypes, KNOWN),
        fedproto,
        {"prototypes": PROTOTYPES},
    ),
    "prototype_margin": Case(
        lambda z, t, y, prototypes: losses.prototype_margin(z, y, prototypes, KNOWN), fedmr, {"prototypes": PROTOTYPES}
    ),
}
few = settings(max_examples=25)
every_loss = pytest.mark.parametrize("loss", CASES.values(), ids=CASES)

logits = arrays(np.float64, C, elements=st.floats(-20, 20, width=16))
samples = st.lists(st.tuples(logits, logits, st.integers(0, C - 1)), min_size=1, max_size=4)


def batch_of(rows):
    z, t, y = zip(*rows, strict=True)
    return torch.tensor(np.stack(z)), torch.tensor(np.stack(t)), torch.tensor(y)


def some(batch=10, scale=3.0):
    """Logits of student and teacher, and labels that go through all classes in turn."""
    z, t = scale * torch.randn(2, batch, C, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return z, t, torch.arange(batch) % C


def gradient(function, z):
    z = z.clone().requires_grad_()
    return torch.autograd.grad(function(z), z)[0]


def test_every_loss_has_a_formula_here():
    measures = {"majority_labels", "class_adaptive_weights", "trusted"}
    of_the_batch = {"decorrelation", "feature_uniformity", "logit_suppression", "prediction_variance"}
    of_the_batch |= {"class_decorrelation", "relaxed_contrast"}  # all in test_of_the_batch.py
    assert {name.split(",")[0] for name in CASES} | measures | of_the_batch == set(losses.__all__)


# Value and gradient.


@every_loss
@few
@given(rows=samples)
def test_a_loss_is_the_mean_of_its_formula_over_the_batch(loss, rows):
    value = loss(*batch_of(rows))
    assert value.shape == ()
    np.testing.assert_allclose(value.item(), np.mean([loss.formula(*row) for row in rows]), rtol=1e-9, atol=1e-12)


@every_loss
def test_the_gradient_is_the_derivative_of_the_formula(loss):
    z, t, y = some()
    derivative, step = np.zeros(z.shape), 1e-5
    for i, (student, teacher, label) in enumerate(zip(z.numpy(), t.numpy(), y.tolist(), strict=True)):
        formula = partial(loss.formula, seen=student) if loss.sees_student else loss.formula
        for c, shift in enumerate(step * np.eye(C)):
            rise = formula(student + shift, teacher, label) - formula(student - shift, teacher, label)
            derivative[i, c] = rise / (2 * step) / len(z)
    assert np.abs(derivative).max() > 1e-6
    np.testing.assert_allclose(gradient(lambda z: loss(z, t, y), z), derivative, rtol=1e-6, atol=1e-9)


@every_loss
def test_only_the_first_argument_gets_a_gradient(loss):
    z, t, y = some()
    constants = {k: c.clone().requires_grad_(c.is_floating_point()) for k, c in loss.constants.items()}
    given = {"student": z.requires_grad_(), "teacher": t.requires_grad_()}
    given |= {name: c for name, c in constants.items() if c.requires_grad}
    found = torch.autograd.grad(loss.call(z, t, y, **constants), list(given.values()), allow_unused=True)
    assert [name for name, g in zip(given, found, strict=True) if g is not None] == ["student"]


@every_loss
def test_float32_is_close_to_float64(loss):
    z, t, y = some()
    value = loss(z.float(), t.float(), y)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), loss(z.float().double(), t.float().double(), y), rtol=1e-5, atol=1e-6)


@every_loss
@pytest.mark.parametrize("batch", [1, 200])
def test_loss_and_gradient_are_finite_on_logits_of_size_1e3(loss, batch):
    z, t, y = some(batch)
    z, t = 1e3 * z.sign().float(), -1e3 * z.sign().float()  # student and teacher always disagree
    assert loss(z, t, y).isfinite()
    assert gradient(lambda z: loss(z, t, y), z).isfinite().all()


# Distillation.

Y = torch.arange(10) % C
SOFTENED = {
    "distill": losses.distill,
    "not_true_distill": partial(losses.not_true_distill, labels=Y),
    "label_masked_distill": partial(losses.label_masked_distill, labels=Y, majority=MAJORITY),
    "class_adaptive_distill": partial(losses.class_adaptive_distill, labels=Y, class_weights=torch.ones(C)),
    "prototype_similarity_distill": partial(
        losses.prototype_similarity_distill, labels=Y, prototypes=PROTOTYPES, mask="none"
    ),
}


@pytest.mark.parametrize("loss", SOFTENED.values(), ids=SOFTENED)
@few
@given(tau=st.floats(0.1, 20))
def test_tau_divides_all_logits_and_its_square_multiplies_the_loss(loss, tau):
    z, t, _ = some()
    torch.testing.assert_close(loss(tau * z, tau * t, tau=tau), tau**2 * loss(z, t, tau=1.0))


@pytest.mark.parametrize("name", ["not_true_distill", "not_true_squared_error", "label_masked_distill"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_labels_logit_has_neither_gradient_nor_influence(name, dtype):
    z, t, y = some()
    z, t = z.to(dtype), t.to(dtype)
    found = gradient(lambda z: CASES[name](z, t, y), z)
    assert (found.gather(1, y[:, None]) == 0).all()  # exactly
    for student, teacher in ((5, 0), (0, 5)):
        moved = [v.scatter_add(1, y[:, None], torch.full_like(v, by)) for v, by in ((z, student), (t, teacher))]
        assert torch.equal(CASES[name](*moved, y), CASES[name](z, t, y))


@few
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
@example([6, 2, 0, 0])  # 2 is the mean, and is no majority
@example([1, 0, 0, 0])  # the mean is over all classes, also those without images
def test_a_majority_class_has_more_than_the_mean_of_all_classes(counts):
    majority = losses.majority_labels(torch.tensor(counts))
    assert majority.dtype == torch.bool
    assert majority.tolist() == [n * len(counts) > sum(counts) for n in counts]
    assert not majority.all()


def test_a_sample_without_an_unmasked_class_adds_nothing():
    z, t, _ = some(2)
    majority, y = torch.tensor([True, True, False, True, True]), torch.tensor([2, 0])  # label 2 leaves no class
    loss = partial(losses.label_masked_distill, majority=majority, tau=2.0)
    assert loss(z[:1], t[:1], y[:1]).item() == 0
    assert (gradient(lambda z: loss(z, t, y), z)[0] == 0).all()
    torch.testing.assert_close(loss(z, t, y), loss(z[1:], t[1:], y[1:]) / 2)


# FedCAD, FedSSD, FedCSD, FedRS, MOON, FedProto.


@few
@given(rows=samples, low=st.floats(0, 0.5), high=st.floats(0, 1))
def test_class_adaptive_weights_are_linear_in_the_papers_phi(rows, low, high):
    _, t, y = batch_of(rows)
    weights = losses.class_adaptive_weights(t.requires_grad_(), y, C, low=low, high=high, tau=2.0)
    assert not weights.requires_grad
    for c in range(C):
        phi = [2 * softmax(t / 2)[label] - 1 for _, t, label in rows if label == c]
        expected = (high - low) / 2 * np.mean(phi) + (high + low) / 2 if phi else low
        assert weights[c].item() == pytest.approx(expected, abs=1e-12)


def test_cosine_with_a_zero_vector_is_zero():
    """No NaN: a class that no client holds has a zero prototype, and features after a ReLU may all be zero."""
    z, t, y = some()
    loss = losses.prototype_similarity_distill(z, t, y, torch.zeros(C, C), tau=1.0, mask="none")
    uniform = losses.prototype_similarity_distill(z, t / C, y, None, tau=1.0, mask="none")
    torch.testing.assert_close(loss, uniform)
    for zero in range(3):
        h = [torch.ones(1, C) for _ in range(3)]
        h[zero].zero_()
        cosines = [0.0 if zero in (0, 1) else 1.0, 0.0 if zero in (0, 2) else 1.0]
        expected = -log_softmax(np.array(cosines) / 0.5)[0]
        assert losses.model_contrast(*h, tau=0.5).item() == pytest.approx(expected)


def test_a_class_that_a_client_lacks_is_not_in_the_calibrated_softmax():
    z, _, _ = some(2)
    y = torch.tensor([0, 4])
    calibrated = partial(losses.calibrated_cross_entropy, labels=y, label_counts=COUNTS, tau=0.1)
    kept = (COUNTS > 0).nonzero()[:, 0]  # classes 0, 1, 3, 4
    alone = losses.calibrated_cross_entropy(z[:, kept], torch.tensor([0, 3]), COUNTS[kept], tau=0.1)
    torch.testing.assert_close(calibrated(z), alone)
    found = gradient(calibrated, z)
    assert (found[:, COUNTS == 0] == 0).all() and (found[:, kept] != 0).all()


def test_a_margin_has_a_gradient_where_a_distance_is_0():
    labels, prototypes = torch.tensor([0]), torch.eye(3, dtype=torch.float64)
    known = torch.tensor([True, True, False])
    found = gradient(lambda h: losses.prototype_margin(h, labels, prototypes, known), prototypes[1:2])
    assert found.isfinite().all()
    alone = torch.tensor([True, False, False])
    assert losses.prototype_margin(prototypes[1:2], labels, prototypes, alone) == 0
