"""Rehearse the largest client in an actor's process, and tell how much memory that takes."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rayfed.rounds.engine import play, start
from rayfed.rounds.round import Round
from rayfed.rounds.setup import Setup
from rayfed.runtime.this_process import ThisProcess

# Linux tells here what memory this process takes, and has taken.
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Needs:
    """The most memory, in bytes, that a process takes for the largest client."""

    # 0 without a GPU.
    gpu_memory: int
    # 0 on a system that does not tell it.
    memory: int


def needs_of(setup: Setup, device: torch.device) -> Needs:
    """Rehearse the largest client, and return what this process needs for it.

    No other process may be on the device.
    """
    rehearse(setup, gpu=device.type == "cuda")
    gpu_memory = peak_gpu_bytes() if device.type == "cuda" else 0
    return Needs(gpu_memory, peak_bytes())


def rehearse(setup: Setup, *, gpu: bool) -> Round:
    """Play the first round, and twice the last round, by one client; return the last one played.

    Both are played as a method may switch in between, and the last one twice as the client then
    has a memory.
    """
    federation, workers = setup.federation, ThisProcess(setup, gpu=gpu)
    largest = max(range(federation.num_clients), key=federation.num_examples)
    played = start(setup, workers)
    for number in (1, setup.job.train.num_rounds, setup.job.train.num_rounds):
        before = replace(played, round=number - 1)
        played = play(setup, before, workers, clients=[largest])
    return played


def peak_gpu_bytes() -> int:
    """Return the most GPU memory, in bytes, that this process has taken so far."""
    free, total = torch.cuda.mem_get_info()
    # CUDA itself takes some hundred MB per process.
    cudas_own = total - free - torch.cuda.memory_reserved()
    return torch.cuda.max_memory_reserved() + max(0, cudas_own)


def peak_bytes() -> int:
    """Return the most memory, in bytes, that this process has had so far; 0 where none tells it.

    The pages of Ray's store are left out: all actors of a node read the same, and Ray sets memory
    aside for the store already. The code of libraries is counted, though actors share it too.
    """
    try:
        status = STATUS.read_text()
    except OSError:
        return 0
    return max(0, kib_of("VmHWM", status) - kib_of("RssShmem", status)) * 1024


def kib_of(name: str, status: str) -> int:
    """Return a number of a process' status, in KiB; 0 if it is not there.

    >>> kib_of("VmHWM", "VmPeak:  900 kB\\nVmHWM:   350 kB\\n")
    350
    """
    line = re.search(rf"^{name}:\s*(\d+) kB$", status, re.MULTILINE)
    return int(line[1]) if line else 0
