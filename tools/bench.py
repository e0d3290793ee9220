"""Measure how fast a round is.

rayfed on Ray and in this process stand beside a plain torch loop and a tuned pool of processes.

    make bench                                     # all workloads on the embedded images
    python tools/bench.py --workloads W1 W2 --data train.parquet --test test.parquet
    python tools/bench.py --device cuda --processes 1 2 4 8 --contenders ray tuned compiled graphs

All contenders of a workload are alive at the same time, each in a process of its own, and take
turns: a block of rounds each, in an order that rotates. A round is compared with the same round of
the others, which has the same clients. docs/speed.md says what the columns mean, and what the tuned
pool does and does not do.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import mmap
import multiprocessing
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import rayfed
from rayfed.base.errors import InputError
from rayfed.base.seeds import Purpose, cohort, seed_of
from rayfed.clients.batches import batches
from rayfed.data.federation import Federation
from rayfed.data.settings import MINI, Data
from rayfed.data.sources import load
from rayfed.job import Job
from rayfed.losses import not_true_distill
from rayfed.methods.distill import NotTrueDistill
from rayfed.rounds.round import Round
from rayfed.rounds.setup import open_setup

# Rounds before the turns: the first has a column of its own, and in the second the memory is
# watched.
BEFORE = 2
# Of test accuracy, mean over the rounds: rounding alone moves it by less.
AGREE = 0.03
# Test images per forward pass in the tuned pool: few enough that activations stay in the cache.
SMALL = 100


@dataclass(frozen=True)
class Workload:
    title: str
    epochs: int = 1
    method: str = "fedavg"
    # Many clients of 60 images, 100 in a round.
    small: bool = False
    # Rounds of a turn that count.
    block: int = 2


WORKLOADS = {
    "W1": Workload("100 clients, Dirichlet 0.1, 10 a round, 1 epoch"),
    "W1b": Workload("as W1, 5 epochs", epochs=5, block=1),
    "W2": Workload("clients of 60 images, 100 a round, 1 epoch", small=True),
    "W3": Workload("as W1, FedNTD", method="fedntd"),
    "W3b": Workload("as W1b, FedNTD", epochs=5, method="fedntd", block=1),
}


class Lap(NamedTuple):
    """A finished round of a contender; times in seconds."""

    number: int
    accuracy: float
    # From the end of the round before, until this one is recorded.
    seconds: float
    # Of the processes, summed.
    training: float
    # The same.
    evaluation: float
    clients: int


class Pace:
    """Holds a contender after each block of rounds until the race lets it go on, and times its
    rounds.
    """

    def __init__(self, link: Connection) -> None:
        self._link, self._allowed = link, 0
        self._began = time.perf_counter()

    def lap(
        self, number: int, accuracy: float, training: Sequence[float], evaluation: float
    ) -> None:
        seconds = time.perf_counter() - self._began
        self._link.send(Lap(number, accuracy, seconds, sum(training), evaluation, len(training)))
        if not self._allowed:
            self._allowed = self._link.recv()
        self._allowed -= 1
        self._began = time.perf_counter()


# The contenders. Each plays round 0, which evaluates the initial model, and then `train.num_rounds`
# rounds.


class Paced(rayfed.Observer):
    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def round(self, round: Round) -> None:
        assert round.evaluation is not None and round.test_accuracy is not None, (
            "every round is evaluated"
        )
        training = [row.seconds for row in round.clients]
        self._pace.lap(round.round, round.test_accuracy, training, round.evaluation.seconds)


def on_ray(table: Mapping[str, Any], pace: Pace, processes: int) -> None:
    rayfed.run(table, {"ray.mode": "on", "ray.actors": processes}, observers=[Paced(pace)])


def measured(table: Mapping[str, Any], pace: Pace, processes: int) -> None:
    """As on Ray, with each client's model measured on 2,000 test images, before and after its
    training, every round.
    """
    on_ray({**table, "measure": ["local"], "measure_images": 2000}, pace, processes)


def in_process(table: Mapping[str, Any], pace: Pace, processes: int) -> None:
    rayfed.run(table, {"ray.mode": "off"}, observers=[Paced(pace)])


def plain(table: Mapping[str, Any], pace: Pace, processes: int) -> None:
    """What one would write first: one process, all threads, client after client."""
    job = rayfed.read_job(table)
    setup, device = open_setup(job), device_of(job)
    data, model = setup.federation, setup.model.to(memory_format=torch.contiguous_format).to(device)
    images, labels, test_images, test_labels = (tensor.to(device) for tensor in tensors(data))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number in range(job.train.num_rounds + 1):
        clients, seconds = clients_of(job, data, number), []
        total = {
            name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in weights.items()
        }
        for client in clients:
            began = time.perf_counter()
            model.load_state_dict(weights)
            optimizer = torch.optim.SGD(model.parameters(), job.train.lr, job.train.momentum)
            teacher = weights if distils(job) else None
            rows = torch.from_numpy(data.client(client))
            for index in batches_of(job, number, client, len(rows)):
                x, y = images[rows[index]], labels[rows[index]]
                logits = model(x)
                loss = cross_entropy(logits, y)
                if teacher is not None:
                    with torch.no_grad():
                        told = torch.func.functional_call(model, weights, (x,))
                    loss = loss + not_true_distill(logits, told, y, tau=1.0)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for name, tensor in model.state_dict().items():
                total[name] += len(rows) * tensor
            seconds.append(time.perf_counter() - began)
        if clients:
            examples = sum(data.num_examples(client) for client in clients)
            weights = {name: (tensor / examples).float() for name, tensor in total.items()}
        model.load_state_dict(weights)
        began = time.perf_counter()
        with torch.no_grad():
            guesses = torch.cat([model(x).argmax(1) for x in test_images.split(500)])
        pace.lap(
            number,
            (guesses == test_labels).double().mean().item(),
            seconds,
            time.perf_counter() - began,
        )


def tuned(table: Mapping[str, Any], pace: Pace, processes: int, how: str = "eager") -> None:
    """Plain torch in a pool of processes with all that is known to pay: see docs/speed.md.

    `how` it runs the model: "eager", "compiled" by torch, or full batches as CUDA "graphs".
    """
    job = rayfed.read_job(table)
    # Before the fork: each process of the pool computes with one thread.
    torch.set_num_threads(1)
    setup = open_setup(job)
    data, pool, fork = setup.federation, [], multiprocessing.get_context("fork")
    size = sum(parameter.numel() for parameter in setup.model.parameters())
    weights, sums = shared(torch.float32, size), shared(torch.float64, processes, size)
    # channels_last is faster on CPUs, slower on GPUs in float32.
    layout = device_of(job).type == "cpu"
    weights.copy_(Flat(setup.model, channels_last=layout).values)
    # The next client of the round, or the next test images.
    turn = fork.Value("q", 0)
    # Normalised once; the processes read these pages in place.
    held = tensors(data)
    for total in sums:
        link, theirs = fork.Pipe()
        start = (theirs, job, setup.model, data, held, weights, total, turn, how)
        fork.Process(target=tuned_process, args=start).start()
        pool.append(link)

    def everywhere(*message: Any) -> list[Any]:
        turn.value = 0
        for link in pool:
            link.send(message)
        return [answer for link in pool for answer in link.recv()]

    for number in range(job.train.num_rounds + 1):
        # The longest first.
        clients = sorted(clients_of(job, data, number), key=data.num_examples, reverse=True)
        seconds = everywhere("train", number, clients) if clients else []
        if clients:
            weights.copy_(sums.sum(0) / sum(data.num_examples(client) for client in clients))
        right, evaluation = (sum(column) for column in zip(*everywhere("evaluate"), strict=True))
        pace.lap(number, right / len(data.test), seconds, evaluation)
    for link in pool:
        link.send(("end",))


def tuned_process(
    link: Connection,
    job: Job,
    model: nn.Module,
    data: Federation,
    held: Sequence[Tensor],
    weights: Tensor,
    total: Tensor,
    turn: Any,
    how: str,
) -> None:
    device = device_of(job)
    # Of the thread that computes: gradients soon are so small, and slow.
    torch.set_flush_denormal(True)
    images, labels, test_images, test_labels = (tensor.to(device) for tensor in held)
    # `frozen` is the round's global model.
    student, frozen = (Flat(model, channels_last=device.type == "cpu").to(device) for _ in range(2))
    run = torch.compile(student.model) if how == "compiled" else student.model
    # The step on a full batch, once there is one.
    graph: list[Callable[..., None]] = []
    frozen.model.eval().requires_grad_(False)
    optimizer = torch.optim.SGD(
        student.model.parameters(), job.train.lr, job.train.momentum, fused=True
    )

    def turns(count: int) -> Iterator[int]:
        while True:
            with turn.get_lock():
                mine, turn.value = turn.value, turn.value + 1
            if mine >= count:
                return
            yield mine

    def step(x: Tensor, y: Tensor, told: Tensor | None = None) -> None:
        logits = run(x)
        loss = cross_entropy(logits, y)
        if told is not None:
            loss = loss + not_true_distill(logits, told, y, tau=1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def train(number: int, client: int) -> float:
        began, full = time.perf_counter(), job.train.batch_size
        rows = torch.from_numpy(data.client(client)).to(device)
        own = [images[rows], labels[rows]]
        if distils(job):
            # Once for all epochs.
            with torch.inference_mode():
                own.append(torch.cat([frozen.model(some) for some in own[0].split(SMALL)]))
        if how == "graphs" and not graph and len(rows) >= full:
            graph.append(as_graph(step, [tensor[:full] for tensor in own]))
        student.values.copy_(frozen.values)
        for state in optimizer.state.values():
            state["momentum_buffer"].zero_()
        for index in batches_of(job, number, client, len(rows)):
            index = index.to(device, non_blocking=True)
            (graph[0] if graph and len(index) == full else step)(*(tensor[index] for tensor in own))
        seconds = time.perf_counter() - began
        # Into float64.
        total.add_(student.values.cpu(), alpha=len(rows))
        return seconds

    while (message := link.recv())[0] != "end":
        frozen.values.copy_(weights)
        if message[0] == "train":
            _, number, clients = message
            total.zero_()
            link.send([train(number, clients[mine]) for mine in turns(len(clients))])
        else:
            right, began = torch.zeros((), dtype=torch.int64, device=device), time.perf_counter()
            with torch.inference_mode():
                for mine in turns(-(-len(test_labels) // SMALL)):
                    some = slice(mine * SMALL, (mine + 1) * SMALL)
                    right += (frozen.model(test_images[some]).argmax(1) == test_labels[some]).sum()
            link.send([(int(right), time.perf_counter() - began)])


def as_graph(step: Callable[..., None], examples: Sequence[Tensor]) -> Callable[..., None]:
    """A step as a CUDA graph, for batches of the examples' size. To make it changes the weights."""
    inputs, aside = [tensor.clone() for tensor in examples], torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    # Libraries and momentum get their memory before the capture.
    with torch.cuda.stream(aside):
        for _ in range(3):
            step(*inputs)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*inputs)

    def replay(*batch: Tensor) -> None:
        for tensor, value in zip(inputs, batch, strict=True):
            tensor.copy_(value)
        graph.replay()

    return replay


class Flat:
    """A copy of the model whose parameters are views of one vector, so that weights are copied and
    added at once.

    The vector's order depends on the layout, so all copies of a pool have the same layout.
    """

    def __init__(self, model: nn.Module, *, channels_last: bool = True) -> None:
        self.model, self._layout = pooled_first(model), channels_last
        self.values = torch.cat(
            [self._ordered(p.detach()).reshape(-1) for p in self.model.parameters()]
        )
        self.to("cpu")

    def to(self, device: torch.device | str) -> Flat:
        self.values, self.model = self.values.to(device), self.model.to(device)
        parameters = list(self.model.parameters())
        for p, piece in zip(
            parameters, self.values.split([p.numel() for p in parameters]), strict=True
        ):
            values = piece.view(self._ordered(p).shape)
            p.data = values.permute(0, 3, 1, 2) if self._layout and p.ndim == 4 else values
        return self

    def _ordered(self, tensor: Tensor) -> Tensor:
        return tensor.permute(0, 2, 3, 1) if self._layout and tensor.ndim == 4 else tensor


def pooled_first(model: Any) -> nn.Module:
    """A copy in which max-pooling comes before ReLU: the same function, and a quarter of the
    ReLUs.
    """
    copied = copy.deepcopy(model)
    layers = list(copied.features)
    for i, (first, second) in enumerate(pairwise(layers)):
        if isinstance(first, nn.ReLU) and isinstance(second, nn.MaxPool2d):
            layers[i : i + 2] = second, first
    copied.features = nn.Sequential(*layers)
    return copied


CONTENDERS: dict[str, Callable[[Mapping[str, Any], Pace, int], None]] = {
    "ray": on_ray,
    "tuned": tuned,
    "here": in_process,
    "plain": plain,
    "measured": measured,
    "compiled": partial(tuned, how="compiled"),
    "graphs": partial(tuned, how="graphs"),
}
USUAL = ["ray", "tuned", "here", "plain"]
# A single process.
ALONE = {"here", "plain"}
POOLS = {"tuned", "compiled", "graphs"}


def entrants(names: Sequence[str], counts: Sequence[int]) -> dict[str, int]:
    """The contenders with their numbers of processes; with several counts, each pool in each size:
    `tuned x4`.
    """
    one = len(counts) == 1
    return {
        name if one or name in ALONE else f"{name} x{count}": 1 if name in ALONE else count
        for name in names
        for count in counts
    }


def kind_of(entrant: str) -> str:
    """The contender that an entrant is."""
    return entrant.partition(" ")[0]


# What all contenders have in common: data, cohorts, batches.


def tensors(data: Federation) -> tuple[Tensor, ...]:
    """Images and labels for training, then for the test; the images normalised."""
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (data.mean, data.std))

    def normalised(images: np.ndarray) -> Tensor:
        return torch.from_numpy(images).float().div_(255).sub_(mean).div_(std)

    both = (
        (normalised(samples.examples), torch.from_numpy(samples.labels))
        for samples in (data.train, data.test)
    )
    return tuple(tensor for pair in both for tensor in pair)


def clients_of(job: Job, data: Federation, number: int) -> list[int]:
    return cohort(job.seed, number, data.num_clients, job.train.clients_per_round) if number else []


def batches_of(job: Job, number: int, client: int, num_examples: int) -> Iterator[Tensor]:
    """The same batches as rayfed's."""
    rng = torch.Generator().manual_seed(seed_of(job.seed, Purpose.BATCHES, number, client))
    return batches(num_examples, job.train, rng)


def distils(job: Job) -> bool:
    return any(isinstance(part, NotTrueDistill) for part in job.method)


def device_of(job: Job) -> torch.device:
    return torch.device("cuda:0" if job.ray.num_gpus else "cpu")


def shared(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of zeros that forked processes share. (Containers have little room in /dev/shm.)"""
    count = math.prod(shape)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype, count=count).view(
        shape
    )


# The race.


@dataclass
class Entry:
    """A contender in a race, and what was measured of it."""

    name: str
    # Seconds from the start of its process until round 1 can begin.
    start: float = 0.0
    # Of round 1.
    first: float = 0.0
    # From the last round until its process has ended.
    end: float = 0.0
    # MiB, the most that was seen.
    memory: float = 0.0
    # All rounds, from 0 on.
    laps: list[Lap] = field(default_factory=list)
    # Those of the medians.
    counted: list[Lap] = field(default_factory=list)


class Runner:
    """The process of a contender.

    Between its turns it is stopped with all its children: a Ray that waits takes 8 % of a core,
    which the other contenders would lack.
    """

    def __init__(self, name: str, table: Mapping[str, Any], processes: int) -> None:
        self.entry = Entry(name)
        spawn = multiprocessing.get_context("spawn")
        self._link, theirs = spawn.Pipe()
        self._process = spawn.Process(target=contend, args=(name, table, theirs, processes))
        before, began = dict(os.environ), time.perf_counter()
        if kind_of(name) in POOLS:
            os.environ["THP_MEM_ALLOC_ENABLE"] = (
                # Huge pages for torch's allocator; it reads this when it starts.
                "1"
            )
            # No page twice.
            os.environ |= {
                "MALLOC_TRIM_THRESHOLD_": "500000000",
                "MALLOC_MMAP_THRESHOLD_": str(2**25),
            }
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()
        self._receive()
        self.entry.start = time.perf_counter() - began
        self._signal(signal.SIGSTOP)

    def play(self, rounds: int, *, watch: bool = False) -> None:
        """Play some rounds; the first does not count, as it has begun already.

        To `watch` the memory slows them.
        """
        self._wake()
        self._link.send(rounds)
        for i in range(rounds):
            while watch and not self._link.poll(0.3):
                self.weigh()
            self._receive()
            self.entry.counted += self.entry.laps[-1:] if i else []
        self._signal(signal.SIGSTOP)

    def weigh(self) -> None:
        self.entry.memory = max(self.entry.memory, memory_of(tree_of(self._process.pid or 0)))

    def finish(self) -> Entry:
        self._wake()
        began = time.perf_counter()
        self._link.send(1)
        self._process.join()
        self.entry.end = time.perf_counter() - began
        if self._process.exitcode:
            raise SystemExit(f"{self.entry.name}: ended with {self._process.exitcode}")
        return self.entry

    def kill(self) -> None:
        """After an error: Ray ends with its driver, and what is then left is killed."""
        if self._process.is_alive():
            self._signal(signal.SIGCONT)
            left = tree_of(self._process.pid or 0)
            self._process.terminate()
            self._process.join(30)
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _wake(self) -> None:
        self._signal(signal.SIGCONT)
        # Ray's processes do first what has come due meanwhile.
        time.sleep(0.5)

    def _signal(self, number: signal.Signals) -> None:
        for pid in tree_of(self._process.pid or 0):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _receive(self) -> None:
        try:
            self.entry.laps.append(self._link.recv())
        except EOFError:
            raise SystemExit(f"{self.entry.name} failed; its message is above") from None


def contend(name: str, table: Mapping[str, Any], link: Connection, processes: int) -> None:
    """The main function of a contender's process. All processes of a contender share a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        gpus = table["ray"]["num_gpus"] / processes
        own = {**table, "ray": {"num_gpus": gpus}, "output": {**table["output"], "path": folder}}
        CONTENDERS[kind_of(name)](own, Pace(link), processes)


def race(
    table: Mapping[str, Any], sizes: Mapping[str, int], block: int, repeats: int
) -> list[Entry]:
    """All contenders of a workload: `repeats` turns, of `block` rounds that count and one before
    them.
    """
    runners: list[Runner] = []
    try:
        for name, processes in sizes.items():
            runners.append(Runner(name, table, processes))
            runners[-1].play(1)
            runners[-1].play(1, watch=True)
        for turn in range(repeats):
            for i in range(len(runners)):
                runner = runners[(i + turn) % len(runners)]
                runner.play(1 + block)
                runner.weigh()
        return [runner.finish() for runner in runners]
    finally:
        for runner in runners:
            runner.kill()


def tree_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, _, rest = stat.read_text().partition(" (")
        except OSError:
            # It has just ended.
            continue
        children.setdefault(int(rest.rpartition(") ")[2].split()[1]), []).append(int(number))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found


def memory_of(pids: Sequence[int]) -> float:
    """The memory of some processes in MiB, as if no other processes were there.

    It is the sum of their PSS, but for pages of files that are mapped (libraries): PSS would divide
    those among all contenders that are alive. Each process's own pages count, and each file once,
    as the process has it that uses most.
    """
    own, files = 0, dict[str, int]()
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps").read_text()
        except OSError:
            continue
        here = dict[str, int]()
        for path, kib in mappings(text):
            if (
                path.startswith("/")
                and not path.startswith("/dev/")
                and not path.endswith("(deleted)")
            ):
                here[path] = here.get(path, 0) + kib["Rss"] - kib["Private_Dirty"]
                # Written to, so no page of the file any more.
                own += kib["Private_Dirty"]
            else:
                own += kib["Pss"]
        files |= {path: max(count, files.get(path, 0)) for path, count in here.items()}
    return (own + sum(files.values())) / 1024


def mappings(smaps: str) -> Iterator[tuple[str, dict[str, int]]]:
    """The path of each mapping of /proc/PID/smaps, and its counts in KiB."""
    for text in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)[1:]:
        head, _, counts = text.partition("\n")
        found = re.findall(r"^(\w+): +(\d+) kB$", counts, re.MULTILINE)
        yield " ".join(head.split()[5:]), {name: int(count) for name, count in found}


# The results.


class Figures(NamedTuple):
    """A line of the table; times in seconds."""

    contender: str
    round: float
    # To the tuned pool.
    ratio: float | None
    # Per client.
    overhead: float
    start: float
    first: float
    end: float
    # MiB
    memory: float
    accuracy: float


def figures_of(entry: Entry, tuned: Entry | None, processes: int) -> Figures:
    laps = entry.counted
    pairs = zip(laps, tuned.counted, strict=True) if tuned else ()
    ratios = [ours.seconds / theirs.seconds for ours, theirs in pairs]
    return Figures(
        entry.name,
        median(lap.seconds for lap in laps),
        median(ratios) if ratios else None,
        median(overhead(lap, processes) for lap in laps),
        *(entry.start, entry.laps[1].seconds, entry.end, entry.memory, entry.laps[-1].accuracy),
    )


def overhead(lap: Lap, processes: int) -> float:
    """Seconds of a process per client in which it neither trained nor evaluated."""
    return (lap.seconds * processes - lap.training - lap.evaluation) / lap.clients


def gap(one: Entry, other: Entry) -> float:
    """How far the test accuracies of two contenders are apart, mean over the rounds."""
    pairs = list(zip(one.laps, other.laps, strict=True))
    return sum(abs(a.accuracy - b.accuracy) for a, b in pairs) / len(pairs)


def table_of(lines: Sequence[Figures]) -> str:
    """As a table in Markdown, which is also readable as it is."""
    head = [
        "",
        "s/round",
        "x tuned",
        "ms/client over",
        "start s",
        "first s",
        "end s",
        "MiB",
        "accuracy",
    ]
    rows = [
        [
            *(
                line.contender,
                f"{line.round:.2f}",
                "" if line.ratio is None else f"{line.ratio:.2f}",
            ),
            *(
                f"{1000 * line.overhead:.1f}",
                f"{line.start:.1f}",
                f"{line.first:.2f}",
                f"{line.end:.1f}",
            ),
            *(f"{line.memory:.0f}", f"{line.accuracy:.1%}"),
        ]
        for line in lines
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for row in (head, rule, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def job_table(
    workload: Workload, data: Mapping[str, Any], num_images: int, rounds: int, gpus: float
) -> dict[str, Any]:
    """The job that all contenders of a workload run; `gpus` for all processes of a contender."""
    if workload.small:
        num_clients, per_round, rule = num_images // 60, 100, "iid"
    else:
        num_clients, per_round, rule = 100, 10, "dirichlet"
    partition = {
        "name": rule,
        "num_clients": num_clients,
        **({"alpha": 0.1} if rule == "dirichlet" else {}),
    }
    train = {
        "num_rounds": rounds,
        "clients_per_round": min(per_round, num_clients),
        "local_epochs": workload.epochs,
    }
    return {
        "name": "bench",
        "method": workload.method,
        "data": {**data, "partition": partition},
        "train": {**train, "batch_size": 50, "lr": 0.03, "momentum": 0.9},
        "ray": {"num_gpus": gpus},
        # The time of a pause is no reason for a checkpoint.
        "output": {"every_seconds": 1e6},
    }


def machine(device: str) -> str:
    model = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    gpu = f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    names = f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores{gpu}"
    return (
        f"{date.today()}; {names}; torch {torch.__version__}; load before: {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="W"
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=USUAL, metavar="NAME"
    )
    parser.add_argument(
        "--data", default=MINI, help="what a job's data.source may be (default: %(default)s)"
    )
    parser.add_argument("--test", default="", help="file of the test set, where --data has none")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    how_many = "actors, and processes of the tuned pool; several numbers for several sizes of both"
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[os.cpu_count()], metavar="N", help=how_many
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="turns of each contender (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="one turn of one round")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all rounds and figures to a file"
    )
    given = parser.parse_args()
    if min(*given.processes, given.repeats) < 1:
        parser.error("--processes and --repeats are 1 or more")
    if given.device == "cpu" and "graphs" in given.contenders:
        parser.error("--contenders graphs: CUDA graphs need --device cuda")
    # Contenders that are stopped must be ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch sees no GPU here")
    data = {"source": given.data, "test": given.test}
    try:
        num_images = len(load(Data(**data)).train)
    except InputError as error:
        raise SystemExit(f"--data: {error}") from None
    sizes, gpus = (
        entrants(given.contenders, given.processes),
        1.0 if given.device == "cuda" else 0.0,
    )
    told, wrong = machine(given.device), []
    print(
        f"{told}\n"
        f"{given.data}: {num_images:,} images; {', '.join(map(str, given.processes))} processes\n"
    )
    results: dict[str, Any] = {
        "machine": told,
        "data": data,
        "processes": given.processes,
        "workloads": {},
    }
    for name in given.workloads:
        workload = WORKLOADS[name]
        block, repeats = (1, 1) if given.quick else (workload.block, given.repeats)
        num_rounds, began = BEFORE + (1 + block) * repeats, time.perf_counter()
        table = job_table(workload, data, num_images, num_rounds, gpus)
        entries = race(table, sizes, block, repeats)
        by_name = {entry.name: entry for entry in entries}
        tuned_pools = {sizes[name]: by_name[name] for name in sizes if kind_of(name) == "tuned"}
        # For contenders of a single process.
        first = next(iter(tuned_pools.values()), None)
        lines = [
            figures_of(entry, tuned_pools.get(sizes[entry.name], first), sizes[entry.name])
            for entry in entries
        ]
        seconds = time.perf_counter() - began
        print(
            f"{name}: {workload.title}; {block * repeats} rounds count, {seconds:.0f} s\n"
            "\n"
            f"{table_of(lines)}\n",
            flush=True,
        )
        for entry in entries[1:]:
            if (apart := gap(entry, entries[0])) > AGREE:
                wrong.append(
                    f"{name}: the accuracies of {entry.name} and {entries[0].name} are {apart:.3f} "
                    "apart"
                )
        both = [
            {**line._asdict(), "laps": [lap._asdict() for lap in by_name[line.contender].laps]}
            for line in lines
        ]
        results["workloads"][name] = {"job": table, "contenders": both}
        # After every workload, so that a run that is stopped leaves something.
        if given.json:
            given.json.write_text(json.dumps(results, indent=1))
    if wrong:
        raise SystemExit("ERROR: the contenders did not do the same work:\n  " + "\n  ".join(wrong))


if __name__ == "__main__":
    main()
