"""Memory: a client that takes too much is killed and run again, and nothing grows with the
rounds.
"""

import gc
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
import torch
from ray._private.internal_api import memory_summary

from rayfed.methods import Part, compose, scaffold
from rayfed.rounds.engine import rounds
from rayfed.rounds.setup import Setup
from rayfed.runtime.session import stored

pytestmark = pytest.mark.slow

GIB = 2**30


def test_the_driver_has_no_copy_of_the_data_and_no_actor_has_what_only_others_need(
    cluster, make_setup, played, here, pool_on, monkeypatch
):
    setup, put, puts = make_setup(scaffold(), norm=True), ray.put, []
    expected = here(setup)
    shared = stored(setup)
    assert not any(
        array.flags.owndata
        for array in (shared.federation.train.examples, shared.federation.test.examples)
    )
    # Else the model goes along with each call.
    monkeypatch.setattr("rayfed.runtime.pool.SMALL", 0)
    monkeypatch.setattr(ray, "put", lambda value: puts.append(type(value)) or put(value))
    with pool_on(shared, "lean", actors=1) as pool:
        assert played(shared, pool) == expected
        # Torch's compiler: 80 MB
        needless = {
            "torch._dynamo",
            "torch._inductor",
            "sympy",
            "triton",
        }
        # A quarter of a second; Ray itself imports pyarrow.
        needless |= {
            "pyarrow.compute",
            "pyarrow.parquet",
            "PIL",
        }
        (member,) = pool._group.idle
        assert not ray.get(
            member.actor.__ray_call__.remote(lambda self: needless & set(sys.modules))
        )
    assert puts and not any(issubclass(kind, Setup) for kind in puts)


def memory():
    """Bytes of this machine, and how many of them are free, as Ray's memory monitor sees them."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (
        int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")
    )
    return total, available


@dataclass(frozen=True)
class Greedy(Part):
    """Takes more and more memory at a client, once, until the process is killed for it.

    It takes all but `left` bytes, and then waits, as Ray looks only from time to time.
    """

    file: str
    left: int

    def begin(self, client):
        if client.id == 1 and client.round == 2 and not Path(self.file).exists():
            Path(self.file).touch()
            taken, end = [], time.monotonic() + 240
            while time.monotonic() < end:
                # Again and again, as other tests may give memory back.
                if memory()[1] > self.left:
                    taken.append(torch.ones(GIB // 4, dtype=torch.uint8))
                time.sleep(0.2)
            raise RuntimeError(f"{len(taken) / 4} GiB were taken, and the process was not killed")


def test_a_client_that_takes_all_memory_is_killed_and_run_again(
    a_cluster, make_setup, played, here, pool_on, tmp_path, caplog
):
    total, free = memory()
    if free < 8 * GIB:
        pytest.skip("needs 8 GiB of free memory")
    # Ray's monitor steps in when so much is taken: more than other tests may take meanwhile, for
    # which no process is to be killed.
    room = max(3 * GIB, free // 3)
    greedy = Greedy(str(tmp_path / "taken"), left=free - room - GIB // 2)
    setup = make_setup(compose(scaffold(), greedy), clients_per_round=6)
    (tmp_path / "taken").touch()
    expected = here(setup)
    (tmp_path / "taken").unlink()
    threshold = f"{(total - free + room) / total:.3f}"
    watched = {"RAY_memory_usage_threshold": threshold, "RAY_memory_monitor_refresh_ms": "1000"}
    with a_cluster(watched, num_cpus=2), pool_on(setup, "greedy", actors=2) as pool:
        assert played(setup, pool) == expected
    assert (tmp_path / "taken").exists(), "it did happen"
    assert re.search(
        r"client 1, round 2: lost with actor-\d on [\d.]+ \(out of memory\); running it again",
        caplog.text,
    )


def alive(_=None):
    """How many tensors a process holds, and their MiB; views of one memory count once."""
    gc.collect()
    # `isinstance` would load what a lazy module of a library stands for.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    # A sparse one, which another test may have left, has no storage of its own.
    tensors = [tensor for tensor in tensors if tensor.layout == torch.strided]
    memories = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return len(tensors), sum(memories.values()) / 2**20


def test_nothing_grows_with_the_rounds(cluster, make_setup, pool_on):
    """Neither driver, actors nor object store hold more after many rounds than after a few.

    The memory of the processes themselves is drawn by docs/make_memory.py over 400 rounds of a
    larger model: it also has what the C library keeps for later, which differs by the machine.
    """

    def look():
        """Of the driver and each actor what `alive` says, and the MiB of the object store."""
        actors = [
            ray.get_actor(name) for name in ray.util.list_named_actors() if name.startswith("flat/")
        ]
        assert len(actors) == 2
        held = [alive(), *ray.get([actor.__ray_call__.remote(alive) for actor in actors])]
        stored = re.search(
            r"Plasma memory usage ([\d.]+) MiB", memory_summary(address=cluster, stats_only=True)
        )
        return [count for count, _ in held], [size for _, size in held], float(stored[1])

    seen = []
    setup = make_setup(scaffold(), num_rounds=60, lr_decay=1.0, lr=0.01)
    with pool_on(setup, "flat", actors=2) as pool:
        for round in rounds(setup, pool):
            pool.between_rounds(round)
            if round.round and round.round % 5 == 0:
                seen.append(look())
    early, late = seen[:6], seen[6:]
    for process in range(3):
        # A round in flight: the parts of one model more or less.
        assert max(counts[process] for counts, _, _ in late) <= max(
            counts[process] for counts, _, _ in early
        ) + len(setup.model.state_dict()), seen
        assert max(sizes[process] for _, sizes, _ in late) <= 1.5 * max(
            sizes[process] for _, sizes, _ in early
        ), seen
    assert max(store for _, _, store in late) <= max(store for _, _, store in early) + 1, seen
