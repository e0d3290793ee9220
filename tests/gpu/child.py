"""Work in a process of its own, for tests: `child.py JSON` prints its answer as JSON."""

import hashlib
import json
import os
import sys

import torch

from rayfed.job import read_job
from rayfed.rounds.engine import rounds
from rayfed.rounds.setup import open_setup
from rayfed.runtime.rehearsal import needs_of
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.wire import pack


def train(table, cap=None):
    """A hash of the last weights, and the most memory that torch took; or that `cap` of the GPU was
    too little.
    """
    if cap is not None:
        torch.cuda.set_per_process_memory_fraction(cap)
    setup = open_setup(read_job(table))
    workers = ThisProcess(setup, gpu=True)
    try:
        *_, last = rounds(setup, workers)
    except Exception as error:
        # cuDNN's words.
        if any(text in str(error) for text in ("CUDA out of memory", "unable to find an engine")):
            return {"digest": "out of memory"}
        raise
    buffers = pack(last.weights).buffers
    digest = hashlib.sha256(
        b"".join(buffers[name].tobytes() for name in sorted(buffers))
    ).hexdigest()
    return {
        "digest": digest,
        "peak": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
    }


def peak(table):
    """The memory that the largest client takes."""
    return needs_of(open_setup(read_job(table)), torch.device("cuda:0")).gpu_memory


def settings(table):
    """What torch is set to once there is a worker for the GPU."""
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    (kind,) = ThisProcess(open_setup(read_job(table)), gpu=True).kinds()
    return {"workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"), "kind": kind}


def fork(table):
    """Whether a driver, before it has workers, leaves CUDA to the processes that are forked from
    it.
    """
    open_setup(read_job(table))
    count = torch.cuda.device_count()
    started = torch.cuda.is_initialized()
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(
            write, str(torch.ones(2, device="cuda:0" if count else "cpu").sum().item()).encode()
        )
        os._exit(0)
    os.wait()
    return {"started": started, "child": os.read(read, 100).decode()}


if __name__ == "__main__":
    # As in a run.
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    print(json.dumps(globals()[given.pop("what")](**given)))
