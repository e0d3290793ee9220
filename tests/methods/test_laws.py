"""Laws of the methods: when two methods are equal, what each loss term is, and what server and
clients keep.
"""

from dataclasses import replace
from itertools import islice, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rayfed import losses
from rayfed import methods as m
from rayfed.data.augment import prepare
from rayfed.methods.anchors import momentum_corrected_steps
from rayfed.methods.views import Notes, Outputs
from rayfed.models.classifier import Classifier
from rayfed.rounds import engine
from rayfed.rounds.client_work import RoundContext, survey
from rayfed.rounds.evaluation import evaluate
from rayfed.rounds.messages import Broadcast
from rayfed.rounds.setup import server_view
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.sums import OrderedSum
from rayfed.tensors.trees import Scaled
from rayfed.tensors.weights import flat, state_of, whole, with_weights
from rayfed.tensors.wire import unpack

# Eight samples per client.
EVEN = [
    [5, 2, 1, 0],
    [1, 1, 3, 3],
    [2, 2, 2, 2],
    [0, 0, 1, 7],
    [4, 4, 0, 0],
    [3, 1, 4, 0],
]
BALANCED = [[2, 2, 2, 2]] * 6
ONE_CLASS = [[8, 0, 0, 0], [0, 7, 0, 0], [0, 0, 9, 0], [0, 0, 0, 8], [6, 0, 0, 0], [0, 0, 10, 0]]

# The values with which a part does nothing; None where a part has no such values, and has a law of
# its own below.
NEUTRAL = {
    m.AdaptiveStep: None,
    m.AdjustedCrossEntropy: None,
    m.AgreedPerturbation: {"rho": 0.0},
    m.Average: {"by": "samples"},
    m.CalibratedCrossEntropy: {"tau": 0.0},
    m.ClassAdaptiveDistill: {"low": 0.0, "high": 0.0},
    m.ClassDecorrelation: {"intra": 0.0},
    m.ClientMomentum: {"alpha": 1.0},
    m.ControlVariates: None,
    m.CrossEntropy: {"weight": 1.0, "smoothing": 0.0},
    m.Curvature: {"strength": 0.0},
    m.Decorrelation: {"beta": 0.0},
    m.DiscrepancyAverage: {"a": 0.0, "b": 0.0},
    m.Distill: {"beta": 0.0},
    m.DynamicRegularizer: None,
    m.EnsembleDistill: {"steps": 0},
    m.ExtrapolatedAverage: {"epsilon": 1e12},
    m.FeatureDistill: {"mu": 0.0},
    m.FeatureUniformity: {"uniformity": 0.0},
    m.GlobalPerturbation: {"rho": 0.0},
    m.HeadCalibration: None,
    m.HeadThenBody: None,
    m.LabelMaskedDistill: {"beta": 0.0},
    m.LocalHead: None,
    m.LocalNorm: None,
    m.LocalModel: None,
    m.LogitSuppression: {"strength": 0.0},
    m.ModelContrast: {"mu": 0.0},
    m.NormalQuantizedAverage: None,
    m.NormalizedAverage: None,
    m.NotTrueDistill: {"beta": 0.0},
    m.OwnModel: {"lam": 0.0},
    m.PastTeachersDistill: {"beta": 0.0},
    m.PersonalHead: None,
    m.PredictionVariance: {"variance": 0.0},
    m.PrototypeContrast: {"rounds": 1},
    m.PrototypeHead: None,
    m.PrototypeSimilarityDistill: {"mu": 0.0},
    m.Prototypes: {"mu": 0.0},
    m.Proximal: {"mu": 0.0},
    m.ProximalPerturbation: {"rho": 0.0},
    # Without a bound and without noise, it is a uniform mean, in another order of rounding.
    m.PrivateAverage: None,
    m.PseudoData: None,
    m.QuantizedAverage: None,
    m.RelaxedContrast: {"weight": 0.0},
    m.RestrictedCrossEntropy: {"alpha": 1.0},
    m.SelectiveDistill: {"m_max": 0.0},
    m.ServerMomentum: {"beta": 0.0},
    m.ShareScaledSimplex: None,
    m.SharpnessAware: {"rho": 0.0},
    m.SimplexHead: None,
    m.SlimAlign: {"mu": 0.0},
    m.SparseAverage: {"share": 1.0},
    m.Smoothed: {"decay": 0.0},
    m.VacantClassDistill: {"beta": 0.0},
}


FINAL = {}  # (method, setting) -> what it ends with: many laws compare with the same run


@pytest.fixture
def final(make_setup, play):
    """The weights that a method ends with, in float64: after two rounds, the second of which has a
    past.
    """

    def final(method, **setting):
        setting = {"num_rounds": 2, **setting}
        key = method, repr(setting)
        if key not in FINAL:
            FINAL[key] = {
                name: w.double()
                for name, w in play(make_setup(method, **setting))[-1].weights.items()
            }
        return dict(FINAL[key])

    return final


def a_step(weights, trainable, proposed=None):
    """The server's step in round 1, with two clients in the population."""
    server = SimpleNamespace(weights=weights, round=1, num_clients=2)
    return m.Step(server, proposed, frozenset(trainable))


def assert_same(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def assert_differ(a, b):
    assert max((a[name] - b[name]).abs().max() for name in a) > 1e-3


# When a model equals another.


class Borrow(nn.Module):
    """The layer of another place once more, without a name of its own."""

    def __init__(self, layer):
        super().__init__()
        self.layer = [layer]

    def forward(self, x):
        return self.layer[0](x)


def two_layers_of_one_weight(named):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        first, second = (nn.Linear(16, 16, bias=False) for _ in range(2))
        second.weight = first.weight
        if not named:
            second = Borrow(first)
        body = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
        return Classifier(nn.Sequential(*body, first, nn.ReLU(), second), nn.Linear(16, 4))


# FedAlign cuts the outputs of linear layers, by their class.
@pytest.mark.parametrize("name", sorted(m.RECIPES.keys() - {"fedalign"}))
def test_a_weight_of_two_names_moves_as_one_of_a_single_name(name, make_setup, play, bits):
    """The server's steps too: fedavgm and fedadam have moved the two names apart."""
    ends = []
    for named in (True, False):
        setup = make_setup(m.RECIPES[name](), num_rounds=2, clients_per_round=2, local_epochs=1)
        ends.append(play(replace(setup, model=two_layers_of_one_weight(named)))[-1])
    assert bits(ends[0])["weights"] == bits(ends[1])["weights"]
    tied = whole(two_layers_of_one_weight(True), ends[0].evaluated)
    assert torch.equal(tied["features.4.weight"], tied["features.6.weight"])


# When a method equals another.


def test_every_part_has_its_neutral_values_here():
    assert set(m.PARTS.values()) == set(NEUTRAL)


BIT_FOR_BIT = [
    m.fedavgm(beta=0.0),
    m.fedprox(mu=0.0),
    m.fedrs(alpha=1.0),
    m.fedrs(alpha=1.0, soft=True),
    m.fedlc(0.0),
]
BIT_FOR_BIT += [
    m.fedcm(alpha=1.0),
    m.feddisco(a=0.0, b=0.0),
    m.feduv(0.0, 0.0),
    m.fedrcl(weight=0.0),
    m.ditto(lam=3.0),
]
BIT_FOR_BIT += [m.fedmr(0.0), m.feddf(steps=0), m.compose(m.Smoothed(0.9)), m.topk(share=1.0)]
RELEASED = m.fedcsd(mu=0.0, released=True)
NEUTRAL_METHODS = [
    *BIT_FOR_BIT,
    RELEASED,
    *(m.compose(part(**zero)) for part, zero in NEUTRAL.items() if zero),
]


@pytest.mark.parametrize("method", NEUTRAL_METHODS, ids=repr)
def test_a_neutral_method_is_fedavg(method, final):
    neutral, fedavg = (final(method, norm=True) for method in (method, m.fedavg()))
    assert_same(neutral, fedavg, tolerance=0 if method in BIT_FOR_BIT else 1e-6)


EQUAL = {
    "FedLMD without majority labels is FedNTD": (
        m.fedlmd(tau=2.0),
        m.fedntd(tau=2.0),
        {"counts": BALANCED},
    ),
    "FedLMD-Tf without majority labels is FedNTD-Tf": (
        m.fedlmd_tf(),
        m.fedntd(teacher=False),
        {"counts": BALANCED},
    ),
    "FedGKD with one teacher is KD from round 2 on": (
        m.fedgkd(beta=0.5, tau=2.0, buffer=1),
        m.switch(m.fedavg(), m.kd(beta=0.5, tau=2.0), at=2),
        {},
    ),
    "FedCAD with one weight is FedLSD": (
        m.fedcad(low=0.3, high=0.3, tau=2.0),
        m.fedlsd(beta=0.3, tau=2.0),
        {},
    ),
    "FedNova with equal steps is FedAvg": (m.fednova(), m.fedavg(), {"counts": EVEN, "norm": True}),
    "FedNova with a given number of steps is FedAvg": (
        m.fednova(),
        m.fedavg(),
        {"local_steps": 3, "norm": True},
    ),
    "FedNTD without its share is KD": (m.fedntd(mix=0.0, tau=2.0), m.kd(tau=2.0), {}),
    "FedRS with all classes held is FedAvg": (m.fedrs(alpha=0.1), m.fedavg(), {"counts": BALANCED}),
    "FedLC with even counts is FedAvg": (m.fedlc(tau=2.0), m.fedavg(), {"counts": BALANCED}),
    "adjusted logits with even counts are plain": (
        m.fedvls(0.0, 0.0),
        m.fedavg(),
        {"counts": BALANCED},
    ),
    "FedVLS distils vacant classes only": (
        m.fedvls(beta=5.0),
        m.fedvls(beta=0.0),
        {"counts": BALANCED},
    ),
    "clients of one size weigh the same": (
        m.compose(m.Average(by="client")),
        m.fedavg(),
        {"counts": EVEN},
    ),
    "FedCSD without mask, similarity and decay is KD": (
        m.fedcsd(mu=0.5, tau=2.0, mask="none", similarity=False, decay=0.0),
        m.kd(beta=0.5, tau=2.0),
        {},
    ),
    "a fresh SCAFFOLD is a uniform mean": (
        m.scaffold(),
        m.compose(m.Average(by="client")),
        {"num_rounds": 1},
    ),
    "a fresh SCAFFOLD by samples is FedAvg": (
        m.scaffold(by="samples"),
        m.fedavg(),
        {"num_rounds": 1},
    ),
    "SCAFFOLD's two averages of clients of one size": (
        m.scaffold(),
        m.scaffold(by="samples"),
        {"counts": EVEN},
    ),
    "MOON without a past is FedAvg": (m.moon(), m.fedavg(), {"num_rounds": 1}),
    "MOON's contrast of a model with itself is constant": (
        m.moon(5.0, first="initial"),
        m.fedavg(),
        {"num_rounds": 1},
    ),
    "FedDyn by the size of clients of one size": (
        m.feddyn(by_size=True),
        m.feddyn(),
        {"counts": EVEN},
    ),
    "a Fisher of as many samples as there are is of all": (m.fedcurv(samples=500), m.fedcurv(), {}),
    "FedCurv without a past is FedAvg": (m.fedcurv(), m.fedavg(), {"num_rounds": 1}),
    "FedProto without prototypes is FedAvg": (m.fedproto(), m.fedavg(), {"num_rounds": 1}),
    "FedProc without prototypes is FedAvg": (m.fedproc(), m.fedavg(), {"num_rounds": 1}),
    "FedMR of clients of one class is FedDecorr": (
        m.fedmr(0.1),
        m.feddecorr(beta=0.1),
        {"counts": ONE_CLASS},
    ),
    "FedGKD without a teacher is FedAvg": (m.fedgkd(), m.fedavg(), {"num_rounds": 1}),
    "the first velocity is the whole step": (m.fedavgm(), m.fedavg(), {"num_rounds": 1}),
    "FedAdam with a large tau takes FedAvg's step, at first": (
        m.fedadam(lr=100 * (1 + 0.99**0.5), beta1=0.0, tau=100.0),
        m.fedavg(),
        {"num_rounds": 1, "norm": True},
    ),
    "FedYogi with a large tau is FedAvg": (
        m.fedyogi(lr=200.0, beta1=0.0, tau=100.0),
        m.fedavg(),
        {"norm": True},
    ),
    "FedAdagrad with a large tau is FedAvg": (
        m.fedadagrad(lr=200.0, tau=100.0),
        m.fedavg(),
        {"norm": True},
    ),
    "FedExP of a single client is FedAvg": (
        m.fedexp(epsilon=1e-9),
        m.fedavg(),
        {"clients_per_round": 1},
    ),
    "FedACG without momentum is FedProx": (
        m.fedacg(beta=0.0, mu=0.5),
        m.fedprox(mu=0.5),
        {"norm": True},
    ),
    "FedCM takes a share of FedAvg's steps, at first": (
        m.fedcm(alpha=0.25),
        m.compose(m.CrossEntropy(weight=0.25)),
        {"num_rounds": 1},
    ),
    "FedDisco with even labels and sizes is FedAvg": (
        m.feddisco(a=0.9),
        m.fedavg(),
        {"counts": BALANCED},
    ),
    "FedDisco with a large offset is a uniform mean": (
        m.feddisco(b=1e6),
        m.compose(m.Average(by="client")),
        {},
    ),
    "FedDC without a past is FedDyn": (m.feddc(alpha=0.1), m.feddyn(alpha=0.1), {"num_rounds": 1}),
    "FedSpeed without a step uphill is FedDyn": (
        m.fedspeed(0.1, rho=0.0),
        m.feddyn(0.1),
        {"norm": True},
    ),
    "FedSMOO without a step uphill is FedDyn": (
        m.fedsmoo(0.1, rho=0.0),
        m.feddyn(0.1),
        {"norm": True},
    ),
    "FedSMOO's first step is FedSpeed's": (
        m.fedsmoo(),
        m.fedspeed(),
        {"num_rounds": 1, "local_steps": 1, "norm": True},
    ),
    "MoFedSAM without a step uphill is FedCM": (
        m.mofedsam(0.25, rho=0.0),
        m.fedcm(0.25),
        {"norm": True},
    ),
    "FedGAMMA without a step uphill is SCAFFOLD": (
        m.fedgamma(rho=0.0),
        m.scaffold(),
        {"norm": True},
    ),
    "a fresh FedGAMMA is FedSAM with a uniform mean": (
        m.fedgamma(),
        m.compose(m.Average(by="client"), m.SharpnessAware()),
        {"num_rounds": 1, "norm": True},
    ),
    "FedLESAM without a past is FedAvg": (m.fedlesam(9.0), m.fedavg(), {"num_rounds": 1}),
    "FedRoD's global model learns by adjusted logits": (
        m.fedrod(),
        m.compose(m.AdjustedCrossEntropy()),
        {},
    ),
    "FedRep without a step for the head is FedBABU": (
        m.fedrep(head=0.0),
        m.fedbabu(),
        {"norm": True},
    ),
    "a switch to the same method changes nothing": (
        m.switch(m.fedntd(), m.fedntd(), at=2),
        m.fedntd(),
        {},
    ),
}


@pytest.mark.parametrize(("one", "other", "setting"), EQUAL.values(), ids=EQUAL)
def test_two_methods_are_equal(one, other, setting, final):
    assert_same(final(one, **setting), final(other, **setting))


# The same pairs in other settings: so the settings do not make all methods equal.
DIFFERENT = {
    "majority labels": (m.fedlmd(tau=2.0), m.fedntd(tau=2.0)),
    "absent classes": (m.fedrs(alpha=0.1), m.fedavg()),
    "margins": (m.fedlc(), m.fedavg()),
    "adjusted logits": (m.fedvls(0.0, 0.0), m.fedavg()),
    "vacant classes": (m.fedvls(5.0), m.fedvls(0.0)),
    "suppressed logits": (m.fedvls(strength=1.0), m.fedvls(strength=0.0)),
    "correlated features": (m.feddecorr(1.0), m.fedavg()),
    "sharpness": (m.fedsam(0.5), m.fedavg()),
    "a perturbation": (m.fedsol(), m.fedavg()),
    "unequal steps": (m.fednova(), m.fedavg()),
    "unequal sizes": (m.compose(m.Average(by="client")), m.fedavg()),
    "control variates with a past": (m.scaffold(by="samples"), m.fedavg()),
    "SCAFFOLD's two averages": (m.scaffold(), m.scaffold(by="samples")),
    "a contrast with a past": (m.moon(mu=5.0), m.fedavg()),
    "a contrast with the initial model": (m.moon(mu=5.0), m.moon(mu=5.0, first="initial")),
    "FedDyn by size": (m.feddyn(0.1, by_size=True), m.feddyn(0.1)),
    "curvature with a past": (m.fedcurv(), m.fedavg()),
    "a Fisher of some samples": (m.fedcurv(samples=2), m.fedcurv()),
    "prototypes": (m.fedproto(), m.fedavg()),
    "contrasted prototypes": (m.fedproc(), m.fedavg()),
    "distilled features": (m.fd(mu=5.0), m.fedavg()),
    "past teachers": (m.fedgkd(beta=1.0), m.kd()),
    "velocity": (m.fedavgm(), m.fedavg()),
    "adaptive steps": (m.fedadam(0.5), m.fedyogi(0.5)),
    "adaptive steps without decay": (m.fedadagrad(), m.fedyogi(beta1=0.0)),
    "extrapolation": (m.fedexp(), m.fedavg()),
    "small entries that are kept back": (m.topk(0.1), m.topk(0.1, feedback=False)),
    "sparse updates": (m.topk(0.5, feedback=False), m.fedavg()),
    "a few levels": (m.fedpaq(levels=1), m.fedavg()),
    "normal levels": (m.fedwsq(bits=1, ends=True), m.fedavg()),
    "whose deviation": (m.fedwsq(scale="client", ends=True), m.fedwsq(ends=True)),
    "momentum at the clients": (m.fedcm(0.25), m.compose(m.CrossEntropy(weight=0.25))),
    "uneven labels": (m.feddisco(a=0.9), m.fedavg()),
    "FedDC's control variates": (m.feddc(0.1), m.feddyn(0.1)),
    "a step uphill": (m.fedspeed(0.1), m.feddyn(0.1)),
    "an agreed step uphill": (m.fedsmoo(0.1), m.fedspeed(0.1)),
    "varied predictions": (m.feduv(uniformity=0.0), m.fedavg()),
    "uniform features": (m.feduv(variance=0.0), m.fedavg()),
    "a step uphill with momentum": (m.mofedsam(0.25, rho=0.5), m.fedcm(0.25)),
    "a step uphill with control variates": (m.fedgamma(0.5), m.scaffold()),
    "a step back": (m.fedlesam(0.5), m.fedavg()),
    "pseudo data": (m.fedreg(gamma=1.0), m.fedavg()),
    "corners as long as shares": (m.fedgela(tau=1.0), m.fedetf()),
    "a head of class means": (m.fednh(keep=0.1), m.fednh(keep=0.9)),
    "correlations within classes": (m.fedmr(1.0), m.feddecorr(1.0)),
    "relaxed contrast": (m.fedrcl(), m.fedavg()),
    "the penalty on near features": (m.fedrcl(penalty=0.0), m.fedrcl(threshold=0.0)),
    "a simplex for a head": (m.fedetf(), m.fedbabu()),
    "a head that is not trained": (m.fedbabu(), m.fedavg()),
    "a head that is trained first": (m.fedrep(head=0.5), m.fedper()),
    "a step ahead": (m.fedavgm(beta=0.85), m.fedacg(mu=0.0)),
    "the released FedCSD": (m.fedcsd(mu=0.1, released=True), m.fedcsd(mu=0.1)),
    "a switch": (m.switch(m.fedntd(), m.fedavg(), at=2), m.fedntd()),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_two_methods_are_different(one, other, final):
    assert_differ(final(one), final(other))


def test_prototypes_are_contrasted_after_a_switch_too(final):
    switched = m.switch(m.fedavg(), m.fedproc(rounds=2), at=2)
    assert_differ(final(switched, num_rounds=3), final(m.fedavg(), num_rounds=3))


def test_the_first_step_of_a_round_is_that_of_fedavg(final):
    """Before the first step, student and teacher are the same model."""
    single = {"local_steps": 1, "batch_size": 20, "num_rounds": 1}
    for method in (
        m.kd(),
        m.fedntd(),
        m.compose(m.Proximal(10.0)),
        m.fedssd(m_max=1.0),
        m.fedsol(),
    ):
        assert_same(final(method, **single), final(m.fedavg(), **single))


# Plain SGD, step by step.


def test_one_client_with_all_data_is_plain_sgd_bit_for_bit(make_setup, play, plain_sgd):
    # The last batch of an epoch has two samples.
    setting = {
        "counts": [[12, 13, 9, 8]],
        "clients_per_round": 1,
    }
    setup = make_setup(m.fedavg(), **setting)
    weights = state_of(setup.model)
    for round in play(make_setup(m.fedavg(), **setting))[1:]:
        weights, losses = plain_sgd(setup, 0, weights, round.round)
        assert all(torch.equal(round.weights[name], w) for name, w in weights.items())
        assert round.clients[0].train_loss == float(np.mean(losses))


def test_a_round_of_fedavg_is_the_weighted_mean_of_plain_sgd(make_setup, play, plain_sgd):
    setup = make_setup(m.fedavg())
    weights = state_of(setup.model)
    for round in play(make_setup(m.fedavg()))[1:]:
        clients = [row.client for row in round.clients]
        sizes = np.array([setup.federation.num_examples(client) for client in clients])
        trained = [plain_sgd(setup, client, weights, round.round)[0] for client in clients]
        for name, w in round.weights.items():
            mean = (
                np.tensordot(sizes, np.array([t[name].double().numpy() for t in trained]), axes=1)
                / sizes.sum()
            )
            np.testing.assert_array_equal(w.numpy(), mean.astype(np.float32))
        weights = round.weights


@pytest.mark.parametrize(
    "change",
    [{"momentum": 0.0}, {"lr_decay": 1.0}, {"weight_decay": 0.0}, {"local_epochs": 1}],
    ids=str,
)
def test_every_training_setting_changes_the_weights(change, final):
    plain, changed = final(m.fedavg()), final(m.fedavg(), **change)
    assert any(not torch.equal(w, changed[name]) for name, w in plain.items())


# Terms on a batch: the loss that a part takes, its inputs and its weight.

Z, T, OLD, H, H_GLOBAL, H_OLD = (
    torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(6)
)
LABELS, COUNTED = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([9, 3, 0, 2])
CLASS_WEIGHTS = losses.class_adaptive_weights(T, LABELS, 4, low=0.2, high=0.7, tau=2.0)
# Of these counts.
MAJORITY = torch.tensor([True, False, False, False])
# The round's global model, and an older model.
PRESENT, PAST = (
    Outputs(H_GLOBAL, T),
    Outputs(H_OLD, OLD),
)
TRUST, CENTRES = (
    torch.tensor([0.9, 0.5, 0.2, 1.0]),
    torch.randn(4, 4, generator=torch.Generator().manual_seed(6)),
)
KNOWN = torch.tensor([True, False, True, True])
# Part, the term; the payload, where the part has one.
ON_A_BATCH = [
    (m.CrossEntropy(0.5, 0.1), 0.5 * losses.cross_entropy(Z, LABELS, smoothing=0.1)),
    (m.RestrictedCrossEntropy(0.3), losses.restricted_cross_entropy(Z, LABELS, COUNTED, alpha=0.3)),
    (
        m.RestrictedCrossEntropy(0.3, True),
        losses.restricted_cross_entropy(Z, LABELS, COUNTED, alpha=0.3, soft=True),
    ),
    (m.CalibratedCrossEntropy(0.3), losses.calibrated_cross_entropy(Z, LABELS, COUNTED, tau=0.3)),
    (m.AdjustedCrossEntropy(), losses.adjusted_cross_entropy(Z, LABELS, COUNTED)),
    (m.LogitSuppression(0.3), 0.3 * losses.logit_suppression(Z, LABELS, COUNTED)),
    (m.Decorrelation(0.3), 0.3 * losses.decorrelation(H)),
    (m.ClassDecorrelation(0.3), 0.3 * losses.class_decorrelation(H, LABELS)),
    (
        m.RelaxedContrast(0.3, 0.5, 0.2, 0.1),
        0.3 * losses.relaxed_contrast(H, LABELS, tau=0.1, threshold=0.2, penalty=0.5),
    ),
    (m.PredictionVariance(0.3), 0.3 * losses.prediction_variance(Z)),
    (m.FeatureUniformity(0.3), 0.3 * losses.feature_uniformity(H)),
    (
        m.ClassAdaptiveDistill(0.2, 0.7, 2.0),
        losses.class_adaptive_distill(Z, T, LABELS, CLASS_WEIGHTS, tau=2.0),
    ),
    (m.Distill(0.5, 2.0), 0.5 * losses.distill(Z, T, tau=2.0)),
    (m.Distill(0.5, form="mse"), 0.5 * losses.squared_error(Z, T)),
    (m.NotTrueDistill(0.5, 2.0), 0.5 * losses.not_true_distill(Z, T, LABELS, tau=2.0)),
    (m.NotTrueDistill(0.5, form="mse"), 0.5 * losses.not_true_squared_error(Z, T, LABELS)),
    (m.NotTrueDistill(teacher=False), losses.not_true_distill(Z, 0 * T, LABELS, tau=1.0)),
    (
        m.NotTrueDistill(0.5, 2.0, mix=0.2),
        0.5
        * (
            0.2 * losses.not_true_distill(Z, T, LABELS, tau=2.0)
            + 0.8 * losses.distill(Z, T, tau=2.0)
        ),
    ),
    (
        m.LabelMaskedDistill(0.5, 2.0),
        0.5 * losses.label_masked_distill(Z, T, LABELS, MAJORITY, tau=2.0),
    ),
    (
        m.LabelMaskedDistill(teacher=False),
        losses.label_masked_distill(Z, 0 * T, LABELS, MAJORITY, tau=1.0),
    ),
    (
        m.SelectiveDistill(0.5),
        losses.selective_distill(Z, T, LABELS, TRUST, m_max=0.5, inside_norm=False),
        TRUST,
    ),
    (
        m.SelectiveDistill(0.5, True),
        losses.selective_distill(Z, T, LABELS, TRUST, m_max=0.5, inside_norm=True),
        TRUST,
    ),
    (
        m.PrototypeSimilarityDistill(0.5, 2.0, "forcible"),
        0.5
        * losses.prototype_similarity_distill(Z, OLD, LABELS, CENTRES, tau=2.0, mask="forcible"),
        CENTRES,
    ),
    (m.PastTeachersDistill(0.5, 2.0), 0.5 * losses.distill(Z, OLD, tau=2.0), {"teacher": "past"}),
    (m.PastTeachersDistill(0.5, 2.0), 0.5 * losses.distill(Z, T, tau=2.0), {"teacher": None}),
    (m.ModelContrast(0.5, 0.2), 0.5 * losses.model_contrast(H, H_GLOBAL, H_OLD, tau=0.2)),
    (
        # In round 2.
        m.PrototypeContrast(4),
        0.25 * losses.cross_entropy(Z, LABELS)
        + 0.75 * losses.prototype_contrast(H, LABELS, CENTRES),
        CENTRES,
    ),
    (m.FeatureDistill(0.5), 0.5 * losses.feature_distill(H, H_GLOBAL)),
    (
        m.Prototypes(0.5),
        0.5 * losses.prototype_distance(H, LABELS, CENTRES, KNOWN),
        {"means": CENTRES, "known": KNOWN},
    ),
]


@pytest.mark.parametrize("case", ON_A_BATCH, ids=lambda case: repr(case[0]))
def test_terms_on_a_batch_are_those_of_the_papers(case):
    """Strings stand for models: "now" for the round's model, "past" for the one in the state and in
    the memory.
    """
    part, term, *payload = case
    client = SimpleNamespace(
        weights="now", state="past", memory="past", payload=payload[0] if payload else None
    )
    client.round, client.since = 2, 1
    client.num_classes, client.label_counts, client.global_model = 4, COUNTED, "now"
    outputs = {"now": PRESENT, "past": PAST}
    client.frozen, client.outputs = (
        lambda weights: weights,
        lambda model: [(outputs[model], LABELS)],
    )
    client.all_outputs = lambda model: (outputs[model], LABELS)
    batch = SimpleNamespace(
        logits=Z, features=H, labels=LABELS, teacher=PRESENT, outputs_of=outputs.__getitem__
    )
    batch.note, batch.label_counts = Notes(), COUNTED
    torch.testing.assert_close(part.loss(batch, part.begin(client)), term)


def test_fedcsd_notes_the_share_of_samples_on_which_the_teacher_is_wrong_and_of_those_that_its_mask_drops():
    """Four samples of four classes: sure and right; unsure, with the label second; below 1/4;
    surely wrong.
    """
    teacher = torch.tensor([[9.0, 0, 0, 0], [2.0, 2.5, 0, 0], [1.0, 1.0, 0.9, 1.0], [0, 9.0, 0, 0]])
    labels = torch.tensor([0, 0, 2, 2])
    batch = SimpleNamespace(
        logits=torch.zeros(4, 4), labels=labels, outputs_of={0: Outputs(None, teacher)}.__getitem__
    )
    for mask, filtered in (("adaptive", 0.5), ("forcible", 0.75), ("none", 0.0)):
        batch.note = Notes()
        m.PrototypeSimilarityDistill(mask=mask).loss(batch, (0, None))
        assert batch.note.means() == {"filtered": filtered, "teacher_wrong": 0.75}


def test_the_released_fedcsd_is_the_objective_of_the_authors_code():
    """`(1 - mu) CE + mu mean(mask KL)`, value and gradient, written here again; prototypes are the
    client's own.
    """
    # The client has no sample of class 3.
    teacher, labels, mu, tau = (
        OLD.double(),
        LABELS.clamp(max=2),
        0.3,
        2.0,
    )
    client = SimpleNamespace(weights="now", state="past", payload=None, num_classes=4)
    client.label_counts = torch.bincount(labels, minlength=4)
    client.frozen, client.outputs = (
        lambda weights: weights,
        lambda model: [(Outputs(None, teacher), labels)],
    )
    z = Z.double().requires_grad_()
    batch = SimpleNamespace(
        logits=z, labels=labels, outputs_of={"past": Outputs(None, teacher)}.__getitem__
    )
    method = m.fedcsd(mu=mu, tau=tau, released=True)
    # No message before training.
    assert method[-1].survey(client) is None
    total = sum(part.loss(batch, part.begin(client)) for part in method if part.slot != "average")

    means = torch.stack(
        [teacher[labels == c].sum(dim=0) / max(1, (labels == c).sum()) for c in range(4)]
    )
    refined = (F.normalize(z) @ F.normalize(means).T).softmax(dim=1) * teacher
    kept = refined.softmax(dim=1)[range(6), labels] > 1 / 4
    assert 0 < kept.sum() < 6
    target, student = (refined / tau).softmax(dim=1), (z / tau).log_softmax(dim=1)
    divergence = tau**2 * F.kl_div(student, target, reduction="none").sum(dim=1)
    expected = (1 - mu) * F.cross_entropy(z, labels) + mu * (kept * divergence).mean()
    for found, right in (
        (total, expected),
        (*torch.autograd.grad(total, z), *torch.autograd.grad(expected, z)),
    ):
        # The part's prototypes are in float32.
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("first", "expected"), [("none", None), ("initial", losses.model_contrast)]
)
def test_a_client_that_has_not_trained_is_pushed_away_from_the_initial_model_or_not_at_all(
    first, expected
):
    part = m.ModelContrast(0.5, 0.2, first)
    state, payload = part.tell(part.init("past"), None, None)
    client = SimpleNamespace(payload=payload, memory=None, frozen=lambda weights: weights)
    batch = SimpleNamespace(features=H, teacher=PRESENT, outputs_of={"past": PAST}.__getitem__)
    found, term = (
        part.loss(batch, part.begin(client)),
        expected and 0.5 * expected(H, H_GLOBAL, H_OLD, tau=0.2),
    )
    assert (found is None and state is None) if term is None else torch.equal(found, term)


# Terms on parameters, by their gradients.

W, ANCHOR, P, Q, R, S = (
    torch.randn(3, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
    for i in range(6)
)
# Part, the client's payload, its memory, the gradient of its term at `w`.
ON_PARAMETERS = {
    "proximal": (m.Proximal(mu=0.3), None, None, 0.3 * (W - ANCHOR)),
    "curvature": (
        m.Curvature(strength=0.5),
        {"u": {"x": P}, "uw": {"x": Q}},
        {"u": {"x": R}, "uw": {"x": S}},
        # Of `sum_j u_j (w - w_j)^2` over the others.
        0.5 * 2 * ((P - R) * W - (Q - S)),
    ),
    "curvature, new client": (
        m.Curvature(),
        {"u": {"x": P}, "uw": {"x": Q}},
        None,
        2 * (P * W - Q),
    ),
    "control variates": (m.ControlVariates(), {"x": P}, {"x": Q}, P - Q),
    "control variates, new client": (m.ControlVariates(), {"x": P}, None, P),
    "client momentum": (m.ClientMomentum(alpha=0.25), {"x": P}, None, 0.75 * P),
    "feddyn": (m.DynamicRegularizer(alpha=0.2), None, {"x": P}, -P + 0.2 * (W - ANCHOR)),
    "feddyn, new client": (m.DynamicRegularizer(alpha=0.2), None, None, 0.2 * (W - ANCHOR)),
    "feddyn, by size": (
        m.DynamicRegularizer(0.2, by_size=True),
        None,
        {"x": P},
        -P + 0.2 / (3 / 12) * (W - ANCHOR),
    ),
}


@pytest.mark.parametrize(
    ("part", "payload", "memory", "gradient"), ON_PARAMETERS.values(), ids=ON_PARAMETERS
)
def test_terms_on_parameters_have_the_gradients_of_the_papers(part, payload, memory, gradient):
    seen = {
        "weights": {"x": ANCHOR},
        "payload": payload,
        "memory": memory,
        "num_examples": 3,
        "mean_examples": 12.0,
    }
    client = SimpleNamespace(**seen, flat=flat)
    local = part.begin(client)
    x = W.clone().requires_grad_()
    (found,) = torch.autograd.grad(part.loss(SimpleNamespace(flat=flat({"x": x})), local), x)
    torch.testing.assert_close(found, gradient)


# What server and clients keep.


@pytest.fixture
def states(make_setup, bits):
    """Per round: the round, the part's state, and the memories of all clients that have trained so
    far.
    """

    def states(method, slot, **setting):
        setup = make_setup(method, **setting)
        for round in islice(engine.rounds(setup, ThisProcess(setup)), 1, None):
            kept = {
                client: unpack(packed)["slots"][slot] for client, packed in round.memories.items()
            }
            yield round, round.held[slot].state, kept

    return states


def test_scaffolds_c_is_the_mean_of_all_clients_c_i(states):
    for _, c, own in states(m.scaffold(), "control_variates", num_rounds=4):
        for name in c:
            # Of all six clients; an untrained client has 0.
            mean = sum(c_i[name].double() for c_i in own.values()) / 6
            torch.testing.assert_close(c[name], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_scaffolds_c_i_is_the_mean_gradient_of_a_single_client(momentum, make_setup, play, states):
    """The distance covered, over the rate and the momentum-corrected steps; the correction `c -
    c_1` is 0.
    """
    alone = {
        "counts": [[12, 13, 9, 8]],
        "clients_per_round": 1,
        "num_rounds": 2,
        "momentum": momentum,
    }
    plain, kept = (
        play(make_setup(m.fedavg(), **alone)),
        states(m.scaffold(), "control_variates", **alone),
    )
    for (before, after), (round, c, own) in zip(pairwise(plain), kept, strict=True):
        course = 0.1 * 0.5 ** (round.round - 1) * momentum_corrected_steps(18, momentum)
        for name in c:
            torch.testing.assert_close(
                round.weights[name], after.weights[name], rtol=1e-4, atol=1e-5
            )
            gradient = (before.weights[name] - after.weights[name]) / course
            torch.testing.assert_close(own[0][name], gradient, rtol=1e-3, atol=1e-4)


def test_fedcurvs_sums_are_the_sums_of_the_memories(states):
    for _, sums, shares in states(m.fedcurv(), "curvature", num_rounds=4):
        for key in ("u", "uw"):
            for name, total in sums[key].items():
                expected = sum(share[key][name].double() for share in shares.values())
                torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)


def test_fedcurvs_share_is_the_fisher_information_at_the_trained_weights(
    make_setup, states, of_client
):
    """For a single client: over its own data in order, batch by batch, in eval mode."""
    alone = {"counts": [[3, 4, 2, 2]], "clients_per_round": 1, "num_rounds": 1}
    setup = make_setup(m.fedavg(), **alone)
    images, labels = of_client(setup, 0)
    for round, _, shares in states(m.fedcurv(), "curvature", **alone):
        setup.model.load_state_dict(round.weights)
        fisher = dict.fromkeys(shares[0]["u"], 0)
        for index in torch.arange(11).split(5):
            setup.model.zero_grad()
            F.cross_entropy(setup.model.eval()(images[index]), labels[index]).backward()
            for name, p in setup.model.named_parameters():
                fisher[name] = fisher[name] + p.grad**2 * len(index) / 11
        for name, u in shares[0]["u"].items():
            torch.testing.assert_close(u, fisher[name])
            torch.testing.assert_close(shares[0]["uw"][name], fisher[name] * round.weights[name])


def test_fedcurvs_share_of_one_sample_is_that_of_one_image_drawn_anew_each_round(
    make_setup, states, of_client
):
    alone = {"counts": [[3, 4, 2, 2]], "clients_per_round": 1, "num_rounds": 4}
    setup = make_setup(m.fedavg(), **alone)
    images, labels = of_client(setup, 0)
    drawn = []
    for round, _, shares in states(m.fedcurv(strength=0.0, samples=1), "curvature", **alone):
        setup.model.load_state_dict(round.weights)
        distances = []
        for index in range(11):
            loss = F.cross_entropy(setup.model.eval()(images[[index]]), labels[[index]])
            gradients = torch.autograd.grad(loss, list(setup.model.parameters()))
            squares = torch.cat([gradient.flatten() for gradient in gradients]) ** 2
            distances.append((squares - flat(shares[0]["u"])).norm() / squares.norm())
        drawn.append(int(np.argmin(distances)))
        assert min(distances) < 1e-4
    assert len({*drawn}) > 1


@pytest.mark.parametrize(
    ("method", "slot"), [(m.scaffold(), "control_variates"), (m.fedcurv(), "curvature")]
)
def test_a_method_that_comes_back_starts_afresh_on_server_and_clients(
    make_setup, play, digest, method, slot
):
    """They must forget together: the server's state is the sum of what the clients remember."""
    setting = {"num_rounds": 6, "clients_per_round": 6}
    run = play(make_setup(m.switch(method, m.switch(m.fedavg(), method, at=4), at=3), **setting))
    setup = make_setup(method, **setting)
    for round in engine.rounds(setup, ThisProcess(setup), replace(run[3], held={}, memories={})):
        assert digest(round.weights) == digest(run[round.round].weights)
    assert run[6].held[slot].since == 4


@pytest.mark.parametrize("by_size", [False, True])
def test_feddyns_h_is_the_mean_of_all_clients_g_i_and_corrects_the_weights(
    by_size, make_setup, states
):
    """`g_i` moves by `-alpha_i (w_local - w)`, which gives `w_local`; the weights are their mean
    less `h / alpha`.

    By size `alpha_i = alpha / (n_i / mean n)`, and `h` is the mean of `g_i n_i / mean n`: its alpha
    is not divided.
    """
    setup = make_setup(m.feddyn())
    sizes = np.array([setup.federation.num_examples(client) for client in range(6)])
    share = sizes / sizes.mean() if by_size else np.ones(6)
    weights, before = state_of(setup.model), {}
    for round, h, own in states(m.feddyn(alpha=0.1, by_size=by_size), "average", num_rounds=4):
        for name in h:
            mean = sum(g[name].double() * share[client] for client, g in own.items()) / 6
            torch.testing.assert_close(h[name], mean, rtol=1e-5, atol=1e-6)
            cohort = [row.client for row in round.clients]
            moved = [share[i] * (own[i][name] - before.get(i, {}).get(name, 0.0)) for i in cohort]
            mean = weights[name] - sum(moved) / len(moved) / 0.1
            torch.testing.assert_close(
                round.weights[name], (mean - h[name] / 0.1).float(), rtol=1e-4, atol=1e-5
            )
        weights, before = round.weights, own


@pytest.mark.parametrize(
    ("method", "slot"), [(m.fedproto(), "prototypes"), (m.fedproc(), "supervise")]
)
def test_the_prototypes_are_the_mean_features_of_the_trained_model(
    method, slot, make_setup, states, of_client
):
    """FedProc's are means of features of length 1."""
    alone = {"counts": [[3, 4, 0, 2]], "clients_per_round": 1, "num_rounds": 1, "norm": True}
    setup = make_setup(method, **alone)
    view = server_view(setup, 1, {})
    images, labels = of_client(setup, 0)
    for round, prototypes, _ in states(method, slot, **alone):
        features = view.frozen(round.weights).features(images)
        features = F.normalize(features) if slot == "supervise" else features
        assert prototypes["known"].tolist() == [True, True, False, True]
        for c in (0, 1, 3):
            torch.testing.assert_close(prototypes["means"][c], features[labels == c].mean(dim=0))


def test_fedcsds_prototypes_are_the_mean_logits_of_the_teacher_over_the_cohort(
    make_setup, of_client
):
    setup, part = make_setup(m.fedcsd(), norm=True), m.fedcsd()[-1]
    weights, total = state_of(setup.model), OrderedSum()
    view, cohort = server_view(setup, 1, weights), [0, 2, 4]
    for client in cohort:
        total.add(
            survey(
                RoundContext(
                    setup, Broadcast(1, weights, {part.slot: weights}, {}, {part.slot: 1})
                ),
                client,
            )
        )
    _, prototypes = part.tell(weights, view, total.value[part.slot])
    images, labels = (
        torch.cat(column)
        for column in zip(*(of_client(setup, client) for client in cohort), strict=True)
    )
    logits = view.global_model(images)
    for c in range(4):
        torch.testing.assert_close(prototypes[c], logits[labels == c].mean(dim=0))


def test_fedssd_measures_the_global_model_on_the_auxiliary_set(make_setup):
    setup, part = make_setup(m.fedssd(), norm=True), m.fedssd()[-1]
    data, view = setup.federation, server_view(setup, 1, state_of(setup.model))
    images = prepare(torch.from_numpy(data.train.examples[data.auxiliary]), data.mean, data.std)
    found = view.global_model(images.plain(torch.arange(8))).argmax(dim=1).tolist()
    rates = np.zeros((4, 4))
    for label, prediction in zip(data.train.labels[data.auxiliary], found, strict=True):
        # Two of each class.
        rates[label, prediction] += 0.5
    expected = [rates[k, k] * (1 - max(rates[j, k] for j in range(4) if j != k)) for k in range(4)]
    assert part.tell(None, view, None)[1].tolist() == pytest.approx(expected)


def test_fedssds_default_is_not_fedavg():
    """The term's gradient on random logits is a part of the cross-entropy's; with `inside_norm` it
    is about 1e-5.
    """
    generator = torch.Generator().manual_seed(0)
    teacher = 2 * torch.randn(256, 10, generator=generator, dtype=torch.float64)
    logits = teacher + torch.randn(256, 10, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 10, (256,), generator=generator)
    batch = SimpleNamespace(
        logits=logits.requires_grad_(), labels=labels, teacher=Outputs(teacher, teacher)
    )

    def strength(part):
        terms = part.loss(batch, torch.full((10,), 0.8)), losses.cross_entropy(logits, labels)
        term, cross_entropy = (torch.autograd.grad(loss, logits)[0].norm().item() for loss in terms)
        return term / cross_entropy

    assert strength(m.fedssd()[-1]) == pytest.approx(3.7e-3, rel=0.05)
    assert strength(m.fedssd(inside_norm=True)[-1]) == pytest.approx(1.4e-5, rel=0.05)


def test_moon_remembers_the_model_that_a_client_has_trained(states):
    alone = {"counts": [[3, 4, 2, 2]], "clients_per_round": 1, "norm": True}
    for round, _, own in states(m.moon(), "model_contrast", **alone):
        assert all(torch.equal(own[0][name], w) for name, w in round.weights.items())


def test_fedcsds_teacher_is_the_moving_average_from_the_initial_model(make_setup, play):
    run = play(make_setup(m.fedcsd(decay=0.75), norm=True))
    teacher = {name: w.double() for name, w in run[0].weights.items()}
    for round in run[1:]:
        teacher = {name: 0.75 * t + 0.25 * round.weights[name] for name, t in teacher.items()}
        for name, kept in round.held["prototype_similarity_distill"].state.items():
            if kept.is_floating_point():
                torch.testing.assert_close(kept, teacher[name].float(), rtol=1e-5, atol=1e-6)


def test_fedgkd_keeps_the_last_models_but_not_the_initial_model(make_setup, play):
    run = play(make_setup(m.fedgkd(buffer=2), num_rounds=4))
    kept = [round.held["past_teachers_distill"].state for round in run[1:]]
    assert [len(models) for models in kept] == [0, 1, 2, 2]
    for models, made in zip(kept, ([], [1], [1, 2], [2, 3]), strict=True):
        for model, number in zip(models, made, strict=True):
            assert all(torch.equal(model[name], w) for name, w in run[number].weights.items())


def test_the_servers_velocity_follows_its_formula(make_setup, play):
    """`v <- beta v + (w - w_avg)`, `w <- w - v`: two rounds, the average from FedAvg on the same
    weights.
    """
    run = play(make_setup(m.fedavgm(beta=0.5), num_rounds=2, norm=True))
    velocity = dict.fromkeys(run[1].held["server_momentum"].state, 0.0)
    assert (
        velocity.keys() == dict(make_setup(m.fedavg(), norm=True).model.named_parameters()).keys()
    )
    setup = make_setup(m.fedavg(), num_rounds=2, norm=True)
    for before, after in pairwise(run):
        averaged = engine.play(setup, replace(before, held={}), ThisProcess(setup))
        for name, w in after.weights.items():
            if name in velocity:
                velocity[name] = (
                    0.5 * velocity[name]
                    + before.weights[name].double()
                    - averaged.weights[name].double()
                )
                torch.testing.assert_close(
                    w, (before.weights[name].double() - velocity[name]).float()
                )
            else:
                # Running statistics have no momentum.
                assert torch.equal(w, averaged.weights[name])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fedcms_direction_is_the_servers_last_step_per_step_of_sgd(momentum, make_setup, states):
    """`(w - w_new) / (K lr)`, `K lr` the cohort's mean: what clients of unequal sizes cover in two
    epochs.
    """
    setup = make_setup(m.fedcm(0.25), momentum=momentum, norm=True)
    before = state_of(setup.model)
    for round, d, own in states(m.fedcm(0.25), "client_momentum", momentum=momentum, norm=True):
        steps = [2 * -(-setup.federation.num_examples(row.client) // 5) for row in round.clients]
        course = (
            np.mean([momentum_corrected_steps(k, momentum) for k in steps])
            * 0.1
            * 0.5 ** (round.round - 1)
        )
        assert d.keys() == dict(setup.model.named_parameters()).keys() and not any(own.values())
        for name in d:
            torch.testing.assert_close(
                d[name], (before[name] - round.weights[name]) / course, rtol=1e-4, atol=1e-5
            )
        before = round.weights


@pytest.mark.parametrize(
    ("counts", "a", "b", "weights"),
    [
        ([[2, 2], [6, 0]], 0.5, 0.1, [0.4 + 0.1, 0.6 - 0.5 + 0.1]),
        # 0.6 - 0.9 is below 0.
        ([[2, 2], [6, 0]], 0.9, 0.0, [0.4, 0.0]),
        # Of the same divergence: half of all each.
        (
            [[4, 0], [0, 12]],
            0.4,
            0.0,
            [0.25 - 0.2, 0.75 - 0.2],
        ),
        # No divergence at all.
        ([[1, 1], [3, 3]], 0.9, 0.0, [0.25, 0.75]),
    ],
    ids=str,
)
def test_feddisco_weighs_clients_by_their_sizes_and_divergences(counts, a, b, weights):
    """By hand; the summands go through the part's survey and report."""
    part, surveyed, total = m.DiscrepancyAverage(a, b), OrderedSum(), OrderedSum()
    clients = [
        SimpleNamespace(label_counts=torch.tensor(each), num_examples=sum(each)) for each in counts
    ]
    for client in clients:
        surveyed.add(part.survey(client))
    _, cohort = part.tell(None, None, surveyed.value)
    for value, client in enumerate(clients, start=1):
        fit = SimpleNamespace(weights={"x": torch.tensor([float(value)])})
        total.add(part.report(client, cohort, fit)[0])
    assert total.value["weight"] / cohort["samples"] == pytest.approx(sum(weights))
    _, step = part.update(None, total.value, a_step({"x": torch.zeros(1)}, {"x"}))
    assert step.averaged["x"].item() == pytest.approx((weights[0] + 2 * weights[1]) / sum(weights))


def test_fedacgs_clients_start_from_their_last_mean_and_the_momentum_of_all_means(make_setup, play):
    """`m <- beta m + (mean - x)`, `x <- mean + beta m`, and `mean` is the model that the paper
    evaluates.
    """
    run = play(make_setup(m.fedacg(beta=0.5, mu=0.1), norm=True))
    setup, momentum = make_setup(m.fedprox(mu=0.1), norm=True), 0.0
    for before, after in pairwise(run):
        means = engine.play(setup, replace(before, held={}), ThisProcess(setup)).weights
        moved = {
            name: means[name].double() - before.weights[name].double()
            for name, _ in setup.model.named_parameters()
        }
        momentum = {
            name: 0.5 * (momentum[name] if momentum else 0.0) + step for name, step in moved.items()
        }
        for name, w in after.weights.items():
            expected = means[name] + 0.5 * momentum[name] if name in momentum else means[name]
            torch.testing.assert_close(w, expected.to(w.dtype), rtol=1e-6, atol=1e-7)
            if name in momentum:
                kept = -after.held["server_momentum"].state[name]
                torch.testing.assert_close(kept, momentum[name], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(after.shown, means, rtol=1e-6, atol=1e-7)


def test_fedexp_shows_the_mean_of_the_last_two_models(make_setup, play):
    for before, after in pairwise(play(make_setup(m.fedexp(), norm=True))):
        for name, w in after.shown.items():
            is_buffer = "running" in name or "num_batches" in name
            expected = (
                after.weights[name]
                if is_buffer
                else (after.weights[name] + before.weights[name]) / 2
            )
            torch.testing.assert_close(w, expected)


@pytest.mark.parametrize("method", [m.fedavg(), m.fedacg()], ids=repr)
def test_a_smoothed_run_evaluates_the_exponential_average_of_what_would_be_evaluated(
    method, make_setup, play
):
    setup, average = make_setup(m.compose(method, m.Smoothed(0.75)), norm=True), None
    for smoothed, plain in zip(
        play(setup)[1:], play(make_setup(method, norm=True))[1:], strict=True
    ):
        assert all(torch.equal(w, plain.weights[name]) for name, w in smoothed.weights.items())
        last = {name: w.double() for name, w in plain.evaluated.items()}
        average = (
            {name: 0.75 * average[name] + 0.25 * w for name, w in last.items()} if average else last
        )
        model = with_weights(setup.model, smoothed.shown).eval()
        assert np.array_equal(
            evaluate(setup, model, 0, 30).confusion, smoothed.evaluation.confusion
        )
        for name, w in smoothed.shown.items():
            expected = average[name] if w.is_floating_point() else average[name].round()
            torch.testing.assert_close(w, expected.to(w.dtype), rtol=1e-6, atol=1e-7)


def follow(rule, v, d):
    """The paper's three rules, for a number."""
    if rule == "adagrad":
        return v + d * d
    return 0.75 * v + 0.25 * d * d if rule == "adam" else v - 0.25 * d * d * np.sign(v - d * d)


@pytest.mark.parametrize("rule", ["adam", "yogi", "adagrad"])
def test_an_adaptive_step_follows_its_formula(rule):
    """Three rounds of two parameters and a buffer, number by number; the second update makes Yogi's
    `v` shrink.
    """
    beta1, beta2, lr, tau = (0.0, 0.0, 0.2, 0.5) if rule == "adagrad" else (0.5, 0.75, 0.2, 0.5)
    part, state = m.AdaptiveStep(rule, lr, beta1, beta2, tau), None
    w, first, second = [1.0, -2.0], [0.0, 0.0], [tau**2, tau**2]
    for updates in ([0.3, -2.0], [0.1, 0.5], [-1.0, 0.0]):
        weights = {"w": torch.tensor(w, dtype=torch.float64), "buffer": torch.tensor(1.0)}
        averaged = {
            "w": weights["w"] + torch.tensor(updates, dtype=torch.float64),
            "buffer": torch.tensor(7.0),
        }
        state, step = part.update(state, None, a_step(weights, {"w"}, averaged))
        first = [beta1 * m + (1 - beta1) * d for m, d in zip(first, updates, strict=True)]
        second = [follow(rule, v, d) for v, d in zip(second, updates, strict=True)]
        w = [x + lr * m / (v**0.5 + tau) for x, m, v in zip(w, first, second, strict=True)]
        assert step.averaged["w"].tolist() == pytest.approx(w)
        # Running statistics are the average's.
        assert step.averaged["buffer"] == 7
        assert state["m"]["w"].tolist() == pytest.approx(first) and state["v"][
            "w"
        ].tolist() == pytest.approx(second)


@pytest.mark.parametrize("by", ["samples", "client"])
@pytest.mark.parametrize(
    ("updates", "eta"),
    [
        # Clients that agree: half of the length, so at least 1.
        ([[3.0, 4.0], [3.0, 4.0]], 1.0),
        ([[3.0, 0.0], [0.0, 4.0]], 1.0),  # (9 + 16) / 2 / 2 over (9 + 16) / 4: the border
        # They cancel in one direction.
        ([[3.0, 1.0], [-1.0, 1.0]], 12 / 2 / 2 / 2.001),
        # They cancel: only epsilon holds eta down.
        ([[2.0, 0.0], [-2.0, 0.0]], 4 / 2 / 1e-3),
    ],
    ids=["equal", "at right angles", "opposed in part", "opposed"],
)
def test_fedexp_goes_on_by_eta_which_is_at_least_1(by, updates, eta):
    """By hand, for two clients of equal size, so that both weights agree; the summands go through
    the part's report.
    """
    part, total = m.ExtrapolatedAverage(by=by), OrderedSum()
    weights = {"weight": torch.tensor([[1.0, -1.0]]), "running": torch.tensor([0.0])}
    for update in updates:
        model = torch.nn.Linear(2, 1, bias=False)
        model.register_buffer("running", torch.tensor([update[0]]))
        model.weight.data = weights["weight"] + torch.tensor([update])
        client = SimpleNamespace(num_examples=5, weights=weights)
        total.add(part.report(client, None, m.Fit(model, model.state_dict(), 1, 0.0))[0])
    _, step = part.update(None, total.value, a_step(weights, {"weight"}))
    mean = torch.tensor(updates).mean(dim=0)
    torch.testing.assert_close(step.averaged["weight"], weights["weight"] + eta * mean)
    assert step.averaged["running"] == mean[0]


@pytest.mark.parametrize("sizes", [(1, 1), (1, 7), (7, 1)], ids=str)
def test_the_mean_of_equal_counts_is_that_count(sizes):
    """Also above 2^24, beyond which float32 skips whole numbers: BatchNorm's `num_batches_tracked`
    may get there.
    """
    count, total = torch.tensor(2**24 + 1), OrderedSum()
    for n in sizes:
        total.add({"weight": n, "weights": Scaled(n, {"count": count})})
    _, step = m.Average().update(None, total.value, a_step({"count": count}, set()))
    assert step.averaged["count"] == count


# Steps.


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_momentum_corrected_steps_are_the_distance_covered_with_a_constant_gradient_of_1(
    steps, momentum
):
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=momentum)
    for _ in range(steps):
        w.grad = torch.ones_like(w)
        optimizer.step()
    assert momentum_corrected_steps(steps, momentum) == pytest.approx(-w.item())
