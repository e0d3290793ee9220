"""Large trees reach many nodes by way of others, in place of all from the driver's node one after the other."""

import os
from collections import deque
from types import SimpleNamespace

import pytest
import ray

from rayfed.methods import scaffold
from rayfed.runtime import dispatch, internals, ray_workers
from rayfed.runtime.crew import Member
from rayfed.runtime.dispatch import Dispatch
from rayfed.runtime.stage import Call, Stage


def dispatch_to(nodes, actors=2):
    """Work for actors on so many nodes, as far as no Ray is needed: its actors are names, which are never done."""
    members = [Member(f"{node}.{number}", None, node_id=node) for number in range(actors) for node in nodes]
    calls = [Call(1, task=(client,)) for client in range(len(members))]
    stage = Stage("train", 1, calls, lambda actor, calls: [ray.ObjectRef(os.urandom(28))], None)
    dispatched = Dispatch(SimpleNamespace(idle=deque(members)), None, 0, None, trees=[None])
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
        assert len(dispatched._working) == 2 * len(at_work(dispatched)), "all actors of a node wait for the same copy"
        assert dispatched._held_back
        copies |= fetching
        dispatched._hand_out()
        waves += 1
    assert 3**waves <= count + 2
    assert not dispatched.crew.idle
    assert not dispatched._held_back


def test_a_node_that_holds_a_copy_never_waits_and_without_trees_none_does(monkeypatch):
    nodes = [f"node-{number}" for number in range(9)]
    for copies in ({"driver", *nodes}, None):
        monkeypatch.setattr(internals, "holders", lambda trees, copies=copies: copies)
        assert not dispatch_to(nodes).crew.idle


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


@pytest.mark.slow
def test_copies_are_known_as_nodes_have_them_and_change_no_bit(
    a_cluster, make_site, here, played, pool_on, monkeypatch
):
    seen, holders = [], internals.holders

    def watched(trees):
        seen.append(holders(trees))
        return seen[-1]

    monkeypatch.setattr(internals, "holders", watched)
    monkeypatch.setattr(ray_workers, "SMALL", 0)
    monkeypatch.setattr(ray_workers, "LARGE", 0)
    site = make_site(scaffold(), clients_per_round=6, num_rounds=3)
    expected = here(site)
    with a_cluster({"RAY_max_direct_call_object_size": "1"}, num_cpus=0) as cluster:
        for _ in range(3):
            cluster.add_node(num_cpus=1)
        with pool_on(site, "copies", actors=3) as pool:
            assert played(site, pool) == expected
    assert {len(nodes) for nodes in seen if nodes is not None} >= {1, 4}
