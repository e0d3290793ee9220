"""How many actors fit on the nodes of a cluster, by examples worked out by hand."""

import pytest

from rayfed.base.errors import InputError
from rayfed.job import RayOptions
from rayfed.runtime.placement import capacity, num_actors, warn_of_idle_gpus

TWO_NODES = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}]


@pytest.mark.parametrize(
    ("asked", "fit"),
    [
        ({}, 6),
        ({"num_cpus": 3}, 1),  # 3 of the 4 on one node; the 1 + 2 that are left lie on two nodes
        ({"num_cpus": 0.5}, 12),
        ({"num_gpus": 0.5}, 2),
        ({"num_gpus": 0.3}, 3),
        ({"num_gpus": 0.18}, 4),  # five shares of a GPU, but 4 CPUs
        ({"num_gpus": 2}, 0),
        ({"num_gpus": "auto"}, 1),  # until it is measured
    ],
)
def test_capacity_counts_each_node_by_itself(asked, fit):
    assert capacity(RayOptions(**asked), TWO_NODES) == fit


def test_an_actor_has_a_fraction_of_one_gpu_or_whole_gpus_of_one_node():
    nodes = [{"CPU": 99.0, "GPU": 3.0}, {"CPU": 99.0, "GPU": 2.0}, {"CPU": 99.0}]
    assert capacity(RayOptions(num_gpus=1 / 3), nodes) == 15
    assert capacity(RayOptions(num_gpus=2), nodes) == 2


@pytest.mark.parametrize(
    ("asked", "share"), [(0.3, 1 / 3), (0.18, 0.2), (0.25, 0.25), (0.51, 1), (1, 1), (2, 2), (0, 0), ("auto", 1)]
)
def test_gpu_fractions_are_rounded_up_to_one_kth(asked, share):
    assert RayOptions(num_gpus=asked).gpu_share == share


def test_too_many_actors_are_refused_with_the_number_that_fits():
    assert num_actors(RayOptions(), TWO_NODES, clients_per_round=4) == 4
    with pytest.raises(InputError, match=r"ray.actors = 7.*6 CPU and 1 GPU on 2 nodes, so at most 6 fit"):
        num_actors(RayOptions(actors=7), TWO_NODES, clients_per_round=10)
    with pytest.raises(InputError, match=r"no actor with 1 CPU and 2 GPU fits"):
        num_actors(RayOptions(num_gpus=2), TWO_NODES, clients_per_round=10)


def test_a_number_of_actors_on_gpus_is_not_refused_before_their_part_of_a_gpu_is_measured():
    assert num_actors(RayOptions(actors=4, num_gpus="auto"), TWO_NODES, clients_per_round=4) == 4
    with pytest.raises(InputError, match=r"no actor with 1 CPU and 1 GPU fits"):
        num_actors(RayOptions(actors=4, num_gpus="auto"), [{"CPU": 2.0}], clients_per_round=4)


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
    warn_of_idle_gpus(RayOptions(num_gpus=asked), [{"CPU": 4.0, "GPU": float(count)} for count in gpus])
    assert warning in caplog.text and bool(warning) == bool(caplog.text)
