"""Measure sums in groups where links are slow (needs root, ip and tc).

    python tools/measure_tree.py [--nodes 3] [--mbit 200] [--rounds 3]

Raylets on this machine: the head's, without actors, and others in network namespaces of their own;
each link passes so many megabits per second in each direction. Rounds of 24 clients of 8 images
with a model of 45 MB, so that the way of weights and updates is most of a round. Prints, of each
way, the seconds of each round, the bytes from and to the head, and whether the weights have the
bits of one process.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

import rayfed
from rayfed.rounds import tasks
from rayfed.runtime.session import OUR_RAY

# The namespaces.
FAR: list[str] = []
GROUP = 6
JOB: dict[str, Any] = {
    "method": "fedavg",
    "data": {"source": "fashion-mnist-mini", "partition": {"name": "iid", "num_clients": 24}},
    "model": {"name": "resnet18"},
    "train": {
        "clients_per_round": 24,
        "local_steps": 1,
        "batch_size": 8,
        "eval_every": 1000,
        "task_images": 1,
    },
}


def sh(script: str) -> None:
    subprocess.run(["sh", "-ec", script], check=True)


@contextmanager
def slow_links(mbit: int) -> Iterator[None]:
    """A bridge, with this machine at 10.93.8.1 and each namespace behind a slow link."""
    slow = f"tbf rate {mbit}mbit burst 256kb latency 400ms"
    try:
        sh(f"""
        ip link add rayfed-br type bridge
        ip addr add 10.93.8.1/24 dev rayfed-br
        ip link set rayfed-br up
        tc qdisc add dev rayfed-br root {slow}
        """)
        for number, name in enumerate(FAR):
            sh(f"""
            ip netns add {name}
            ip link add rf{number} type veth peer name rg{number}
            ip link set rf{number} master rayfed-br up
            ip link set rg{number} netns {name}
            ip -n {name} addr add 10.93.8.{number + 2}/24 dev rg{number}
            ip -n {name} link set rg{number} up
            ip -n {name} link set lo up
            tc qdisc add dev rf{number} root {slow}
            ip netns exec {name} tc qdisc add dev rg{number} root {slow}
            """)
        yield
    finally:
        for name in FAR:
            sh(
                f"ip netns pids {name} | xargs --no-run-if-empty kill -9; ip netns delete {name} "
                "|| true"
            )
        sh("ip link delete rayfed-br")


@contextmanager
def raylets(folder: str) -> Iterator[str]:
    """The address of their Ray."""
    address, stack = "10.93.8.1:6390", ExitStack()
    start = [
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--block",
        f"--object-store-memory={2 * 10**9}",
    ]
    head = [
        "--head",
        "--node-ip-address=10.93.8.1",
        "--port=6390",
        "--num-cpus=0",
        f"--temp-dir={folder}",
    ]
    commands = [[*start, *head, "--include-dashboard=false"]]
    for number, name in enumerate(FAR):
        node = [f"--address={address}", f"--node-ip-address=10.93.8.{number + 2}", "--num-cpus=1"]
        commands.append(["ip", "netns", "exec", name, *start, *node])
    with stack:
        for command in commands:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, env={**os.environ, **OUR_RAY}, text=True
            )
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            assert process.stdout
            while "Ray runtime started" not in (line := process.stdout.readline()):
                if not line:
                    raise RuntimeError(f"this has ended: {' '.join(command)}")
        yield address


def passed() -> tuple[int, ...]:
    """The bytes that have gone from the head's node to the others, and come from them."""
    statistics = Path("/sys/class/net/rayfed-br/statistics")
    return tuple(int((statistics / name).read_text()) for name in ("tx_bytes", "rx_bytes"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=3, help="with an actor each, beside the head")
    parser.add_argument("--mbit", type=int, default=200, help="of each link, in each direction")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    tasks.GROUP = GROUP
    FAR.extend(f"rayfed-far{number}" for number in range(arguments.nodes))
    # The network is this machine's own.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
        slow_links(arguments.mbit),
    ):
        with raylets(f"{folder}/ray") as address:
            for way, most_bytes in (
                ("all to the head", tasks.MOST_BYTES_UNGROUPED),
                ("in groups", 0),
            ):
                tasks.MOST_BYTES_UNGROUPED = most_bytes
                on_ray = {"address": address, "actors": arguments.nodes}
                name, before = f"tree/{way.replace(' ', '-')}", passed()
                # What a run sends beside its rounds.
                played(f"{name}-begun", folder, 1, on_ray)
                begun, rounds = passed(), arguments.rounds + 1
                result = played(f"{name}-ray", folder, rounds, on_ray)
                one = [after - then for after, then in zip(begun, before, strict=True)]
                all_rounds = [after - then for after, then in zip(passed(), begun, strict=True)]
                went, came = (
                    (a - b) / 1e6 / arguments.rounds for a, b in zip(all_rounds, one, strict=True)
                )
                here = played(f"{name}-off", folder, rounds, {"mode": "off"}).weights
                same = all(torch.equal(value, here[key]) for key, value in result.weights.items())
                # The last round is evaluated too.
                seconds = result.rounds.column("seconds").to_pylist()[1:-1]
                times = ", ".join(f"{each:.1f}" for each in seconds)
                print(
                    f"{way}: {times} s; {went:,.0f} MB per round from the head, {came:,.0f} to it; "
                    f"same bits: {same}"
                )


def played(name: str, folder: str, rounds: int, options: dict[str, Any]) -> rayfed.Result:
    """A run of the job, to its end."""
    train = {**JOB["train"], "num_rounds": rounds}
    return rayfed.run(
        {**JOB, "name": name, "output": {"path": folder}, "train": train, "ray": options},
        force=True,
    )


if __name__ == "__main__":
    main()
