"""A worker serves a site in packed values: the same work and the same wire on an actor and in this process."""

import copy
import ctypes
import os
import platform
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from rayfed.base.errors import RunFailed
from rayfed.base.spans import at, span
from rayfed.losses.metrics import Evaluation
from rayfed.methods.part import Part, parts_at, remembers
from rayfed.rounds import local
from rayfed.rounds.local import Broadcast, Desk, Reply, Site
from rayfed.rounds.measures import UPDATES, Activations, Seen
from rayfed.rounds.round import Arrival, ClientRow, Kind, Memory
from rayfed.rounds.tasks import Summed, Task, refusing
from rayfed.tensors.sums import OrderedSum, checked
from rayfed.tensors.trees import Layout, Tree, leaves, num_bytes
from rayfed.tensors.weights import Weights, with_weights
from rayfed.tensors.wire import Packed, bytes_of, pack, unpack

EVALUATION_CHUNK = 1000  # test images per piece of work: a constant, so that the sum of losses has a fixed order
Look = Literal["evaluation", "activations"]
KNOWN = "rayfed.", "torch.", "torchvision."  # whose parts and modules of models keep nothing of a client
# Variables of the environment that decide bits, and those of such names that decide none: rayfed sets the threads.
DECIDE = re.compile(
    r"(ATEN|BLIS|CUBLAS(LT)?|CUDNN|DNNL|MKL|NPY_(DIS|EN)ABLE|NVIDIA_TF32|ONEDNN|OPENBLAS)_|OMP_(DYNAMIC|THREAD_LIMIT)$"
    r"|TORCH_(ALLOW_TF32|BLAS|CUBLAS|CUDNN|LINALG|MKLDNN)_|DISABLE_ADDMM_"
)
HARMLESS = re.compile(r"VERBOSE|LOG|DUMP|PROFILE|CACHE_CAPACITY|(MKL|BLAS|BLIS)_(NUM_THREADS|DYNAMIC)|WORKSPACE_CONFIG")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as glibc's malloc.h numbers them
# What to do about errors of CUDA's, by a pattern in their text.
ADVICE = {
    "does not have a deterministic implementation": (
        "on a GPU this operation gives other bits each time, so rayfed refuses it: put another in its place, in the "
        "model or the part (docs/gpu.md names some), or train on CPUs with ray.num_gpus = 0"
    ),
    "CUDA out of memory|CUDA error: out of memory|_ALLOC_FAILED": (
        "its actor has too little GPU memory: try a larger ray.num_gpus (auto measures the need), or a smaller "
        "train.batch_size"
    ),
}


@dataclass(frozen=True, eq=False)
class Done:
    """A task's answer without its tensors; the lists have an item per client."""

    layout: Layout  # of each client's summands
    bytes_up: list[int]
    rows: list[ClientRow]  # none after a survey
    confusions: list[np.ndarray | None]  # as in `Arrival`
    remember: list[bool]  # whether a client has a memory: a handle does not show it


def kind_of(device: torch.device) -> Kind:
    """The hardware, and torch's settings: what the bits of a result depend on beside the code and its versions."""
    settings = {
        "float32": torch.get_float32_matmul_precision(),
        "deterministic": "yes" if torch.are_deterministic_algorithms_enabled() else "no",
        "variables": _variables() or "none",
    }
    if device.type == "cuda":
        tf32 = "yes" if torch.backends.cudnn.allow_tf32 else "no"
        return {"device": torch.cuda.get_device_name(device), "tf32 in cudnn": tf32, **settings}
    instructions = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {"device": device.type, "instructions": instructions, **_processor(), **settings}


def _variables() -> str:
    """Those of the environment that change how torch and its libraries compute: `NAME=value NAME=value`."""
    found = [name for name, value in os.environ.items() if value and DECIDE.match(name) and not HARMLESS.search(name)]
    return " ".join(f"{name}={os.environ[name]}" for name in sorted(found))


def _processor() -> Kind:
    """Its maker, and its instructions for matrices and short numbers: oneDNN and MKL choose their code by both."""
    known = torch.cpu.get_capabilities()
    maker = str(known.get("cpu_name", "")).partition(" ")[0]
    with suppress(OSError):  # there is no /proc
        found = re.search(r"(?:vendor_id|CPU implementer)\s*:\s*(\S+)", Path("/proc/cpuinfo").read_text())
        maker = found[1] if found else maker
    short = [name for name, there in known.items() if there is True and re.search("amx|bf16|fp16|i8mm|sve|vnni", name)]
    return {"maker": maker or "unknown", "extensions": " ".join(sorted(short)) or "none"}


def make_cuda_repeatable() -> None:
    """Set CUDA, in this process, to give the same bits every time, and float32 where float32 is asked for.

    What has no such form is an error, with `ADVICE`. Memory that torch leaves unset is filled, as is torch's default.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS is first used; another size, other bits
    torch.use_deterministic_algorithms(True)
    backends: Any = torch.backends
    backends.cudnn.benchmark = False  # it would choose by time, so differently each time
    # TF32 keeps 10 bits of 23, and is torch's default in convolutions. torch has two sets of switches for it: the newer
    # overrules the older, but raises an error where they disagree.
    backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    for operations in (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul):
        operations.fp32_precision = "ieee"


def keep_freed_memory() -> None:
    """Let this process keep what torch frees: to have it from the kernel again slows evaluation by 15 %."""
    if platform.libc_ver()[0] == "glibc":
        of_c = ctypes.CDLL(None)
        of_c.mallopt(M_TRIM_THRESHOLD, 2**27)  # bytes, at the end of the heap
        of_c.mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that glibc takes


@contextmanager
def advising() -> Iterator[None]:
    """An error of CUDA's in the context comes with a note: what to do next."""
    try:
        yield
    except Exception as error:
        for pattern, advice in ADVICE.items():
            if re.search(pattern, str(error)):
                error.add_note(advice)
        raise


class Worker:
    """Serves any client of a site. A broadcast comes with packed trees."""

    def __init__(self, site: Site, device: torch.device, node: str) -> None:
        keep_freed_memory()
        if device.type == "cuda":
            make_cuda_repeatable()
        if device != site.device:
            # The layout that is faster on CPUs is slower on GPUs, in float32.
            model = copy.deepcopy(site.model).to(device).to(memory_format=torch.contiguous_format)
            site = replace(site, model=model, device=device)
        self.site = site
        self.kind = kind_of(device)
        self._node = node
        self._model: nn.Module | None = None  # for the clients to train
        self._seen: tuple[int, list[Seen]] = 0, []  # in a round, what measures need of its global model
        self._repeats = site.job.ray.check_repeat  # until the first client of the user's own code was served again

    def survey(self, packed: Broadcast, tasks: Sequence[Task]) -> Iterator[tuple[Done, Packed]]:
        """For each task, the clients' summands before training."""
        desk = self._desks(packed)

        def surveyed(client: int) -> Tree:
            its_desk = desk()
            with span("survey"):
                return local.survey(its_desk, client)

        for task in tasks:
            layout, sizes, total = _summed(f"round {packed.round} (survey)", task, surveyed)
            yield Done(layout, sizes, [], [], []), total

    def train(
        self, packed: Broadcast, tasks: Sequence[Task], memories: Mapping[int, Packed]
    ) -> Iterator[tuple[Any, ...]]:
        """For each task a `Done`, the clients' summands, and each client's new memory, None for one that has none.

        The memories are left out where the parts never give one: each is an object of its own in Ray's store.
        """
        desk, remembering = self._desks(packed), remembers(parts_at(self.site.job.method, packed.round))
        replies: list[tuple[ClientRow, np.ndarray | None, Packed | None]] = []

        def serve(client: int) -> Reply:
            memory: dict[str, Any] = unpack(memories[client]) if client in memories else {"round": 0, "slots": {}}
            # Only of parts that have been in force since the memory was written.
            recalled = {slot: tree for slot, tree in memory["slots"].items() if packed.holds(slot, memory["round"])}
            its_desk = desk()
            with span("train"):
                return local.train(its_desk, client, recalled)

        def trained(client: int) -> Tree:
            reply = serve(client)
            if own and not first:
                first.update({client: _bits(reply)})
            row = ClientRow(client, reply.num_examples, reply.train_loss, reply.seconds, self._node, reply.notes)
            kept = pack({"round": packed.round, "slots": reply.memory}) if reply.memory else None
            replies.append((row, reply.confusion, kept))
            return reply.summands if reply.update is None else {**reply.summands, UPDATES: reply.update}

        def again(client: int) -> Tree:
            _refuse_other_bits(
                own, f"client {client}, round {packed.round}", first[client], _bits(reply := serve(client))
            )
            return reply.summands

        own, first = self._own(packed.round) if self._repeats else [], dict[int, dict[str, Any]]()
        for task in tasks:
            replies.clear()
            layout, sizes, total = _summed(f"round {packed.round}", task, trained)
            rows, confusions, kept = (list(column) for column in zip(*replies, strict=True))
            done = Done(layout, sizes, rows, confusions, [memory is not None for memory in kept])
            if own and task is tasks[-1]:
                self._repeats = False
                _summed(f"round {packed.round}", tuple(first), again)
            yield done, total, *(kept if remembering else ())
        if self._model is not None:
            self._model.zero_grad()  # what comes next has their memory

    def _desks(self, packed: Broadcast) -> Callable[[], Desk]:
        """Gives each client its desk.

        A part or a module of the user's may write to anything there: then each client has a desk, and a model, of its
        own. The parts of this package leave all as it was, as tests/methods/test_contract.py checks.
        """
        if packed.round != self._seen[0]:
            self._seen = packed.round, []
        if own := self._own(packed.round):
            modules = {type(one).__module__ for one in own}
            held = [value for name in modules if name in sys.modules for value in vars(sys.modules[name]).values()]
            caches = [value.cache_clear for value in held if callable(getattr(value, "cache_clear", None))]

            def fresh() -> Desk:
                for clear in caches:
                    clear()
                return Desk(self.site, packed.map(unpack), self._seen[1])

            return fresh
        self._model = self._model or copy.deepcopy(self.site.model)
        shared = Desk(self.site, packed.map(partial(unpack, copy=False)), self._seen[1], self._model)
        return lambda: shared

    def _own(self, round: int) -> list[Part | nn.Module]:
        """The parts and the modules of the model that are the user's."""
        every: list[Part | nn.Module] = [*parts_at(self.site.job.method, round), *self.site.model.modules()]
        return [one for one in every if not type(one).__module__.startswith(KNOWN)]

    def evaluate(self, weights: Packed, pieces: Sequence[tuple[int, int]], look: Look) -> list[Any]:
        """What a look at the weights gives for some ranges of test images, each by itself."""
        with at(f"the {look}"), advising():
            model = with_weights(self.site.model, unpack(weights, copy=False)).eval()
            return [self._evaluate(model, start, stop, look) for start, stop in pieces]

    def _evaluate(self, model: nn.Module, start: int, stop: int, look: Look) -> Any:
        with span("evaluate"):
            work = local.evaluate if look == "evaluation" else local.activations
            return work(self.site, model, start, stop)


def _bits(reply: Reply) -> dict[str, Any]:
    """All bits of an answer that a run depends on, by slot; the loss."""
    found: dict[str, Any] = {"": reply.train_loss.hex()}
    for slot in {*reply.summands, *reply.memory}:
        values = leaves((reply.summands.get(slot), reply.memory.get(slot)))
        found[slot] = [(path, _bytes(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)) for path, leaf in values]
    return found


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes_of(tensor.detach().contiguous().reshape(-1)).tobytes()


def _refuse_other_bits(own: Sequence[Any], what: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raises `RunFailed` where a client that is served again, after others, gives other bits."""
    if before == after:
        return
    suspects = [one for one in own if before.get(slot := getattr(one, "slot", "")) != after.get(slot)] or own
    names = " or ".join(dict.fromkeys(f"{type(one).__module__}.{type(one).__qualname__}" for one in suspects))
    raise RunFailed(
        f"{what}: served again after others, it gives other bits, so the results would depend "
        f"on which process serves whom, and on where a run is resumed. {names} keeps something from client to client "
        "(a global, an attribute of a class, a generator of its own, a patched function): give it back as memory or "
        "state, and draw from torch's generator (docs/own.md); to have no check: ray.check_repeat = false"
    )


def _summed(stage: str, task: Task, work: Callable[[int], Tree]) -> tuple[Layout, list[int], Packed]:
    """The summands of a task's clients, checked: their layout, the bytes of the parts' in each, and their sum.

    A single client's summands stay as they are: in float32, where a sum has twice the bytes. An exception of a client's
    work gets the client's number, `at_client`.
    """
    total, sizes = OrderedSum(), []
    for client in task:
        try:
            with at(f"client {client}, {stage}"), advising():
                summand = work(client)
        except StopIteration as error:  # it would end the generator that this belongs to
            raise name_client(RuntimeError("a StopIteration, as of next(...), was not caught"), client) from error
        except Exception as error:
            name_client(error, client)
            raise
        with refusing(stage, client, task[0]):
            layout = checked(summand)
            if len(task) > 1:
                total.add(summand, layout)
        sizes.append(num_bytes(summand) - num_bytes(summand.get(UPDATES)))
    return layout, sizes, total.packed() if len(task) > 1 else pack(summand)


def name_client(error: Exception, client: int) -> Exception:
    """The error, which says from now on at which client it was raised."""
    with suppress(AttributeError):
        error.at_client = client  # type: ignore[attr-defined]
    return error


def at_client(error: BaseException | None, task: Sequence[int]) -> int | None:
    """The client of a task at which an exception was raised; None where nobody knows."""
    return getattr(error, "at_client", task[0] if len(task) == 1 else None)


def what_of(task: Task, round: int, *, survey: bool) -> str:
    """A task in words, for messages."""
    clients = f"client {task[0]}" if len(task) == 1 else f"{len(task)} clients ({', '.join(map(str, task))})"
    return f"{clients}, round {round}" + (" (survey)" if survey else "")


class CohortWorkers(ABC):
    """`Workers` without the way in which a `Worker` is called: in this process, or on an actor."""

    num_test: int  # images
    num_sampled: int  # of them, to measure on

    @abstractmethod
    def call_each(
        self, broadcast: Broadcast, tasks: Sequence[Task], memories: Mapping[int, Memory] | None
    ) -> Iterator[Sequence[Any]]:
        """What `Worker.train` gives; with `memories` None, what `Worker.survey` gives."""

    @abstractmethod
    def evaluate_pieces(self, weights: Weights, pieces: Sequence[tuple[int, int]], look: Look) -> Iterator[Any]:
        """The values of `Worker.evaluate`."""

    def survey(self, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[tuple[Summed, list[int]]]:
        return map(_surveyed, self.call_each(broadcast, tasks, None))

    def train(
        self, broadcast: Broadcast, tasks: Sequence[Task], memories: Mapping[int, Memory]
    ) -> Iterator[tuple[Summed, list[Arrival]]]:
        return map(_trained, self.call_each(broadcast, tasks, memories))

    def evaluate(self, weights: Weights) -> Callable[[], Evaluation]:
        pieces = self.evaluate_pieces(weights, pieces_of(self.num_test), "evaluation")
        return lambda: sum(pieces, next(pieces))

    def activations(self, weights: Weights) -> Activations | None:
        found = [*self.evaluate_pieces(weights, pieces_of(self.num_sampled), "activations")]
        return None if None in found else sum(found[1:], found[0])


def _surveyed(answer: Sequence[Any]) -> tuple[Summed, list[int]]:
    done, summands = answer
    return Summed(unpack(summands, copy=False), done.layout), done.bytes_up


def _trained(answer: Sequence[Any]) -> tuple[Summed, list[Arrival]]:
    done, summands, *kept = answer
    kept = kept or [None] * len(done.rows)
    handles = [memory if there else None for memory, there in zip(kept, done.remember, strict=True)]
    each = zip(done.rows, handles, done.bytes_up, done.confusions, strict=True)
    return Summed(unpack(summands, copy=False), done.layout), [Arrival(*fields) for fields in each]


def pieces_of(images: int) -> list[tuple[int, int]]:
    """Ranges of test images, each for a piece of work."""
    return [(start, min(start + EVALUATION_CHUNK, images)) for start in range(0, images, EVALUATION_CHUNK)]
