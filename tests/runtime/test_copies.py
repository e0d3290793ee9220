"""Large trees reach many nodes by way of others, in place of all from the driver's node one after the other."""

import os
import signal
import time
from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest
import ray

from rayfed.methods import compose, scaffold
from rayfed.runtime import dispatch, internals, ray_workers
from rayfed.runtime.crew import TICK, Member
from rayfed.runtime.dispatch import Dispatch
from rayfed.runtime.stage import Call, Stage
from tests.runtime.test_nodes import IN_STORE, PATIENT, Slow


def dispatch_to(nodes, actors=2):
    """Work for actors on so many nodes, as far as no Ray is needed: its actors are names, which are never done."""
    members = [
        Member(f"{node}.{number}", None, node_id=node) for number in range(actors) for node in nodes
    ]
    calls = [Call(1, task=(client,)) for client in range(len(members))]
    stage = Stage("train", 1, calls, lambda actor, calls: [ray.ObjectRef(os.urandom(28))], None)
    dispatched = Dispatch(SimpleNamespace(idle=deque(members)), None, 0, None, trees={None: 0.0})
    dispatched.begin(stage)
    return dispatched


def at_work(dispatched):
    return {message.member.node_id for message in dispatched._working.values()}


@pytest.mark.parametrize("count", [1, 2, 3, 9, 27, 100])
def test_two_nodes_per_copy_fetch_a_tree_at_once(monkeypatch, count):
    nodes = [f"node-{number}" for number in range(count)]
    copies = {"driver"}
    monkeypatch.setattr(internals, "holders", lambda trees: copies)
    dispatched, waves = dispatch_to(nodes), 0
    while len(at_work(dispatched)) < count:
        fetching = at_work(dispatched) - copies
        assert len(fetching) == 2 * len(copies)
        assert len(dispatched._working) == 2 * len(at_work(dispatched)), (
            "all actors of a node wait for the same copy"
        )
        assert dispatched._until_something_is_due() == TICK
        copies |= fetching
        dispatched._hand_out()
        waves += 1
    assert 3**waves <= count + 2
    assert not dispatched.crew.idle


def test_a_node_that_holds_a_copy_never_waits_and_without_trees_none_does(monkeypatch):
    nodes = [f"node-{number}" for number in range(9)]
    for copies in ({"driver", *nodes}, None):
        monkeypatch.setattr(internals, "holders", lambda trees, copies=copies: copies)
        assert not dispatch_to(nodes).crew.idle


def test_work_that_began_before_a_tree_was_put_does_not_fetch_it(monkeypatch):
    """As an evaluation that still goes on when the next round begins."""
    nodes = [f"node-{number}" for number in range(9)]
    monkeypatch.setattr(internals, "holders", lambda trees: {"driver", *nodes})
    dispatched = dispatch_to(nodes[:6], actors=1)
    monkeypatch.setattr(internals, "holders", lambda trees: {"driver"})
    dispatched.trees = {None: time.monotonic()}
    dispatched.crew.idle.extend(Member(f"{node}.0", None, node_id=node) for node in nodes[6:])
    calls = [Call(1, task=(client,)) for client in range(3)]
    dispatched.begin(
        Stage("train", 2, calls, lambda actor, calls: [ray.ObjectRef(os.urandom(28))], None)
    )
    assert at_work(dispatched) == {*nodes[:8]}


def test_a_call_that_waits_for_another_gpu_goes_there_once_its_node_may_fetch(monkeypatch):
    copies = {"driver"}
    monkeypatch.setattr(internals, "holders", lambda trees: copies)
    dispatched = dispatch_to(["a", "b"], actors=1)
    stage = Stage(
        "train", 1, [Call(1, task=(9,))], lambda actor, calls: [ray.ObjectRef(os.urandom(28))], None
    )
    stage.faulty = {0: ("a", "")}
    dispatched.crew.idle.extend(
        [Member("a.1", None, node_id="a"), Member("c.0", None, node_id="c")]
    )
    dispatched.begin(stage)
    assert dispatched._until_something_is_due() == TICK, (
        "c may not fetch yet, and is looked at again"
    )
    copies |= {"a", "b"}
    dispatched._hand_out()
    assert at_work(dispatched) == {"a", "b", "c"}


def test_a_ray_that_does_not_tell_of_copies_has_all_nodes_fetch_at_once(monkeypatch):
    monkeypatch.setitem(internals.NAMES, "holders", "ray:gone")
    assert not dispatch_to([f"node-{number}" for number in range(9)]).crew.idle


def test_a_silent_node_holds_up_no_other_for_long(monkeypatch):
    monkeypatch.setattr(internals, "holders", lambda trees: {"driver"})
    dispatched = dispatch_to(["a", "b", "c", "d"], actors=1)
    assert at_work(dispatched) == {"a", "b"}
    monkeypatch.setattr(dispatch, "FETCH", 0.0)
    dispatched._hand_out()
    assert at_work(dispatched) == {"a", "b", "c", "d"}


@pytest.fixture
def watched(monkeypatch):
    """All trees are large ones. The numbers of nodes that had a copy, each time that was asked; and what to do then."""
    seen, holders, harm = [], internals.holders, []

    def ask(trees):
        copies = holders(trees)
        seen.append(len(copies) if copies else None)
        if harm and seen[-1] == 2:
            harm.pop()()
        return copies

    monkeypatch.setattr(internals, "holders", ask)
    monkeypatch.setattr(ray_workers, "SMALL", 0)
    monkeypatch.setattr(ray_workers, "LARGE", 0)
    return seen, harm


@pytest.mark.slow
def test_copies_are_known_as_nodes_have_them_and_change_no_bit(
    watched, a_cluster, make_site, here, played, pool_on
):
    site = make_site(scaffold(), clients_per_round=6, num_rounds=3)
    expected = here(site)
    with a_cluster(IN_STORE, num_cpus=0) as cluster:
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        with pool_on(site, "copies", actors=3) as pool:
            assert played(site, pool) == expected
    assert {*watched[0]} >= {1, 4}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["lost", "silent"])
def test_a_node_that_goes_while_others_fetch_changes_no_bit(
    watched, a_cluster, make_site, here, played, pool_on, how, caplog
):
    site = make_site(compose(scaffold(), Slow()), clients_per_round=6, num_rounds=3)
    expected = here(site)
    with a_cluster({**IN_STORE, **(PATIENT if how == "silent" else {})}, num_cpus=0) as cluster:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
        raylet = nodes[1].all_processes["raylet"][0].process.pid
        gone = (
            partial(cluster.remove_node, nodes[1])
            if how == "lost"
            else partial(os.kill, raylet, signal.SIGSTOP)
        )
        watched[1].append(gone)
        try:
            with pool_on(site, "copies", actors=3, deadline=6.0) as pool:
                assert played(site, pool) == expected
        finally:
            if how == "silent":
                os.kill(raylet, signal.SIGCONT)
    assert not watched[1]
    assert "running it again" in caplog.text
