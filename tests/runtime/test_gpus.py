"""How a GPU is shared by the actors on it: for any sizes, and as far as no GPU is needed."""

import os
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rayfed.base.errors import ClientFailed, InputError
from rayfed.base.isolation import HAS_PRECISIONS, isolated
from rayfed.job import RayOptions
from rayfed.methods import Part, compose, fedavg
from rayfed.rounds.executor import Evaluate
from rayfed.runtime import hardware
from rayfed.runtime.gpus import (
    GPU_PART,
    memory_cap,
    most_on_a_gpu,
    share_as_measured,
    without_absent_gpus,
)
from rayfed.runtime.hardware import make_cuda_repeatable
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.weights import state_of

GIB = 2**30


@pytest.mark.parametrize(
    ("asked", "gpus", "found"),
    # The last is refused later.
    [("auto", [0, 0], 0), ("auto", [0, 1], "auto"), (0.5, [0], 0.5)],
)
def test_auto_is_no_gpu_where_no_node_has_one(asked, gpus, found):
    nodes = [{"CPU": 2.0, "GPU": float(count)} if count else {"CPU": 2.0} for count in gpus]
    assert without_absent_gpus(RayOptions(num_gpus=asked), nodes) == RayOptions(num_gpus=found)


@example(1, GIB, 48)
@given(st.integers(1, 80 * GIB), st.integers(GIB, 80 * GIB), st.integers(1, 48))
def test_as_many_clients_share_a_gpu_as_fit_on_it(client, gpu, most):
    if client > GPU_PART * gpu:
        with pytest.raises(InputError, match=r"a client needs [\d,.]+ [MG]B of GPU memory"):
            share_as_measured(client, [gpu, 2 * gpu], most)
        return
    share = share_as_measured(client, [gpu, 2 * gpu], most)
    actors = round(1 / share)
    assert actors * client <= GPU_PART * gpu
    assert actors == most or GPU_PART * gpu < (actors + 1) * client
    assert RayOptions(num_gpus=share).gpu_share == pytest.approx(share), "Ray can place it as it is"
    assert actors * memory_cap(RayOptions(num_gpus=share).gpu_share) <= 1.0 + 1e-9


def test_more_actors_share_a_gpu_where_they_compute_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert most_on_a_gpu() == 4
    # As NVIDIA's daemon does.
    (tmp_path / "control").touch()
    assert most_on_a_gpu() == 48


def test_an_actor_alone_on_a_gpu_may_fill_it():
    assert memory_cap(1) == memory_cap(2) == 1
    assert memory_cap(0.25) == pytest.approx(0.225)


@pytest.mark.parametrize(
    "newer",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(not HAS_PRECISIONS, reason="torch before 2.9 has none")
        ),
    ],
)
def test_cuda_is_set_to_the_same_bits_and_to_float32_whatever_the_user_set_before(
    monkeypatch, newer
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    backends = torch.backends
    with isolated(0, torch.device("cpu")):
        torch.set_float32_matmul_precision("high")
        backends.cudnn.benchmark = True
        # Torch's newer switches, of which the older know nothing.
        if newer:
            monkeypatch.setattr(backends, "fp32_precision", "tf32")
            backends.cuda.matmul.fp32_precision = "tf32"
        make_cuda_repeatable()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not backends.cudnn.benchmark and not backends.cudnn.allow_tf32
        if HAS_PRECISIONS:
            operations = (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul)
            assert [operation.fp32_precision for operation in operations] == ["ieee"] * 3
        assert torch.get_float32_matmul_precision() == "highest"


@dataclass(frozen=True)
class Throws(Part):
    """A client's work ends with an error of CUDA's, as torch words it."""

    error: str

    def begin(self, client):
        raise RuntimeError(self.error)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but",
            "put another in",
        ),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "try a larger ray.num_gpus"),
        (
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "try a larger ray.num_gpus",
        ),
        ("CUDA error: device-side assert triggered", None),
    ],
)
def test_an_error_of_cudas_comes_with_advice(make_setup, play, error, advice):
    with pytest.raises(ClientFailed) as caught:
        play(make_setup(compose(Throws(error))))
    said = str(caught.value)
    assert error in said
    assert advice in said if advice else said.endswith(error)


def test_evaluation_gives_advice_too(make_setup, monkeypatch):
    def evaluate(*given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    workers = ThisProcess(setup := make_setup(fedavg()))
    monkeypatch.setattr("rayfed.rounds.evaluation.evaluate", evaluate)
    with pytest.raises(ClientFailed, match=r"(?s)CUDA out of memory.*ray\.num_gpus"):
        list(workers.map(Evaluate(), [(0, 10)], {"weights": state_of(setup.model)}))


@dataclass(frozen=True)
class MakesDo(Part):
    """A client for which cuDNN asks for more memory than there is, and takes a way that needs
    less.
    """

    requests: ClassVar[list[int]]

    def begin(self, client):
        self.requests.append(client.id)


def test_a_way_of_computing_that_needs_less_memory_is_refused_as_it_has_other_bits(
    make_setup, play, monkeypatch
):
    # As it is again afterwards.
    monkeypatch.setattr(hardware, "_ran_short", False)
    monkeypatch.setattr(MakesDo, "requests", [], raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_ooms": len(MakesDo.requests)})
    play(make_setup(fedavg()))
    with pytest.raises(
        ClientFailed,
        match=r"(?s)client \d+, round 1.*CUDA out of memory.*try a larger ray.num_gpus",
    ):
        play(make_setup(compose(MakesDo())))
    assert len(MakesDo.requests) == 1
    with pytest.raises(InputError, match=r"ran short of GPU memory before.* start a new process"):
        make_cuda_repeatable()


@pytest.mark.slow
def test_tf32_is_refused_by_the_first_actor_on_a_cpu(cluster, make_setup, pool_on):
    with pytest.raises(
        InputError,
        match=r"^train.precision = 'tf32' needs an NVIDIA GPU .* would train on cpu; use",
    ):
        with pool_on(make_setup(fedavg(), precision="tf32"), "test-tf32", actors=1):
            pass
