"""A part that changes the model or the process harms no other client, wherever and in whatever
order clients train.
"""

import copy
import logging
import random
import threading
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from rayfed.base.errors import InputError, RunFailed
from rayfed.base.isolation import (
    ENVIRONMENT,
    HAS_PRECISIONS,
    KEPT,
    ROUNDING_ON_GPU,
    SETTINGS,
    USUAL_ROUNDING,
    alone,
    set_tf32,
)
from rayfed.base.seeds import Purpose, seed_of
from rayfed.methods import Part, compose, fedavg
from rayfed.rounds.executor import Evaluate
from rayfed.rounds.setup import open_setup
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.weights import state_of


def refuse_tf32(model):
    """By the newer switches, which torch has since 2.9, or else by the older."""
    if HAS_PRECISIONS:
        torch.backends.cudnn.conv.fp32_precision = "ieee"
    else:
        torch.backends.cudnn.allow_tf32 = False


HARMS = {
    "freezes": lambda model: model.requires_grad_(False),
    "hooks": lambda model: model.head.register_forward_hook(
        lambda module, args, output: output * 1.5
    ),
    "modules": lambda model: setattr(model.head, "forward", lambda features: features[:, :4]),
    "threads": lambda model: torch.set_num_threads(torch.get_num_threads() + 1),
    "dtype": lambda model: torch.set_default_dtype(torch.float64),
    "device": lambda model: torch.set_default_device("meta"),
    "gradients": lambda model: torch.set_grad_enabled(False),
    "precision": lambda model: torch.set_float32_matmul_precision("medium"),
    "TF32": refuse_tf32,
    "determinism": lambda model: torch.use_deterministic_algorithms(True),
    "cuDNN": lambda model: setattr(torch.backends.cudnn, "benchmark", True),
    "denormal numbers": lambda model: torch.set_flush_denormal(True),
    "autocast": lambda model: torch.set_autocast_enabled("cpu", True),
    "generators": lambda model: (torch.rand(7), np.random.rand(7), random.random()),
}


@dataclass(frozen=True)
class Harm(Part):
    """Does harm after every second client's training; its loss draws from every global
    generator.
    """

    what: tuple[str, ...]

    def loss(self, batch, local):
        return (random.random() + np.random.rand() + torch.rand(())) * batch.logits.square().mean()

    def report(self, client, local, fit):
        if client.id % 2:
            for what in self.what:
                HARMS[what](fit.model)
        return None, None

    def update(self, state, total, step):
        for what in {*self.what} - {"freezes", "hooks", "modules"}:
            HARMS[what](None)
        return state, step


class Backwards(ThisProcess):
    """Trains the last task first."""

    def map(self, work, items, shared):
        if work.kind != "train":
            yield from super().map(work, items, shared)
            return
        done = [next(super(Backwards, self).map(work, [item], shared)) for item in reversed(items)]
        yield from reversed(done)


@pytest.mark.parametrize("what", HARMS)
def test_no_client_inherits_what_a_part_changed(what, make_setup, play, bits):
    def settings():
        return [repr(setting.read()) for setting in SETTINGS]

    setup, before = make_setup(compose(Harm((what,))), norm=True, num_rounds=2), settings()
    run = [bits(round) for round in play(setup)]
    assert settings() == before
    assert [bits(round) for round in play(setup, Backwards(setup))] == run
    assert len({round["weights"] for round in run}) == len(run), "training goes on"


# Hook -> 20 numbers of 32 bits from each generator; a Mersenne Twister gives them one after the
# other.
DRAWN = {}


def draw(hook):
    numbers = [random.getrandbits(32) for _ in range(20)], np.random.randint(0, 2**32, 20).tolist()
    DRAWN[hook] = [*numbers, torch.randint(0, 2**32, (20,)).tolist()]


@dataclass(frozen=True)
class Draws(Part):
    """Draws in each hook; in a client's round only in one of them, as these follow each other in
    one stream.
    """

    def init(self, weights):
        draw("init")

    def survey(self, client):
        draw("survey")
        return torch.zeros(())

    def tell(self, state, server, surveyed):
        draw("tell")
        return state, None

    def begin(self, client):
        draw("begin")

    def update(self, state, total, step):
        draw("update")
        return state, step


def test_no_two_uses_have_the_same_random_numbers(make_setup, play):
    """Also a round's batches, and Python's, NumPy's and torch's generators, all of which are
    Mersenne Twisters.
    """
    setup = make_setup((*fedavg(), Draws()), num_rounds=1, clients_per_round=1)
    (client,) = play(setup)[1].clients
    batches = torch.Generator().manual_seed(seed_of(0, Purpose.BATCHES, 1, client.client))
    streams = [torch.randint(0, 2**32, (20,), generator=batches).tolist()]
    streams += [
        numbers for hook in ("init", "survey", "tell", "begin", "update") for numbers in DRAWN[hook]
    ]
    assert len({number for numbers in streams for number in numbers}) == 16 * 20


class Counting(nn.Linear):
    """What it gives depends on how many batches it has seen."""

    seen = 0

    def forward(self, features):
        self.seen += 1
        return super().forward(features) * (1 + self.seen % 3)


def test_no_client_inherits_what_a_module_of_the_users_holds(make_setup, play, bits):
    setup = make_setup(fedavg())
    model = copy.deepcopy(setup.model)
    model.head = Counting(model.head.in_features, model.head.out_features)
    setup = replace(setup, model=model)
    run = [bits(round) for round in play(setup)]
    assert [bits(round) for round in play(setup, Backwards(setup))] == run
    assert model.head.seen == 0


@pytest.mark.slow
def test_the_bits_are_the_same_on_any_number_of_actors(cluster, make_setup, here, on_ray):
    setup = make_setup(compose(Harm(tuple(HARMS))), norm=True)
    expected = here(setup)
    for actors in (1, 2, 3):
        assert on_ray(setup, actors) == expected


def test_a_client_that_adds_a_parameter_is_named(make_setup, play):
    setup = make_setup(compose(Grow()), clients_per_round=6)
    with pytest.raises(
        RunFailed,
        match=(
            r"client 4 or 3, round 1: one of their summands is odd; .*weights\.extra should not be "
            r"there"
        ),
    ):
        play(setup)


@dataclass(frozen=True)
class Grow(Part):
    """One client's model gets a parameter more."""

    def begin(self, client):
        return client.id

    def loss(self, batch, client):
        if client == 3:
            batch.model.register_parameter("extra", nn.Parameter(torch.zeros(1)))
        return None


# What a script may have in force around `rayfed.run`.
AMBIENT = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "a device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("what", AMBIENT)
def test_what_is_in_force_around_a_run_changes_no_bit_and_is_in_force_again(
    what, make_setup, play, bits
):
    setup = make_setup(fedavg(), norm=True, num_rounds=2)
    expected = [bits(round) for round in play(setup)]
    with AMBIENT[what]():
        before = [repr(setting.read()) for setting in SETTINGS]
        with alone("a run"):
            run = [bits(round) for round in play(setup)]
        assert [repr(setting.read()) for setting in SETTINGS] == before
    assert run == expected


@pytest.mark.parametrize("what", sorted({*HARMS} - {"freezes", "hooks", "modules"}))
def test_what_a_script_has_set_is_usual_in_a_run_and_as_before_after_it(what):
    """The number of threads is the job's; generators are seeded where user's code runs."""
    at_first = [setting.read() for setting in SETTINGS]
    try:
        HARMS[what](None)
        before = [repr(setting.read()) for setting in SETTINGS]
        with alone("a run"):
            unusual = [s.name for s in SETTINGS if s.usual is not KEPT and s.read() != s.usual]
            assert unusual == []
            torch.rand(3), random.random(), np.random.rand(3)
        assert [repr(setting.read()) for setting in SETTINGS] == before
    finally:
        for setting, value in zip(SETTINGS, at_first, strict=True):
            setting.write(value)


def test_rounding_on_a_gpu_is_as_tf32_switched_off_leaves_it():
    (rounding,) = (setting for setting in SETTINGS if setting.usual == USUAL_ROUNDING)
    with alone("a run"):
        set_tf32(False)
        assert rounding.read() == ROUNDING_ON_GPU
        if HAS_PRECISIONS:
            # The older switches cannot be read any more.
            torch.backends.fp32_precision = "tf32"
    assert rounding.read() == USUAL_ROUNDING


def test_a_run_leaves_the_environment_that_libraries_have_set(monkeypatch):
    with alone("a run"):
        monkeypatch.setenv("RAYFED_SET", "1")
    assert ENVIRONMENT.read()["RAYFED_SET"] == "1"


class Drawing(nn.Linear):
    """Draws in its forward pass, also in evaluation."""

    def forward(self, features):
        noise = torch.randn(()) + random.random() + np.random.rand()
        return super().forward(features) * (1 + noise)


class CountingAlways(nn.Linear):
    """What it gives depends on how many forward passes its class has made."""

    made: ClassVar = [0]

    def forward(self, features):
        self.made[0] += 1
        return super().forward(features) * self.made[0]


def with_head(setup, kind):
    model = copy.deepcopy(setup.model)
    model.head = kind(model.head.in_features, model.head.out_features)
    return replace(setup, model=model)


@pytest.mark.parametrize("kind", [Drawing, Counting])
def test_an_evaluation_is_the_same_in_any_order_and_however_often(kind, make_setup):
    setup = with_head(make_setup(fedavg()), kind)
    weights = state_of(setup.model)

    def losses(pieces):
        found = ThisProcess(setup).map(Evaluate(), pieces, {"weights": weights})
        return {piece: each.loss for piece, each in zip(pieces, found, strict=True)}

    expected = losses([(0, 10), (10, 20), (20, 30)])
    torch.rand(5), random.random(), np.random.rand(5)
    assert losses([(20, 30), (10, 20)]) | losses([(0, 10)]) == expected


def test_a_model_that_keeps_something_between_evaluations_is_refused(make_setup):
    setup = with_head(make_setup(fedavg()), CountingAlways)
    with pytest.raises(RunFailed, match=r"the evaluation: .*CountingAlways keeps something"):
        next(ThisProcess(setup).map(Evaluate(), [(0, 30)], {"weights": state_of(setup.model)}))


def test_runs_in_threads_of_one_process_wait_for_each_other(caplog):
    order, entered, may_end = [], threading.Event(), threading.Event()

    def first():
        with alone("the run 'a'"):
            entered.set()
            may_end.wait(60)
            order.append("a")

    def second():
        with alone("the run 'b'"):
            order.append("b")

    class Noticed(logging.Handler):
        def emit(self, record):
            may_end.set()

    handler = Noticed()
    logging.getLogger("rayfed.base.isolation").addHandler(handler)
    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert entered.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    logging.getLogger("rayfed.base.isolation").removeHandler(handler)
    assert order == ["a", "b"]
    assert "the run 'b' waits for the end of the run 'a'" in caplog.text


def test_a_run_within_a_run_is_refused_and_later_runs_are_not():
    with alone("the run 'a'"):
        with pytest.raises(InputError, match="the run 'b' cannot begin within the run 'a'"):
            with alone("the run 'b'"):
                pass
    with alone("the run 'b'"):
        pass


def test_what_a_function_draws_for_the_data_is_the_same_in_each_run(monkeypatch):
    from rayfed.rounds import setup as of_setup

    drawn = []

    def reads(job, read):
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
        raise InputError("enough")

    monkeypatch.setattr(of_setup, "open_data", reads)
    for _ in range(2):
        with pytest.raises(InputError, match="enough"):
            open_setup(None)
    assert drawn[0] == drawn[1]
