"""What is asked for against what there is, by hand and by law; and what a client takes of a GPU."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayfed.job import RayOptions
from rayfed.methods import fedavg, scaffold
from rayfed.methods.part import Switch
from rayfed.runtime.placement import (
    GPU_PART,
    MOST_ON_A_GPU,
    Place,
    capacity,
    memory_cap,
    num_actors,
    settled,
    share_of_gpu,
    where,
)
from rayfed.runtime.probe import peak_bytes, rehearse
from rayfed.values import InputError

GIB = 2**30
TWO_NODES = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 2.0}]


@pytest.mark.parametrize(
    ("asked", "fit"),
    [
        ({}, 6),
        ({"num_cpus": 3}, 1),  # 3 of 4, and not 3 of the 2 + 1 that are left over on two nodes
        ({"num_cpus": 0.5}, 12),
        ({"num_gpus": 0.5}, 2),
        ({"num_gpus": 0.3}, 3),
        ({"num_gpus": 0.18}, 4),  # a fifth of a GPU each, and 4 CPUs for 5
        ({"num_gpus": 2}, 0),
        ({"num_gpus": "auto"}, 1),  # until it is measured
    ],
)
def test_capacity_counts_each_node_by_itself(asked, fit):
    assert capacity(RayOptions(**asked), TWO_NODES) == fit


def test_a_fraction_lies_on_one_gpu_and_a_whole_number_on_one_node():
    nodes = [{"CPU": 99.0, "GPU": 3.0}, {"CPU": 99.0, "GPU": 2.0}, {"CPU": 99.0}]
    assert capacity(RayOptions(num_gpus=1 / 3), nodes) == 15
    assert capacity(RayOptions(num_gpus=2), nodes) == 2


@pytest.mark.parametrize(
    ("asked", "share"), [(0.3, 1 / 3), (0.18, 0.2), (0.25, 0.25), (0.51, 1), (1, 1), (2, 2), (0, 0), ("auto", 1)]
)
def test_gpu_fractions_are_rounded_up_to_one_kth(asked, share):
    assert RayOptions(num_gpus=asked).gpu_share == share


def test_what_does_not_fit_is_refused_with_what_does():
    assert num_actors(RayOptions(), TWO_NODES, clients_per_round=4) == 4
    with pytest.raises(InputError, match=r"ray.actors = 7.*6 CPU and 1 GPU on 2 nodes, so at most 6 fit"):
        num_actors(RayOptions(actors=7), TWO_NODES, clients_per_round=10)
    with pytest.raises(InputError, match=r"no actor with 1 CPU and 2 GPU fits"):
        num_actors(RayOptions(num_gpus=2), TWO_NODES, clients_per_round=10)


def test_auto_is_no_gpu_where_there_is_none():
    assert settled(RayOptions(num_gpus="auto"), [{"CPU": 2.0}]).gpu_share == 0
    assert settled(RayOptions(num_gpus="auto"), TWO_NODES).num_gpus == "auto"
    assert settled(RayOptions(num_gpus=0.5), [{"CPU": 2.0}]).num_gpus == 0.5, "is refused later, and in words"


@example(1, GIB)
@given(st.integers(1, 80 * GIB), st.integers(GIB, 80 * GIB))
def test_those_who_share_a_gpu_fit_on_it_and_one_more_would_not(client, gpu):
    if client > GPU_PART * gpu:
        with pytest.raises(InputError, match=r"a client needs .* GiB of GPU memory"):
            share_of_gpu(client, gpu)
        return
    share = share_of_gpu(client, gpu)
    actors = round(1 / share)
    assert actors * client <= GPU_PART * gpu
    assert actors == MOST_ON_A_GPU or GPU_PART * gpu < (actors + 1) * client
    assert RayOptions(num_gpus=share).gpu_share == pytest.approx(share), "Ray can place it as it is"
    assert actors * memory_cap(RayOptions(num_gpus=share).gpu_share) <= 1.0 + 1e-9


def test_whoever_has_a_gpu_alone_may_fill_it():
    assert memory_cap(1) == memory_cap(2) == 1
    assert memory_cap(0.25) == pytest.approx(0.225)


def test_pool_sizes_are_said_by_node_and_device():
    places = [Place("10.0.0.1", "a", "cuda:0")] * 2 + [Place("10.0.0.1", "a", "cpu"), Place("10.0.0.2", "b", "cpu")]
    assert where(places) == "1 actor on 10.0.0.1, 1 on 10.0.0.2 (cpu); 2 on 10.0.0.1 (cuda:0)"
    assert where([Place("10.0.0.1", node, "cpu") for node in "ab"]) == "1 actor on 10.0.0.1, 1 on 10.0.0.1 (cpu)"
    assert where([]) == "no actor"


def test_the_largest_client_is_rehearsed_in_the_first_and_the_last_round(make_site):
    site = make_site(Switch(at=3, before=fedavg(), after=scaffold()), num_rounds=3)
    last = rehearse(site)
    sizes = [site.federation.num_examples(client) for client in range(site.federation.num_clients)]
    assert last.round == 3
    assert [row.num_examples for row in last.clients] == [max(sizes)]
    assert len(last.memories) == 1, "scaffold has been at work"
    assert peak_bytes(site) == 0, "there is no GPU to measure"
