"""Simulate rounds on clusters that nobody here has: where does the driver become the limit?

    python tools/simulate_scale.py            the table of docs/scale.md
    python tools/simulate_scale.py --measure  the driver's cost of an addition, on this machine

A discrete-event simulation of one round: the real rule cuts the cohort into tasks (`rayfed/rounds/tasks.py`); actors
take them in their order; a finished sum waits for its turn on the driver's link, and then for its turn to be added. It
leaves out the survey, evaluation, client memories, lost work, and other traffic on the link.
"""

import argparse
import heapq
import time
from dataclasses import dataclass

import numpy as np
import torch

from rayfed.clients.settings import Training
from rayfed.rounds.tasks import Task, cut
from rayfed.tensors.sums import OrderedSum, checked
from rayfed.tensors.trees import Scaled

MB, GBIT = 1e6, 1e9 / 8


@dataclass(frozen=True)
class Costs:
    """What the driver's work takes. Measured on one core of the machine that docs/scale.md names."""

    call: float = 0.0010  # seconds to hand out a task and take its answer
    add_float32: float = 0.31e-9  # seconds per byte of one client's summands, as they are
    add_float64: float = 0.09e-9  # seconds per byte of a task's sum, which has twice the bytes
    link: float = 10 * GBIT  # bytes per second into the driver's node
    per_node: int = 8  # actors, which share one copy of the weights


@dataclass(frozen=True)
class Outcome:
    """A simulated round."""

    tasks: int
    seconds: float
    ideal: float  # seconds, if all actors worked all the time and the driver took none
    driver: float  # share of the round in which the driver's process works
    link: float  # share of the round in which its link is busy
    waiting: float  # bytes of finished sums that wait, at most


def simulate(
    cohort: int, actors: int, update: float, client_seconds: float, costs: Costs, *, alone: bool = False
) -> Outcome:
    """One round of clients whose sizes spread by a factor of about three around 600 images.

    `update` is in bytes; with `alone` each client is a task.
    """
    sizes = np.random.default_rng(0).lognormal(np.log(600), 0.5, cohort).astype(int) + 1
    tasks: list[Task]
    if alone:
        tasks = [(client,) for client in np.argsort(-sizes, kind="stable").tolist()]
    else:
        tasks = cut(dict(enumerate(sizes.tolist())), Training())
    per_image = client_seconds / float(sizes.mean())
    sent = -(-actors // costs.per_node) * update / costs.link  # the weights, to every node
    free = [sent] * actors
    driver = link = handed = 0.0
    finished, size_of, rate_of = [], [], []
    for task in tasks:
        handed += costs.call
        start = max(heapq.heappop(free), handed)
        finished.append(start + per_image * float(sizes[list(task)].sum()))
        size_of.append(update if len(task) == 1 else 2 * update)
        rate_of.append(costs.add_float32 if len(task) == 1 else costs.add_float64)
        heapq.heappush(free, finished[-1])
    arrived = [0.0] * len(tasks)
    for index in sorted(range(len(tasks)), key=finished.__getitem__):
        link = max(link, finished[index]) + size_of[index] / costs.link
        arrived[index] = link
    events = []
    for index in range(len(tasks)):
        driver = max(driver, arrived[index]) + size_of[index] * rate_of[index]
        events += [(finished[index], size_of[index]), (driver, -size_of[index])]
    held = most = 0.0
    for _, change in sorted(events):
        held += change
        most = max(most, held)
    busy = sum(size * rate for size, rate in zip(size_of, rate_of, strict=True))
    ideal = client_seconds * cohort / min(actors, cohort)
    worked = (busy + costs.call * len(tasks)) / driver
    return Outcome(len(tasks), driver, ideal, worked, (sent + sum(size_of) / costs.link) / driver, most)


def table(costs: Costs, client_seconds: float) -> str:
    """The table of docs/scale.md, in Markdown; every cohort with the default tasks, and with each client alone."""
    lines = [
        "| update | cohort | actors | tasks | seconds | ideal | driver | link | waiting | each client alone |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for update in (6.6 * MB, 94 * MB):
        for cohort, actors in ((100, 2), (100, 100), (1000, 100), (10_000, 100), (10_000, 1000), (1_000_000, 1000)):
            found = simulate(cohort, actors, update, client_seconds, costs)
            alone = simulate(cohort, actors, update, client_seconds, costs, alone=True)
            row = [f"{update / MB:.1f} MB", f"{cohort:,}", f"{actors:,}", f"{found.tasks:,}", f"{found.seconds:,.1f}"]
            row += [f"{found.ideal:,.1f}", f"{found.driver:.0%}", f"{found.link:.0%}", f"{found.waiting / 1e9:,.2f} GB"]
            lines.append("| " + " | ".join([*row, f"{alone.seconds:,.1f}"]) + " |")
    return "\n".join(lines)


def measure() -> None:
    """Print the seconds per byte of the driver's additions."""
    torch.set_num_threads(1)
    for name, summand in (("float32", Scaled(600, torch.rand(1_650_000))), ("float64", torch.rand(1_650_000).double())):
        total, layout = OrderedSum(), checked(summand)
        total.add(summand, layout)
        seconds = []
        for _ in range(50):
            began = time.perf_counter()
            total.add(summand, layout)
            seconds.append(time.perf_counter() - began)
        size = 6.6 * MB * (2 if name == "float64" else 1)
        took = float(np.median(seconds))
        print(f"add_{name}: {took / size * 1e9:.2f}e-9 seconds per byte ({took * 1e3:.1f} ms)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--client-seconds", type=float, default=3.0, help="of one client's training")
    parser.add_argument("--gbit", type=float, default=10.0, help="the driver's link, Gbit/s")
    arguments = parser.parse_args()
    if arguments.measure:
        measure()
    else:
        print(table(Costs(link=arguments.gbit * GBIT), arguments.client_seconds))
