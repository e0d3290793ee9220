"""The [train] table: schedules, parts of epochs, patience, and what cannot mean what its user
thinks.
"""

import inspect
import math
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfed.base.errors import InputError
from rayfed.clients.batches import batches
from rayfed.clients.schedules import Constant, Cosine, Step
from rayfed.clients.settings import Training
from rayfed.job import Job, make_job, read_job
from rayfed.methods import Part, fedavg, fednova, fedntd

# Schedules.


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [0.8, 0.8, 0.8, 0.8, 0.8]),
        ({"lr_decay": 0.5}, [0.8, 0.4, 0.2, 0.1, 0.05]),
        ({"schedule": {"warmup": 3}}, [0.2, 0.4, 0.6, 0.8, 0.8]),
        (
            {"schedule": {"name": "constant", "warmup": 1}, "lr_decay": 0.5},
            [0.4, 0.4, 0.2, 0.1, 0.05],
        ),
        ({"schedule": {"name": "step", "every": 2}}, [0.8, 0.8, 0.08, 0.08, 0.008]),
        (
            {"schedule": {"name": "step", "every": 2, "gamma": 0.5, "warmup": 1}},
            [0.4, 0.8, 0.8, 0.4, 0.4],
        ),
        (
            {"schedule": {"name": "cosine", "until": 5, "warmup": 1}},
            [0.4, 0.8, 0.6828427, 0.4, 0.1171573],
        ),
        ({"schedule": {"name": "Cosine", "until": 2, "floor": 0.25}}, [0.8, 0.5, 0.2, 0.2, 0.2]),
    ],
)
def test_rates_by_hand(settings, rates):
    training = make_job({"name": "n", "train": {"num_rounds": 5, "lr": 0.8, **settings}}).train
    assert [training.lr_at(round) for round in range(1, 6)] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [
        (
            Step(every=3, gamma=0.3),
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.3),
        ),
        (
            Cosine(until=10, floor=0.1),
            lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10, 0.05),
        ),
    ],
)
def test_rates_are_those_of_torchs_schedulers(schedule, theirs):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.5)
    scheduler, training = theirs(optimizer), Training(num_rounds=10, lr=0.5, schedule=schedule)
    for round in range(1, 12):
        assert training.lr_at(round) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()


OWN = """
import random
from dataclasses import dataclass

@dataclass(frozen=True)
class Same:
    def factor(self, round):
        return 1

@dataclass(frozen=True)
class Rate:
    value: float
    def factor(self, round):
        return {1.5: "fast", 2.5: None, 3.5: random.random(), 4.5: float("nan")}.get(self.value, self.value)

@dataclass(frozen=True)
class Broken:
    def factor(self, round):
        return 1 / abs(round - 2)

@dataclass
class Thawed:
    def factor(self, round):
        return 1

def function(round):
    return 1
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of schedules; gives what makes a job's rates from one of them."""
    (tmp_path / "schedules_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)

    def rates(name, **values):
        schedule = {"name": f"schedules_of_mine:{name}", **values}
        train = {"num_rounds": 5, "lr": 0.3, "schedule": schedule}
        job = make_job({"name": "n", "train": train})
        assert make_job(job.table()).train == job.train, "a run's job.toml has it too"
        return [job.train.lr_at(round) for round in range(1, 6)]

    yield rates
    sys.modules.pop("schedules_of_mine", None)


def test_a_constant_schedule_of_ones_own_has_the_rates_of_constant(own):
    constant = make_job({"name": "n", "train": {"num_rounds": 5, "lr": 0.3}}).train
    assert own("Same") == own("Rate", value=1.0) == [constant.lr_at(n) for n in range(1, 6)]
    assert own("Rate", value=0.5) == [0.15] * 5


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("Rate", {"value": -1.0}, "factor(1) gives -1.0; give a finite number above 0"),
        ("Rate", {"value": 0.0}, "factor(1) gives 0.0; give a finite number above 0"),
        ("Rate", {"value": 4.5}, "factor(1) gives nan; give a finite number above 0"),
        ("Rate", {"value": 1.5}, "factor(1) gives 'fast'; give a number, such as 0.5"),
        ("Rate", {"value": 2.5}, "factor(1) gives None; give a number, such as 0.5"),
        ("Rate", {"value": 3.5}, "it must depend on the round and on the fields alone"),
        ("Rate", {}, "train.schedule.value is missing"),
        ("Broken", {}, "factor(2) fails: ZeroDivisionError: division by zero"),
        ("Thawed", {}, "it must be a frozen dataclass with a method `factor(self, round)`"),
        ("function", {}, "it must be a frozen dataclass with a method `factor(self, round)`"),
    ],
    ids=str,
)
def test_a_schedule_of_ones_own_that_gives_no_rate_is_refused(own, name, values, says):
    with pytest.raises(InputError, match=re.escape(says)):
        own(name, **values)


def test_a_schedule_is_what_clients_train_with(make_setup, play):
    """Half the rate by a warm-up, and half of twice the rate by a decay: the same round, and the
    same next one.
    """
    warm = make_setup(fedavg(), lr_decay=1.0, lr=0.1, schedule=Constant(warmup=1), num_rounds=1)
    cold = make_setup(fedavg(), lr_decay=1.0, lr=0.05, num_rounds=1)
    one, other = (play(setup)[-1].weights for setup in (warm, cold))
    assert all(torch.equal(other[name], w) for name, w in one.items())


def test_a_job_is_written_as_it_is_read():
    for schedule in (
        "step",
        {"name": "cosine", "until": 30, "floor": 0.01, "warmup": 3},
        {"warmup": 2},
    ):
        given = {
            "name": "n",
            "train": {"schedule": schedule, "local_epochs": 0.5, "optimizer": "adamw", "clip": 1.0},
        }
        if schedule == "step":
            given["train"]["schedule"] = {"name": "step", "every": 9}
        job = make_job(given)
        assert make_job(job.table()) == job


def test_another_schedule_by_name_drops_the_options_of_the_one_before():
    tables = {"name": "n", "train": {"schedule": {"name": "step", "every": 9}}}
    cosine = {"train.schedule": "cosine", "train.schedule.until": 20}
    assert read_job(tables, cosine).train.schedule == Cosine(until=20)
    assert read_job(tables, {"train.schedule": "constant"}).train.schedule == Constant()
    assert read_job(
        {"name": "n", "train": {"schedule": "constant"}}, {"train.schedule.warmup": 2}
    ).train.schedule == (Constant(warmup=2))


# Parts of epochs.


@given(st.integers(1, 60), st.integers(1, 20), st.floats(0.01, 4.0))
def test_a_part_of_an_epoch_is_the_beginning_of_a_whole_one(num_examples, batch_size, epochs):
    def drawn(epochs):
        rng = torch.Generator().manual_seed(0)
        training = Training(batch_size=batch_size, local_epochs=epochs)
        return [index.tolist() for index in batches(num_examples, training, rng)]

    found, per_epoch = drawn(epochs), -(-num_examples // batch_size)
    assert found == drawn(5)[: len(found)]
    assert (
        len(found) >= 1
        and len(found) - 1 < epochs * per_epoch + 1e-6
        and len(found) > epochs * per_epoch - 1e-6
    )
    last = [image for index in found[len(found) // per_epoch * per_epoch :] for image in index]
    assert len({*last}) == len(last), "no image comes twice in one pass"


def test_a_number_of_steps_is_not_spoilt_by_rounding():
    assert [
        Training(batch_size=1, local_epochs=epochs).steps(100) for epochs in (0.07, 0.29, 1.1)
    ] == [7, 29, 110]


def test_whole_epochs_are_whole_numbers():
    one, same = (make_job({"name": "n", "train": {"local_epochs": epochs}}) for epochs in (2, 2.0))
    assert (one, one.hash(), one.table()) == (same, same.hash(), same.table())
    assert repr(same.table()["train"]["local_epochs"]) == repr(same.train.local_epochs) == "2"


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 1), (1.5, 3), (0.3, 1)])
@pytest.mark.parametrize("method", [fedntd(), fednova()])
def test_parts_of_epochs_are_so_many_steps(make_setup, play, method, epochs, steps):
    """The teacher too: it is asked for all images at once only where all are used."""
    setting = {
        "counts": [[5, 5, 0, 0], [0, 3, 7, 0], [1, 2, 3, 4]],
        "clients_per_round": 3,
        "num_rounds": 2,
    }
    # Of two batches each.
    by_epochs = play(make_setup(method, local_epochs=epochs, **setting))[-1]
    by_steps = play(make_setup(method, local_epochs=1, local_steps=steps, **setting))[-1]
    assert all(torch.equal(by_steps.weights[name], w) for name, w in by_epochs.weights.items())


# Patience.


@pytest.mark.parametrize(
    ("settings", "accuracies", "over"),
    [
        ({"patience": 2}, {}, False),
        ({"patience": 2}, {0: 0.9, 1: 0.1, 2: 0.2, 3: 0.3}, False),
        ({"patience": 2}, {0: 0.9, 1: 0.5, 2: 0.4}, False),
        # As good as before is not better.
        (
            {"patience": 2},
            {0: 0.9, 1: 0.5, 2: 0.4, 3: 0.5},
            True,
        ),
        ({"patience": 2}, {0: 0.1, 1: 0.5, 2: 0.4, 3: 0.6, 4: 0.1}, False),
        ({"patience": 2}, {0: 0.1, 1: 0.5, 2: 0.4, 3: 0.6, 4: 0.1, 5: 0.2}, True),
        ({"patience": 1}, {0: 0.1, 1: 0.5, 2: 0.4}, True),
        ({"patience": 0}, {0: 0.1, 1: 0.5, 2: 0.4, 3: 0.4, 4: 0.4}, False),
        ({"patience": 1, "eval_every": 2}, {0: 0.1, 1: None, 2: 0.5, 3: None}, False),
        ({"patience": 1, "eval_every": 2}, {0: 0.1, 1: None, 2: 0.5, 3: None, 4: 0.4}, True),
        # 3 was an extra one.
        (
            {"patience": 1, "eval_every": 2},
            {0: 0.1, 1: None, 2: 0.5, 3: 0.9, 4: 0.6},
            False,
        ),
    ],
)
def test_patience_by_hand(settings, accuracies, over):
    assert Training(**settings).patience_is_over(accuracies) is over


# A job's hash.


def test_a_jobs_hash_has_all_that_its_rounds_depend_on_and_how_many_there_are():
    job = Job("n")
    before = job.hash()
    changes = [
        {"optimizer": "adam"},
        {"schedule": Constant(warmup=1)},
        {"clip": 1.0},
        {"local_epochs": 0.5},
    ]
    for change in changes:
        other = replace(job, train=replace(job.train, **change))
        assert other.hash() != before and other.lineage() != job.lineage()
    patient = replace(job, train=replace(job.train, patience=3))
    assert patient.hash() != before and patient.lineage() == job.lineage(), (
        "it changes no round, but how many there are"
    )


COSINE = {"name": "cosine", "until": 20}


def test_the_job_in_the_documentation_is_one():
    text = (Path(__file__).parents[2] / "docs/training.md").read_text()
    job = read_job(tomllib.loads(re.search(r"```toml\n(.*?)```", text, re.DOTALL)[1]))
    # Of the 55 rounds after the warm-up.
    late = (1 + math.cos(math.pi * 27 / 55)) / 2
    assert [job.train.lr_at(round) / job.train.lr for round in (1, 6, 33)] == pytest.approx(
        [1 / 6, 1.0, late]
    )


def test_what_is_just_possible_is_not_refused():
    for settings in (
        {"schedule": COSINE, "num_rounds": 20},
        {"schedule": COSINE, "num_rounds": 2},
        {"schedule": {**COSINE, "floor": 0.01}, "num_rounds": 21},
        {"patience": 3, "eval_every": 5, "num_rounds": 20},
        # A tiny variant of a longer job.
        {"patience": 30},
    ):
        make_job({"name": "n", "train": settings})


def test_every_part_that_reads_the_rate_or_the_momentum_says_that_it_needs_sgd():
    def used(cls):
        hooks = [value for value in vars(cls).values() if hasattr(value, "__code__")]
        names = {name for hook in hooks for name in hook.__code__.co_names}
        # A field of the part's own is not the job's key of this name.
        return names - {*inspect.get_annotations(cls)}

    def below(cls):
        return [cls, *(one for sub in cls.__subclasses__() for one in below(sub))]

    ours = [cls for cls in below(Part) if cls.__module__.startswith("rayfed.methods.")]
    found = {cls.__name__ for cls in ours if {"momentum", "momentum_corrected_steps"} & used(cls)}
    assert found == {"ClientMomentum", "ControlVariates", "NormalizedAverage"}
    # PseudoData takes a step back.
    assert found | {"PseudoData"} == {
        cls.__name__ for cls in ours if "require_sgd" in cls.check.__code__.co_names
    }
