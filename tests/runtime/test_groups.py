"""Sums that are added in groups on their way to the driver: the bits of one process, whatever is lost on the way."""

import os
import re
import signal
from collections import deque
from types import SimpleNamespace

import pytest
import ray
import torch
from ray.exceptions import ObjectLostError

from rayfed.methods import compose, fedavg, scaffold
from rayfed.rounds import tasks
from rayfed.rounds.tasks import GROUP, MOST_BYTES, add_up, grouped
from rayfed.runtime.crew import Member
from rayfed.runtime.dispatch import Dispatch
from rayfed.runtime.stage import Answer, Call, Stage
from tests.runtime.test_nodes import IN_STORE, PATIENT, Slow

MANY = [[20] * 4, *[[2] * 4] * 12]  # 13 clients, of which some share a task


@pytest.fixture
def in_groups(monkeypatch):
    """Groups of at most three tasks, however small the model is."""
    monkeypatch.setattr(tasks, "MOST_BYTES", 0)
    monkeypatch.setattr(tasks, "GROUP", 3)


@pytest.fixture
def site(make_site):
    return make_site(scaffold(), counts=MANY, clients_per_round=13, num_rounds=3, task_images=20)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 65, 2000])
def test_groups_are_tasks_in_a_row_of_much_the_same_number(count):
    given = [(client,) for client in range(count)]
    groups = grouped(given, MOST_BYTES)
    assert [task for group in groups for task in group] == given
    sizes = [len(group) for group in groups]
    assert len(groups) == -(-count // GROUP)
    assert max(sizes) - min(sizes) <= 1
    assert grouped(given, MOST_BYTES // (2 * count)) == [[task] for task in given], (
        "what is small goes alone"
    )


def test_a_rounds_total_is_the_sum_of_its_groups_sums(in_groups, monkeypatch, site, here):
    sums = []

    def added(stage, replies):
        replies = [*replies]
        sums.append(replies)
        return add_up(stage, replies)

    monkeypatch.setattr("rayfed.runtime.this_process.add_up", added)
    here(site)
    of_round = sums[: len(sums) // 3]
    assert len(of_round) > 2
    assert max(map(len, of_round)) == 3


def test_groups_change_the_last_bits_at_most(in_groups, monkeypatch, make_site, play):
    def played():
        return play(
            make_site(scaffold(), counts=MANY, clients_per_round=13, num_rounds=1, task_images=20)
        )[1].weights

    together = played()
    monkeypatch.setattr(tasks, "MOST_BYTES", MOST_BYTES)
    for name, alone in played().items():
        torch.testing.assert_close(together[name], alone, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("actors", [1, 2])
def test_groups_have_the_same_bits_on_ray(in_groups, cluster, site, here, on_ray, actors):
    assert on_ray(site, actors) == here(site)


def test_a_sum_waits_for_all_that_it_adds_and_for_what_is_made_again():
    calls = [Call(1, task=(client,), num_objects=1) for client in range(3)] + [
        Call(3, num_objects=1, adds=range(3))
    ]
    stage = Stage(
        "train", 1, calls, None, lambda error, calls: pytest.fail("none of the trees is lost")
    )
    assert (stage.turns, [stage.next_message(1) for _ in range(3)]) == (
        [3],
        [range(i, i + 1) for i in range(3)],
    )
    references = [ray.ObjectRef(os.urandom(28)) for _ in range(3)]
    for index in (2, 0, 1):
        assert not stage.waiting
        stage.answered(index, Answer(None, None, [references[index]], 0.0))
    assert (stage.done, stage.next_message(1), stage.text(range(3, 4))) == (
        3,
        range(3, 4),
        "the sum of tasks 1 to 3, round 1",
    )
    lost = ObjectLostError(references[1].hex(), "", "")
    assert (stage.to_run_again(range(3, 4), lost), stage.done) == (range(1, 2), 2)
    stage.wait_again(range(1, 2))
    assert [*stage.waiting] == [1]
    stage.next_message(1)
    stage.answered(1, Answer(None, None, [references[1]], 0.0))
    assert [*stage.waiting] == [3]


def test_sums_are_made_on_nodes_that_make_the_fewest():
    """As far as no Ray is needed: its actors are names, which are never done."""
    calls = [
        Call(1, num_objects=1, adds=range(10 + 2 * number, 12 + 2 * number)) for number in range(4)
    ]
    calls += [Call(1)] * 6 + [Call(1, task=(client,), num_objects=1) for client in range(8)]
    made = []

    def add(actor, answers):
        made.append(actor)
        return [ray.ObjectRef(os.urandom(28))] * 2

    stage = Stage("train", 1, calls, None, None, add=add)
    stage.waiting.clear()
    members = deque(
        Member(f"{node}-{number}", f"{node}-{number}", node_id=node)
        for node in "ab"
        for number in range(3)
    )
    dispatch = Dispatch(SimpleNamespace(idle=members), None, 0, None)
    for index in range(10, 18):
        stage.answered(index, Answer(Member("x", "x", node_id="c"), None, [None], 0.0))
    dispatch.begin(stage)
    assert [actor[0] for actor in made] == ["a", "b", "a", "b"]


@pytest.fixture
def at_first_sum(monkeypatch):
    """Does something just before the first sum of round 2 is asked for, and notes the actor that is to make it."""

    def arrange(harm):
        harmed = []

        def send(stage, actor, indices, send=Stage.send):
            if stage.calls[indices[0]].adds and stage.round == 2 and not harmed:
                harmed.append(actor)
                harm(actor)
            return send(stage, actor, indices)

        monkeypatch.setattr(Stage, "send", send)
        return harmed

    return arrange


@pytest.mark.slow
def test_an_actor_dies_while_it_adds(in_groups, cluster, site, here, on_ray, at_first_sum, caplog):
    expected = here(site)
    harmed = at_first_sum(lambda actor: ray.kill(actor, no_restart=False))
    assert on_ray(site, 2) == expected
    assert harmed
    assert re.search(r"the sum of tasks \d+ to \d+, round 2: lost with actor-\d on", caplog.text)


@pytest.mark.slow
def test_a_node_is_lost_with_sums_that_are_to_be_added(
    in_groups, a_cluster, site, played, here, pool_on, at_first_sum, caplog
):
    expected = here(site)
    with a_cluster(IN_STORE, num_cpus=1) as cluster:
        node = cluster.add_node(num_cpus=1)
        harmed = at_first_sum(lambda actor: cluster.remove_node(node))
        with pool_on(site, "node", actors=2) as pool:
            assert played(site, pool) == expected
    assert harmed
    assert re.search(r"round 2: (an object that it gave was lost|lost with actor)", caplog.text)


@pytest.mark.slow
def test_a_silent_node_does_not_hold_up_a_sum(
    in_groups, a_cluster, make_site, played, here, pool_on, at_first_sum, caplog
):
    """Its raylet is stopped when sums that lie there are to be added elsewhere."""
    site = make_site(
        compose(fedavg(), Slow()), counts=MANY, clients_per_round=13, num_rounds=2, task_images=20
    )
    expected = here(site)
    with a_cluster({**IN_STORE, **PATIENT}, num_cpus=1) as cluster:
        node = cluster.add_node(num_cpus=1)
        raylet = node.all_processes["raylet"][0].process.pid
        harmed = at_first_sum(lambda actor: os.kill(raylet, signal.SIGSTOP))
        try:
            with pool_on(site, "silent", actors=2, deadline=6.0) as pool:
                assert played(site, pool) == expected
        finally:
            os.kill(raylet, signal.SIGCONT)
    assert harmed
