"""Measures of the clients' models: by hand, against the engine's evaluation, and without a trace in
the training.
"""

import copy
import itertools
import logging
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from rayfed.base.errors import ClientFailed, InputError
from rayfed.data.augment import Augment
from rayfed.data.inputs import Images
from rayfed.job import read_job
from rayfed.measures import clients, failing, gradients, metrics, updates
from rayfed.measures.clients import Seen, sampled
from rayfed.methods import RECIPES, fedavg, fedntd
from rayfed.methods.views import run_model
from rayfed.models.classifier import Classifier
from rayfed.rounds import engine, measuring
from rayfed.rounds import gradients as gradients_of_clients
from rayfed.rounds.engine import open_round, rounds
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.sums import OrderedSum
from rayfed.tensors.weights import with_weights
from rayfed.tensors.wire import unpack

ALL = ["local", "train", "epochs", "drift", "gradients", "confusion"]
# The measures that show models images.
OF_OUTPUTS = ["local", "train", "epochs", "drift", "confusion"]
OF_MEASURES = ("local.", "train.", "epochs.", "drift.", "gradients.")
LABELS = np.array([0, 0, 1, 1])
MEASURED = {
    "measure": ["drift"],
    "measure_every": 7,
    "measure_layers": ["head"],
    "measure_clients": [1],
}


def measured(names, before, after, p):
    """`measuring.measured`, of models that have seen the images."""
    looks = lambda: before, lambda: after
    notes, confusion = measuring.measured(names, dict.fromkeys(names, looks), p)
    assert confusion is None
    return notes


def seen(predictions, weights=(0.0, 0.0), features=None):
    """A model that predicts these classes, surely."""
    named = {
        "a.w": torch.tensor([weights[0]]),
        "a.b": torch.tensor([0.0]),
        "head.w": torch.tensor([weights[1]]),
    }
    return Seen(
        named,
        LABELS,
        10.0 * np.eye(2)[predictions],
        features,
        {} if features is None else {"": features},
    )


def test_local_by_hand():
    before, after, p = seen([0, 1, 1, 1]), seen([0, 0, 0, 1]), np.array([0.75, 0.25])
    assert measured(["local"], before, after, p) == {
        "local.before.accuracy": 0.75,
        "local.before.in_local": 0.75 * 0.5 + 0.25 * 1.0,
        "local.before.out_local": 0.25 * 0.5 + 0.75 * 1.0,
        "local.after.accuracy": 0.75,
        "local.after.in_local": 0.75 * 1.0 + 0.25 * 0.5,
        "local.after.out_local": 0.25 * 1.0 + 0.75 * 0.5,
    }


def test_drift_by_hand():
    one = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    # Each feature is still largest on the same class.
    other = one + np.array([3.0, 4.0])
    found = measured(
        ["drift"],
        seen([0, 0, 1, 0], features=one),
        seen([0, 0, 1, 1], (3.0, 4.0), other),
        np.array([1.0, 0.0]),
    )
    assert found == pytest.approx(
        {
            "drift.divergence": 5.0,
            "drift.divergence_l1": 7.0,
            "drift.divergence.a": 3.0,
            "drift.divergence.head": 4.0,
            "drift.distribution_distance": abs(2 / 3 - 1)
            # Accuracies of 1 and 1/2, scaled to 2/3 and 1/3.
            + 1 / 3,
            # Of one image in four.
            "drift.logit_distance": np.sqrt(200) / 4,
            # The logits (10, 0) became (0, 10), so each log-probability has moved by 10.
            "drift.logit_kl": 10 * np.tanh(5) / 4,
            "drift.feature_distance": 5.0,
            "drift.alignment": 1.0,
            "drift.dead": 0.0,
        }
    )
    without = measured(["drift"], seen([0, 0, 1, 0]), seen([0, 0, 1, 1]), np.array([1.0, 0.0]))
    assert without.keys() == found.keys() - {
        "drift.feature_distance",
        "drift.alignment",
        "drift.dead",
    }


def test_an_epoch_by_hand():
    """The accuracies are the later model's, and the distances are those of `drift`."""
    one = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    start = seen([0, 0, 1, 0], features=one)
    now = seen([0, 0, 0, 1], (3.0, 4.0), one + np.array([3.0, 4.0]))
    p = np.array([0.75, 0.25])
    assert dict(clients.epoch(start, now, p)) == pytest.approx(
        {
            "accuracy": 0.75,
            "in_local": 0.75 * 1.0 + 0.25 * 0.5,
            "out_local": 0.25 * 1.0 + 0.75 * 0.5,
            "divergence": 5.0,
            "divergence_l1": 7.0,
            "logit_distance": 2 * np.sqrt(200) / 4,
            "logit_kl": 2 * 10 * np.tanh(5) / 4,
            "feature_distance": 5.0,
        }
    )


def test_the_kl_of_logits_is_torchs_and_ignores_a_shift_of_all_logits():
    rng = np.random.default_rng(0)
    logits, other = rng.normal(size=(2, 30, 5)).astype(np.float32)
    expected = nn.functional.kl_div(
        torch.tensor(other).double().log_softmax(dim=1),
        torch.tensor(logits).double().log_softmax(dim=1),
        reduction="batchmean",
        log_target=True,
    )
    assert metrics.logit_kl(logits, other) == pytest.approx(float(expected))
    assert metrics.logit_kl(logits, other + 1000) == pytest.approx(float(expected), rel=1e-3)
    assert metrics.logit_kl(logits, logits) == 0


def test_the_drift_does_not_depend_on_the_threads_of_numpys_blas():
    """Which actors have one of, and this process as many as there are cores."""
    lines = (
        "import numpy as np; from rayfed.measures.metrics import length, weight_divergence as moved"
    )
    lines += (
        "; x = np.random.default_rng(0).normal(size=400_000).astype('f'); print(length(x).hex(), "
        "moved(x, -x).hex())"
    )
    said = {
        subprocess.check_output(
            [sys.executable, "-c", lines], env={**os.environ, "OPENBLAS_NUM_THREADS": threads}
        )
        for threads in "12"
    }
    assert len(said) == 1


@pytest.mark.parametrize(
    ("total", "wanted", "count"), [(100, 10, 10), (100, 0, 100), (100, 100, 100), (100, 500, 100)]
)
def test_a_sample_is_fixed_by_the_seed(total, wanted, count):
    rows = sampled(total, wanted, seed=3)
    assert len(rows) == len(set(rows)) == count and (np.diff(rows) > 0).all() and rows.max() < total
    assert rows.tolist() == sampled(total, wanted, seed=3).tolist()
    assert count == total or rows.tolist() != sampled(total, wanted, seed=4).tolist()


def with_measures(setup, **changes):
    """The setup, measured in every way on all test images."""
    changes = {"measure": ALL, "measure_images": 0, **changes}
    return replace(setup, job=replace(setup.job, **changes))


def without_measures(round):
    """A round as if nothing had been measured."""
    rows = (
        replace(
            row,
            notes={k: v for k, v in row.notes.items() if not k.startswith(OF_MEASURES)},
        )
        for row in round.clients
    )
    return replace(round, clients=tuple(rows), notes={}, confusions={})


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedcsd", "moon", "fednova"])
def test_a_measure_leaves_no_trace_in_the_training(name, make_setup, play, bits):
    """Not in weights, states, memories, surveys, losses, evaluations, nor in the bytes of the
    method.
    """
    setup = make_setup(RECIPES[name](), norm=True)
    chosen = {
        "measure_every": 2,
        "measure_layers": ["features.0", "head"],
        "measure_clients": [0, 1, 2],
    }
    plain, with_them = (play(each) for each in (setup, with_measures(setup, **chosen)))
    for one, other in zip(plain, with_them, strict=True):
        assert bits(one) == bits(without_measures(other))
        measured_here = {row.client: "local.after.accuracy" in row.notes for row in other.clients}
        assert measured_here == {
            client: other.round == 2 and client < 3 for client in measured_here
        }
        assert other.confusions.keys() == {client for client, here in measured_here.items() if here}
        assert bool(other.notes) == (other.round == 2)


class Restless(nn.Module):
    """A layer with a buffer that every forward pass changes, in training and in evaluation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(dim=(0, 2, 3)))
        return x - self.mean[:, None, None]


@pytest.mark.parametrize("method", [fedavg(), fedntd()])
def test_a_buffer_that_every_forward_pass_changes_is_not_changed_by_a_measure(
    method, make_setup, play, bits
):
    setup = make_setup(method)
    layers = nn.Sequential(nn.Conv2d(1, 4, 3), Restless(), nn.ReLU(), nn.Flatten())
    setup = replace(setup, model=Classifier(layers, nn.Linear(16, 4)))
    plain, with_them = (
        play(replace(each, model=copy.deepcopy(setup.model)))
        for each in (setup, with_measures(setup))
    )
    assert [bits(round) for round in plain] == [
        bits(without_measures(round)) for round in with_them
    ]


def states_after_training(setup, last):
    """What each client of the round after `last` has trained, each in a task of its own: float64
    (K, P).
    """
    workers = ThisProcess(setup)
    opening = open_round(setup, last, workers)
    names = dict(setup.model.named_parameters())
    found = {}
    for client in opening.cohort.answered:
        (reply,) = engine.begin_training(setup, workers, opening.broadcast, [(client,)], {})
        found[client] = unpack(reply.summands)["average"]["weights"].values
    return names, found


def test_the_agreement_of_updates_is_that_of_the_clients_own_weights(make_setup, play):
    """With BatchNorm, whose statistics are no parameters, and tasks of one and of several
    clients.
    """
    setup = make_setup(fedavg(), norm=True)
    last, *others = play(with_measures(setup))
    for round in others:
        names, states = states_after_training(setup, last)
        updates = np.array(
            [
                np.concatenate(
                    [
                        (state[n].double() - last.weights[n].double()).flatten().numpy()
                        for n in names
                    ]
                )
                for state in states.values()
            ]
        )
        mean = updates.mean(axis=0)
        assert round.notes["drift.gradient_diversity"] == pytest.approx(
            np.mean([u @ u for u in updates]) / (mean @ mean), rel=1e-5
        )
        pairs = [u @ v / np.sqrt((u @ u) * (v @ v)) for u, v in itertools.combinations(updates, 2)]
        assert round.notes["drift.update_cosine"] == pytest.approx(np.mean(pairs), abs=1e-6)
        last = round


def preferred(setup, weights, layer):
    """The class on which each neuron is largest on average, computed without hooks, image by
    image.
    """
    model = with_weights(setup.model, weights).eval()
    data = setup.federation
    found = [[] for _ in data.train.classes]
    with torch.no_grad():
        for row in range(len(data.test)):
            [(image, label)] = data.batches(data.test, np.array([row]), setup.device)
            outputs = {
                "": model.features(image),
                "features.0": model.features[0](image).mean(dim=(2, 3)),
            }
            found[int(label)].append(outputs[layer][0].double().numpy())
    means = np.array([np.mean(outputs, axis=0) for outputs in found])
    return np.where(means.any(axis=0), means.argmax(axis=0), -1)


@pytest.mark.parametrize("layer", ["", "features.0"])
def test_alignment_of_the_global_model_and_of_clients_by_layer(make_setup, play, layer):
    """A map counts as its mean over space. The only client of a round becomes the global model."""
    setup = make_setup(fedavg(), clients_per_round=1, norm=True, num_rounds=4)
    key = f"drift.alignment.{layer}" if layer else "drift.alignment"
    last, *others = play(with_measures(setup, measure_layers=[layer] if layer else []))
    shares = []
    for round in others:
        before, after = (preferred(setup, model.weights, layer) for model in (last, round))
        alive = (before >= 0) & (after >= 0)
        share = float((before == after)[alive].mean())
        assert round.notes[key.replace("alignment", "dead")] == 1 - alive.mean()
        assert round.notes[key] == round.clients[0].notes[key] == share
        assert [name for name in round.notes if "alignment" in name] == [key]
        shares.append(share)
        last = round
    assert min(shares) < 1


def test_a_confusion_is_of_the_measured_images_and_gives_the_numbers_of_local(make_setup, play):
    setup = with_measures(make_setup(fedavg(), norm=True), measure_images=20)
    for round in play(setup)[1:]:
        assert round.confusions.keys() == {row.client for row in round.clients}
        for row in round.clients:
            confusion = round.confusions[row.client]
            assert confusion.sum() == 20
            share = setup.federation.label_counts(row.client) / row.num_examples
            there = confusion.sum(axis=1) > 0
            by_class = confusion.diagonal()[there] / confusion.sum(axis=1)[there]
            found = {
                "accuracy": confusion.trace() / 20,
                "in_local": (by_class * share[there]).sum() / share[there].sum(),
                "out_local": (by_class * (1 - share[there])).sum() / (1 - share[there]).sum(),
            }
            assert {key: row.notes[f"local.after.{key}"] for key in found} == pytest.approx(found)


def test_domains_have_the_accuracy_of_their_own_test_images(make_setup, play, bits):
    setup = make_setup(fedavg())
    test, names = setup.federation.test, ("amazon", "none", "webcam")
    domains = np.where(np.arange(len(test)) % 3, 2, 0)
    marked = replace(test, domains=domains, domain_names=names)
    apart = replace(setup, federation=replace(setup.federation, test=marked))
    for plain, round in zip(play(setup), play(apart), strict=True):
        assert bits(plain) == bits(replace(round, notes={}))
        assert round.notes.keys() == {"domain.amazon", "domain.webcam"}, (
            "a domain without test images has no accuracy"
        )
        for code, name in ((0, "amazon"), (2, "webcam")):
            only = replace(
                setup,
                federation=replace(
                    setup.federation, test=test.take(np.flatnonzero(domains == code))
                ),
            )
            own = engine.with_evaluation(
                only, round, engine.begin_evaluation(only, ThisProcess(only), round)
            ).evaluation.confusion
            assert round.notes[f"domain.{name}"] == own.trace() / own.sum()
        shares = round.notes["domain.amazon"] * 10 + round.notes["domain.webcam"] * 20
        assert shares / 30 == pytest.approx(round.test_accuracy)


def test_before_is_the_global_model_and_after_the_clients_own(make_setup, play):
    """On all test images, with one client per round: its model becomes the global model."""
    last, *others = play(
        setup := with_measures(make_setup(fedavg(), clients_per_round=1, norm=True))
    )
    parameters = dict(setup.model.named_parameters())
    for round in others:
        (row,) = round.clients
        assert row.notes["local.before.accuracy"] == pytest.approx(last.test_accuracy)
        assert row.notes["local.after.accuracy"] == pytest.approx(round.test_accuracy)
        moved = sum(
            (round.weights[name] - last.weights[name]).double().square().sum()
            # Not BatchNorm's statistics.
            for name in parameters
        )
        assert row.notes["drift.divergence"] == pytest.approx(float(moved.sqrt()), rel=1e-6)
        last = round


def epochs_of(row):
    """The numbers of a client's epochs by epoch, in their order."""
    found = {}
    for name, value in row.notes.items():
        if name.startswith("epochs."):
            epoch, _, key = name.removeprefix("epochs.").rpartition(".")
            found.setdefault(float(epoch), {})[key] = value
    return found


def measured_rows(setup, play):
    return {row.client: row for round in play(setup)[1:] for row in round.clients}


@pytest.mark.parametrize("method", ["fedavg", "fedntd", "fedbn"])
def test_epochs_lead_from_before_to_after_the_training(method, make_setup, play):
    """Also of a client whose BatchNorm stays there: it begins with its own."""
    setup = with_measures(make_setup(RECIPES[method](), norm=True, local_epochs=3))
    for row in measured_rows(setup, play).values():
        epochs = epochs_of(row)
        assert [*epochs] == [0, 1, 2, 3]
        for number, when in ((0, "before"), (3, "after")):
            for key in ("accuracy", "in_local", "out_local"):
                assert epochs[number][key] == row.notes[f"local.{when}.{key}"]
        for key in epochs[0].keys() - {"accuracy", "in_local", "out_local"}:
            assert epochs[0][key] == 0 < epochs[1][key]
            assert epochs[3][key] == row.notes[f"drift.{key}"]


def test_the_first_epochs_are_those_of_a_shorter_training(make_setup, play):
    """To the bit, with generators that a part and the augmentation draw from."""
    augment = Augment(crop=1, flip=True)
    short, long = (
        measured_rows(
            with_measures(
                make_setup(fedntd(), norm=True, augment=augment, local_epochs=epochs, num_rounds=1)
            ),
            play,
        )
        for epochs in (2, 4)
    )
    assert short.keys() == long.keys()
    for client, row in short.items():
        of_long = epochs_of(long[client])
        assert epochs_of(row) == {number: of_long[number] for number in (0, 1, 2)}


@pytest.mark.parametrize(
    ("training", "epochs"),
    [
        ({"local_epochs": 0.5}, [0, 0.5]),
        ({"local_epochs": 1.5}, [0, 1, 1.5]),
        ({"local_steps": 5}, [0, 1, 2, 2.5]),
    ],
)
def test_a_training_that_ends_within_an_epoch_is_measured_at_its_end(
    training, epochs, make_setup, play
):
    # Eight images in batches of five are two steps.
    setup = make_setup(fedavg(), counts=[[2, 2, 2, 2]] * 4, num_rounds=1, **training)
    for row in measured_rows(with_measures(setup, measure=["epochs"]), play).values():
        assert [*epochs_of(row)] == epochs
        assert not any(name.startswith(("local.", "drift.")) for name in row.notes)


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_the_accuracy_on_a_clients_own_training_images(method, make_setup, play, of_client):
    """Before the training it is the global model's, and after it the client's own model's."""
    setup = make_setup(RECIPES[method](), clients_per_round=1, num_rounds=4, norm=True)
    setup = with_measures(setup, measure=["train"])
    last, *others = play(setup)
    for round in others:
        (row,) = round.clients
        images, labels = of_client(setup, row.client)
        for when, at in (("before", last), ("after", round)):
            weights = at.weights
            if method == "ditto" and row.client in at.memories:
                # A client's first own model is the global model.
                weights = unpack(at.memories[row.client])["slots"]["own_model"]
            model = with_weights(setup.model, weights).eval()
            right = (model(images).argmax(dim=1) == labels).double().mean().item()
            assert row.notes[f"train.{when}.accuracy"] == right
        last = round


# Gradients.


def softmax_gradients(setup, weights, images, labels):
    """The mean gradient (P,) of a linear model by class, from the formula, in float64."""
    x = images.flatten(1).double()
    w, b = (weights[name].double() for name in ("head.weight", "head.bias"))
    errors = (x @ w.T + b).softmax(dim=1) - torch.eye(4, dtype=torch.float64)[labels]
    by_class = {}
    for c in labels.unique().tolist():
        of_class, inputs = errors[labels == c], x[labels == c]
        gradient = of_class.T @ inputs / len(inputs)
        by_class[c] = torch.cat([gradient.flatten(), of_class.mean(dim=0)]).numpy()
    return by_class


def test_gradients_of_a_linear_model_by_hand(make_setup, play, of_client):
    setup = make_setup(fedavg())
    setup = replace(setup, model=Classifier(nn.Flatten(), nn.Linear(16, 4)))
    setup = with_measures(setup, measure=["gradients"])
    last, *others = play(setup)
    for round in others:
        of_clients, sizes, variances = [], [], []
        for row in round.clients:
            images, labels = of_client(setup, row.client)
            by_class = softmax_gradients(setup, last.weights, images, labels)
            share = np.bincount(labels.numpy(), minlength=4) / len(labels)
            gradient = sum(share[c] * g for c, g in by_class.items())
            lengths = [np.linalg.norm(g) for g in by_class.values()]
            pairs = [
                g @ h / np.linalg.norm(g) / np.linalg.norm(h)
                for g, h in itertools.combinations(by_class.values(), 2)
            ]
            assert row.notes["gradients.length"] == pytest.approx(
                np.linalg.norm(gradient), rel=1e-4
            )
            # A client with one class has no pair of classes, and so no such note.
            cosine = pytest.approx(np.mean(pairs), abs=1e-4) if pairs else None
            assert row.notes.get("gradients.class_cosine") == cosine
            spread = np.std(lengths) / np.mean(lengths)
            assert row.notes["gradients.class_spread"] == pytest.approx(spread, abs=1e-4)
            of_clients.append(gradient)
            sizes.append(len(labels))
            variances.append(np.var(share))
        squares = np.array([g @ g for g in of_clients])
        mean, weighted = np.mean(of_clients, axis=0), np.average(of_clients, axis=0, weights=sizes)
        assert round.notes == pytest.approx(
            {
                "gradients.diversity": squares.mean() / (mean @ mean),
                "gradients.dissimilarity": np.sqrt(
                    np.average(squares, weights=sizes) / (weighted @ weighted)
                ),
                "gradients.bound": 2 * 4**3 / (len(sizes) * 3**2) * sum(variances),
            },
            rel=1e-4,
        )
        last = round


def test_the_diversity_of_updates_of_one_step_is_that_of_the_gradients(make_setup, play):
    """An update of a single step of plain SGD is the gradient times the learning rate."""
    plain = {"momentum": 0.0, "weight_decay": 0.0, "local_steps": 1, "batch_size": 1000}
    setup = with_measures(make_setup(fedavg(), **plain), measure=["drift", "gradients"])
    for round in play(setup)[1:]:
        diversity = round.notes["gradients.diversity"]
        assert diversity == pytest.approx(round.notes["drift.gradient_diversity"], rel=1e-3)
        assert diversity > 1


def of_round(p, by_class, clients):
    """The numbers of a round of clients with these gradients by class."""
    total = OrderedSum()
    for client in range(clients):
        found = gradients.ClassGradients(p[client], [*by_class[p[client] > 0]])
        total.add(gradients.gradient_summand(found, by_class.shape[1], 7))
    return gradients.dissimilarity(total.value, clients, p.shape[1])


def test_clients_of_one_kind_have_a_diversity_and_a_dissimilarity_of_1():
    p = np.tile([0.5, 0.25, 0.25], (3, 1))
    by_class = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    found = of_round(p, by_class, clients=3)
    assert found["gradients.diversity"] == pytest.approx(1)
    assert found["gradients.dissimilarity"] == pytest.approx(1)
    # A uniform distribution has no variance, and nothing is out-local.
    assert of_round(np.full((3, 4), 0.25), torch.eye(4), 3)["gradients.bound"] == 0


def test_the_diversity_falls_with_the_weight_of_the_other_classes_as_the_bound_says():
    """FedNTD, eq. 30: the classes' gradients are orthogonal, and all classes are equally common."""
    p = np.array([[0.7, 0.2, 0.1], [0.1, 0.7, 0.2], [0.2, 0.1, 0.7]])

    def diversity(beta):
        mixed = p + beta * (1 - p) / 2
        return metrics.gradient_diversity(mixed.sum(axis=0), np.square(mixed).sum(), 3)

    found = of_round(p, torch.eye(3), 3)
    assert found["gradients.diversity"] == pytest.approx(diversity(0.0))
    for beta in (0.0, 0.3, 0.5):
        slope = (diversity(beta + 1e-6) - diversity(beta - 1e-6)) / 2e-6
        factor = 3 / (1 + beta) ** 3 - 1 / (1 + beta) ** 2
        assert slope == pytest.approx(-found["gradients.bound"] * factor, rel=1e-4)
        assert slope <= -found["gradients.bound"] / (1 + beta) ** 2 * (1 - 1e-6)


def test_a_measure_that_fails_warns_once_and_the_run_goes_on(make_setup, monkeypatch, caplog):
    def broken(*given):
        raise ValueError("no such layer")

    failing._warn.cache_clear()
    monkeypatch.setitem(clients.MEASURES, "drift", broken)
    setup = with_measures(make_setup(fedavg()))
    with caplog.at_level(logging.WARNING):
        *_, last = rounds(setup, ThisProcess(setup))
    assert [r.getMessage() for r in caplog.records] == [
        "measure = drift fails, and is left out: ValueError: no such layer"
    ]
    assert all("local.after.accuracy" in row.notes for row in last.clients)


def test_a_model_that_cannot_be_shown_the_images_does_not_end_the_run(
    make_setup, monkeypatch, caplog
):
    def full(*given):
        raise RuntimeError("not enough memory")

    failing._warn.cache_clear()
    monkeypatch.setattr(measuring, "Seen", full)
    setup = with_measures(make_setup(fedavg()), measure=OF_OUTPUTS)
    with caplog.at_level(logging.WARNING):
        *_, last = rounds(setup, ThisProcess(setup))
    text = "fails, and is left out: RuntimeError: not enough memory"
    said = [record.getMessage() for record in caplog.records]
    # The epochs are measured while the client trains, the others afterwards.
    order = ("epochs", "local", "train", "drift", "confusion")
    assert said == [f"measure = {name} {text}" for name in order]
    assert last.round == 3 and all(
        row.notes.keys() == {"loss.cross_entropy"} for row in last.clients
    )
    assert (
        last.notes.keys() == {"drift.gradient_diversity", "drift.update_cosine"}
        and not last.confusions
    )


def test_a_measure_that_a_gpus_memory_does_not_suffice_for_ends_the_run(make_setup, monkeypatch):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measuring, "Seen", full)
    with pytest.raises(ClientFailed, match=r"(?s)CUDA out of memory.*ray.num_gpus"):
        list(rounds(setup := with_measures(make_setup(fedavg())), ThisProcess(setup)))


def test_an_update_that_cannot_be_measured_leaves_out_the_numbers_of_the_round(
    make_setup, monkeypatch, caplog
):
    failing._warn.cache_clear()
    update_summand = updates.update_summand
    monkeypatch.setattr(
        "rayfed.measures.updates.update_summand",
        lambda w, m: update_summand({} if next(turn) == 5 else w, m),
    )
    turn, setup = (
        itertools.count(),
        with_measures(make_setup(fedavg(), norm=True), measure=["drift"]),
    )
    with caplog.at_level(logging.WARNING):
        found = [round.notes.keys() for round in rounds(setup, ThisProcess(setup))][1:]
    assert [record.getMessage() for record in caplog.records] == [
        "measure = drift fails, and is left out: KeyError: 'features.0.weight'"
    ]
    aligned = {"drift.alignment", "drift.dead"}
    with_all = {"drift.gradient_diversity", "drift.update_cosine", *aligned}
    assert found == [with_all, aligned, with_all], "the sixth client is of the second round"


def test_gradients_that_cannot_be_measured_leave_out_the_numbers_of_the_round(
    make_setup, monkeypatch, caplog
):
    failing._warn.cache_clear()

    def broken(*given):
        if next(turn) == 5:
            raise KeyError("no gradient")
        return by_class(*given)

    by_class, turn = gradients_of_clients.by_class, itertools.count()
    monkeypatch.setattr(gradients_of_clients, "by_class", broken)
    setup = with_measures(make_setup(fedavg(), norm=True), measure=["gradients"])
    with caplog.at_level(logging.WARNING):
        played = [*rounds(setup, ThisProcess(setup))][1:]
    assert [record.getMessage() for record in caplog.records] == [
        "measure = gradients fails, and is left out: KeyError: 'no gradient'"
    ]
    assert [bool(round.notes) for round in played] == [True, False, True]
    of_clients = ["gradients.length" in row.notes for round in played for row in round.clients]
    assert of_clients.count(False) == 1, "the sixth client is of the second round"


def test_the_keys_of_measures_are_no_part_of_the_lineage():
    plain, other = (
        read_job({"name": "x"}),
        read_job({"name": "x", "data": {"domain": "d"}, **MEASURED}),
    )
    assert plain.lineage() == other.lineage() and plain.hash() == other.hash()


def test_a_worker_shows_the_images_to_the_global_model_once_per_round(
    make_setup, play, monkeypatch
):
    shown, see = [], measuring.see
    monkeypatch.setattr(
        "rayfed.rounds.measuring.see", lambda *given: shown.append(given[-1]) or see(*given)
    )
    # Each client is a task of its own.
    play(with_measures(make_setup(fedavg(), task_images=1)))
    # After each epoch and at the end; and the client's own images, before and after.
    of_client = 2 + 1 + 2
    assert len(shown) == 3 * (4 * of_client + 1 + 2), (
        "the global model before and after each round, for the round's alignment"
    )


class Odd(torch.nn.Module):
    """With layers that cannot be measured."""

    def __init__(self):
        super().__init__()
        self.net, self.unused, self.twice = (
            torch.nn.Linear(4, 2),
            torch.nn.Linear(1, 1),
            torch.nn.ReLU(),
        )
        self.pair = torch.nn.MaxPool1d(1, return_indices=True)

    def forward(self, x):
        return self.net(self.twice(self.twice(self.pair(x.flatten(1))[0])))


@pytest.mark.parametrize(
    ("layer", "why"),
    {
        "unused": "gave 0 outputs in 1 forward",
        "twice": "gave 2 outputs",
        "pair": "gives no tensor",
    }.items(),
)
def test_a_layer_without_one_output_per_forward_pass_is_refused(layer, why):
    with pytest.raises(
        InputError, match=rf"measure_layers = \['{layer}'\]: the layer '{layer}' {why}"
    ):
        measuring.refuse_absent([layer], Odd(), Images((1, 2, 2)))
    measuring.refuse_absent(["net"], Odd(), Images((1, 2, 2)))


def test_a_layers_output_is_as_it_was_before_a_later_layer_writes_to_it():
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(inplace=True), torch.nn.Linear(8, 2)
    )
    x = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    seen = measuring.see(run_model, ["0", "1"], [(x, torch.tensor([0, 1, 0, 1, 0]))], net)
    np.testing.assert_array_equal(seen.layers["0"], net[0](x).detach().numpy())
    np.testing.assert_array_equal(seen.layers["1"], net[0](x).relu().detach().numpy())
    assert seen.layers["0"].min() < 0 and seen.activations.counts.tolist() == [3, 2]
    assert not any(module._forward_hooks for module in net.modules())
