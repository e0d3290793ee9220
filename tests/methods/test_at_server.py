"""The server's own training: FedDF's distillation and CCVR's head, beside independent forms of
them.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rayfed import methods as m
from rayfed.base.errors import Diverged, InputError
from rayfed.base.seeds import Purpose, seed_of
from rayfed.clients.batches import batches
from rayfed.clients.settings import Training
from rayfed.methods import at_server
from rayfed.methods.at_server import gaussian, trained
from rayfed.methods.checks import of_rounds
from rayfed.methods.part import trains
from rayfed.methods.views import Frozen, run_model
from rayfed.models.classifier import Classifier
from rayfed.rounds import engine
from rayfed.rounds.choosing import cohort_of
from rayfed.rounds.setup import server_view
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.sums import OrderedSum
from rayfed.tensors.trees import copied
from rayfed.tensors.weights import state_of, with_weights


def of_server(setup):
    """The server's images, as the parts see them."""
    return torch.cat([images for images, _ in server_view(setup, 1, {}).samples()])


def adam(parameters, loss, rows_of_steps, lr):
    """torch's own class, which the package does not use."""
    oracle.descend(
        parameters, [partial(loss, rows) for rows in rows_of_steps], torch.optim.Adam, lr=lr
    )


def rows_of(count, seed, **training):
    torch.default_generator.manual_seed(seed)
    return list(batches(count, Training(**training), torch.default_generator))


# FedDF.


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_feddf_distils_the_mean_logits_into_the_mean_model_by_hand(tau):
    """A linear model in float64."""
    generator = torch.Generator().manual_seed(0)
    # Six samples of three features.
    images = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    clients = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    linear = nn.Linear(3, 5, bias=False).double()
    pieces = [(images[:4], torch.zeros(4)), (images[4:], torch.zeros(2))]
    view = SimpleNamespace(run=run_model, samples=lambda: pieces)
    part, total = (
        m.EnsembleDistill(steps=7, lr=0.1, batch_size=6, tau=tau, held_out=0.0),
        OrderedSum(),
    )
    _, payload = part.tell(None, view, None)
    for w in clients:
        fit = SimpleNamespace(model=with_weights(linear, {"weight": w}))
        total.add(part.report(view, payload, fit)[0])
    # Not from the mean of the clients: of linear models it has the mean logits, and there is
    # nothing to learn.
    weights = {"weight": clients[0]}
    server = SimpleNamespace(
        round=1, weights=weights, frozen=Frozen(linear), run=run_model, samples=view.samples
    )
    begin = m.Step(server, weights, frozenset({"weight"}))
    _, step = part.update(None, total.value, begin)

    w, taught = clients[0].clone().requires_grad_(), (images @ clients.mT).mean(dim=0)
    divergence = oracle.mean_of(lambda z, t, y: oracle.kl(z, t, tau))
    adam([w], lambda rows: divergence(images @ w.T, taught, torch.zeros(6)), range(7), lr=0.1)
    torch.testing.assert_close(step.averaged["weight"], w.detach(), rtol=1e-8, atol=1e-10)


def test_feddf_trains_the_average_on_the_servers_images_in_eval_mode(make_setup, play):
    """A round with BatchNorm and Dropout, beside torch's Adam on the average and the mean of the
    clients' logits.
    """
    part = m.EnsembleDistill(steps=5, batch_size=3, lr=0.01, held_out=0.0)
    setup = make_setup(m.compose(part), norm=True, num_rounds=1)
    averaged = play(make_setup(m.fedavg(), norm=True, num_rounds=1))[1].weights
    images, fits = of_server(setup), []
    opening = engine.open_round(setup, engine.start(setup, ThisProcess(setup)), ThisProcess(setup))
    assert torch.equal(opening.broadcast.payloads[part.slot], images)
    with pytest.MonkeyPatch.context() as patch:
        report = m.EnsembleDistill.report
        patch.setattr(
            m.EnsembleDistill,
            "report",
            lambda *given: fits.append(state_of(given[-1].model)) or report(*given),
        )
        (_, last) = play(setup)
    with torch.no_grad():
        teacher = (
            torch.stack([with_weights(setup.model, w).eval()(images).double() for w in fits])
            .mean(dim=0)
            .float()
        )
    model = with_weights(setup.model, averaged).eval()
    rows = rows_of(len(images), seed_of(0, Purpose.UPDATE, 1), local_steps=5, batch_size=3)

    def loss(some):
        return F.kl_div(
            model(images[some]).log_softmax(1), teacher[some].softmax(1), reduction="batchmean"
        )

    adam(model.parameters(), loss, rows, lr=0.01)
    torch.testing.assert_close(last.weights, state_of(model), rtol=1e-5, atol=1e-6)
    assert all(
        torch.equal(last.weights[name], averaged[name]) for name in dict(model.named_buffers())
    )
    assert max((last.weights[name] - averaged[name]).abs().max() for name in averaged) > 1e-2


@pytest.mark.parametrize(
    ("held_out", "rows", "lr"),
    [(0.5, [1, 3, 5, 7], 0.1), (0.25, [3, 7], 0.1), (0.25, [3, 7], 1e-6)],
)
def test_feddf_gives_the_student_that_was_best_on_held_out_images(
    held_out, rows, lr, make_setup, play, monkeypatch
):
    """Of the students after each pass over the other images, and the average; it is not trained on
    them.

    With the small rate all are equally good, and the first one is given.
    """
    part = m.EnsembleDistill(steps=9, batch_size=3, lr=lr, held_out=held_out)
    setup, seen = make_setup(m.compose(part), num_rounds=1), []
    images = of_server(setup)
    labels = torch.tensor(setup.federation.train.labels[setup.federation.auxiliary])

    def watched(model, step):
        weights = trained(model, step)
        right = model(images[rows]).argmax(dim=1) == labels[rows]
        seen.append((right.double().mean().item(), copied(weights)))
        return weights

    monkeypatch.setattr(at_server, "trained", watched)
    (_, last) = play(setup)
    start, *others = seen
    # The first of equals.
    best = max(others, key=lambda one: one[0])[1]
    assert all(torch.equal(last.weights[name], w) for name, w in best.items())
    assert start[0] <= max(accuracy for accuracy, _ in others)


def test_feddf_leaves_what_is_frozen(make_setup, play):
    setup = make_setup(m.feddf(steps=3, held_out=0.0), norm=True)
    setup.model.head.requires_grad_(False)
    run = play(setup)
    assert not any(name.startswith("head.") for name in run[-1].weights)
    assert not torch.equal(
        run[-1].weights["features.0.weight"], run[0].weights["features.0.weight"]
    )


def test_server_momentum_takes_the_distilled_model_where_it_comes_second(make_setup, play):
    """Both change the average, in the order in which the method lists them."""
    first, then = m.EnsembleDistill(steps=3, held_out=0.0), m.ServerMomentum(beta=0.5)
    one, other = (
        play(make_setup(m.compose(*parts)))[-1].weights for parts in ((first, then), (then, first))
    )
    assert max((one[name] - other[name]).abs().max() for name in one) > 1e-4


# CCVR.


def calibrated(make_setup, play, **options):
    """A setup that calibrates in round 3, and its rounds."""
    setup = make_setup(m.switch(m.fedavg(), m.ccvr(**options), at=3), norm=True)
    return setup, play(setup)


def test_the_gaussian_of_sums_is_numpys_mean_and_covariance():
    rng = np.random.default_rng(0)
    # Three clients.
    parts = [rng.normal(size=(n, 5)) @ rng.normal(size=(5, 5)) + 3 for n in (1, 4, 9)]
    n, sums = sum(map(len, parts)), sum(x.sum(axis=0) for x in parts)
    mean, covariance = gaussian(n, torch.tensor(sums), torch.tensor(sum(x.T @ x for x in parts)))
    together = np.concatenate(parts)
    np.testing.assert_allclose(mean, together.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(covariance, np.cov(together.T), rtol=1e-10, atol=1e-12)
    # The paper's form, from each client's own mean and covariance.
    by_client = sum((len(x) - 1) * np.cov(x.T) for x in parts[1:]) + sum(
        len(x) * np.outer(x.mean(axis=0), x.mean(axis=0)) for x in parts
    )
    expected = (by_client - n * np.outer(mean, mean)) / (n - 1)
    np.testing.assert_allclose(covariance, expected, rtol=1e-10, atol=1e-12)
    single = torch.tensor(parts[0])
    assert gaussian(1, single[0], single.T @ single)[1].abs().max() < 1e-12


def test_ccvr_trains_the_old_head_on_features_of_the_cohorts_gaussians(make_setup, play):
    """Beside numpy's moments of the cohort's features, the same draws, and torch's Adam."""
    options = {"features_per_class": 7, "steps": 6, "batch_size": 8}
    setup, run = calibrated(make_setup, play, lr=0.05, **options)
    data, view = setup.federation, server_view(setup, 3, run[2].weights)
    cohort = cohort_of(setup, 3).answered
    rows = np.concatenate([data.client(client) for client in cohort])
    images = torch.cat([images for images, _ in data.batches(data.train, rows, setup.device)])
    features, labels = view.global_model.features(images).double().numpy(), data.train.labels[rows]
    torch.default_generator.manual_seed(seed_of(0, Purpose.UPDATE, 3))
    drawn = []
    for c in range(4):
        own = features[labels == c]
        values, vectors = np.linalg.eigh(np.cov(own.T) if len(own) > 1 else np.zeros((16, 16)))
        root = vectors @ np.diag(np.sqrt(np.maximum(values, 0))) @ vectors.T
        drawn.append(own.mean(axis=0) + torch.randn(7, 16, dtype=torch.float64).numpy() @ root)
    x, y = torch.tensor(np.concatenate(drawn)).float(), torch.arange(4).repeat_interleave(7)
    head = with_weights(setup.model, run[2].weights).head
    order = list(batches(28, Training(local_steps=6, batch_size=8), torch.default_generator))
    adam(head.parameters(), lambda some: F.cross_entropy(head(x[some]), y[some]), order, lr=0.05)
    for name, w in head.state_dict().items():
        torch.testing.assert_close(run[3].weights[f"head.{name}"], w, rtol=1e-4, atol=1e-5)


def test_in_ccvrs_round_no_client_trains_and_all_but_the_head_stays(make_setup, play):
    _, run = calibrated(make_setup, play)
    before, last = run[2], run[3]
    changed = {name for name, w in last.weights.items() if not torch.equal(w, before.weights[name])}
    assert changed == {"head.weight", "head.bias"}
    assert last.clients == () and last.train_loss is None and last.evaluation is not None
    # The sums are not kept.
    assert last.held["average"].state is None
    # Four clients: counts, sums, products.
    assert last.bytes_up == 4 * 8 * (4 + 4 * 16 + 4 * 16 * 16)


def test_ccvr_leaves_the_logits_of_a_class_that_the_cohort_lacks(make_setup, play):
    counts = [[5, 2, 1, 0]] * 4 + [[0, 0, 0, 9]]
    method = m.switch(m.fedavg(), m.ccvr(), at=2)
    setup = make_setup(method, counts=counts, num_rounds=2)
    last = play(make_setup(method, counts=counts, num_rounds=1))[-1]
    after = engine.play(setup, last, ThisProcess(setup), clients=[0, 1, 2])
    for name in ("head.weight", "head.bias"):
        assert torch.equal(after.weights[name][3], last.weights[name][3])
        assert not torch.equal(after.weights[name][:3], last.weights[name][:3])


@pytest.mark.parametrize(
    "head", [nn.Linear(4, 2).requires_grad_(False), nn.Identity()], ids=["frozen", "empty"]
)
def test_ccvr_refuses_a_model_without_a_head_that_trains(head):
    with pytest.raises(
        InputError, match="head_calibration: the model has no module `head` that trains"
    ):
        m.HeadCalibration().check(Classifier(nn.Linear(4, 4), head), Training())
    with pytest.raises(
        InputError, match=r"HeadCalibration.* looks at features, and this model has none"
    ):
        m.HeadCalibration().check(nn.Linear(4, 2), Training())


def test_ccvr_in_several_rounds_is_warned_of():
    assert not trains(m.ccvr()) and trains(m.fedavg()) and trains(m.feddf())
    assert list(of_rounds(m.switch(m.fedavg(), m.ccvr(), at=9), 9)) == []
    (said,) = of_rounds(m.switch(m.fedavg(), m.ccvr(), at=7), 9)
    assert "which are 3 of 9. Give it the last round alone: method = [{until = 8" in said
    (said,) = of_rounds(m.switch(m.ccvr(), m.fedavg(), at=2), 9)
    assert "which are 1 of 9" in said


def test_a_server_that_diverges_says_what_to_lower(make_setup, play):
    with pytest.raises(
        Diverged, match=r"the server's loss became \S+ in round \d, step \d+ .*; try a smaller lr"
    ):
        play(make_setup(m.feddf(lr=1e30)))
