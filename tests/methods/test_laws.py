"""What is known of a method without running its paper: when it is another one, and what its sums must be."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rayfed import losses
from rayfed import methods as m
from rayfed.data.augment import prepare
from rayfed.local import Broadcast, batches, server_view, survey
from rayfed.methods.anchors import momentum_corrected_steps
from rayfed.methods.part import Outputs
from rayfed.rounds import rounds, start
from rayfed.runtime.here import Here
from rayfed.seeds import Purpose, seed_of
from rayfed.weights import OrderedSum, Scaled, state_of
from rayfed.wire import unpack

EVEN = [[5, 2, 1, 0], [1, 1, 3, 3], [2, 2, 2, 2], [0, 0, 1, 7], [4, 4, 0, 0], [3, 1, 4, 0]]  # eight samples each
BALANCED = [[2, 2, 2, 2]] * 6

# How each part is made to do nothing; None where it has no such value, and a law of its own below instead.
NEUTRAL = {
    m.Average: {"by": "samples"},
    m.ClassAdaptiveDistill: {"low": 0.0, "high": 0.0},
    m.ControlVariates: None,
    m.CrossEntropy: {"weight": 1.0, "smoothing": 0.0},
    m.Curvature: {"strength": 0.0},
    m.Distill: {"beta": 0.0},
    m.DynamicRegularizer: None,
    m.LabelMaskedDistill: {"beta": 0.0},
    m.ModelContrast: {"mu": 0.0},
    m.NormalizedAverage: None,
    m.NotTrueDistill: {"beta": 0.0},
    m.PastTeachersDistill: {"beta": 0.0},
    m.PrototypeSimilarityDistill: {"mu": 0.0},
    m.Prototypes: {"mu": 0.0},
    m.Proximal: {"mu": 0.0},
    m.RestrictedCrossEntropy: {"alpha": 1.0},
    m.SelectiveDistill: {"m_max": 0.0},
    m.ServerMomentum: {"beta": 0.0},
    m.SlimAlign: {"mu": 0.0},
}


@pytest.fixture
def final(make_site, play):
    """The weights that a method ends with, in float64."""

    def final(method, **setting):
        return {name: w.double() for name, w in play(make_site(method, **setting))[-1].weights.items()}

    return final


def assert_same(a, b, tolerance=1e-5):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_differ(a, b):
    assert max((a[name] - b[name]).abs().max() for name in a) > 1e-3


# When a method is another.


def test_every_part_says_how_it_is_made_to_do_nothing():
    assert set(m.PARTS.values()) == set(NEUTRAL)


@pytest.mark.parametrize("part", [part for part, zero in NEUTRAL.items() if zero], ids=lambda part: part.__name__)
def test_a_part_that_weighs_nothing_is_fedavg(part, final):
    assert_same(final(m.compose(part(**NEUTRAL[part])), norm=True), final(m.fedavg(), norm=True), tolerance=1e-6)


@pytest.mark.parametrize(
    "method", [m.fedavgm(beta=0.0), m.fedprox(mu=0.0), m.fedrs(alpha=1.0), m.fedrs(alpha=1.0, soft=True)], ids=repr
)
def test_and_the_baselines_are_so_to_the_bit(method, final):
    assert_same(final(method, norm=True), final(m.fedavg(), norm=True), tolerance=0)


EQUAL = {
    "FedLMD without majority labels is FedNTD": (m.fedlmd(tau=2.0), m.fedntd(tau=2.0), {"counts": BALANCED}),
    "FedLMD-Tf without majority labels is FedNTD-Tf": (m.fedlmd_tf(), m.fedntd(teacher=False), {"counts": BALANCED}),
    "FedGKD with one teacher is KD, once there is one": (
        m.fedgkd(beta=0.5, tau=2.0, buffer=1),
        m.switch(m.fedavg(), m.kd(beta=0.5, tau=2.0), at=2),
        {},
    ),
    "FedCAD with one weight is FedLSD": (m.fedcad(low=0.3, high=0.3, tau=2.0), m.fedlsd(beta=0.3, tau=2.0), {}),
    "FedNova with equal steps is FedAvg": (m.fednova(), m.fedavg(), {"counts": EVEN, "norm": True}),
    "FedNova with a given number of steps is FedAvg": (m.fednova(), m.fedavg(), {"local_steps": 3, "norm": True}),
    "FedNTD without its share is KD": (m.fedntd(mix=0.0, tau=2.0), m.kd(tau=2.0), {}),
    "FedRS with all classes held is FedAvg": (m.fedrs(alpha=0.1), m.fedavg(), {"counts": BALANCED}),
    "clients of one size weigh the same": (
        m.compose(m.Average(by="client")),
        m.compose(m.Average(by="samples")),
        {"counts": EVEN},
    ),
    "FedCSD less all that it adds is KD": (
        m.fedcsd(mu=0.5, tau=2.0, mask="none", similarity=False, decay=0.0),
        m.kd(beta=0.5, tau=2.0),
        {},
    ),
    "a fresh SCAFFOLD is FedAvg": (m.scaffold(), m.fedavg(), {"num_rounds": 1}),
    "MOON without a past is FedAvg": (m.moon(), m.fedavg(), {"num_rounds": 1}),
    "FedCurv without a past is FedAvg": (m.fedcurv(), m.fedavg(), {"num_rounds": 1}),
    "FedProto without prototypes is FedAvg": (m.fedproto(), m.fedavg(), {"num_rounds": 1}),
    "FedGKD without a teacher is FedAvg": (m.fedgkd(), m.fedavg(), {"num_rounds": 1}),
    "the first velocity is the whole step": (m.fedavgm(), m.fedavg(), {"num_rounds": 1}),
    "a switch to the same is none": (m.switch(m.fedntd(), m.fedntd(), at=2), m.fedntd(), {}),
}


@pytest.mark.parametrize(("one", "other", "setting"), EQUAL.values(), ids=EQUAL)
def test_are_equal(one, other, setting, final):
    assert_same(final(one, **setting), final(other, **setting))


DIFFERENT = {  # the settings in which the laws above would hold anyway are not those that test them
    "majority labels": (m.fedlmd(tau=2.0), m.fedntd(tau=2.0)),
    "absent classes": (m.fedrs(alpha=0.1), m.fedavg()),
    "unequal steps": (m.fednova(), m.fedavg()),
    "unequal sizes": (m.compose(m.Average(by="client")), m.fedavg()),
    "control variates with a past": (m.scaffold(), m.fedavg()),
    "a contrast with a past": (m.moon(mu=5.0), m.fedavg()),
    "curvature with a past": (m.fedcurv(), m.fedavg()),
    "prototypes": (m.fedproto(), m.fedavg()),
    "past teachers": (m.fedgkd(beta=1.0), m.kd()),
    "velocity": (m.fedavgm(), m.fedavg()),
    "a switch": (m.switch(m.fedntd(), m.fedavg(), at=2), m.fedntd()),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_are_different(one, other, final):
    assert_differ(final(one), final(other))


def test_one_step_of_a_teachers_pupil_is_free(final):
    """At the round's weights student and teacher agree, so the first step of a distilled round is that of FedAvg."""
    single = {"local_steps": 1, "batch_size": 20, "num_rounds": 1}
    for method in (m.kd(), m.fedntd(), m.compose(m.Proximal(10.0)), m.fedssd(m_max=1.0)):
        assert_same(final(method, **single), final(m.fedavg(), **single))


# Plain SGD, step for step.


def of_client(site, client):
    """A client's images, normalised, and labels."""
    data = site.federation
    rows = data.client(client)
    images = prepare(torch.from_numpy(data.train.images[rows]), data.mean, data.std)
    return images.plain(torch.arange(len(rows))), torch.from_numpy(data.train.labels[rows])


def sgd(site, client, weights, round):
    """One client's round in plain torch, from the given weights: its model's state, and its losses."""
    training, model = site.training, site.model
    model.load_state_dict(weights)
    model.train()
    images, labels = of_client(site, client)
    lr = training.lr * training.lr_decay ** (round - 1)
    optimizer = torch.optim.SGD(model.parameters(), lr, training.momentum, weight_decay=training.weight_decay)
    losses = []
    for index in batches(
        len(labels), training, torch.Generator().manual_seed(seed_of(site.seed, Purpose.CLIENT, round, client))
    ):
        loss = F.cross_entropy(model(images[index]), labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return state_of(model), losses


def test_one_client_with_all_data_is_plain_sgd_to_the_bit(make_site, play):
    setting = {"counts": [[12, 13, 9, 8]], "clients_per_round": 1}  # the last batch of an epoch has two samples
    site = make_site(m.fedavg(), **setting)
    weights = state_of(site.model)
    for round in play(make_site(m.fedavg(), **setting))[1:]:
        weights, losses = sgd(site, 0, weights, round.round)
        assert all(torch.equal(round.weights[name], w) for name, w in weights.items())
        assert round.clients[0].train_loss == float(np.mean(losses))


def test_a_round_of_fedavg_is_the_weighted_mean_of_plain_sgd(make_site, play):
    site = make_site(m.fedavg())
    weights = state_of(site.model)
    for round in play(make_site(m.fedavg()))[1:]:
        clients = [row.client for row in round.clients]
        sizes = np.array([site.federation.num_examples(client) for client in clients])
        trained = [sgd(site, client, weights, round.round)[0] for client in clients]
        for name, w in round.weights.items():
            mean = np.tensordot(sizes, np.array([t[name].double().numpy() for t in trained]), axes=1) / sizes.sum()
            np.testing.assert_array_equal(w.numpy(), mean.astype(np.float32))
        weights = round.weights


@pytest.mark.parametrize(
    "change", [{"momentum": 0.0}, {"lr_decay": 1.0}, {"weight_decay": 0.0}, {"local_epochs": 1}], ids=str
)
def test_every_number_of_the_training_matters(change, final):
    assert any(
        not torch.equal(a, b)
        for a, b in zip(final(m.fedavg()).values(), final(m.fedavg(), **change).values(), strict=True)
    )


# Terms on a batch: which loss a part takes, of whom, and how much of it.

Z, T, OLD, H, H_GLOBAL, H_OLD = (torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(6))
LABELS, COUNTED = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([9, 3, 0, 2])
PRESENT, PAST = Outputs(H_GLOBAL, T), Outputs(H_OLD, OLD)  # of the round's global model, and of another
TRUST, CENTRES = torch.tensor([0.9, 0.5, 0.2, 1.0]), torch.randn(4, 4, generator=torch.Generator().manual_seed(6))
KNOWN = torch.tensor([True, False, True, True])
TAUGHT = [  # part, the payload, the term
    (m.CrossEntropy(0.5, 0.1), None, 0.5 * losses.cross_entropy(Z, LABELS, smoothing=0.1)),
    (m.RestrictedCrossEntropy(0.3), None, losses.restricted_cross_entropy(Z, LABELS, COUNTED, alpha=0.3)),
    (
        m.RestrictedCrossEntropy(0.3, True),
        None,
        losses.restricted_cross_entropy(Z, LABELS, COUNTED, alpha=0.3, soft=True),
    ),
    (
        m.ClassAdaptiveDistill(0.2, 0.7, 2.0),
        None,
        losses.class_adaptive_distill(
            Z, T, LABELS, losses.class_adaptive_weights(T, LABELS, 4, low=0.2, high=0.7, tau=2.0), tau=2.0
        ),
    ),
    (m.Distill(0.5, 2.0), None, 0.5 * losses.distill(Z, T, tau=2.0)),
    (m.Distill(0.5, form="mse"), None, 0.5 * losses.squared_error(Z, T)),
    (m.NotTrueDistill(0.5, 2.0), None, 0.5 * losses.not_true_distill(Z, T, LABELS, tau=2.0)),
    (m.NotTrueDistill(0.5, form="mse"), None, 0.5 * losses.not_true_squared_error(Z, T, LABELS)),
    (m.NotTrueDistill(teacher=False), None, losses.not_true_distill(Z, 0 * T, LABELS, tau=1.0)),
    (
        m.NotTrueDistill(0.5, 2.0, mix=0.2),
        None,
        0.5 * (0.2 * losses.not_true_distill(Z, T, LABELS, tau=2.0) + 0.8 * losses.distill(Z, T, tau=2.0)),
    ),
    (
        m.LabelMaskedDistill(0.5, 2.0),
        None,
        0.5 * losses.label_masked_distill(Z, T, LABELS, torch.tensor([True, False, False, False]), tau=2.0),
    ),
    (
        m.LabelMaskedDistill(teacher=False),
        None,
        losses.label_masked_distill(Z, 0 * T, LABELS, torch.tensor([True, False, False, False]), tau=1.0),
    ),
    (m.SelectiveDistill(0.5), TRUST, losses.selective_distill(Z, T, LABELS, TRUST, m_max=0.5)),
    (
        m.SelectiveDistill(0.5, False),
        TRUST,
        losses.selective_distill(Z, T, LABELS, TRUST, m_max=0.5, inside_norm=False),
    ),
    (
        m.PrototypeSimilarityDistill(0.5, 2.0, "forcible"),
        CENTRES,
        0.5 * losses.prototype_similarity_distill(Z, OLD, LABELS, CENTRES, tau=2.0, mask="forcible"),
    ),
    (m.PastTeachersDistill(0.5, 2.0), {"teacher": "past"}, 0.5 * losses.distill(Z, OLD, tau=2.0)),
    (m.PastTeachersDistill(0.5, 2.0), {"teacher": None}, 0.5 * losses.distill(Z, T, tau=2.0)),
    (m.ModelContrast(0.5, 0.2), None, 0.5 * losses.model_contrast(H, H_GLOBAL, H_OLD, tau=0.2)),
    (
        m.Prototypes(0.5),
        {"means": CENTRES, "known": KNOWN},
        0.5 * losses.prototype_distance(H, LABELS, CENTRES, KNOWN),
    ),
]


@pytest.mark.parametrize(
    ("part", "payload", "term"), TAUGHT, ids=lambda value: repr(value) if isinstance(value, m.Part) else ""
)
def test_terms_on_a_batch_are_the_papers(part, payload, term):
    """A model stands here for its outputs: weights "now" are the round's, "past" those of the state and the memory."""
    outputs = {"now": PRESENT, "past": PAST}
    client = SimpleNamespace(
        weights="now", state="past", memory="past", payload=payload, frozen=lambda weights: weights
    )
    client.num_classes, client.label_counts, client.global_model = 4, COUNTED, "now"
    client.outputs = lambda model: [(outputs[model], LABELS)]
    batch = SimpleNamespace(logits=Z, features=H, labels=LABELS, teacher=PRESENT, outputs_of=outputs.__getitem__)
    torch.testing.assert_close(part.loss(batch, part.begin(client)), term)


# Terms on parameters, by their gradients.

W, ANCHOR, P, Q, R, S = (
    torch.randn(3, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(6)
)
TERMS = {  # part, what the client was told, what it remembers, the gradient of its term at `w`
    "proximal": (m.Proximal(mu=0.3), None, None, 0.3 * (W - ANCHOR)),
    "curvature": (
        m.Curvature(strength=0.5),
        {"u": {"x": P}, "uw": {"x": Q}},
        {"u": {"x": R}, "uw": {"x": S}},
        0.5 * 2 * ((P - R) * W - (Q - S)),  # of `sum_j u_j (w - w_j)^2` over the others
    ),
    "curvature, new client": (m.Curvature(), {"u": {"x": P}, "uw": {"x": Q}}, None, 2 * (P * W - Q)),
    "control variates": (m.ControlVariates(), {"x": P}, {"x": Q}, P - Q),
    "control variates, new client": (m.ControlVariates(), {"x": P}, None, P),
    "feddyn": (m.DynamicRegularizer(alpha=0.2), None, {"x": P}, -P + 0.2 * (W - ANCHOR)),
    "feddyn, new client": (m.DynamicRegularizer(alpha=0.2), None, None, 0.2 * (W - ANCHOR)),
}


@pytest.mark.parametrize(("part", "payload", "memory", "gradient"), TERMS.values(), ids=TERMS)
def test_terms_on_parameters_pull_as_they_say(part, payload, memory, gradient):
    local = part.begin(SimpleNamespace(weights={"x": ANCHOR}, payload=payload, memory=memory))
    x = W.clone().requires_grad_()
    (found,) = torch.autograd.grad(part.loss(SimpleNamespace(parameters={"x": x}), local), x)
    torch.testing.assert_close(found, gradient)


# What the servers keep.


@pytest.fixture
def states(make_site, bits):
    """Round by round: the part's state, and the memories of its clients (None for one that has not trained)."""

    def states(method, slot, **setting):
        site = make_site(method, **setting)
        first = start(site, state_of(site.model), Here(site))
        for round in rounds(site, first, Here(site)):
            kept = {client: unpack(packed)["slots"][slot] for client, packed in round.memories.items()}
            yield round, round.held[slot].state, kept

    return states


def test_scaffolds_c_is_the_mean_of_all_clients_c_i(states):
    for _, c, own in states(m.scaffold(), "control_variates", num_rounds=4):
        for name in c:
            mean = sum(c_i[name].double() for c_i in own.values()) / 6  # of the population; who never trained has zero
            torch.testing.assert_close(c[name], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scaffolds_c_i_is_the_mean_gradient_of_a_client_alone(momentum, make_site, play, states):
    """Its way, divided by the rate and by the steps as momentum makes them worth; `c - c_1` is nothing."""
    alone = {"counts": [[12, 13, 9, 8]], "clients_per_round": 1, "num_rounds": 2, "momentum": momentum}
    plain, kept = play(make_site(m.fedavg(), **alone)), states(m.scaffold(), "control_variates", **alone)
    for (before, after), (round, c, own) in zip(pairwise(plain), kept, strict=True):
        course = 0.1 * 0.5 ** (round.round - 1) * momentum_corrected_steps(18, momentum)
        for name in c:
            torch.testing.assert_close(round.weights[name], after.weights[name], rtol=1e-4, atol=1e-5)
            gradient = (before.weights[name] - after.weights[name]) / course
            torch.testing.assert_close(own[0][name], gradient, rtol=1e-3, atol=1e-4)


def test_fedcurvs_sums_are_those_of_the_memories(states):
    for _, sums, shares in states(m.fedcurv(), "curvature", num_rounds=4):
        for key in ("u", "uw"):
            for name, total in sums[key].items():
                expected = sum(share[key][name].double() for share in shares.values())
                torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)


def test_fedcurvs_share_is_the_fisher_information_at_the_trained_weights(make_site, states):
    """Of a client that is alone, batch by batch of its own data in order, in eval mode."""
    alone = {"counts": [[3, 4, 2, 2]], "clients_per_round": 1, "num_rounds": 1}
    site = make_site(m.fedavg(), **alone)
    images, labels = of_client(site, 0)
    for round, _, shares in states(m.fedcurv(), "curvature", **alone):
        site.model.load_state_dict(round.weights)
        fisher = dict.fromkeys(shares[0]["u"], 0)
        for index in torch.arange(11).split(5):
            site.model.zero_grad()
            F.cross_entropy(site.model.eval()(images[index]), labels[index]).backward()
            for name, p in site.model.named_parameters():
                fisher[name] = fisher[name] + p.grad**2 * len(index) / 11
        for name, u in shares[0]["u"].items():
            torch.testing.assert_close(u, fisher[name])
            torch.testing.assert_close(shares[0]["uw"][name], fisher[name] * round.weights[name])


@pytest.mark.parametrize(("method", "slot"), [(m.scaffold(), "control_variates"), (m.fedcurv(), "curvature")])
def test_a_method_that_comes_back_starts_anew_on_both_sides(make_site, digest, method, slot):
    """Server and clients forget together: what a client remembers is what the state of the server sums up."""
    in_turn = m.switch(method, m.switch(m.fedavg(), method, at=4), at=3)
    site = make_site(in_turn, num_rounds=6, clients_per_round=6)
    first = start(site, state_of(site.model), Here(site))
    run = {round.round: round for round in rounds(site, first, Here(site))}
    alone = rounds(replace(site, method=method), replace(run[3], held={}, memories={}), Here(site))
    for round in alone:
        assert digest(round.weights) == digest(run[round.round].weights)
    assert run[6].held[slot].since == 4


def test_feddyns_h_is_the_mean_of_all_clients_g_i_and_the_weights_follow(make_site, states):
    """`g_i` moves by `-alpha (w_local - w)`: so it tells `w_local`; the weights are their mean less `h / alpha`."""
    weights, before = state_of(make_site(m.feddyn()).model), {}
    for round, h, own in states(m.feddyn(alpha=0.1), "average", num_rounds=4):
        for name in h:
            torch.testing.assert_close(h[name], sum(g[name].double() for g in own.values()) / 6, rtol=1e-5, atol=1e-6)
            moved = [own[row.client][name] - before.get(row.client, {}).get(name, 0.0) for row in round.clients]
            mean = weights[name] - sum(moved) / len(moved) / 0.1
            torch.testing.assert_close(round.weights[name], mean - h[name].float() / 0.1, rtol=1e-4, atol=1e-5)
        weights, before = round.weights, own


def test_fedprotos_prototypes_are_the_mean_features_of_the_trained_model(make_site, states):
    alone = {"counts": [[3, 4, 0, 2]], "clients_per_round": 1, "num_rounds": 1, "norm": True}
    site = make_site(m.fedproto(), **alone)
    view = server_view(site, 1, {})
    images, labels = of_client(site, 0)
    for round, prototypes, _ in states(m.fedproto(), "prototypes", **alone):
        features = view.frozen(round.weights).features(images)
        assert prototypes["known"].tolist() == [True, True, False, True]
        for c in (0, 1, 3):
            torch.testing.assert_close(prototypes["means"][c], features[labels == c].mean(dim=0))


def test_fedcsds_prototypes_are_the_mean_logits_of_the_teacher_over_the_cohort(make_site):
    site = make_site(m.fedcsd(), norm=True)
    (part,) = (part for part in site.method if isinstance(part, m.PrototypeSimilarityDistill))
    weights, total = state_of(site.model), OrderedSum()
    view, cohort = server_view(site, 1, weights), [0, 2, 4]
    for client in cohort:
        total.add(survey(site, Broadcast(1, weights, {part.slot: weights}, {}, {}), client))
    _, prototypes = part.tell(weights, view, total.value[part.slot])
    images, labels = (torch.cat(column) for column in zip(*(of_client(site, client) for client in cohort), strict=True))
    logits = view.global_model(images)
    for c in range(4):
        torch.testing.assert_close(prototypes[c], logits[labels == c].mean(dim=0))


def test_fedssd_measures_the_global_model_on_the_auxiliary_set(make_site):
    site = make_site(m.fedssd(), norm=True)
    (part,) = (part for part in site.method if isinstance(part, m.SelectiveDistill))
    data, view = site.federation, server_view(site, 1, state_of(site.model))
    images = prepare(torch.from_numpy(data.train.images[data.auxiliary]), data.mean, data.std)
    found = view.global_model(images.plain(torch.arange(8))).argmax(dim=1).tolist()
    rates = np.zeros((4, 4))
    for label, prediction in zip(data.train.labels[data.auxiliary], found, strict=True):
        rates[label, prediction] += 0.5  # two of each class
    expected = [rates[k, k] * (1 - max(rates[j, k] for j in range(4) if j != k)) for k in range(4)]
    assert part.tell(None, view, None)[1].tolist() == pytest.approx(expected)


def test_moon_remembers_the_model_that_a_client_has_trained(states):
    alone = {"counts": [[3, 4, 2, 2]], "clients_per_round": 1, "norm": True}
    for round, _, own in states(m.moon(), "model_contrast", **alone):
        assert all(torch.equal(own[0][name], w) for name, w in round.weights.items())


def test_fedcsds_teacher_is_the_moving_average_from_the_initial_model(make_site, play):
    run = play(make_site(m.fedcsd(decay=0.75), norm=True))
    teacher = {name: w.double() for name, w in run[0].weights.items()}
    for round in run[1:]:
        teacher = {name: 0.75 * t + 0.25 * round.weights[name] for name, t in teacher.items()}
        for name, kept in round.held["prototype_similarity_distill"].state.items():
            if kept.is_floating_point():
                torch.testing.assert_close(kept, teacher[name].float(), rtol=1e-5, atol=1e-6)


def test_fedgkd_keeps_the_last_models_and_not_the_untrained_one(make_site, play):
    run = play(make_site(m.fedgkd(buffer=2), num_rounds=4))
    kept = [round.held["past_teachers_distill"].state for round in run[1:]]
    assert [len(models) for models in kept] == [0, 1, 2, 2]
    for models, made in zip(kept, ([], [1], [1, 2], [2, 3]), strict=True):
        for model, number in zip(models, made, strict=True):
            assert all(torch.equal(model[name], w) for name, w in run[number].weights.items())


def test_the_servers_velocity_by_hand(make_site, play):
    """`v <- beta v + (w - w_avg)`, `w <- w - v`: two rounds, the average from FedAvg on the same weights."""
    run = play(make_site(m.fedavgm(beta=0.5), num_rounds=2, norm=True))
    velocity = dict.fromkeys(run[1].held["server_momentum"].state, 0.0)
    assert velocity.keys() == dict(make_site(m.fedavg(), norm=True).model.named_parameters()).keys()
    site = make_site(m.fedavg(), num_rounds=2, norm=True)
    for before, after in pairwise(run):
        (averaged,) = [r for r in rounds(site, replace(before, held={}), Here(site)) if r.round == after.round]
        for name, w in after.weights.items():
            if name in velocity:
                velocity[name] = 0.5 * velocity[name] + before.weights[name].double() - averaged.weights[name].double()
                torch.testing.assert_close(w, (before.weights[name].double() - velocity[name]).float())
            else:
                assert torch.equal(w, averaged.weights[name])  # a running statistic has no momentum


@pytest.mark.parametrize("sizes", [(1, 1), (1, 7), (7, 1)], ids=str)
def test_the_mean_of_equal_counts_is_that_count(sizes):
    """Also beyond what float32 can count, as BatchNorm's `num_batches_tracked` may be in a long run."""
    count, total = torch.tensor(2**24 + 1), OrderedSum()
    for n in sizes:
        total.add({"weight": n, "weights": Scaled(n, {"count": count})})
    _, step = m.Average().update(None, total.value, m.Step({"count": count}, None, 1, 2, frozenset()))
    assert step.averaged["count"] == count


# Steps.


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_momentum_corrected_steps_are_how_far_a_constant_gradient_goes(steps, momentum):
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=momentum)
    for _ in range(steps):
        w.grad = torch.ones_like(w)
        optimizer.step()
    assert momentum_corrected_steps(steps, momentum) == pytest.approx(-w.item())
