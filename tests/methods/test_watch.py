"""A part of the user's that writes to what its hooks are given is refused, by part, hook and
name.
"""

import re
from dataclasses import dataclass

import pytest
import torch

from rayfed.base.errors import RunFailed
from rayfed.methods import Part, compose, fedavg, scaffold, switch
from rayfed.methods.watch import call

# What a part writes to, by hook.
WRITES = {
    ("begin", "client.weights['head.weight']"): lambda c: c.weights["head.weight"].mul_(0.9),
    ("begin", "client.label_counts"): lambda c: c.label_counts.numpy().fill(3),
    ("begin", "client.payload['p']"): lambda c: c.payload["p"].data.add_(1),
    ("loss", "batch.images"): lambda b: b.images.mul_(0.9),
    ("loss", "batch.labels"): lambda b: b.labels.data.fill_(0),
    ("loss", "batch.label_counts"): lambda b: b.label_counts.add_(1),
    ("report", "fit.weights['head.bias']"): lambda c: c.weights["head.bias"].data.zero_(),
    ("tell", "server.weights['head.bias']"): lambda s: s.weights["head.bias"].add_(1),
    ("update", "step.weights['head.bias']"): lambda s: s.weights["head.bias"].add_(1),
    ("survey", "client.weights['head.bias']"): lambda c: c.weights["head.bias"].add_(1),
}


@dataclass(frozen=True)
class Writes(Part):
    hook: str
    name: str
    since: int = 1

    def _write(self, hook, given, round=None):
        if hook == self.hook:
            WRITES[hook, self.name](given)

    def survey(self, client):
        self._write("survey", client)
        return torch.zeros(())

    def tell(self, state, server, surveyed):
        self._write("tell", server)
        return state, {"p": torch.zeros(2)}

    def begin(self, client):
        self._write("begin", client)

    def loss(self, batch, local):
        self._write("loss", batch)

    def report(self, client, local, fit):
        self._write("report", fit)
        return None, None

    def update(self, state, total, step):
        self._write("update", step)
        return state, step


@pytest.mark.parametrize(("hook", "name"), WRITES)
def test_a_part_that_writes_to_what_it_is_given_is_refused(hook, name, make_setup, play):
    setup = make_setup(compose(scaffold(), Writes(hook, name)), num_rounds=1)
    says = re.escape(f"test_watch.Writes.{hook} wrote to {name}, which other parts")
    with pytest.raises(RunFailed, match=says):
        play(setup)


def test_it_is_refused_too_where_the_part_acts_only_from_a_later_round_on(make_setup, play):
    writes = compose(Writes("loss", "batch.images"))
    with pytest.raises(RunFailed, match=r"Writes\.loss wrote to batch\.images"):
        play(make_setup(switch(fedavg(), writes, at=2), num_rounds=2))


@dataclass(frozen=True)
class WritesToItsOwn(Part):
    """Changes copies, its local values and its state."""

    def tell(self, state, server, surveyed):
        mine = {name: tensor.clone().mul_(2) for name, tensor in server.weights.items()}
        return state, mine

    def begin(self, client):
        counts = client.label_counts.clone().add_(1)
        return {"counts": counts, "seen": torch.zeros(())}

    def loss(self, batch, local):
        local["seen"].add_(1)
        local["counts"].add_(1)
        return batch.images.clone().mul_(0).sum() * batch.logits.sum()

    def report(self, client, local, fit):
        return {"seen": local["seen"]}, {"seen": local["seen"].add_(1)}

    def update(self, state, total, step):
        state = torch.zeros(()) if state is None else state
        return state.add_(total["seen"]), step


def test_a_part_may_write_to_copies_and_to_what_is_its_own(make_setup, play):
    assert len(play(make_setup(compose(WritesToItsOwn()), num_rounds=2))) == 3


def test_hooks_that_are_not_watched_are_called_as_they_are(make_setup):
    class Odd:
        def begin(self, client):
            return client

    assert call(Odd(), "begin", 3, watch=False) == 3
