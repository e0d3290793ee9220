"""A client's work: its batches, what its hooks see, what training leaves behind, and what it
refuses.
"""

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rayfed.base.errors import Diverged, InputError
from rayfed.base.isolation import HAS_PRECISIONS, set_tf32, threads
from rayfed.clients.batches import batches
from rayfed.clients.settings import Training
from rayfed.data.settings import Augment
from rayfed.job import Job, RayOptions, make_job
from rayfed.methods import (
    CrossEntropy,
    NotTrueDistill,
    Part,
    Proximal,
    compose,
    fedavg,
    fedlmd,
    fedntd,
    moon,
)
from rayfed.methods.part import all_parts, names_of_terms
from rayfed.methods.views import Notes
from rayfed.rounds import setup as sites
from rayfed.rounds.client_work import RoundContext, survey, train
from rayfed.rounds.evaluation import evaluate
from rayfed.rounds.messages import Broadcast
from rayfed.rounds.setup import open_setup, server_view
from rayfed.runtime.hardware import refuse_tf32
from rayfed.tensors.weights import state_of

CLIENT = 1  # [0, 8, 1, 2] samples: 5, 5 and 1 of them in a batch


def broadcast_of(setup, round=1):
    return Broadcast(
        round, state_of(setup.model), {}, {}, {part.slot: 1 for part in all_parts(setup.job.method)}
    )


def turned(image_shape, num_classes):
    """A model whose weights come from a QR decomposition."""
    head = nn.Linear(600, num_classes)
    nn.init.orthogonal_((inner := nn.Linear(784, 600)).weight)
    return nn.Sequential(nn.Flatten(), inner, head)


def test_a_sites_weights_do_not_depend_on_the_threads_that_this_process_has():
    """As many as it has cores; LAPACK's results depend on them."""

    def weights(count):
        with threads(count):
            return state_of(
                open_setup(make_job({"name": "n", "model": f"{__name__}:turned"})).model
            )

    assert all(
        torch.equal(one, two)
        for one, two in zip(weights(1).values(), weights(2).values(), strict=True)
    )


def trained(setup, broadcast=None, client=CLIENT):
    """The client's state after training."""
    reply = train(RoundContext(setup, broadcast or broadcast_of(setup)), client, {})
    return {name: w.clone() for name, w in reply.summands["average"]["weights"].values.items()}


def test_denormal_numbers_are_zero_in_training_with_one_thread(make_setup):
    """With several threads, torch would set it for one of them alone."""

    def product(threads):
        setup = make_setup(compose(Tiny()), ray=RayOptions(num_cpus=threads), local_steps=1)
        return train(RoundContext(setup, broadcast_of(setup)), CLIENT, {}).memory["tiny"]

    assert product(1) == 0.0 and product(2) == pytest.approx(1e-40, rel=1e-3)
    # As before.
    assert float(torch.tensor(1e-40) * 1.0) != 0.0


@dataclass(frozen=True)
class Tiny(Part):
    """Remembers a denormal number that it has computed."""

    def report(self, client, local, fit):
        return None, float(torch.tensor(1e-40) * 1.0)


def test_a_context_serves_one_client_as_a_new_one_would(make_setup, digest):
    setup = make_setup(fedntd(), norm=True, augment=Augment(flip=True))
    shared = RoundContext(setup, broadcast_of(setup))
    for client in (1, 4, 1):
        replies = [
            train(context, client, {})
            for context in (shared, RoundContext(setup, broadcast_of(setup)))
        ]
        assert digest(replies[0].summands) == digest(replies[1].summands)


def test_a_context_keeps_no_copy_that_a_single_client_asked_for(make_setup):
    """MOON asks for each client's own last model: a task of many clients would fill the memory."""
    setup = make_setup(moon(), batch_size=100)
    context, sizes = RoundContext(setup, broadcast_of(setup)), []
    for client in range(6):
        train(context, client, {"model_contrast": state_of(setup.model)})
        sizes.append(len(context._frozen._copies))
    assert sizes == [2] * 6


# Batches.


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 4), st.integers(0, 5))
def test_every_epoch_sees_every_sample_once(num_examples, batch_size, epochs, seed):
    training = Training(batch_size=batch_size, local_epochs=epochs)
    steps = [
        index.tolist()
        for index in batches(num_examples, training, torch.Generator().manual_seed(seed))
    ]
    per_epoch = -(-num_examples // batch_size)
    assert len(steps) == per_epoch * epochs
    for epoch in range(epochs):
        some = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(i for index in some for i in index) == list(range(num_examples))
        assert [len(index) for index in some[:-1]] == [batch_size] * (per_epoch - 1)
        # Smaller, and kept.
        assert len(some[-1]) == num_examples - batch_size * (per_epoch - 1)


@given(st.integers(1, 30), st.integers(1, 10), st.integers(1, 20))
def test_a_number_of_steps_replaces_the_epochs_and_changes_nothing_else(
    num_examples, batch_size, steps
):
    def drawn(**training):
        rng = torch.Generator().manual_seed(0)
        return [
            i.tolist()
            for i in batches(num_examples, Training(batch_size=batch_size, **training), rng)
        ]

    assert drawn(local_steps=steps) == drawn(local_epochs=steps)[:steps]


def test_epochs_have_different_orders():
    one, two = batches(
        50, Training(batch_size=50, local_epochs=2), torch.Generator().manual_seed(0)
    )
    assert one.tolist() != two.tolist()


# What the hooks see.


SEEN = []


@dataclass(frozen=True)
class Spy(Part):
    """Keeps what its hooks are given."""

    def survey(self, client):
        SEEN.append(("survey", client))
        return {"n": client.num_examples}

    def begin(self, client):
        SEEN.append(("begin", client))
        return "local"

    def loss(self, batch, local):
        SEEN.append(
            ("loss", (len(batch.labels), local, batch.model.training, torch.is_grad_enabled()))
        )
        return None

    def report(self, client, local, fit):
        live = all(p.requires_grad for p in fit.model.parameters())
        SEEN.append(("report", (local, fit.steps, fit.loss, fit.model.training, live)))
        return None, "memory"


def test_hooks_run_in_order_and_see_their_client(make_setup):
    setup = make_setup(
        compose(Spy()), local_epochs=1, norm=True, augment=Augment(flip=True, cutout=2)
    )
    broadcast = replace(
        broadcast_of(setup, 2), states={"spy": "state"}, payloads={"spy": "payload"}
    )
    # Only of parts that survey.
    assert survey(RoundContext(setup, broadcast), CLIENT) == {"spy": {"n": 11}}
    reply = train(RoundContext(setup, broadcast), CLIENT, {"spy": "before", "other": "not for it"})
    assert [name for name, _ in SEEN] == ["survey", "begin", "loss", "loss", "loss", "report"]
    assert [value for name, value in SEEN if name == "loss"] == [
        (size, "local", True, True) for size in (5, 5, 1)
    ]
    assert SEEN[-1][1] == ("local", 3, reply.row.train_loss, False, True)
    assert reply.memory == {"spy": "memory"}
    # A part that reports nothing sends nothing.
    assert reply.summands.keys() == {"average"}
    surveying, view = SEEN[0][1], SEEN[1][1]
    assert (surveying.state, surveying.payload, surveying.memory) == ("state", None, None)
    assert (view.state, view.payload, view.memory) == ("state", "payload", "before")
    assert (view.id, view.round, view.num_clients, view.num_classes, view.num_examples) == (
        CLIENT,
        2,
        6,
        4,
        11,
    )
    assert (view.lr, view.momentum, view.batch_size) == (0.05, 0.9, 5)
    assert view.label_counts.tolist() == [0, 8, 1, 2]
    images, labels = next(view.samples())
    rows = setup.federation.client(CLIENT)
    assert labels.tolist() == setup.federation.train.labels[rows].tolist()
    plain = setup.federation.train.examples[rows] / 255.0
    np.testing.assert_allclose(
        images, (plain - setup.federation.mean[0]) / setup.federation.std[0], atol=1e-5
    )
    assert [len(labels) for _, labels in view.samples(4)] == [4, 4, 3]


def test_the_servers_samples_are_its_auxiliary_set(make_setup):
    setup = make_setup(fedavg())
    view = server_view(setup, 1, state_of(setup.model))
    assert [labels.tolist() for _, labels in view.samples()] == [[0, 0, 1, 1, 2, 2, 3, 3]]
    dealt = np.concatenate([setup.federation.client(client) for client in range(6)])
    assert not set(dealt) & set(setup.federation.auxiliary)


def test_the_loss_is_the_sum_of_all_terms(make_setup):
    """One step with all images, from the global weights, where Proximal's term is 0.

    The values are equal to the bit: float32 multiplies by 0 and 2 exactly, and rounds the sum of
    two terms once.
    """

    def loss(*parts):
        setup = make_setup(compose(*parts), local_steps=1, batch_size=100)
        return train(RoundContext(setup, broadcast_of(setup)), CLIENT, {}).row.train_loss

    plain, term = loss(), loss(CrossEntropy(weight=0.0), NotTrueDistill(teacher=False))
    assert plain > 0 and term > 0
    assert loss(CrossEntropy(weight=2.0), Proximal(mu=1.0)) == 2 * plain
    for beta in (1.0, 2.0):
        assert loss(NotTrueDistill(beta=beta, teacher=False)) == np.float32(plain) + np.float32(
            beta * term
        )


# The teacher.


@dataclass(frozen=True)
class Noting(Part):
    """Notes a number of some batches, and has a term in the smaller batches alone."""

    def loss(self, batch, local):
        if len(batch.labels) == 5:
            batch.note("full", torch.tensor(2.0, requires_grad=True))
            return None
        batch.note("size", len(batch.labels))
        return 3.0 + 0.0 * batch.logits.sum()


@dataclass(frozen=True)
class TeacherWatch(Part):
    """Fails unless the teacher is the round's global model, frozen and in eval mode."""

    def begin(self, client):
        return client

    def loss(self, batch, client):
        teacher = client.global_model
        assert teacher is not batch.model
        assert not batch.teacher.logits.requires_grad
        for name, tensor in teacher.state_dict().items():
            assert torch.equal(tensor, client.weights[name]), name
        # An image has the same logits alone as in its batch: nothing is drawn.
        with torch.no_grad():
            alone = teacher(batch.images[:1])
        torch.testing.assert_close(batch.teacher.logits[:1], alone)
        return None


def test_notes_are_means_over_the_steps_that_have_them(make_setup):
    # Batches of 5, 5 and 1.
    setup = make_setup(compose(Noting()), local_epochs=2)
    reply = train(RoundContext(setup, broadcast_of(setup)), CLIENT, {})
    assert reply.row.notes.keys() == {"loss.cross_entropy", "loss.noting", "full", "size"}
    assert (reply.row.notes["full"], reply.row.notes["size"], reply.row.notes["loss.noting"]) == (
        2.0,
        1.0,
        3.0,
    )
    assert reply.row.train_loss == pytest.approx(
        reply.row.notes["loss.cross_entropy"] + 3.0 / 3, rel=1e-6
    )


@dataclass(frozen=True)
class Silent(Noting):
    """The same without a note."""

    def loss(self, batch, local):
        return None if len(batch.labels) == 5 else 3.0 + 0.0 * batch.logits.sum()


def test_notes_leave_the_training_as_it_is(make_setup, digest):
    one, other = (
        trained(make_setup(compose(part), local_epochs=2)) for part in (Noting(), Silent())
    )
    assert digest(one) == digest(other)


NAME = "a name has 1 to 100 printable characters that do not begin with"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mask", torch.ones(2), r"got .*a tensor \(torch.float32, \(2,\)\).*; give a number"),
        ("mask", "0.5", "got .*0.5.*; give a number"),
        ("x" * 101, 1.0, NAME),
        # Rayfed's own.
        ("loss.mine", 1.0, NAME),
    ],
)
def test_only_a_number_can_be_noted_under_a_name_that_can_be_recorded(name, value, words):
    with pytest.raises(TypeError, match=rf"batch.note\('{name}'.*{words}"):
        Notes()(name, value)


def test_every_kind_of_number_is_noted_as_it_is_then():
    note, counter = Notes(), torch.zeros((), dtype=torch.float64)
    for value in (np.float32(0.5), np.int64(2), 10**30, True):
        note(f"a {type(value).__name__}", value)
    for _ in range(2):
        counter += 1
        note("counter", counter)
    assert note.means() == {
        "a float32": 0.5,
        "a int64": 2.0,
        "a int": 1e30,
        "a bool": 1.0,
        "counter": 1.5,
    }


def test_terms_of_two_classes_with_one_name_are_kept_apart():
    one, other = (type("Focal", (Part,), {"slot": slot}) for slot in ("supervise", "focal"))
    assert names_of_terms([one(), other()]) == {"supervise": "supervise", "focal": "focal"}
    assert names_of_terms([one(), Proximal()]) == {"supervise": "focal", "proximal": "proximal"}


def test_the_teacher_stays_the_global_model_in_eval_mode(make_setup):
    setup = make_setup(compose(TeacherWatch(), NotTrueDistill()), norm=True)
    broadcast = broadcast_of(setup)
    moved = trained(setup, broadcast)
    assert all(not torch.equal(moved[name], w) for name, w in broadcast.weights.items())


# Six batches without FEW
FLIP, FEW = {"augment": Augment(flip=True)}, {"local_steps": 2}


@pytest.mark.parametrize(
    ("method", "setting", "passes"),
    [(fedavg(), {}, 0), (fedntd(teacher=False), {}, 0), (fedlmd(teacher=False), {}, 0),
     (fedntd(), FLIP, 6), (fedntd(mix=0.5), FLIP, 6), (compose(fedntd(), TeacherWatch()), FLIP, 12),
     (fedntd(), {}, 1), (fedntd(mix=0.5), {}, 1), (compose(fedntd(), TeacherWatch()), {}, 7), (fedntd(), FEW, 2)],
    ids=repr,
)  # fmt: skip
def test_the_teacher_runs_once_per_batch_or_once_without_augmentation_and_only_when_asked(
    method, setting, passes, make_setup, monkeypatch
):
    setup, count = make_setup(method, **setting), 0
    forward = type(setup.model.head).forward

    def counting(self, x):
        nonlocal count
        count += not self.weight.requires_grad
        return forward(self, x)

    monkeypatch.setattr(type(setup.model.head), "forward", counting)
    trained(setup)
    assert count == passes


@dataclass(frozen=True)
class OwnTeacher(Part):
    """Its own teacher changes from batch to batch: what it says must never be taken from before."""

    def begin(self, client):
        return copy.deepcopy(client.global_model)

    def loss(self, batch, teacher):
        with torch.no_grad():
            teacher.head.bias.add_(1.0)
            expected = teacher(batch.images)
        assert torch.equal(batch.outputs_of(teacher).logits, expected)
        known = batch.teacher
        torch.testing.assert_close(
            known.of_features, batch._client.global_model.features(batch.images)
        )
        return None


@pytest.mark.parametrize("augment", [Augment(), Augment(crop=1)], ids=repr)
def test_only_the_outputs_of_frozen_models_are_kept_for_later_batches(augment, make_setup):
    trained(make_setup(compose(OwnTeacher()), norm=True, augment=augment))


# Precision.


def test_bf16_is_near_float32_and_leaves_weights_sums_and_losses_in_float32(make_setup):
    @dataclass(frozen=True)
    class Watch(Part):
        def loss(self, batch, local):
            outputs = (
                batch.logits,
                batch.features,
                batch.teacher.logits,
                batch.teacher.of_features,
            )
            assert {tensor.dtype for tensor in outputs} == {torch.float32}
            return None

    full, half = (
        make_setup(compose(fedntd(), Watch()), precision=precision)
        for precision in ("float32", "bf16")
    )
    one, other = trained(full), trained(half)
    assert {name: w.dtype for name, w in one.items()} == {
        name: w.dtype for name, w in other.items()
    }
    torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert all(
        torch.equal(w, again)
        for w, again in zip(other.values(), trained(half).values(), strict=True)
    )
    losses = [
        evaluate(setup, copy.deepcopy(setup.model).eval(), 0, 30).loss for setup in (full, half)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.01) and losses[0] != losses[1]


def tf32_as_set():
    """By torch's newer switches, which it has since 2.9, by its older switches, and for
    products.
    """
    backends = torch.backends
    of = {"tf32" if backends.cudnn.allow_tf32 else "ieee"}
    if HAS_PRECISIONS:
        operations = (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul)
        of = {each.fp32_precision for each in operations}
    return of, backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()


@dataclass(frozen=True)
class WhatIsSet(Part):
    """What torch is set to while a client trains, by the newer and the older switches."""

    def loss(self, batch, local):
        assert tf32_as_set() == ({"tf32"}, True, "high")
        raise KeyError("seen")


def test_tf32_is_on_while_a_client_trains_and_off_afterwards_also_after_an_error(make_setup):
    # As every worker on a GPU begins.
    set_tf32(False)
    with pytest.raises(KeyError, match="seen"):
        trained(make_setup(compose(WhatIsSet()), precision="tf32"))
    assert tf32_as_set() == ({"ieee"}, False, "highest")


@pytest.mark.parametrize("of_card", [None, (7, 5), (8, 0)])
def test_tf32_is_refused_where_a_device_has_none(monkeypatch, of_card):
    device = torch.device("cuda:0" if of_card else "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: of_card)
    if of_card == (8, 0):
        refuse_tf32(device)
        return
    where = "a card" if of_card else "cpu"
    with pytest.raises(
        InputError,
        match=rf"^train.precision = 'tf32' needs .* would train on {where}; use 'float32'",
    ):
        refuse_tf32(device)


# What training leaves behind.


@pytest.mark.parametrize(("seed", "round", "client"), [(1, 1, 0), (0, 2, 0), (0, 1, 1)], ids=str)
def test_a_client_draws_its_own_numbers_in_each_round(seed, round, client, make_setup):
    """Two clients have the same image: only what Dropout and Cutout draw differs."""
    setting = {
        "counts": [[1, 0, 0, 0]] * 2,
        "norm": True,
        "augment": Augment(cutout=2),
        "lr_decay": 1.0,
    }
    one, other = make_setup(fedavg(), **setting), make_setup(fedavg(), **setting, seed=seed)
    same = one.federation.train.examples
    same[1] = same[0]
    other.federation.train.examples[:2] = same[:2]
    a = trained(one, broadcast_of(one, 1), client=0)
    b = trained(other, broadcast_of(other, round), client=client)
    assert not torch.equal(a["head.weight"], b["head.weight"])


def test_evaluations_add_up(make_setup):
    setup = make_setup(fedavg(), norm=True)
    weights, model = state_of(setup.model), copy.deepcopy(setup.model).eval()
    whole = evaluate(setup, model, 0, 30)
    first, *others = (evaluate(setup, model, start, start + 7) for start in range(0, 30, 7))
    total = sum(others, first)
    assert total.confusion.tolist() == whole.confusion.tolist()
    assert total.loss == pytest.approx(whole.loss)
    assert (
        whole.confusion.sum(axis=1).tolist()
        == np.bincount(setup.federation.test.labels, minlength=4).tolist()
    )
    assert all(
        torch.equal(tensor, weights[name]) for name, tensor in setup.model.state_dict().items()
    )


def test_an_evaluation_waits_for_its_device_as_often_with_many_batches_as_with_one(
    make_setup, monkeypatch
):
    """A read of a number, and a copy to the CPU, waits for a GPU."""
    setup = make_setup(fedavg())
    model, waits, cpu = copy.deepcopy(setup.model).eval(), [], torch.Tensor.cpu
    federation, in_batches = type(setup.federation), setup.federation.batches
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: waits.append("copy") or cpu(self))

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "_local_scalar_dense" in str(function):
                waits.append("read")
            return function(*args, **(kwargs or {}))

    def number_of_waits(size):
        monkeypatch.setattr(federation, "batches", lambda _, *rest: in_batches(*rest, size=size))
        waits.clear()
        with Reads():
            evaluation = evaluate(setup, model, 0, 30)
        return len(waits), evaluation.confusion.tolist()

    once, of_all = number_of_waits(30)
    assert 0 < once < 10 and (once, of_all) == number_of_waits(3)


# Refusals.


@dataclass(frozen=True)
class Break(Part):
    """A loss that is infinite in a single step, and leaves the weights finite."""

    def begin(self, client):
        return []

    def loss(self, batch, local):
        local.append(batch)
        return batch.logits.square().sum() * float("inf") if len(local) == 4 else None


def test_a_single_infinite_loss_is_refused_with_client_round_batch_and_method(make_setup):
    setup = make_setup(compose(fedntd(), Break()))
    said = (
        r"the loss became inf at client 1, round 3, batch 4 of 6, in break of the method fedntd "
        r".*Break; try a smaller"
    )
    with pytest.raises(Diverged, match=said):
        trained(setup, broadcast_of(setup, 3))


@pytest.mark.parametrize("batch_size", [5, 1, 12])
def test_a_batch_of_one_image_is_refused_where_batchnorm_could_not_learn_from_it(
    make_federation, monkeypatch, batch_size
):
    """Clients of 12, 11, 8 and 13 images: batches of 5 or of 12 leave a single image."""
    federation = make_federation([[12, 0, 0, 0], [0, 11, 0, 0], [2, 2, 2, 2], [0, 0, 13, 0]])
    one_by_one = nn.Sequential(nn.Conv2d(1, 2, 4), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 4))
    wide = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 4))
    before = [tensor.clone() for tensor in one_by_one.state_dict().values()]
    monkeypatch.setattr(sites, "open_data", lambda job, read: federation)

    def open_with(model, batch_size):
        monkeypatch.setattr(sites, "build_model", lambda name, options, **given: model)
        open_setup(Job("n", train=Training(clients_per_round=4, batch_size=batch_size)))

    message = rf"train.batch_size = {batch_size}: .* give another train.batch_size, or model"
    with pytest.raises(InputError, match=message):
        open_with(one_by_one, batch_size)
    assert all(map(torch.equal, before, one_by_one.state_dict().values()))
    open_with(one_by_one, 8)
    open_with(wide, batch_size)
