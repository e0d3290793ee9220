"""Sums that are added in groups on their way to the driver: the bits of one process, whatever is
lost on the way.
"""

import os
import re
import signal

import pytest
import ray
import torch

from rayfed.methods import compose, fedavg, scaffold
from rayfed.rounds import tasks
from rayfed.rounds.executor import AddUp, Train
from rayfed.rounds.messages import Assignment
from rayfed.rounds.tasks import LARGEST_GROUP, MOST_BYTES_UNGROUPED, add_up, grouped
from rayfed.runtime.items import Answer, ItemState, MapCall, QueuedItem, text_of
from rayfed.runtime.pool import Pool
from tests.runtime.test_nodes import IN_STORE, PATIENT, Slow

# 13 clients, of which some share a task.
MANY = [[20] * 4, *[[2] * 4] * 12]


@pytest.fixture
def in_groups(monkeypatch):
    """Groups of at most three tasks, however small the model is."""
    monkeypatch.setattr(tasks, "MOST_BYTES_UNGROUPED", 0)
    monkeypatch.setattr(tasks, "LARGEST_GROUP", 3)


@pytest.fixture
def setup(make_setup):
    return make_setup(scaffold(), counts=MANY, clients_per_round=13, num_rounds=3, task_images=20)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 65, 2000])
def test_groups_are_tasks_in_a_row_of_much_the_same_number(count):
    given = [(client,) for client in range(count)]
    groups = grouped(given, MOST_BYTES_UNGROUPED)
    assert [task for group in groups for task in group] == given
    sizes = [len(group) for group in groups]
    assert len(groups) == -(-count // LARGEST_GROUP)
    assert max(sizes) - min(sizes) <= 1
    assert grouped(given, MOST_BYTES_UNGROUPED // (2 * count)) == [[task] for task in given], (
        "what is small goes alone"
    )


def test_a_rounds_total_is_the_sum_of_its_groups_sums(in_groups, monkeypatch, setup, here):
    sums = []

    def added(stage, replies):
        replies = [*replies]
        sums.append(replies)
        return add_up(stage, replies)

    monkeypatch.setattr("rayfed.rounds.executor.add_up", added)
    here(setup)
    of_round = sums[: len(sums) // 3]
    assert len(of_round) > 2
    assert max(map(len, of_round)) == 3


def test_groups_change_the_last_bits_at_most(in_groups, monkeypatch, make_setup, play):
    def played():
        return play(
            make_setup(scaffold(), counts=MANY, clients_per_round=13, num_rounds=1, task_images=20)
        )[1].weights

    together = played()
    monkeypatch.setattr(tasks, "MOST_BYTES_UNGROUPED", MOST_BYTES_UNGROUPED)
    for name, alone in played().items():
        torch.testing.assert_close(together[name], alone, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("actors", [1, 2])
def test_groups_have_the_same_bits_on_ray(in_groups, cluster, setup, here, on_ray, actors):
    assert on_ray(setup, actors) == here(setup)


def test_a_sum_waits_for_all_that_it_adds_and_for_what_is_made_again():
    work = Train(1, {}, False)
    addends = [QueuedItem(work, [Assignment((client,), {})], 1, client) for client in range(3)]
    whole = QueuedItem(AddUp(1), None, 3, 3, addends)
    call = MapCall(work, {}, [whole], 1)
    assert [call.next_message(1, evenly=False) for _ in range(3)] == [[part] for part in addends]
    for part in reversed(addends):
        assert not call.waiting
        call.answered(part, Answer(None, None, ["a sum"], 0.0))
    assert (call.done, call.next_message(1, evenly=False), text_of([whole])) == (
        3,
        [whole],
        "the sum of tasks 1 to 3, round 1",
    )
    whole.state = ItemState.WAITING
    call.wait_again([addends[1]])
    assert (call.done, [*call.waiting]) == (2, [addends[1]])
    call.next_message(1, evenly=False)
    call.answered(addends[1], Answer(None, None, ["a sum"], 0.0))
    assert [*call.waiting] == [whole]


@pytest.fixture
def at_first_sum(monkeypatch):
    """Does something just before the first sum of round 2 is asked for, perhaps something else just
    after, and notes the actor that is to make it.
    """

    def arrange(harm, after=None):
        harmed = []

        def send(pool, call, items, worker, send=Pool._send):
            if not items[0].addends or call.work.round != 2 or harmed:
                return send(pool, call, items, worker)
            harmed.append(worker.actor)
            harm(worker.actor)
            sent = send(pool, call, items, worker)
            if after:
                after()
            return sent

        monkeypatch.setattr(Pool, "_send", send)
        return harmed

    return arrange


@pytest.mark.slow
def test_an_actor_dies_while_it_adds(in_groups, cluster, setup, here, on_ray, at_first_sum, caplog):
    expected = here(setup)
    stopped = []

    def stop(actor):
        """Stop the actor's process, which could otherwise have added up before it is killed."""
        stopped.append(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())))
        os.kill(stopped[0], signal.SIGSTOP)

    harmed = at_first_sum(stop, after=lambda: os.kill(stopped[0], signal.SIGKILL))
    assert on_ray(setup, 2) == expected
    assert harmed
    assert re.search(r"the sum of tasks \d+ to \d+, round 2: lost with actor-\d on", caplog.text)


@pytest.mark.slow
def test_a_node_is_lost_with_sums_that_are_to_be_added(
    in_groups, a_cluster, setup, played, here, pool_on, at_first_sum, caplog
):
    expected = here(setup)
    with a_cluster(IN_STORE, num_cpus=1) as cluster:
        node = cluster.add_node(num_cpus=1)
        harmed = at_first_sum(lambda actor: cluster.remove_node(node))
        with pool_on(setup, "node", actors=2) as pool:
            assert played(setup, pool) == expected
    assert harmed
    assert re.search(r"round 2: (an object that it gave was lost|lost with actor)", caplog.text)


@pytest.mark.slow
def test_a_silent_node_does_not_hold_up_a_sum(
    in_groups, a_cluster, make_setup, played, here, pool_on, at_first_sum, caplog
):
    """Its raylet is stopped when sums that lie there are to be added elsewhere."""
    setup = make_setup(
        compose(fedavg(), Slow()), counts=MANY, clients_per_round=13, num_rounds=2, task_images=20
    )
    expected = here(setup)
    with a_cluster({**IN_STORE, **PATIENT}, num_cpus=1) as cluster:
        node = cluster.add_node(num_cpus=1)
        raylet = node.all_processes["raylet"][0].process.pid
        harmed = at_first_sum(lambda actor: os.kill(raylet, signal.SIGSTOP))
        try:
            with pool_on(setup, "silent", actors=2, deadline=6.0) as pool:
                assert played(setup, pool) == expected
        finally:
            os.kill(raylet, signal.SIGCONT)
    assert harmed
