"""What a part keeps from client to client is restored, or ends the run: no bits depend on where a
run is resumed.
"""

import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from rayfed.base.errors import BrokenContract, RunFailed
from rayfed.job import RayOptions
from rayfed.methods import Part, compose, fedavg
from rayfed.rounds.engine import rounds
from rayfed.runtime.repeat import refuse_other_bits, users_own
from rayfed.runtime.this_process import ThisProcess

GENERATOR, COUNTS, SQUARE = torch.Generator().manual_seed(1), [0], torch.square


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found * 2 if function is torch.Tensor.square else found


def hook(module, args, output):
    return output * 1.01 if isinstance(module, nn.Linear) else None


def number(_):
    os.environ["RAYFED_TEST"] = str(float(os.environ.get("RAYFED_TEST", 0)) + 1)
    return float(os.environ["RAYFED_TEST"])


@dataclass(frozen=True)
class Keeps(Part):
    what: str
    slot = "keeps"
    seen = 0

    def begin(self, client):
        return KEEPS[self.what](client)

    def loss(self, batch, factor):
        return torch.square(batch.logits).mean() * batch.logits.square().mean() * factor

    def report(self, client, local, fit):
        if self.what == "hook":
            LEFT_BEHIND.append(register_module_forward_hook(hook).remove)
        if self.what == "mode":
            mode = Doubling()
            mode.__enter__()
            LEFT_BEHIND.append(lambda: mode.__exit__(None, None, None))
        if self.what == "patch":
            torch.square = torch.abs
        return None, None


def count(_):
    COUNTS[0] += 1
    return COUNTS[0]


def attribute(_):
    Keeps.seen += 1
    return Keeps.seen


KEEPS = {
    "global": count,
    "attribute": attribute,
    "generator": lambda _: float(torch.rand((), generator=GENERATOR)),
    "patch": lambda _: 1,
    "environment": number,
    "hook": lambda _: 1,
    "mode": lambda _: 1,
}
REFUSED = ["global", "attribute", "generator", "patch", "hook", "mode"]
# What ends what the parts have left in force in this process.
LEFT_BEHIND = []


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(torch, "square", SQUARE)
    monkeypatch.setattr(Keeps, "seen", 0)
    yield
    while LEFT_BEHIND:
        LEFT_BEHIND.pop()()


@pytest.mark.parametrize("what", KEEPS)
def test_what_a_part_keeps_is_restored_or_ends_the_run_before_its_round_is_recorded(
    make_setup, bits, what
):
    setup = make_setup(compose(fedavg(), Keeps(what)))
    come = rounds(setup, ThisProcess(setup))
    initial = next(come)
    if what in REFUSED:
        with pytest.raises(
            RunFailed, match=r"^client \d, round 1: served again .*\btest_repeat\.Keeps keeps"
        ) as refused:
            next(come)
        assert refused.value.client is not None and refused.value.exit_code == 1
        return
    whole = [initial, *come]
    again = [*rounds(setup, ThisProcess(setup), whole[1])]
    assert [bits(round) for round in again] == [bits(round) for round in whole[2:]]


def test_a_model_of_torchs_own_modules_on_which_the_user_has_hung_a_counter_is_refused(make_setup):
    def counter(module, args, output):
        return output * (1 + 0.001 * count(module))

    setup = make_setup(fedavg())
    setup.model.head.register_forward_hook(counter)
    named = replace(setup.job, model=replace(setup.job.model, name="mine:hooked"))
    setup = replace(setup, job=named)
    with pytest.raises(
        RunFailed,
        match=r"other outputs the second time\. the model that your function makes keeps something",
    ):
        list(rounds(setup, ThisProcess(setup)))


def test_the_check_is_off_where_the_job_says_so_and_for_parts_of_rayfed(
    make_setup, play, monkeypatch
):
    play(make_setup(compose(fedavg(), Keeps("global")), ray=RayOptions(check_repeat=False)))
    monkeypatch.setattr("rayfed.runtime.runner.refuse_other_bits", pytest.fail)
    play(make_setup(fedavg()))


def test_modules_of_timm_and_peft_share_a_model_as_torchs_do(make_setup, play, monkeypatch):
    """They keep nothing of a client either; a module of the user's gets a model of its own for each
    client.
    """
    norm = pytest.importorskip("timm.layers").LayerNorm2d
    peft = pytest.importorskip("peft")
    setup = make_setup(fedavg())
    setup.model.features.insert(1, norm(4))
    setup.model.head = peft.tuners.lora.Linear(setup.model.head, "default", peft.LoraConfig(), r=2)
    assert users_own(setup, 1) == []
    monkeypatch.setattr("rayfed.runtime.runner.refuse_other_bits", pytest.fail)
    assert len(play(setup)) == 4
    setup.model.features.append(Own())
    assert [type(one) for one in users_own(setup, 1)] == [Own]


class Own(nn.Identity):
    pass


A, B = [("w", b"1")], [("w", b"2")]
DIFFERING = {
    "loss, which depends on modules": (
        {"": "0x1", "keeps": A},
        {"": "0x2", "keeps": A},
        "Own",
    ),
    "summand": ({"": "0x1", "keeps": A}, {"": "0x1", "keeps": B}, "Keeps"),
    "of a slot that is new": ({"": "0x1"}, {"": "0x1", "keeps": A}, "Keeps"),
    "of a slot that is gone": ({"": "0x1", "keeps": A}, {"": "0x1"}, "Keeps"),
    "of a slot of no part of the user's": ({"x": A}, {"x": B}, r"Keeps or .*\.Own"),
}


@pytest.mark.parametrize("what", DIFFERING)
def test_every_part_of_a_reply_that_differs_is_refused_and_names_the_part_of_its_slot(what):
    before, after, named = DIFFERING[what]
    own = [Keeps("global"), Own()]
    for bits in (before, after):
        refuse_other_bits("client 1", own, bits, dict(reversed(bits.items())))
    with pytest.raises(BrokenContract, match=rf"resumed\. [\w.]*\.{named} keeps something"):
        refuse_other_bits("client 1", own, before, after)


@pytest.mark.slow
def test_an_actor_checks_too(cluster, make_setup, on_ray):
    setup = make_setup(compose(fedavg(), Keeps("global")), clients_per_round=6)
    with pytest.raises(RunFailed, match=r"client \d, round 1: served again .*Keeps keeps"):
        on_ray(setup, 1)
