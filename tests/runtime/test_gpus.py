"""How a GPU is shared by the actors on it: for any sizes, and as far as no GPU is needed."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rayfed.errors import InputError
from rayfed.job import RayOptions
from rayfed.methods import fedavg, scaffold
from rayfed.methods.part import Switch
from rayfed.runtime.gpus import (
    GPU_PART,
    MOST_ON_A_GPU,
    memory_cap,
    peak_bytes,
    rehearse,
    share_as_measured,
    without_absent_gpus,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("asked", "gpus", "found"),
    [("auto", [0, 0], 0), ("auto", [0, 1], "auto"), (0.5, [0], 0.5)],  # the last is refused later
)
def test_auto_is_no_gpu_where_no_node_has_one(asked, gpus, found):
    nodes = [{"CPU": 2.0, "GPU": float(count)} if count else {"CPU": 2.0} for count in gpus]
    assert without_absent_gpus(RayOptions(num_gpus=asked), nodes) == RayOptions(num_gpus=found)


@example(1, GIB)
@given(st.integers(1, 80 * GIB), st.integers(GIB, 80 * GIB))
def test_as_many_clients_share_a_gpu_as_fit_on_it(client, gpu):
    if client > GPU_PART * gpu:
        with pytest.raises(InputError, match=r"a client needs [\d.]+ [MG]B of GPU memory"):
            share_as_measured(client, [gpu, 2 * gpu])
        return
    share = share_as_measured(client, [gpu, 2 * gpu])
    actors = round(1 / share)
    assert actors * client <= GPU_PART * gpu
    assert actors == MOST_ON_A_GPU or GPU_PART * gpu < (actors + 1) * client
    assert RayOptions(num_gpus=share).gpu_share == pytest.approx(share), "Ray can place it as it is"
    assert actors * memory_cap(RayOptions(num_gpus=share).gpu_share) <= 1.0 + 1e-9


def test_an_actor_alone_on_a_gpu_may_fill_it():
    assert memory_cap(1) == memory_cap(2) == 1
    assert memory_cap(0.25) == pytest.approx(0.225)


def test_the_largest_client_is_rehearsed_in_the_first_and_the_last_round(make_site):
    site = make_site(Switch(at=3, before=fedavg(), after=scaffold()), num_rounds=3)
    last = rehearse(site)
    sizes = [site.federation.num_examples(client) for client in range(site.federation.num_clients)]
    assert last.round == 3
    assert [row.num_examples for row in last.clients] == [max(sizes)]
    assert len(last.memories) == 1, "scaffold is the method of the last round"
    assert peak_bytes(site) == 0, "there is no GPU to measure"
