"""The round engine: cohorts, rounds, what a round reports and what it refuses."""

import sys
from collections import namedtuple
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfed.base.errors import BrokenContract, ClientFailed, Diverged, RunFailed
from rayfed.base.seeds import Purpose, cohort, seed_of
from rayfed.clients.settings import Training
from rayfed.measures import forgetting
from rayfed.measures.metrics import Evaluation
from rayfed.methods import Part, Proximal, compose, fedavg, fedcsd, fedntd, moon, scaffold, switch
from rayfed.rounds import tasks as module
from rayfed.rounds.engine import play as play_round
from rayfed.rounds.engine import rounds, start
from rayfed.rounds.executor import pieces_of
from rayfed.rounds.round import ClientRow, Round
from rayfed.rounds.tasks import cut_into_tasks
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.weights import state_of
from rayfed.tensors.wire import unpack

# Cohorts and seeds.


@given(st.integers(0, 10**6), st.integers(1, 500), st.data())
def test_a_cohort_is_drawn_without_replacement_and_sorted(seed, num_clients, data):
    size = data.draw(st.integers(1, num_clients))
    clients = cohort(seed, 1, num_clients, size)
    assert clients == sorted(set(clients))
    assert len(clients) == size
    assert set(clients) <= set(range(num_clients))
    assert clients == cohort(seed, 1, num_clients, size)
    assert all(type(client) is int for client in clients)
    assert len(cohort(seed, 1, 10**15, size)) == size, "no list of all clients is made"


def test_every_client_has_the_same_chance():
    drawn = np.bincount(
        [client for round in range(2000) for client in cohort(0, round, 10, 3)], minlength=10
    )
    assert drawn.sum() == 6000
    assert (np.abs(drawn - 600) < 5 * np.sqrt(600 * 0.7)).all()


@given(st.tuples(*[st.integers(0, 2**40)] * 3), st.tuples(*[st.integers(0, 2**40)] * 3))
def test_seeds_differ_where_seed_round_client_or_purpose_differ(one, other):
    a, b = (seed_of(seed, Purpose.BATCHES, round, client) for seed, round, client in (one, other))
    assert (a == b) == (one == other)
    assert 0 <= a < 2**63
    assert a != seed_of(one[0], Purpose.COHORT, *one[1:])


# Tasks.

sizes = st.dictionaries(st.integers(0, 10**6), st.integers(1, 2000), min_size=1, max_size=60)


@given(sizes, st.integers(1, 3000), st.integers(1, 5), st.none() | st.integers(1, 40))
def test_a_cohort_is_cut_into_tasks_the_longest_first(num_examples, task_images, epochs, steps):
    training = Training(task_images=task_images, local_epochs=epochs, local_steps=steps)
    tasks = cut_into_tasks(num_examples, training)
    order = sorted(num_examples, key=lambda client: (-num_examples[client], client))
    assert [client for task in tasks for client in task] == order
    images = {
        c: steps * training.batch_size if steps else n * epochs for c, n in num_examples.items()
    }
    left = sum(images.values())
    for task in tasks:
        work = sum(images[client] for client in task)
        assert len(task) == 1 or work <= min(task_images, left / module.TAPER)
        left -= work
    assert cut_into_tasks(dict(reversed(num_examples.items())), training) == tasks


def test_a_cohort_of_any_size_has_about_two_thousand_tasks_at_most(monkeypatch):
    monkeypatch.undo()
    for num_clients, num_examples in ((1000, 600), (10_000, 600), (100_000, 50)):
        sizes = dict.fromkeys(range(num_clients), num_examples)
        assert len(cut_into_tasks(sizes, Training())) < 2500


def test_sums_are_added_in_groups_only_where_all_together_exceed_4_gib():
    """A sum has twice the model's bytes."""
    tasks = [(0,), (1,)]
    assert module.grouped(tasks, 2**30) == [[(0,)], [(1,)]]
    assert module.grouped(tasks, 2**30 + 1) == [[(0,), (1,)]]


@dataclass(frozen=True)
class Order(Part):
    """Sends what depends on the order of additions, and the number 1."""

    def report(self, client, local, fit):
        return {
            "clients": 1,
            "x": torch.tensor([1e16, 1.0, -1e16, 3.0][client.id % 4], dtype=torch.float64),
        }, None

    def update(self, state, total, step):
        return total, step


def test_summands_are_added_within_tasks_and_then_over_tasks(make_setup, play, monkeypatch):
    setup = make_setup(
        compose(Order()), counts=[[3, 3, 0, 0]] * 8, clients_per_round=8, num_rounds=1
    )
    monkeypatch.setattr(
        "rayfed.rounds.engine.cut_into_tasks",
        lambda sizes, training: [(0, 1, 2), (3,), (4, 5), (6, 7)],
    )
    x = [1e16, 1.0, -1e16, 3.0] * 2
    expected = (((x[0] + x[1]) + x[2]) + x[3] + (x[4] + x[5])) + (x[6] + x[7])
    total = play(setup)[-1].held["order"].state
    assert (total["clients"], total["x"].item()) == (8, expected)


# A run.


def test_the_cohort_depends_only_on_seed_and_round(make_setup, play):
    for method, seed, setting in (
        (fedavg(), 0, {}),
        (moon(), 0, {"lr": 0.01, "norm": True}),
        (fedavg(), 1, {}),
    ):
        clients = [
            [row.client for row in round.clients]
            for round in play(make_setup(method, seed=seed, **setting))
        ]
        assert clients == [[], *(cohort(seed, round, 6, 4) for round in (1, 2, 3))]


def test_a_round_can_be_played_with_given_clients(make_setup, bits):
    # It surveys.
    setup = make_setup(fedcsd())
    first = start(setup, ThisProcess(setup))
    usual = bits(play_round(setup, first, ThisProcess(setup)))
    assert bits(play_round(setup, first, ThisProcess(setup), clients=cohort(0, 1, 6, 4))) == usual
    given = play_round(setup, first, ThisProcess(setup), clients=[5, 1])
    assert [row.client for row in given.clients] == [5, 1]
    # Two clients instead of four.
    assert tuple(2 * size for size in bits(given)["bytes"]) == usual["bytes"]
    assert bits(given)["weights"] != usual["weights"]


def test_round_0_evaluates_the_initial_model(make_setup, play):
    setup = make_setup(fedavg(), norm=True)
    expected = state_of(setup.model)
    first = play(setup)[0]
    assert (first.round, first.clients, first.bytes_down, first.bytes_up, first.forgetting) == (
        0,
        (),
        0,
        0,
        None,
    )
    assert all(torch.equal(first.weights[name], tensor) for name, tensor in expected.items())
    assert np.isnan(first.peak).all()


def test_rounds_continue_to_num_rounds_and_no_further(make_setup, play, bits):
    three = play(make_setup(fedavg()))
    assert [round.round for round in three] == [0, 1, 2, 3]
    setup = make_setup(fedavg(), num_rounds=4)
    (fourth,) = rounds(setup, ThisProcess(setup), three[-1])
    assert bits(fourth) == bits(play(make_setup(fedavg(), num_rounds=4))[-1])
    assert [*rounds(make_setup(fedavg()), None, fourth)] == []
    # Nothing is played before it is asked for: without workers that would fail.
    rounds(make_setup(fedavg()), None)


def test_a_round_is_evaluated_with_its_own_weights(make_setup, play):
    setup = make_setup(fedntd(), norm=True)
    test, run = setup.federation.test, play(make_setup(fedntd(), norm=True))
    for round in run:
        setup.model.load_state_dict(round.weights)
        std = torch.tensor(setup.federation.std).view(1, -1, 1, 1)
        mean = torch.tensor(setup.federation.mean).view(1, -1, 1, 1)
        images, labels = (
            (torch.from_numpy(test.examples).float() / 255 - mean) / std,
            torch.from_numpy(test.labels),
        )
        with torch.no_grad():
            logits = setup.model.eval()(images)
        assert round.test_accuracy == pytest.approx(
            (logits.argmax(1) == labels).float().mean().item()
        )
        assert round.test_loss == pytest.approx(
            torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-4
        )
        assert round.evaluation.confusion.sum() == len(labels)
    history = np.array([round.class_accuracy for round in run[1:]])
    np.testing.assert_array_equal(run[-1].peak, history.max(axis=0))
    assert run[-1].forgetting == pytest.approx(
        forgetting.peak(history[:-1].max(axis=0), history[-1])
    )


def figures(round):
    return [round.test_accuracy, round.test_loss, round.class_accuracy, round.forgetting]


def test_rounds_without_evaluation_train_the_same_bits(make_setup, play, bits):
    often, seldom = (
        play(make_setup(scaffold(), num_rounds=7, eval_every=k, norm=True)) for k in (1, 3)
    )
    measured = {"evaluation", "calibration_error", "forgetting", "peak"}
    for one, other in zip(often, seldom, strict=True):
        assert {k: v for k, v in bits(one).items() if k not in measured}.items() <= bits(
            other
        ).items()
    assert [round.round for round in seldom if round.evaluation] == [0, 3, 6, 7]
    for one, other in zip(often, seldom, strict=True):
        if other.evaluation:
            assert bits(other)["evaluation"] == bits(one)["evaluation"]
        else:
            assert figures(other) == [None] * 4
    assert [
        round.round for round in play(make_setup(fedavg(), eval_every=10**18)) if round.evaluation
    ] == [0, 3]


def test_forgetting_looks_back_at_every_kth_round_only(make_setup, play):
    run = play(make_setup(fedntd(), num_rounds=8, eval_every=3))
    history = [run[number].class_accuracy for number in (3, 6)]
    np.testing.assert_array_equal(run[8].peak, np.max(history, axis=0))
    assert [run[number].forgetting for number in range(6)] == [None] * 6, "nothing to forget yet"
    for earlier, number in ((1, 6), (2, 8)):
        best = np.max(history[:earlier], axis=0)
        assert run[number].forgetting == forgetting.peak(best, run[number].class_accuracy)


def test_a_longer_run_does_not_depend_on_the_extra_evaluation_at_its_old_end(
    make_setup, play, bits, monkeypatch
):
    """Even where the model was perfect at the old end, which would be a peak of every class."""
    undisturbed = play(make_setup(scaffold(), num_rounds=8, eval_every=3))
    setup = make_setup(scaffold(), num_rounds=4, eval_every=3)
    short = rounds(setup, ThisProcess(setup))
    before = [next(short) for _ in range(4)]
    assert [bits(round) for round in before] == [bits(round) for round in undisturbed[:4]]
    with monkeypatch.context() as patch:
        usual = ThisProcess.map
        perfect = Evaluation(np.eye(4, dtype=np.int64), 0.0)
        patch.setattr(
            ThisProcess,
            "map",
            lambda self, work, *rest: (
                iter([perfect]) if work.kind == "evaluation" else usual(self, work, *rest)
            ),
        )
        (end,) = short
    assert (end.round, end.test_accuracy) == (4, 1.0)
    setup = make_setup(scaffold(), num_rounds=8, eval_every=3)
    later = [*rounds(setup, ThisProcess(setup), end)]
    assert [round.round for round in later if round.evaluation] == [6, 8]
    assert [bits(round) for round in later] == [bits(round) for round in undisturbed[5:]]


def test_a_round_that_becomes_the_last_is_evaluated_then(make_setup, play, bits):
    long, short = (
        play(make_setup(scaffold(), num_rounds=number, eval_every=3)) for number in (7, 5)
    )
    assert long[5].evaluation is None
    for num_rounds in (5, 4):
        setup = make_setup(scaffold(), num_rounds=num_rounds, eval_every=3)
        (again,) = rounds(setup, ThisProcess(setup), long[5])
        assert bits(again) == bits(short[5])
        assert [*rounds(setup, ThisProcess(setup), again)] == []


class Told(ThisProcess):
    """Notes what it is asked for, and when its answers are waited for."""

    def __init__(self, setup):
        super().__init__(setup)
        self.told = []

    def map(self, work, items, shared):
        if work.kind == "survey":
            return super().map(work, items, shared)
        begun, ended = {"train": ("train", "trained"), "evaluation": ("evaluate", "evaluated")}[
            work.kind
        ]
        number = work.round or len([what for what, _ in self.told if what == "evaluate"])
        self.told.append((begun, number))
        results = super().map(work, items, shared)
        return (self.told.append((ended, number)) or result for result in results)


@dataclass(frozen=True)
class Surveys(Part):
    def survey(self, client):
        return {"n": 1}


OVERLAP = (
    "evaluate 0, train 1, evaluated 0, finished 0, trained 1, evaluate 1, evaluated 1, finished 1"
)
IN_TURN = (
    "evaluate 0, evaluated 0, finished 0, train 1, trained 1, evaluate 1, evaluated 1, finished 1"
)


@pytest.mark.parametrize(
    ("method", "order"), [(fedavg(), OVERLAP), (compose(fedavg(), Surveys()), IN_TURN)], ids=repr
)
def test_a_round_begins_before_the_one_before_it_is_evaluated_unless_it_surveys(
    make_setup, method, order
):
    setup = make_setup(method, num_rounds=1, clients_per_round=1)
    workers = Told(setup)
    for round in rounds(setup, workers):
        workers.told.append(("finished", round.round))
    assert ", ".join(f"{event} {number}" for event, number in workers.told) == order


@dataclass(frozen=True)
class FailsToTell(Part):
    round: int

    def tell(self, state, server, total):
        if server.round == self.round:
            raise RuntimeError("nothing to tell")
        return state, None


def test_what_fails_while_a_round_begins_is_raised_after_the_round_before_it(make_setup):
    setup = make_setup(compose(fedavg(), FailsToTell(2)), num_rounds=3)
    playing = rounds(setup, ThisProcess(setup))
    assert [next(playing).round for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match="nothing to tell"):
        next(playing)
    # A run that ends with round 1 never needs round 2.
    last = []
    for round in rounds(setup, ThisProcess(setup), is_over=lambda: last[-1] == 1):
        last.append(round.round)
    assert last == [0, 1]


@given(st.integers(1, 5000))
def test_the_pieces_of_an_evaluation_cover_the_test_set_once_and_in_order(num_test):
    """With a list of images in place of each evaluation, the sum is the list of all images."""
    assert [image for piece in pieces_of(num_test) for image in range(*piece)] == [*range(num_test)]


def test_bytes_are_counted_for_each_client(make_setup, play):
    size = sum(tensor.nbytes for tensor in state_of(make_setup(fedavg(), norm=True).model).values())
    for method in (fedavg(), fedntd()):
        for round in play(make_setup(method, norm=True))[1:]:
            assert (round.bytes_down, round.bytes_up) == (4 * size, 4 * size)
    # Down: teacher and prototypes; up: their sums and counts.
    for round in play(make_setup(fedcsd(), norm=True))[1:]:
        assert round.bytes_down >= 4 * (2 * size + 4 * 4 * 4)
        assert round.bytes_up == 4 * (size + 4 * 4 * 8 + 4 * 8)


def test_each_clients_row_has_its_images_loss_time_and_node(make_setup, play):
    setup = make_setup(fedavg())
    for round in play(make_setup(fedavg()))[1:]:
        for row in round.clients:
            assert row.num_examples == setup.federation.num_examples(row.client)
            assert row.train_loss > 0
            assert row.seconds >= 0
            assert row.node


# Memory and refusals.


@dataclass(frozen=True)
class Diary(Part):
    """Clients with an odd number remember their rounds; the others remember nothing."""

    def report(self, client, local, fit):
        rounds = [*(client.memory["rounds"] if client.memory else []), client.round]
        return {"clients": 1, "past": len(rounds) - 1}, {
            "id": client.id,
            "rounds": rounds,
        } if client.id % 2 else None

    def update(self, state, total, step):
        return [*(state or []), (total["clients"], total["past"])], step


def test_memory_is_kept_for_each_client_while_others_train(make_setup, play):
    run = play(make_setup(compose(Diary()), num_rounds=5, clients_per_round=3))
    cohorts = [cohort(0, round, 6, 3) for round in range(1, 6)]
    for round in run:
        seen = {
            c: [r + 1 for r, clients in enumerate(cohorts[: round.round]) if c in clients]
            for c in (1, 3, 5)
        }
        kept = {
            client: unpack(memory)["slots"]["diary"] for client, memory in round.memories.items()
        }
        assert kept == {c: {"id": c, "rounds": r} for c, r in seen.items() if r}
    past = [
        sum(c in earlier for c in clients if c % 2 for earlier in cohorts[:r])
        for r, clients in enumerate(cohorts)
    ]
    assert run[-1].held["diary"].state == [(3, count) for count in past]
    assert sum(past) > 0


def test_clients_forget_a_part_that_left_and_remember_one_that_stayed(make_setup, play):
    def kept(method):
        run = play(make_setup(method, num_rounds=4, clients_per_round=6))
        return [
            1 in round.memories and unpack(round.memories[1])["slots"]["diary"]["rounds"]
            for round in run[1:]
        ]

    diary, plain = compose(Diary()), fedavg()
    assert kept(switch(diary, compose(Diary(), Proximal()), at=3)) == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 3, 4],
    ]
    assert kept(switch(switch(diary, plain, at=2), diary, at=3)) == [[1], False, [3], [3, 4]]


# A summand where the others are {"x": [torch.zeros(2)]}, and the message; test_trees.py has more of
# them.
SPOILT = {
    "nan": (
        {"x": [torch.tensor([1.0, float("nan")])]},
        "holds a NaN or an infinity at spoiler.x.0",
    ),
    "sparse": (
        {"x": [torch.zeros(2).to_sparse()]},
        "holds a tensor (torch.float32, torch.sparse_coo) that is neither",
    ),
    "nothing": (None, "spoiler.x.0 is missing"),
}


@dataclass(frozen=True)
class Spoiler(Part):
    """In round 2, one client's survey or report gives a summand that does not fit the others."""

    hook: str
    client: int
    value: str

    def survey(self, client):
        return self._summand("survey", client)

    def report(self, client, local, fit):
        return self._summand("report", client), None

    def _summand(self, hook, client):
        if (hook, client.id, client.round) == (self.hook, self.client, 2):
            return SPOILT[self.value][0]
        return {"x": [torch.zeros(2)]}


@pytest.mark.parametrize("value", SPOILT)
@pytest.mark.parametrize(("hook", "stage"), [("report", "round 2"), ("survey", "round 2 (survey)")])
def test_a_summand_that_cannot_be_added_is_refused_with_client_round_and_place(
    hook, stage, value, make_setup, play
):
    setup = make_setup(compose(Spoiler(hook, 5, value)))
    order = sorted(
        cohort(0, 2, 6, 4), key=lambda client: (-setup.federation.num_examples(client), client)
    )
    assert order == [0, 3, 5, 2], "of 12, 8, 7 and 1 images"
    with pytest.raises(RunFailed) as refused:
        play(setup)
    assert str(refused.value).endswith("; nothing was averaged")
    # Of two summands that differ, either may be wrong.
    if value == "nothing":
        said = (
            f"client 0 or 5, {stage}: one of their summands is odd; that of client 5 is not like "
            "that of client 0: "
        )
    else:
        said = f"client 5, {stage}: its summand "
    assert str(refused.value).startswith(said + SPOILT[value][1])


POINT = namedtuple("point", "x y")(1, 2)


# A hook, what it gives, and what the message says.
ODD = [
    (
        "loss",
        0.5,
        "test_engine.Odd.loss gave 0.5; it must give a scalar tensor, or None for no term",
    ),
    (
        "loss",
        torch.ones(2),
        "Odd.loss gave a tensor of shape (2,); it must give a scalar tensor",
    ),
    (
        "loss",
        torch.ones(()),
        "Odd.loss gave a number without a gradient, which trains nothing; compute it from",
    ),
    ("report", 3, "Odd.report gave 3; it must give two values, the summands and the memory"),
    (
        "memory",
        {"a": np.ones(2)},
        "Odd.report gave a memory with array([1., 1.]) at a; a memory is made of",
    ),
    (
        "memory",
        object(),
        "Odd.report gave an object of the class builtins.object as its memory; a memory is",
    ),
    (
        "sum",
        {"a": np.ones(2)},
        "its summand holds a ndarray, which is neither a tensor nor a number, at odd.a",
    ),
    ("sum", "", "its summand holds a str, which is neither a tensor nor a number, at odd"),
    ("tell", 7, "Odd.tell gave 7; it must give two values, the state and the payload"),
    ("update", 7, "Odd.update gave 7; it must give two values, the state and the step"),
    (
        "init",
        {1},
        "Odd.init gave {1} as its state; a state is made of tensors, numbers and text",
    ),
    ("told", {(1, 2): 3}, "Odd.tell gave a state with 3 at (1, 2); a state is made of"),
    ("state", POINT, "Odd.update gave point(x=1, y=2) as its state; a state is"),
    (
        "fewer",
        None,
        "round 1: the average does not fit the model: features.0.weight is missing",
    ),
    (
        "shown",
        None,
        "round 1: the evaluated average does not fit the model: features.0.weight is missing",
    ),
    (
        "factor",
        float("nan"),
        "round 1, after Odd.update: the new global model holds a NaN or an infinity at",
    ),
]


@dataclass(frozen=True)
class Odd(Part):
    """Gives a value from one hook, or as one of the two values of a hook."""

    # A job could not record the value itself.
    case: int

    @property
    def hook(self):
        return ODD[self.case][0]

    @property
    def value(self):
        return ODD[self.case][1]

    def init(self, weights):
        return self.value if self.hook == "init" else 0

    def tell(self, state, server, surveyed):
        return (
            self.value
            if self.hook == "tell"
            else (self.value if self.hook == "told" else state, None)
        )

    def loss(self, batch, local):
        return self.value if self.hook == "loss" else None

    def report(self, client, local, fit):
        given = {"sum": (self.value, None), "memory": (None, self.value), "report": self.value}
        return given.get(self.hook, (None, None))

    def update(self, state, total, step):
        if self.hook == "factor":
            return state, step.towards(
                {name: tensor * self.value for name, tensor in step.averaged.items()}
            )
        if self.hook == "fewer":
            return state, replace(step, proposed=dict(list(step.averaged.items())[1:]))
        if self.hook == "shown":
            return state, replace(step, shown=dict(list(step.averaged.items())[1:]))
        return (
            self.value
            if self.hook == "update"
            else (self.value if self.hook == "state" else state, step)
        )


@pytest.mark.parametrize("case", range(len(ODD)))
def test_what_a_hook_gives_is_checked(case, make_setup, play):
    said = ODD[case][2]
    with pytest.raises(RunFailed) as refused:
        play(make_setup(compose(Odd(case))))
    assert said in str(refused.value) and "Traceback" not in str(refused.value)
    # The advice after a broken contract is to mend the code. A NaN may have another reason.
    is_broken = isinstance(refused.value, BrokenContract)
    assert is_broken == (ODD[case][0] != "factor")


@dataclass(frozen=True)
class InPlace(Part):
    """Writes to the state that it is given. To write to weights is refused (`test_watch.py`)."""

    def init(self, weights):
        return {"rounds": torch.zeros(()), "list": []}

    def tell(self, state, server, surveyed):
        state["rounds"].add_(1)
        state["list"].append(server.round)
        return state, None

    def update(self, state, total, step):
        state["rounds"].mul_(2)
        return state, step


def test_a_round_stays_as_it_was_when_a_hook_writes_to_its_state(make_setup, bits):
    setup = make_setup(compose(InPlace()))
    first = start(setup, ThisProcess(setup))
    second = play_round(setup, first, ThisProcess(setup))
    before = bits(first), bits(second)
    # As after a stop.
    for _ in range(2):
        third = play_round(setup, second, ThisProcess(setup))
        assert (bits(first), bits(second)) == before
        assert (third.held["in_place"].state["rounds"], third.held["in_place"].state["list"]) == (
            6,
            [1, 2],
        )


@dataclass(frozen=True)
class Quitting(Part):
    """Ends Python, in a hook of the server or of a client."""

    hook: str

    def tell(self, state, server, surveyed):
        return sys.exit() if self.hook == "tell" else (state, None)

    def begin(self, client):
        return sys.exit(0) if self.hook == "begin" and client.id == 2 else None


def test_a_hook_that_ends_python_is_an_error(make_setup, play):
    with pytest.raises(RuntimeError, match="a hook has ended Python"):
        play(make_setup(compose(Quitting("tell"))))
    with pytest.raises(
        ClientFailed, match=r"(?s)^client 2, round \d failed:.*a hook has ended Python"
    ) as failed:
        play(make_setup(compose(Quitting("begin"))))
    assert failed.value.client == 2


def test_a_loss_that_diverges_ends_the_run_and_changes_no_earlier_round(make_setup, bits):
    wild = make_setup(fedavg(), lr=1e30)
    first = start(wild, ThisProcess(wild))
    before = bits(first)
    with pytest.raises(Diverged, match=r"client \d, round 1, batch 2") as caught:
        play_round(wild, first, ThisProcess(wild))
    assert f"client {caught.value.client}, round {caught.value.round}," in str(caught.value), (
        "so it can be replayed"
    )
    assert bits(first) == before


def test_a_rounds_training_loss_has_the_same_bits_on_every_python():
    """From Python 3.12 on, the built-in sum of ten times 0.1 is 1.0."""
    rows = tuple(ClientRow(client, 1, 0.1, 0.0, "") for client in range(10))
    peak = np.full(2, np.nan)
    round = Round(
        1, {}, held={}, memories={}, evaluation=None, peak=peak, forgetting=None, clients=rows
    )
    assert round.train_loss == 0.9999999999999999 / 10
