"""Simulate rounds on clusters that nobody here has: where does the driver become the limit?

    python tools/simulate_scale.py            the table of docs/scale.md
    python tools/simulate_scale.py --measure  the costs of additions, on this machine

A discrete-event simulation of one round: the real rules cut the cohort into tasks and these into
groups (`rayfed/rounds/tasks.py`); idle actors take what is to be added first, and then the tasks in
their order; sums and memories cross the links of their receivers, one after the other; the driver
adds what it gets. It leaves out the survey, lost work, the sending of memories to clients, and
other traffic on the links.
"""

import argparse
import heapq
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from rayfed.clients.settings import Training
from rayfed.rounds.tasks import cut_into_tasks, grouped
from rayfed.tensors.sums import OrderedSum, checked
from rayfed.tensors.trees import Scaled

MB, GBIT = 1e6, 1e9 / 8


@dataclass(frozen=True)
class Costs:
    """What the work takes beside training.

    Measured on one core of the machine that docs/scale.md names.
    """

    # Seconds of the driver to hand out a call and take its answer.
    call: float = 0.0010
    # Seconds per byte of one client's summands, as they are.
    add_float32: float = 0.31e-9
    # Seconds per byte of a task's sum, which has twice the bytes.
    add_float64: float = 0.18e-9
    # Bytes per second into a node.
    link: float = 10 * GBIT
    # Actors, which share one copy of the weights.
    per_node: int = 8
    # Seconds of one actor for the whole test set, in at most ten pieces.
    evaluation: float = 3.0


@dataclass(frozen=True)
class Outcome:
    """A simulated round."""

    tasks: int
    # That the driver gets.
    sums: int
    seconds: float
    # Seconds, if all actors worked all the time and the driver took none.
    ideal: float
    # Share of the round in which the driver's process works.
    driver: float
    # Share of the round in which its link is busy.
    link: float
    # Bytes of sums that are finished and not yet added, at most.
    waiting: float


def simulate(
    cohort: int,
    actors: int,
    update: float,
    client_seconds: float,
    costs: Costs,
    *,
    memory: float = 0.0,
    tree: bool = True,
) -> Outcome:
    """One round of clients whose sizes spread by a factor of about three around 600 images.

    `update` and `memory` are bytes per client. Without `tree` the driver gets each task's sum, and
    all memories.
    """
    sizes = np.random.default_rng(0).lognormal(np.log(600), 0.5, cohort).astype(int) + 1
    tasks = cut_into_tasks(dict(enumerate(sizes.tolist())), Training())
    per_image = client_seconds / float(sizes.mean())
    trained = [per_image * float(sizes[list(task)].sum()) for task in tasks]
    # Bytes of a task's sum.
    held = [update if len(task) == 1 else 2 * update for task in tasks]
    rate = [costs.add_float32 if len(task) == 1 else costs.add_float64 for task in tasks]
    remembered = [memory * len(task) for task in tasks]
    groups = grouped(tasks, int(update)) if tree else [[task] for task in tasks]
    ends = np.cumsum([len(group) for group in groups]).tolist()
    members = [range(end - len(group), end) for end, group in zip(ends, groups, strict=True)]
    of_task = {index: number for number, group in enumerate(members) for index in group}
    direct = len(groups) == len(tasks)

    nodes = -(-actors // costs.per_node)
    # Each node fetches the weights from the driver's; Ray may take copies that other nodes have by
    # then.
    sent = nodes * update / costs.link
    # By the first actors, before they train.
    evaluated = costs.evaluation / min(10, actors)
    idle = [(sent + (evaluated if actor < 10 else 0.0), actor) for actor in range(actors)]
    heapq.heapify(idle)
    # When the link into a node is free; the driver's is apart.
    links = [sent] * nodes
    waiting_tasks, to_add = deque(range(len(tasks))), list[tuple[float, int]]()
    missing = [len(group) for group in members]
    # When a call ends, the actor, the task or group, whether it adds.
    running = list[tuple[float, int, int, bool]]()
    # Group -> when its sum is there for the driver.
    ready = dict[int, float]()
    # Of the bytes that wait.
    changes = list[tuple[float, float]]()
    # Until when the driver hands out calls.
    handed = 0.0

    def start(now: float, actor: int) -> None:
        nonlocal handed
        handed += costs.call
        begin = max(now, handed)
        if to_add:
            _, group = heapq.heappop(to_add)
            node = actor // costs.per_node
            here = max(links[node], begin)
            links[node] = (
                here + sum(held[index] + remembered[index] for index in members[group]) / costs.link
            )
            adding = sum(held[index] * rate[index] for index in members[group])
            heapq.heappush(
                running,
                (max(links[node], begin + adding) + 2 * update * 0.1e-9, actor, group, True),
            )
        else:
            index = waiting_tasks.popleft()
            heapq.heappush(running, (begin + trained[index], actor, index, False))

    while len(ready) < len(groups):
        while idle and (to_add or waiting_tasks):
            # On the node whose link is free first.
            if to_add:
                idle.sort(key=lambda one: (links[one[1] // costs.per_node], one))
                start(*idle.pop(0))
                heapq.heapify(idle)
            else:
                start(*heapq.heappop(idle))
        end, actor, number, adds = heapq.heappop(running)
        heapq.heappush(idle, (end, actor))
        if adds:
            ready[number] = end
            changes += [(end, -held[index]) for index in members[number]]
            changes.append((end, 2 * update))
            continue
        changes.append((end, held[number]))
        if direct:
            ready[number] = end
            continue
        group = of_task[number]
        missing[group] -= 1
        if not missing[group]:
            heapq.heappush(to_add, (end, group))
            idle = [(max(when, end), one) for when, one in idle]
            heapq.heapify(idle)

    size = held if direct else [2 * update] * len(groups)
    rates = rate if direct else [costs.add_float64] * len(groups)
    extra = remembered if direct else [0.0] * len(groups)
    link = sent
    arrived = dict[int, float]()
    for number in sorted(ready, key=ready.__getitem__):
        link = max(link, ready[number]) + (size[number] + extra[number]) / costs.link
        arrived[number] = link
    driver = 0.0
    for number in range(len(groups)):
        driver = max(driver, arrived[number]) + size[number] * rates[number]
        changes.append((driver, -size[number]))
    waiting = most = 0.0
    for _, change in sorted(changes):
        waiting += change
        most = max(most, waiting)
    calls = len(tasks) + (0 if direct else len(groups))
    worked = sum(s * r for s, r in zip(size, rates, strict=True)) + costs.call * calls
    ideal = client_seconds * cohort / min(actors, cohort)
    busy = sent + (sum(size) + sum(extra)) / costs.link
    return Outcome(len(tasks), len(groups), driver, ideal, worked / driver, busy / driver, most)


def table(costs: Costs, client_seconds: float) -> str:
    """The table of docs/scale.md, in Markdown."""
    lines = [
        "| update | memory | cohort | actors | tasks | sums | seconds | ideal | driver | link | "
        "waiting | one by one |",
        "|---" * 12 + "|",
    ]
    clusters = ((100, 2), (100, 100), (1000, 100), (1000, 1000), (10_000, 1000), (1_000_000, 1000))
    for update, memory in ((6.6 * MB, 0.0), (6.6 * MB, 6.6 * MB), (94 * MB, 0.0)):
        for cohort, actors in clusters:
            each = simulate(cohort, actors, update, client_seconds, costs, memory=memory)
            direct = simulate(
                cohort, actors, update, client_seconds, costs, memory=memory, tree=False
            )
            row = [
                f"{update / MB:.1f} MB",
                f"{memory / MB:.1f} MB" if memory else "",
                f"{cohort:,}",
                f"{actors:,}",
            ]
            row += [
                f"{each.tasks:,}",
                f"{each.sums:,}",
                f"{each.seconds:,.1f}",
                f"{each.ideal:,.1f}",
            ]
            row += [
                f"{each.driver:.0%}",
                f"{each.link:.0%}",
                f"{each.waiting / 1e9:,.1f} GB",
                f"{direct.seconds:,.1f}",
            ]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def measure() -> None:
    """Print the seconds per byte of additions; no summand is in a cache, as none is that comes from
    a network.
    """
    torch.set_num_threads(1)
    kinds = {"float32": [torch.rand(1_650_000) for _ in range(40)]}
    kinds["float64"] = [each.double() for each in kinds["float32"]]
    for name, tensors in kinds.items():
        total = OrderedSum()
        for _ in range(3):
            seconds = []
            for tensor in tensors:
                summand = Scaled(600, tensor) if name == "float32" else tensor
                layout = checked(summand)
                began = time.perf_counter()
                total.add(summand, layout)
                seconds.append(time.perf_counter() - began)
        took = float(np.median(seconds))
        print(
            f"add_{name}: {took / tensors[0].nbytes * 1e9:.2f}e-9 seconds per byte "
            f"({took * 1e3:.1f} ms)"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument(
        "--client-seconds", type=float, default=3.0, help="of one client's training"
    )
    parser.add_argument("--gbit", type=float, default=10.0, help="the link into each node, Gbit/s")
    arguments = parser.parse_args()
    if arguments.measure:
        measure()
    else:
        print(table(Costs(link=arguments.gbit * GBIT), arguments.client_seconds))
