"""Draw the memory of driver, actors and object store over 400 rounds: it has to be flat.

    python docs/make_memory.py [ROUNDS]

The method is SCAFFOLD, whose clients remember. Writes docs/figures/memory.svg.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import ray
from matplotlib import style
from matplotlib.figure import Figure
from pages import to_svg
from ray._private.internal_api import memory_summary

from rayfed import Observer, read_job, run
from rayfed.papers.style import STYLE
from rayfed.rounds.round import Round

ROOT = Path(__file__).resolve().parents[1]
FIGURE = ROOT / "docs/figures/memory.svg"
SETTINGS = {
    "method": "scaffold",
    "model.name": "lenet",
    "ray.actors": 2,
    "train.clients_per_round": 4,
    "train.local_steps": 1,
    "train.lr": 0.01,
}


class Watch(Observer):
    """Looks at the memory every 20 rounds, in MiB: driver, actors together, objects in the
    store.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[int, float, float, float]] = []

    def round(self, round: Round) -> None:
        if round.round % 20:
            return
        actors = [
            ray.get_actor(name)
            for name in ray.util.list_named_actors()
            if name.startswith("memory/actor-")
        ]
        pids: list[int] = ray.get(
            [actor.__ray_call__.remote(lambda self: os.getpid()) for actor in actors]
        )
        summary = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
        stored = float(re.findall(r"Plasma memory usage ([\d.]+) MiB", summary)[0])
        self.rows.append((round.round, resident(os.getpid()), sum(map(resident, pids)), stored))


def resident(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


def measure(rounds: int) -> np.ndarray:
    """(looks, 4): round, driver, actors, store."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        settings = {**SETTINGS, "name": "memory", "train.num_rounds": rounds, "output.path": folder}
        run(read_job(ROOT / "jobs/quickstart.toml", settings), observers=[watch])
    return np.array(watch.rows)


def draw(rows: np.ndarray, path: Path) -> None:
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(9.0, 2.6))
        for axes, column, name in zip(
            figure.subplots(1, 3), (1, 2, 3), ("driver", "actors", "object store"), strict=True
        ):
            axes.plot(rows[:, 0], rows[:, column])
            axes.set(
                title=name, xlabel="round", ylabel="MiB", ylim=(0, 1.2 * rows[:, column].max())
            )
        to_svg(figure, path)


if __name__ == "__main__":
    rows = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
    print("round  driver  actors   store   (MiB)")
    for row in rows:
        print("{:5.0f}  {:6.1f}  {:6.1f}  {:6.1f}".format(*row))
    draw(rows, FIGURE)
    ray.shutdown()
