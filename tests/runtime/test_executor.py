"""What every executor keeps to, in this process and on Ray: `InProcess` is the meaning of `map`."""

import copy
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from torch import nn

from rayfed.base.errors import ClientFailed
from rayfed.job import RayOptions
from rayfed.methods import Part, compose, scaffold
from rayfed.rounds import engine
from rayfed.rounds.executor import Evaluate, MeasureActivations, pieces_of
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.weights import state_of

PIECES = [(0, 7), (7, 11), (11, 30)]


@dataclass(frozen=True)
class Visits(Part):
    """Writes the number of each client to a file, when it is its turn; client 4 may fail."""

    file: str
    fails: str = ""

    def begin(self, client):
        with open(self.file, "a") as file:
            file.write(f"{client.id}\n")
        if self.fails == "divides" and client.id == 4:
            raise ZeroDivisionError("client 4 divides by zero")
        # It would end a generator in silence.
        if self.fails == "stops" and client.id == 4:
            next(iter([]))


@pytest.fixture(params=["in this process", pytest.param("on Ray", marks=pytest.mark.slow)])
def executor_of(request):
    """Open an executor for a setup: here, or an actor on Ray, so that the order of work is
    known.
    """

    @contextmanager
    def open_executor(setup):
        if request.param == "in this process":
            yield ThisProcess(replace(setup, model=copy.deepcopy(setup.model)))
            return
        request.getfixturevalue("cluster")
        pool_on = request.getfixturevalue("pool_on")
        options = {"actors": 1, "check_repeat": False}
        with pool_on(setup, f"executor-{id(setup)}", **options) as pool:
            yield pool

    return open_executor


@pytest.fixture
def visiting(make_setup, tmp_path):
    """A setup whose clients leave a note, and a function that reads the notes."""
    file = tmp_path / "visits"

    def make(fails=""):
        method = compose(Visits(str(file), fails))
        setup = make_setup(method, clients_per_round=6, ray=RayOptions(check_repeat=False))
        return setup, lambda: file.read_text().split() if file.exists() else []

    return make


class Broken(nn.Module):
    """A model that fails on all images."""

    def forward(self, images):
        raise ZeroDivisionError("the model divides by zero")


def training(setup, executor):
    """Begin the training of round 1; returns its tasks and its results."""
    opening = engine.open_round(setup, engine.initial(setup), executor)
    tasks = opening.to_train
    return tasks, engine.begin_training(setup, executor, opening.broadcast, tasks, {})


def test_results_come_in_the_order_of_the_items_each_once(executor_of, make_setup):
    setup = make_setup(compose(scaffold()))
    weights = state_of(setup.model)
    with executor_of(setup) as executor:
        results = list(executor.map(Evaluate(), PIECES, {"weights": weights}))
        assert [int(result.confusion.sum()) for result in results] == [7, 4, 19]
        whole = list(executor.map(Evaluate(), [(0, 30)], {"weights": weights}))
        total = results[0] + results[1] + results[2]
        assert (total.confusion == whole[0].confusion).all()


def test_no_items_have_no_results(executor_of, make_setup):
    setup = make_setup(compose(scaffold()))
    with executor_of(setup) as executor:
        assert list(executor.map(Evaluate(), [], {"weights": state_of(setup.model)})) == []


def test_calls_may_overlap_and_do_not_mix(executor_of, make_setup):
    setup = make_setup(compose(scaffold()))
    shared = {"weights": state_of(setup.model)}
    with executor_of(setup) as executor:
        first = executor.map(Evaluate(), PIECES, shared)
        second = executor.map(MeasureActivations(), pieces_of(30), shared)
        assert len(list(second)) == 1
        assert [int(result.confusion.sum()) for result in first] == [7, 4, 19]


@pytest.mark.parametrize("asked", [0, 1])
def test_a_call_that_is_closed_begins_no_more_work_and_the_next_call_works(
    executor_of, visiting, asked
):
    """Also before its first result was asked for, when a generator would not have begun."""
    setup, visits = visiting()
    with executor_of(setup) as executor:
        tasks, results = training(setup, executor)
        assert len(tasks) > 3
        for _ in range(asked):
            next(results)
        results.close()
        assert list(results) == []
        evaluations = executor.map(Evaluate(), PIECES, {"weights": state_of(setup.model)})
        assert len(list(evaluations)) == 3
        # One message may be on its way when the call is closed: of at most four tasks.
        assert len(visits()) < sum(len(task) for task in tasks)


@pytest.mark.parametrize(
    ("fails", "words"),
    [("divides", "client 4 divides by zero"), ("stops", "a StopIteration, as of next")],
)
def test_an_error_of_a_client_names_it_and_the_round(executor_of, visiting, fails, words):
    setup, visits = visiting(fails)
    with executor_of(setup) as executor:
        _, results = training(setup, executor)
        with pytest.raises(ClientFailed, match=words) as error:
            list(results)
        assert (error.value.client, error.value.round) == (4, 1)
        # The executor is of use afterwards.
        evaluations = executor.map(Evaluate(), PIECES, {"weights": state_of(setup.model)})
        assert len(list(evaluations)) == 3
    assert "4" in visits()


def test_an_error_of_an_evaluation_names_its_images(executor_of, make_setup):
    setup = make_setup(scaffold(), ray=RayOptions(check_repeat=False))
    with executor_of(replace(setup, model=Broken())) as executor:
        results = executor.map(Evaluate(2), PIECES, {"weights": {}})
        words = r"(?s)^evaluation of test images 0 to \d+ failed.*the model divides by zero"
        with pytest.raises(ClientFailed, match=words) as error:
            list(results)
        assert (error.value.client, error.value.round) == (None, 2)


def test_a_memory_is_recalled_as_it_was_remembered(executor_of, make_setup):
    setup = make_setup(scaffold())
    with executor_of(setup) as executor:
        round = engine.play(setup, engine.start(setup, executor), executor)
        assert round.memories
        for memory in round.memories.values():
            packed = executor.recall(memory)
            again = executor.recall(executor.remember(packed))
            assert packed.skeleton == again.skeleton
            assert {name: buffer.tobytes() for name, buffer in packed.buffers.items()} == {
                name: buffer.tobytes() for name, buffer in again.buffers.items()
            }
