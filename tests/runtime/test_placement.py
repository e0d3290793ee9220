"""How many actors fit on the nodes of a cluster, by examples; and which GPUs they use, by a model
of Ray.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfed.base.errors import InputError
from rayfed.job import RayOptions
from rayfed.runtime.placement import (
    capacity,
    num_actors,
    spread,
    warn_of_idle_gpus,
    warn_of_small_stores,
)

TWO_NODES = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}]


@pytest.mark.parametrize(
    ("asked", "fit"),
    [
        ({"num_gpus": 0}, 6),
        # 3 of the 4 on one node; the 1 + 2 that are left lie on two nodes.
        (
            {"num_cpus": 3, "num_gpus": 0},
            1,
        ),
        ({"num_cpus": 0.5, "num_gpus": 0}, 12),
        ({"num_gpus": 0.5}, 2),
        ({"num_gpus": 0.3}, 3),
        # Five shares of a GPU, but 4 CPUs.
        ({"num_gpus": 0.18}, 4),
        ({"num_gpus": 2}, 0),
        # A whole GPU, until it is measured.
        ({}, 1),
    ],
)
def test_capacity_counts_each_node_by_itself(asked, fit):
    assert capacity(RayOptions(**asked), TWO_NODES) == fit


def test_an_actor_has_its_memory_on_one_node():
    nodes = [{"CPU": 8.0, "memory": 10e9}, {"CPU": 8.0, "memory": 3e9}]
    asked = [RayOptions(memory=memory, num_gpus=0) for memory in (0, 1, 3, 3.5, 5, 10, 10.1)]
    assert [capacity(options, nodes) for options in asked] == [16, 11, 4, 2, 2, 1, 0]
    assert capacity(asked[-1], [{"CPU": 2.0}]) == 2, "of a Ray that is to be started"
    few_cpus = RayOptions(memory=1, num_cpus=4, num_gpus=0)
    assert capacity(few_cpus, nodes) == 4
    words = r"1 CPU and 0 GPU and 10\.1 GB of memory"
    most = r"there are 16 CPU and 0 GPU on 2 nodes, and a node has at most 10\.0 GB for actors"
    with pytest.raises(InputError, match=f"^no actor with {words} fits: {most}; .* or ray.memory$"):
        num_actors(asked[-1], nodes, 4)
    with pytest.raises(InputError, match=f"{most}, so at most 4 fit; ask for fewer actors"):
        num_actors(RayOptions(memory=3, num_gpus=0, actors=5), nodes, 9)


def test_what_is_left_of_a_number_by_rounding_takes_no_actor_away():
    """In floating point, 0.3 / 0.1 is below 3, as is what Ray counts of a node's resources."""
    assert 0.3 / 0.1 < 3
    assert capacity(RayOptions(num_cpus=0.1, num_gpus=0), [{"CPU": 0.3}]) == 3
    nodes = [{"CPU": 8.0, "GPU": 2 - 1e-9}]
    assert [capacity(RayOptions(num_gpus=gpus), nodes) for gpus in (2, 1, 0.5)] == [1, 2, 4]


def test_an_actor_has_a_fraction_of_one_gpu_or_whole_gpus_of_one_node():
    nodes = [{"CPU": 99.0, "GPU": 3.0}, {"CPU": 99.0, "GPU": 2.0}, {"CPU": 99.0}]
    assert capacity(RayOptions(num_gpus=1 / 3), nodes) == 15
    assert capacity(RayOptions(num_gpus=2), nodes) == 2


@pytest.mark.parametrize(
    ("asked", "share"),
    [(0.3, 1 / 3), (0.18, 0.2), (0.25, 0.25), (0.51, 1), (1, 1), (2, 2), (0, 0), ("auto", 1)],
)
def test_gpu_fractions_are_rounded_up_to_one_kth(asked, share):
    assert RayOptions(num_gpus=asked).gpu_share == share


def test_too_many_actors_are_refused_with_the_number_that_fits():
    assert num_actors(RayOptions(num_gpus=0), TWO_NODES, clients_per_round=4) == 4
    with pytest.raises(
        InputError, match=r"ray.actors = 7.*6 CPU and 1 GPU on 2 nodes, so at most 6 fit"
    ):
        num_actors(RayOptions(actors=7, num_gpus=0), TWO_NODES, clients_per_round=10)
    with pytest.raises(
        InputError,
        match=r"no actor with 1 CPU and 2 GPU fits: .*; leave ray.num_gpus out to use what is there",
    ):
        num_actors(RayOptions(num_gpus=2), TWO_NODES, clients_per_round=10)


def test_a_number_of_actors_on_gpus_is_not_refused_before_their_part_of_a_gpu_is_measured():
    assert num_actors(RayOptions(actors=4, num_gpus="auto"), TWO_NODES, clients_per_round=4) == 4
    with pytest.raises(InputError, match=r"no actor with 1 CPU and 1 GPU fits"):
        num_actors(RayOptions(actors=4, num_gpus="auto"), [{"CPU": 2.0}], clients_per_round=4)


def as_ray_places(options, nodes, count, seed):
    """How many actors each GPU gets, node by node: any node that has room, and there the fullest
    GPU that has room.
    """
    part, order = round(1 / options.gpu_share), random.Random(seed)
    placed = [[0] * int(node["GPU"]) for node in nodes]
    for _ in range(count):
        room = [
            gpus
            for gpus, node in zip(placed, nodes, strict=True)
            if sum(gpus) < node["CPU"] and gpus and min(gpus) < part
        ]
        gpus = order.choice(room)
        gpus[gpus.index(max(number for number in gpus if number < part))] += 1
    return placed


def even(placed, nodes):
    """Whether no GPU is idle, on a node with CPUs for it, while another has two actors."""
    two = any(number > 1 for gpus in placed for number in gpus)
    usable = [min(node["CPU"], node["GPU"]) for node in nodes]
    idle = any(sum(map(bool, gpus)) < count for gpus, count in zip(placed, usable, strict=True))
    return not (two and idle)


@pytest.mark.parametrize("gpus", [[1], [2], [4], [8], [1, 1], [2, 2], [4, 4], [1, 1, 2, 4], [4, 0]])
def test_no_gpu_is_idle_while_another_has_two_actors(gpus):
    nodes = [{"CPU": 64.0, "GPU": float(count)} for count in gpus]
    for k in range(1, 9):
        for cohort in range(2, 17):
            options = spread(RayOptions(num_gpus=1 / k), nodes, cohort)
            count = num_actors(options, nodes, cohort)
            assert options.gpu_share >= 1 / k - 1e-9, "an actor has the part that it asked for"
            assert count > min(cohort, k * sum(gpus)) / 2, "at most a GPU's last places are left"
            for seed in range(3):
                placed = as_ray_places(options, nodes, count, seed)
                assert even(placed, nodes), (k, cohort, placed)


SOME_NODES = st.lists(
    st.builds(
        lambda cpus, gpus: {"CPU": float(cpus), "GPU": float(gpus)},
        st.integers(0, 9),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=4,
)


@given(SOME_NODES, st.integers(1, 8), st.integers(1, 20), st.integers())
def test_neither_where_nodes_have_few_cpus(nodes, k, cohort, seed):
    options = spread(RayOptions(num_gpus=1 / k), nodes, cohort)
    count = min(cohort, capacity(options, nodes))
    assert even(as_ray_places(options, nodes, count, seed), nodes)


@pytest.mark.parametrize(
    ("gpus", "most_on_a_gpu", "cohort", "actors", "on_a_gpu"),
    [
        (4, 4, 4, 4, 1),
        (4, 4, 6, 4, 1),
        (4, 4, 7, 7, 2),
        (4, 4, 16, 16, 4),
        (4, 4, 99, 16, 4),
        (8, 2, 10, 8, 1),
    ],
)
def test_actors_are_few_enough_to_be_spread_over_all_gpus(
    gpus, most_on_a_gpu, cohort, actors, on_a_gpu
):
    nodes = [{"CPU": 64.0, "GPU": float(gpus)}]
    options = spread(RayOptions(num_gpus=1 / most_on_a_gpu), nodes, cohort)
    assert (num_actors(options, nodes, cohort), options.gpu_share) == (actors, 1 / on_a_gpu)
    kept = spread(
        RayOptions(num_gpus=1 / most_on_a_gpu, actors=min(cohort, 6)), nodes, min(cohort, 6)
    )
    assert num_actors(kept, nodes, cohort) == min(cohort, 6), (
        "a number that the user has set is kept"
    )


@pytest.mark.parametrize(
    ("asked", "idle"), [((6, 0.5), 1), ((4, 0.25), 3), ((8, 0.5), 0), ((7, 0.5), 0), ((1, 0.5), 0)]
)
def test_actors_that_leave_gpus_idle_as_the_user_has_set_both_are_warned_about(caplog, asked, idle):
    actors, share = asked
    warn_of_idle_gpus(RayOptions(actors=actors, num_gpus=share), [{"CPU": 64.0, "GPU": 4.0}])
    assert (f"Ray fills one GPU after the other, and {idle} GPU stay idle" in caplog.text) == bool(
        idle
    )
    assert bool(caplog.text) == bool(idle)


@pytest.mark.parametrize(
    ("megabytes", "small"), [((800, 799), True), ((800, 800), False), ((), False)]
)
def test_a_store_that_holds_fewer_than_four_sums_is_warned_about(caplog, megabytes, small):
    warn_of_small_stores(
        10**8, [{"CPU": 1.0, "object_store_memory": each * 1e6} for each in megabytes]
    )
    assert (
        ("has 799.0 MB, and four sums of this model's updates have 800.0 MB" in caplog.text)
        == small
        == bool(caplog.text)
    )


@pytest.mark.parametrize(
    ("asked", "gpus", "warning"),
    [
        (0, [0, 2], "clients train on CPUs, and 2 GPU stay idle"),
        (2, [0, 2], "a client trains on one of its actor's GPUs"),
        (0.5, [0, 0], "torch sees no GPU here"),
        *[(asked, [0, 2], "") for asked in (0.5, 1, "auto")],
        *[(asked, [0, 0], "") for asked in (0, "auto")],
    ],
)
def test_gpus_that_are_asked_for_and_idle_or_absent_are_warned_about(caplog, asked, gpus, warning):
    warn_of_idle_gpus(
        RayOptions(num_gpus=asked), [{"CPU": 4.0, "GPU": float(count)} for count in gpus]
    )
    assert warning in caplog.text and bool(warning) == bool(caplog.text)
