"""The contract of a part: what `compose` accepts and refuses, and what the hooks are given."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import pytest
import torch
from torch import nn

from rayfed.methods import (
    Average,
    Batch,
    CrossEntropy,
    Distill,
    LabelMaskedDistill,
    NormalizedAverage,
    NotTrueDistill,
    Part,
    Proximal,
    RestrictedCrossEntropy,
    ServerMomentum,
    Step,
    compose,
    fedavg,
    fedlmd,
    fedntd,
    switch,
)
from rayfed.methods.part import Frozen, arrange, defines, name_of, parts_at, run_model
from rayfed.values import Ge, InputError
from rayfed.weights import squared_distance, state_of


@dataclass(frozen=True)
class OwnProximal(Part):
    """As the contract's docstring has it."""

    mu: Annotated[float, Ge(0)] = 0.01

    def begin(self, client):
        return client.weights

    def loss(self, batch, local):
        return self.mu / 2 * squared_distance(batch.parameters, local)


@dataclass(frozen=True)
class Watcher(Part):
    """Defines `report` and `update` and no loss."""

    order: ClassVar[int] = 0

    def report(self, client, local, fit):
        return {"steps": fit.steps, "loss": fit.loss}, None

    def update(self, state, total, step):
        return (state or 0) + total["steps"], step


# Composition.


def test_compose_of_nothing_is_fedavg():
    assert compose() == fedavg() == (Average(), CrossEntropy())


def test_compose_flattens_fills_and_puts_in_order():
    method = compose(Proximal(0.1), [NotTrueDistill(), ServerMomentum(0.5)])
    assert method == (Average(), ServerMomentum(0.5), CrossEntropy(), Proximal(0.1), NotTrueDistill())
    assert compose(fedlmd(), Proximal()) == (Average(), CrossEntropy(), LabelMaskedDistill(), Proximal())
    assert compose(NormalizedAverage()) == (NormalizedAverage(), CrossEntropy())
    assert compose(RestrictedCrossEntropy(), Distill()) == (Average(), RestrictedCrossEntropy(), Distill())


def test_compose_is_the_same_however_it_is_grouped():
    parts = [ServerMomentum(), Proximal(), NotTrueDistill()]
    assert compose(*parts) == compose(parts) == compose(parts[:1], compose(*parts[1:])[2:])
    assert compose(compose(*parts)) == compose(*parts)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [CrossEntropy(), RestrictedCrossEntropy()],
            "two parts fill the slot 'supervise': CrossEntropy.* and Restricted",
        ),
        ([Average(), NormalizedAverage()], "two parts fill the slot 'average'"),
        ([Proximal(0.1), Proximal(0.2)], r"'proximal': Proximal\(mu=0.1\) and Proximal\(mu=0.2\); keep one"),
        ([fedntd(), fedlmd()], "add the second one's own part rather than its whole recipe"),
        ([Proximal(-1.0)], r"Proximal.mu = -1.0: input should be greater than or equal to 0"),
        ([Proximal(float("nan"))], "Proximal.mu = nan: input should be a finite number"),
        ([Distill(tau=0.0)], r"Distill.tau = 0.0: input should be greater than 0"),
        ([NotTrueDistill(mix=1.5)], r"NotTrueDistill.mix = 1.5: input should be less than or equal to 1"),
        ([NotTrueDistill(form="l1")], r"NotTrueDistill.form = 'l1': input should be 'kl' or 'mse'"),
        ([ServerMomentum(1.0)], r"ServerMomentum.beta = 1.0: input should be less than 1"),
        ([OwnProximal(-1.0)], r"OwnProximal.mu = -1.0"),
        ([Proximal], "a method is made of parts; .*Proximal.* is none"),
        (["fedntd"], "a method is made of parts"),
    ],
)
def test_compose_refuses_in_words(parts, message):
    with pytest.raises(InputError, match=message):
        compose(*parts)


def test_a_part_that_is_no_dataclass_is_refused_in_words():
    class Bare(Part):
        pass

    with pytest.raises(InputError, match="dataclass"):
        compose(Bare())


def test_the_order_of_updates_is_stable():
    assert arrange((Proximal(), ServerMomentum(), Distill(), Average())) == (
        Average(),
        ServerMomentum(),
        Proximal(),
        Distill(),
    )


# Slots, names, hooks.


def test_a_slot_is_the_classs_name_unless_it_or_its_base_says_otherwise():
    class MyOwnPart(Part):
        pass

    class Named(Part):
        slot = "distill"

    class Heir(Named):
        pass

    class SecondHeir(MyOwnPart):
        pass

    assert [cls.slot for cls in (MyOwnPart, Named, Heir)] == ["my_own_part", "distill", "distill"]
    assert SecondHeir.slot == "my_own_part"  # an heir does what its base does
    assert name_of(SecondHeir) == "second_heir"


def test_defines_sees_own_and_inherited_hooks():
    class Heir(Proximal):
        pass

    for part in (Proximal(), Heir()):
        assert [hook for hook in ("init", "survey", "tell", "begin", "loss", "report") if defines(part, hook)] == [
            "begin",
            "loss",
        ]


def test_hooks_that_are_not_defined_do_nothing():
    part, step = Part(), object()
    assert part.init({}) is part.survey(None) is part.begin(None) is part.loss(None, None) is None
    assert part.tell("state", None, None) == ("state", None)
    assert part.report(None, None, None) == (None, None)
    assert part.update("state", None, step) == ("state", step)


def test_switch_changes_at_its_round():
    one, two, three = fedavg(), fedntd(), fedlmd()
    method = switch(switch(one, two, at=2), three, at=4)
    assert [parts_at(method, round) for round in (1, 2, 3, 4, 5)] == [one, two, two, three, three]
    assert parts_at(one, 7) == one
    assert parts_at(lambda round: [one, two][round % 2], 3) == two
    with pytest.raises(InputError, match="at = 1: the first round is 1, so a method can change at round 2 or later"):
        switch(one, two, at=1)


# What a part gives to a run.


def test_a_part_of_ones_own_runs_as_the_librarys_does(make_site, play, bits):
    own, ours = (play(make_site(compose(part)))[-1] for part in (OwnProximal(0.5), Proximal(0.5)))
    assert bits(own)["weights"] == bits(ours)["weights"]


def test_a_part_without_a_loss_only_watches(make_site, play, bits):
    watched, plain = play(make_site(compose(Watcher())))[-1], play(make_site(fedavg()))[-1]
    assert bits(watched)["weights"] == bits(plain)["weights"]
    sizes = [row.num_examples for row in watched.clients]
    assert watched.held["watcher"].state > sum(-(-size // 5) * 2 for size in sizes)  # of this round and those before


@dataclass(frozen=True)
class Counter(Part):
    """Its state: the weights that it began with, and the rounds since."""

    slot: ClassVar[str] = "count"
    note: str = ""

    def init(self, weights):
        return weights, 0

    def update(self, state, total, step):
        return (state[0], state[1] + 1), step


class OtherCounter(Counter):
    """Another part for the same slot."""


def test_a_part_that_a_switch_brings_starts_anew_and_one_that_stays_keeps_its_state(make_site, play):
    method = switch(compose(Counter("a")), switch(compose(Counter("b")), compose(OtherCounter()), at=3), at=2)
    run = play(make_site(method, num_rounds=5))
    began, counts = zip(*(round.held["count"].state for round in run[1:]), strict=True)
    assert counts == (1, 2, 1, 2, 3)  # another number is no other part; another part is, though it has the same slot
    for weights, at in zip(began, (0, 0, 2, 2, 2), strict=True):
        assert all(torch.equal(weights[name], tensor) for name, tensor in run[at].weights.items())
    run = play(make_site(switch(switch(compose(Counter()), fedavg(), at=2), compose(Counter()), at=3)))
    counted = [round.held["count"].state[1] if "count" in round.held else 0 for round in run]
    assert counted == [0, 1, 0, 1]  # who leaves, forgets


# Views.


class Counting(nn.Module):
    """A model that counts its forward passes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return self.layer(x)


@dataclass
class View:
    """As much of a client's view as a batch looks at."""

    global_model: nn.Module = field(default_factory=Counting)


def test_a_batch_runs_a_model_when_asked_and_once():
    model, view, other = Counting(), View(), Counting()
    batch = Batch(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64), model, {}, view)
    assert (model.passes, view.global_model.passes) == (0, 0)
    for _ in range(2):
        assert batch.logits.requires_grad
        assert not batch.teacher.logits.requires_grad
        assert not batch.outputs_of(other).logits.requires_grad
    assert (model.passes, view.global_model.passes, other.passes) == (1, 1, 1)


def test_features_are_given_where_the_model_has_them(make_model):
    images = torch.rand(2, 1, 4, 4)
    outputs = run_model(make_model(), images)
    assert outputs.of_features.shape == (2, 16)
    assert outputs.logits.shape == (2, 4)
    with pytest.raises(AssertionError, match="gives no features"):
        run_model(nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), images).of_features  # noqa: B018


def test_a_frozen_model_is_a_copy_in_eval_mode_without_gradients(make_model):
    model = make_model(norm=True).train()
    frozen, weights = Frozen(model), state_of(make_model(norm=True))
    one = frozen(weights)
    assert one is frozen(weights) is not frozen(dict(weights))
    assert not any(module.training for module in one.modules())
    assert not any(p.requires_grad for p in one.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in one.state_dict().items())
    assert all(module.training for module in model.modules())


def test_a_step_tells_parameters_from_buffers_and_asks_for_an_average():
    weights = {"w": torch.zeros(1), "running_mean": torch.ones(1)}
    step = Step(weights, None, round=1, num_clients=3, trainable=frozenset({"w"}))
    assert step.parameters(weights).keys() == {"w"}
    with pytest.raises(AssertionError, match="no part has averaged the clients yet"):
        step.averaged  # noqa: B018
    later = step.towards({"w": torch.ones(1)})
    assert later.averaged["w"] == 1
