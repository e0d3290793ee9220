"""The contract of a part: what `compose` accepts and refuses, and what the hooks get."""

import pickle
from dataclasses import dataclass, field
from itertools import permutations
from types import SimpleNamespace
from typing import Annotated, ClassVar

import pytest
import torch
from torch import nn

from rayfed import methods as m
from rayfed.base.errors import BrokenContract, InputError
from rayfed.base.values import Ge
from rayfed.methods import RECIPES
from rayfed.methods.checks import two_values
from rayfed.methods.part import Part, all_parts, gives_memory, name_of, parts_at, remembers
from rayfed.methods.views import Frozen, run_model
from rayfed.tensors.weights import squared_distance, state_of


@dataclass(frozen=True)
class OwnProximal(m.Part):
    """The example in the contract's docstring."""

    mu: Annotated[float, Ge(0)] = 0.01

    def begin(self, client):
        return client.weights

    def loss(self, batch, local):
        return self.mu / 2 * squared_distance(batch.parameters, local)


@dataclass(frozen=True)
class Watcher(m.Part):
    """Defines `report` and `update` and no loss."""

    def report(self, client, local, fit):
        return {"steps": fit.steps, "loss": fit.loss}, None

    def update(self, state, total, step):
        return (state or 0) + total["steps"], step


# Composition.


def test_compose_flattens_adds_defaults_and_puts_parts_in_order():
    assert m.compose() == m.fedavg() == (m.Average(), m.CrossEntropy())
    method = m.compose(m.Proximal(0.1), [m.NotTrueDistill(), m.ServerMomentum(0.5)])
    assert method == (
        m.Average(),
        m.ServerMomentum(0.5),
        m.CrossEntropy(),
        m.Proximal(0.1),
        m.NotTrueDistill(),
    )
    assert m.compose(m.fedlmd(), m.Proximal()) == (
        m.Average(),
        m.CrossEntropy(),
        m.LabelMaskedDistill(),
        m.Proximal(),
    )
    assert m.compose(m.NormalizedAverage()) == (m.NormalizedAverage(), m.CrossEntropy())
    assert m.compose(m.RestrictedCrossEntropy(), m.Distill()) == (
        m.Average(),
        m.RestrictedCrossEntropy(),
        m.Distill(),
    )


def test_parts_act_in_the_order_in_which_they_are_written():
    penalty, distance = m.Proximal(0.1), m.NotTrueDistill()
    assert m.compose(penalty, distance)[-2:] == (penalty, distance)
    assert m.compose(distance, penalty)[-2:] == (distance, penalty)


def test_the_average_is_first_and_what_changes_it_is_next_wherever_they_are_written():
    average, momentum, penalty = m.NormalizedAverage(), m.ServerMomentum(0.5), m.Proximal(0.1)
    loss = m.RestrictedCrossEntropy()
    expected = (average, momentum, penalty, loss)
    for written in permutations([average, momentum, penalty, loss]):
        composed = m.compose(*written)
        assert composed[:2] == expected[:2]
        # The others are as they were written.
        others = [part for part in written if part not in composed[:2]]
        assert list(composed[2:]) == others


@dataclass(frozen=True)
class OwnAverage(m.Part):
    slot: ClassVar[str] = "average"

    def report(self, client, local, fit):
        return {"n": 1}, None


def test_a_recipe_has_its_own_name_and_can_be_pickled():
    assert all(
        made.__name__ == name and pickle.loads(pickle.dumps(made)) is made
        for name, made in m.RECIPES.items()
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [m.CrossEntropy(), m.RestrictedCrossEntropy()],
            "the slot 'supervise': CrossEntropy.* and Restricted",
        ),
        ([m.Average(), m.NormalizedAverage()], "two parts fill the slot 'average'"),
        (
            [m.Proximal(0.1), m.Proximal(0.2)],
            r"'proximal': Proximal\(mu=0.1\) and Proximal\(mu=0.2\); keep one",
        ),
        (
            [m.fedntd(), m.fedlmd()],
            "'average'.*; of a whole method, .*: not_true_distill, label_masked_distill$",
        ),
        (
            [m.fedlmd(), m.RestrictedCrossEntropy()],
            "'supervise'.*, so that the slot is free: label_masked_distill$",
        ),
        (
            [m.RestrictedCrossEntropy(), m.fedlmd()],
            "'supervise'.*, so that the slot is free: label_masked_distill$",
        ),
        ([m.label_smoothing(), m.RestrictedCrossEntropy()], "keep one of them$"),
        (
            [m.Proximal],
            r"a method is made of parts; .*Proximal is not a part; did you mean Proximal\(\)\?",
        ),
        ([m.fedntd, m.Proximal()], r"is not a part; did you mean fedntd\(\)\?"),
        (["fedntd"], "a method is made of parts"),
        ([OwnAverage()], r"OwnAverage\(\) fills the slot 'average', so it has to define update"),
    ],
)
def test_compose_refuses_with_a_message(parts, message):
    with pytest.raises(InputError, match=message):
        m.compose(*parts)


def test_a_part_that_is_not_a_dataclass_is_refused():
    class Bare(m.Part):
        pass

    @dataclass
    class Loose(m.Part):
        def loss(self, batch, local):
            return None

    for part in (Bare(), Loose()):
        with pytest.raises(InputError, match="is not a frozen dataclass; put @dataclass"):
            m.compose(part)


def test_a_hook_that_cannot_be_called_is_refused_where_it_is_written():
    said = r"Short.loss has to take \(self, batch, local\): too many positional arguments"
    with pytest.raises(InputError, match=said):

        class Short(m.Part):
            def loss(self, batch):
                return None

    class Free(m.Part):
        def update(self, *given, extra=None):
            return given[0], given[-1]

    assert Free().update("state", None, "step") == ("state", "step")


# Slots, names, hooks.


def test_a_slot_is_the_name_of_the_class_unless_the_class_or_its_base_sets_it():
    class MyOwnPart(m.Part):
        pass

    class Named(m.Part):
        slot = "distill"

    class Heir(Named):
        pass

    class SecondHeir(MyOwnPart):
        pass

    assert [cls.slot for cls in (MyOwnPart, Named, Heir)] == ["my_own_part", "distill", "distill"]
    # A subclass has its base's place in a method.
    assert SecondHeir.slot == "my_own_part"
    assert name_of(SecondHeir) == "second_heir"


def test_hooks_that_are_not_defined_do_nothing():
    part, step = m.Part(), object()
    assert part.init({}) is part.survey(None) is part.loss(None, None) is None
    assert part.begin(SimpleNamespace(payload="payload")) == "payload"
    assert part.tell("state", None, None) == ("state", None)
    assert part.report(None, None, None) == (None, None)
    assert part.update("state", None, step) == ("state", step)


def test_switch_changes_at_its_round():
    one, two, three = m.fedavg(), m.fedntd(), m.fedlmd()
    method = m.switch(m.switch(one, two, at=2), three, at=4)
    assert [parts_at(method, round) for round in (1, 2, 3, 4, 5)] == [one, two, two, three, three]
    assert parts_at(one, 7) == one
    with pytest.raises(InputError, match="at = 1: a method can change at round 2 or later"):
        m.switch(one, two, at=1)
    with pytest.raises(InputError, match="at = 4, then at = 4: the second change must come later"):
        m.switch(one, m.switch(two, three, at=4), at=4)


# What a part does in a run.


def test_a_users_part_runs_as_the_librarys_does(make_setup, play, bits):
    own, ours = (
        play(make_setup(m.compose(part)))[-1] for part in (OwnProximal(0.5), m.Proximal(0.5))
    )
    assert bits(own)["weights"] == bits(ours)["weights"]


def test_a_part_without_a_loss_only_watches(make_setup, play, bits):
    watched, plain = play(make_setup(m.compose(Watcher())))[-1], play(make_setup(m.fedavg()))[-1]
    assert bits(watched)["weights"] == bits(plain)["weights"]
    sizes = [row.num_examples for row in watched.clients]
    # With the earlier rounds.
    assert watched.held["watcher"].state > sum(-(-size // 5) * 2 for size in sizes)


@dataclass(frozen=True)
class Counter(m.Part):
    """Keeps the weights with which it began, and counts the rounds since then."""

    slot: ClassVar[str] = "count"
    note: str = ""

    def init(self, weights):
        return weights, 0

    def update(self, state, total, step):
        return (state[0], state[1] + 1), step


class OtherCounter(Counter):
    """Another part for the same slot."""


def test_a_switch_keeps_the_state_of_a_part_that_stays_and_of_no_other(make_setup, play):
    method = m.switch(
        m.compose(Counter("a")),
        m.switch(m.compose(Counter("b")), m.compose(OtherCounter()), at=3),
        at=2,
    )
    run = play(make_setup(method, num_rounds=5))
    began, counts = zip(*(round.held["count"].state for round in run[1:]), strict=True)
    # A part with other values is the same part, a part of another class is not.
    assert counts == (
        1,
        2,
        1,
        2,
        3,
    )
    for weights, at in zip(began, (0, 0, 2, 2, 2), strict=True):
        assert all(torch.equal(weights[name], tensor) for name, tensor in run[at].weights.items())
    run = play(
        make_setup(
            m.switch(m.switch(m.compose(Counter()), m.fedavg(), at=2), m.compose(Counter()), at=3)
        )
    )
    counted = [round.held["count"].state[1] if "count" in round.held else 0 for round in run]
    # A part that leaves loses its state.
    assert counted == [0, 1, 0, 1]


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
    """The part of a client's view that a batch needs."""

    run = staticmethod(run_model)
    global_model: nn.Module = field(default_factory=Counting)


def test_a_batch_runs_a_model_once_and_only_when_asked():
    model, view, other = Counting(), View(), Counting()
    batch = m.Batch(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64), model, {}, view)
    assert (model.passes, view.global_model.passes) == (0, 0)
    for _ in range(2):
        assert batch.logits.requires_grad
        assert not batch.teacher.logits.requires_grad
        assert not batch.outputs_of(other).logits.requires_grad
    assert (model.passes, view.global_model.passes, other.passes) == (1, 1, 1)


def test_a_batch_has_features_where_the_model_has_them(make_model):
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


def test_a_step_separates_parameters_from_buffers_and_needs_an_average():
    weights = {"w": torch.zeros(1), "running_mean": torch.ones(1)}
    server = SimpleNamespace(weights=weights)
    step = m.Step(server, None, trainable=frozenset({"w"}))
    assert step.weights is weights
    assert step.parameters(weights).keys() == {"w"}
    with pytest.raises(AssertionError, match="no part has averaged the clients yet"):
        step.averaged  # noqa: B018
    later = step.towards({"w": torch.ones(1)})
    assert later.averaged["w"] == 1


@pytest.mark.parametrize(
    ("name", "hook", "arguments"),
    [
        ("los", "loss", "batch, local"),
        ("reports", "report", "client, local, fit"),
        ("updat", "update", "state, total, step"),
    ],
)
def test_a_misspelt_hook_is_refused_and_no_other_method(name, hook, arguments):
    def defined(arguments):
        return eval(f"lambda self, {arguments}: None")

    with pytest.raises(InputError, match=f"Mine.{name} is no hook; did you mean '{hook}'"):
        type("Mine", (m.Part,), {name: defined(arguments)})
    type(
        "Mine",
        (m.Part,),
        {f"_{name}": defined(arguments), name: defined("logits"), "losses": defined("batch")},
    )


def test_a_part_without_a_hook_is_refused():
    with pytest.raises(
        InputError,
        match=r"Idle\(\) has no hook, and would .*; the hooks are init, survey, tell, begin",
    ):
        m.compose(dataclass(frozen=True)(type("Idle", (m.Part,), {"alone": True}))())


@dataclass(frozen=True)
class Reports(Part):
    def report(self, client, local, fit) -> tuple[int, None]:
        return 1, None


@dataclass(frozen=True)
class Lies(Part):
    def report(self, client, local, fit) -> tuple[int, None]:
        return 1, 2


@dataclass(frozen=True)
class Silent(Part):
    def report(self, client, local, fit):
        return 1, 2


@dataclass(frozen=True)
class Unknown(Part):
    def report(self, client, local, fit) -> "tuple[Nowhere, None]":  # noqa: F821
        return 1, None


MEMORY = [
    "moon",
    "fedgamma",
    "fedlesam",
    "fedcurv",
    "scaffold",
    "feddyn",
    "feddc",
    "fedspeed",
    "fedsmoo",
]
MEMORY += ["topk", "local", "fedbn", "fedper", "fedrep", "ditto", "fedrod"]


def test_a_report_that_is_annotated_so_gives_no_memory():
    assert [gives_memory(kind.report) for kind in (Part, Reports, Lies)] == [False] * 3
    assert [gives_memory(kind.report) for kind in (Silent, Unknown)] == [True] * 2
    assert remembers((Reports(), Silent())) and not remembers((Reports(),))
    assert [name for name, recipe in RECIPES.items() if remembers(all_parts(recipe()))] == MEMORY
    with pytest.raises(
        BrokenContract, match=r"Lies\.report gave a memory, and is annotated to give None"
    ):
        two_values(Lies(), "report", (1, 2), "summands", "memory")


@pytest.mark.parametrize(
    ("declared", "call"),
    [
        ({"needs_features": True}, "require_features(self, model)"),
        ({"needs_sgd": True}, "require_sgd(self, training)"),
        ({"without_momentum": True}, "warn_of_momentum(self, training)"),
    ],
)
def test_what_earlier_parts_declared_is_refused_with_what_to_call(declared, call):
    with pytest.raises(InputError, match=r"^Mine\.\w+ is no part of the contract any more") as told:
        type("Mine", (Part,), declared)
    assert f"call {call} in check(self, model, training)" in str(told.value)


def test_a_check_of_the_earlier_form_is_refused_with_what_it_has_to_take():
    def check(self, model):
        raise AssertionError("it is never called")

    with pytest.raises(InputError, match=r"Mine\.check has to take \(self, model, training\)"):
        type("Mine", (Part,), {"check": check})
