"""FedSAM's, FedSOL's and FedSMOO's terms: value and gradient, by hand, and what their second pass
leaves behind.
"""

import copy
from types import SimpleNamespace

import oracle
import pytest
import torch
from torch import nn

from rayfed import methods as m
from rayfed.methods.views import run_in_bf16, run_model
from rayfed.models.classifier import Classifier
from rayfed.tensors.weights import parameters_of

IMAGES = torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.arange(8) % 4


def network(seed):
    torch.manual_seed(seed)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
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


def term_of(part, model, teacher, run=run_model):
    batch, client = batch_and_client(model, teacher, run)
    return part.loss(batch, part.begin(client))


def plain(model):
    return oracle.loss_of(model, IMAGES, LABELS)


def step_of_fedsam(model, teacher, rho):
    return oracle.scaled(oracle.gradients(plain(model), model), rho)


def step_of_fedsol(model, teacher, rho):
    """Element by element, as the authors' code has it: along the first dimension the distances have
    norm 1.
    """
    divergence = oracle.mean_of(lambda z, t, y: oracle.kl(z, t))(
        model(IMAGES) / 3, teacher(IMAGES) / 3, LABELS
    )
    step, anchor = (
        oracle.scaled(oracle.gradients(divergence, model), rho),
        dict(teacher.named_parameters()),
    )
    for name, w in model.named_parameters():
        moved = (w - anchor[name]).abs().detach()
        size = (moved**2).sum(dim=0, keepdim=True).sqrt()
        step[name] = torch.where(size > 0, moved / size, 0) * step[name]
    return step


CASES = {
    "fedsam": (m.SharpnessAware(0.5), step_of_fedsam),
    "fedsol": (m.ProximalPerturbation(0.5), step_of_fedsol),
    # A client's first step in the first round.
    "fedsmoo": (
        m.AgreedPerturbation(0.5),
        step_of_fedsam,
    ),
}
every_part = pytest.mark.parametrize(("part", "step"), CASES.values(), ids=CASES)


@every_part
def test_the_value_is_the_loss_here_and_the_gradient_is_the_one_a_step_away(
    part, step, model, teacher
):
    away, here = step(copy.deepcopy(model), teacher, 0.5), copy.deepcopy(model)
    expected = oracle.gradient_away(copy.deepcopy(model), away, IMAGES, LABELS)
    value, term = plain(here), term_of(part, model, teacher)
    torch.testing.assert_close(term, value)
    found = oracle.gradients(term, model)
    torch.testing.assert_close(found, expected)
    # Another gradient than that of the loss here.
    for name, g in oracle.gradients(value, here).items():
        assert (found[name] - g).abs().max() > 1e-4 * g.abs().max()


@every_part
def test_the_running_statistics_count_a_batch_once_and_the_parameters_stay(
    part, step, model, teacher
):
    once, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    once(IMAGES)
    term_of(part, model, teacher).backward()
    for name, buffer in once.named_buffers():
        assert torch.equal(model.state_dict()[name], buffer) and not torch.equal(
            buffer, before[name]
        )
    assert all(torch.equal(w, before[name]) for name, w in model.named_parameters())


@every_part
def test_terms_of_other_parts_still_have_their_gradients_at_the_weights_in_training(
    part, step, model, teacher
):
    batch, client = batch_and_client(model, teacher)
    both = oracle.gradients(
        part.loss(batch, part.begin(client)) + m.Distill().loss(batch, None), model
    )
    again, _ = batch_and_client(copy.deepcopy(model), teacher)
    of_other = oracle.gradients(m.Distill().loss(again, None), again.model)
    alone = oracle.gradients(term_of(part, model, teacher), model)
    torch.testing.assert_close(both, {name: g + alone[name] for name, g in of_other.items()})


@every_part
def test_the_second_pass_is_in_the_jobs_precision(part, step, teacher):
    model, teacher = network(0).float().train(), network(1).float().eval()
    found = []
    for run in (run_model, run_in_bf16):
        batch, client = batch_and_client(copy.deepcopy(model), teacher, run)
        batch.images = IMAGES.float()
        found.append(
            oracle.gradients(part.loss(batch, part.begin(client)), batch.model)["head.weight"]
        )
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, rtol=0.1, atol=0.02)


def test_a_parameter_without_a_gradient_has_none_here_either(teacher):
    """Else weight decay would pull it, as SGD skips a parameter without a gradient."""
    model = network(0)
    model.extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
    term_of(m.SharpnessAware(0.5), model, teacher).backward()
    assert model.extra.grad is None and model.head.weight.grad is not None


def test_fedsol_before_the_first_step_is_plain(model):
    """No weight has moved from the global one, so there is no step, whatever the divergence is."""
    here = copy.deepcopy(model)
    found = oracle.gradients(
        term_of(m.ProximalPerturbation(), model, copy.deepcopy(model).eval()), model
    )
    torch.testing.assert_close(found, oracle.gradients(plain(here), here))


def test_fedlesams_step_goes_back_to_the_global_model_that_the_client_had_last(model, teacher):
    """`rho (w_then - w_now) / ||w_then - w_now||`; it is the same for every batch, and no step in a
    client's first.
    """
    part, now = m.GlobalPerturbation(0.5), teacher.state_dict()
    then = {
        name: w + torch.linspace(-1, 1, w.numel()).view_as(w)
        for name, w in teacher.named_parameters()
    }
    batch, client = batch_and_client(model, teacher)
    client.memory = then
    step = oracle.scaled({name: then[name].detach() - now[name] for name in then}, 0.5)
    expected = oracle.gradient_away(copy.deepcopy(model), step, IMAGES, LABELS)
    torch.testing.assert_close(
        oracle.gradients(part.loss(batch, part.begin(client)), model), expected
    )
    sent, kept = part.report(client, None, SimpleNamespace(parameters=parameters_of(model)))
    assert (
        sent is None
        and kept.keys() == then.keys()
        and all(torch.equal(w, now[name]) for name, w in kept.items())
    )
    here = copy.deepcopy(model)
    torch.testing.assert_close(
        oracle.gradients(term_of(part, model, teacher), model), oracle.gradients(plain(here), here)
    )


def test_fedsmoos_multipliers_follow_each_step(model, teacher):
    """Two batches by hand: `e = rho (g - mu - s) / norm`, `mu <- mu + e - s`.

    The client's memory is not written to.
    """
    part, draw = m.AgreedPerturbation(0.5), torch.Generator().manual_seed(3)
    mu, s = (
        {
            k: 0.1 * torch.randn(w.shape, generator=draw).double()
            for k, w in parameters_of(model).items()
        }
        for _ in "ab"
    )
    _, client = batch_and_client(model, teacher)
    client.payload, client.memory = s, copy.deepcopy(mu)
    local, remembered = part.begin(client), client.memory
    for _ in range(2):
        g = oracle.gradients(plain(model), model)
        step = oracle.scaled({name: g[name] - mu[name] - s[name] for name in g}, 0.5)
        expected = oracle.gradient_away(model, step, IMAGES, LABELS)
        batch, _ = batch_and_client(model, teacher)
        torch.testing.assert_close(oracle.gradients(part.loss(batch, local), model), expected)
        mu = {name: mu[name] + step[name] - s[name] for name in mu}
        model = oracle.moved(model, dict.fromkeys(mu, 0.1))
    sent, kept = part.report(client, local, None)
    torch.testing.assert_close(sent, mu)
    torch.testing.assert_close(kept, mu)
    assert client.memory is remembered and not torch.equal(remembered["head.bias"], mu["head.bias"])


def test_fedsmoos_agreed_step_has_length_rho_and_the_direction_of_the_cohorts_multipliers():
    part = m.AgreedPerturbation(0.5)
    total = {
        "a": torch.tensor([3.0], dtype=torch.float64),
        "b": torch.tensor([0.0, -4.0], dtype=torch.float64),
    }
    s, step = part.update(None, total, "step")
    assert (
        step == "step"
        and s["a"].tolist() == pytest.approx([0.3])
        and s["b"].tolist() == pytest.approx([0.0, -0.4])
    )
    assert part.tell(s, None, None) == (s, s)
