"""FedSAM's, FedSOL's and FedSMOO's terms: value and gradient, by hand, and what their second pass leaves behind."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rayfed import methods as m
from rayfed.methods.views import run_in_bf16, run_model
from rayfed.models.classifier import Classifier
from rayfed.tensors.weights import parameters_of

IMAGES = torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.arange(8) % 4


def network(seed, norm=True):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 4, 3), *([nn.BatchNorm2d(4)] if norm else []), nn.ReLU(), nn.Flatten()]
    return Classifier(nn.Sequential(*layers), nn.Linear(16, 4)).double()


@pytest.fixture
def model():
    return network(0).train()


@pytest.fixture
def teacher():
    return network(1).eval()


def batch_and_client(model, teacher, run=run_model):
    client = SimpleNamespace(run=run, weights=teacher.state_dict(), payload=None, memory=None)
    view = SimpleNamespace(run=run, global_model=teacher)
    return m.Batch(IMAGES, LABELS, model, parameters_of(model), view), client


def gradients(loss, model):
    return dict(zip(parameters_of(model), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def step_of_fedsam(model, teacher, rho):
    g = gradients(F.cross_entropy(model(IMAGES), LABELS), model)
    norm = torch.cat([x.flatten() for x in g.values()]).norm()
    return {name: rho * x / norm for name, x in g.items()}


def step_of_fedsol(model, teacher, rho):
    """Element by element, as the authors' code has it: along the first dimension the distances have norm 1."""
    student, target = F.log_softmax(model(IMAGES) / 3, dim=1), F.softmax(teacher(IMAGES) / 3, dim=1)
    g = gradients((target * (target.log() - student)).sum() / len(IMAGES), model)
    norm = torch.cat([x.flatten() for x in g.values()]).norm()
    step, anchor = {}, dict(teacher.named_parameters())
    for name, w in model.named_parameters():
        moved = (w - anchor[name]).abs().detach()
        length = (moved**2).sum(dim=0, keepdim=True).sqrt()
        step[name] = torch.where(length > 0, moved / length, 0) * g[name] * rho / norm
    return step


CASES = {
    "fedsam": (m.SharpnessAware(0.5), step_of_fedsam),
    "fedsol": (m.ProximalPerturbation(0.5), step_of_fedsol),
    "fedsmoo": (m.AgreedPerturbation(0.5), step_of_fedsam),  # a client's first step in the first round
}
every_part = pytest.mark.parametrize(("part", "step"), CASES.values(), ids=CASES)


@every_part
def test_the_value_is_the_loss_here_and_the_gradient_is_the_one_a_step_away(part, step, model, teacher):
    there, steps = copy.deepcopy(model), step(copy.deepcopy(model), teacher, 0.5)
    with torch.no_grad():
        for w, e in zip(there.parameters(), steps.values(), strict=True):
            w += e
    expected = gradients(F.cross_entropy(there(IMAGES), LABELS), there)
    plain = copy.deepcopy(model)
    value = F.cross_entropy(plain(IMAGES), LABELS)
    batch, client = batch_and_client(model, teacher)
    term = part.loss(batch, part.begin(client))
    torch.testing.assert_close(term, value)
    found = gradients(term, model)
    for name, g in gradients(value, plain).items():
        torch.testing.assert_close(found[name], expected[name])
        assert (found[name] - g).abs().max() > 1e-4 * g.abs().max()  # another gradient than that of the loss here


@every_part
def test_the_running_statistics_count_a_batch_once_and_the_parameters_stay(part, step, model, teacher):
    once, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    once(IMAGES)
    batch, client = batch_and_client(model, teacher)
    part.loss(batch, part.begin(client)).backward()
    for name, buffer in once.named_buffers():
        assert torch.equal(model.state_dict()[name], buffer) and not torch.equal(buffer, before[name])
    assert all(torch.equal(w, before[name]) for name, w in model.named_parameters())


@every_part
def test_terms_of_other_parts_still_have_their_gradients_at_the_weights_in_training(part, step, model, teacher):
    batch, client = batch_and_client(model, teacher)
    alone, other = part.loss(batch, part.begin(client)), m.Distill().loss(batch, None)
    both = gradients(alone + other, model)
    again, _ = batch_and_client(copy.deepcopy(model), teacher)
    for name, g in gradients(m.Distill().loss(again, None), again.model).items():
        batch, client = batch_and_client(model, teacher)
        torch.testing.assert_close(both[name], g + gradients(part.loss(batch, part.begin(client)), model)[name])


@every_part
def test_the_second_pass_is_in_the_jobs_precision(part, step, teacher):
    model, teacher = network(0).float().train(), network(1).float().eval()
    found = []
    for run in (run_model, run_in_bf16):
        batch, client = batch_and_client(copy.deepcopy(model), teacher, run)
        batch.images = IMAGES.float()
        found.append(gradients(part.loss(batch, part.begin(client)), batch.model)["head.weight"])
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, rtol=0.1, atol=0.02)


def test_a_parameter_without_a_gradient_has_none_here_either(teacher):
    """Else weight decay would pull it, as SGD skips a parameter without a gradient."""
    model = network(0)
    model.extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    batch, client = batch_and_client(model, teacher)
    part = m.SharpnessAware(0.5)
    part.loss(batch, part.begin(client)).backward()
    assert model.extra.grad is None and model.head.weight.grad is not None


def test_fedsol_before_the_first_step_is_plain(model):
    """No weight has moved from the global one, so there is no step, whatever the divergence is."""
    global_model = copy.deepcopy(model).eval()
    batch, client = batch_and_client(model, global_model)
    part = m.ProximalPerturbation()
    found = gradients(part.loss(batch, part.begin(client)), model)
    plain = copy.deepcopy(model)
    for name, g in gradients(F.cross_entropy(plain(IMAGES), LABELS), plain).items():
        torch.testing.assert_close(found[name], g)


def test_fedsmoos_multipliers_follow_each_step(model, teacher):
    """Two batches by hand: `e = rho (g - mu - s) / norm`, `mu <- mu + e - s`. The client's memory is not written to."""
    part, draw = m.AgreedPerturbation(0.5), torch.Generator().manual_seed(3)
    mu, s = (
        {k: 0.1 * torch.randn(w.shape, generator=draw).double() for k, w in parameters_of(model).items()} for _ in "ab"
    )
    batch, client = batch_and_client(model, teacher)
    client.payload, client.memory = s, copy.deepcopy(mu)
    local, remembered = part.begin(client), client.memory
    for _ in range(2):
        g = gradients(F.cross_entropy(model(IMAGES), LABELS), model)
        push = {name: g[name] - mu[name] - s[name] for name in g}
        norm = torch.cat([x.flatten() for x in push.values()]).norm()
        step = {name: 0.5 * x / norm for name, x in push.items()}
        there = copy.deepcopy(model)
        with torch.no_grad():
            for w, e in zip(there.parameters(), step.values(), strict=True):
                w += e
        expected = gradients(F.cross_entropy(there(IMAGES), LABELS), there)
        batch, _ = batch_and_client(model, teacher)
        found = gradients(part.loss(batch, local), model)
        for name in found:
            torch.testing.assert_close(found[name], expected[name])
        mu = {name: mu[name] + step[name] - s[name] for name in mu}
        with torch.no_grad():
            for w in model.parameters():
                w += 0.1
    sent, kept = part.report(client, local, None)
    for name in mu:
        torch.testing.assert_close(sent[name], mu[name])
        torch.testing.assert_close(kept[name], mu[name])
    assert client.memory is remembered and not torch.equal(remembered["head.bias"], mu["head.bias"])


def test_fedsmoos_agreed_step_has_length_rho_and_the_direction_of_the_cohorts_multipliers():
    part = m.AgreedPerturbation(0.5)
    total = {"a": torch.tensor([3.0], dtype=torch.float64), "b": torch.tensor([0.0, -4.0], dtype=torch.float64)}
    s, step = part.update(None, total, "step")
    assert step == "step" and s["a"].tolist() == pytest.approx([0.3]) and s["b"].tolist() == pytest.approx([0.0, -0.4])
    assert part.tell(s, None, None) == (s, s)
