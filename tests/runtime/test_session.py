"""Placement: what is asked for against what there is."""

import os

import pytest
import ray

from rayfed.job import RayOptions
from rayfed.methods import fedavg
from rayfed.runtime.session import capacity, num_actors, workers
from rayfed.values import InputError

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
    ],
)
def test_capacity_counts_each_node_by_itself(asked, fit):
    assert capacity(RayOptions(**asked), TWO_NODES) == fit


@pytest.mark.parametrize(
    ("asked", "share"), [(0.3, 1 / 3), (0.18, 0.2), (0.25, 0.25), (0.51, 1), (1, 1), (2, 2), (0, 0)]
)
def test_gpu_fractions_are_rounded_up_to_one_kth(asked, share):
    assert RayOptions(num_gpus=asked).gpu_share == share


def test_what_does_not_fit_is_refused_with_what_does():
    assert num_actors(RayOptions(), TWO_NODES, clients_per_round=4) == 4
    with pytest.raises(InputError, match=r"ray.actors = 7.*6 CPU and 1 GPU on 2 nodes, so at most 6 fit"):
        num_actors(RayOptions(actors=7), TWO_NODES, clients_per_round=10)
    with pytest.raises(InputError, match=r"no actor with 1 CPU and 2 GPU fits"):
        num_actors(RayOptions(num_gpus=2), TWO_NODES, clients_per_round=10)


def test_actors_have_their_share_of_a_gpu(cluster, make_site):
    with workers(RayOptions(address=cluster, num_gpus=0.5, actors=4), f"gpu-{os.getpid()}", make_site(fedavg())):
        free = ray.available_resources()
        assert free.get("GPU", 0) == 0
        names = [name for name in ray.util.list_named_actors() if name.startswith("gpu-")]
        assert sorted(names) == [f"gpu-{os.getpid()}/client-{i}" for i in range(4)]


def test_an_address_where_no_ray_answers_is_refused(make_site, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "1")
    with pytest.raises(InputError, match=r"ray.address = '127.0.0.1:1': no Ray answers there"):
        with workers(RayOptions(address="127.0.0.1:1"), "nobody", make_site(fedavg())):
            pass
