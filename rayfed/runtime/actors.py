"""The actor that does the clients' work. It imports torch and this package, but not torchvision, which is slow."""

import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
import torch
from ray import ObjectRef, cloudpickle
from ray.exceptions import GetTimeoutError, ObjectFetchTimedOutError

from rayfed.base.code import Source, import_from
from rayfed.base.errors import Restarted
from rayfed.rounds.client_work import Broadcast
from rayfed.rounds.round import Kind
from rayfed.rounds.tasks import Task, TaskReply, add_up
from rayfed.rounds.workers import Look, Piece
from rayfed.runtime.gpus import device_given, memory_cap, peak_bytes
from rayfed.runtime.worker import Worker, at_client, name_client
from rayfed.tensors.wire import Packed

NOTHING = Packed([], {})  # in place of a task's summands


@ray.remote
class ClientActor:
    """Serves any client of the run, task by task. Ray's dashboard shows the names of these methods."""

    def __init__(self, name: str, threads: int, gpu_share: float) -> None:
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # Ray's handler raises SystemExit, in a hook: the user's error
        torch.set_num_threads(
            threads
        )  # Ray sets fewer; the number of threads can change the last bits
        self._name = name
        self._gpu_share = gpu_share
        self._opened: Worker | None = None

    def __repr__(self) -> str:
        return self._name

    def where(self) -> tuple[str, str, str, str]:
        """Where this actor is: the node, by Ray's id and by its address; the GPU there, by its number; the process."""
        context, gpus = ray.get_runtime_context(), ",".join(map(str, ray.get_gpu_ids()))
        return context.get_node_id(), ray.util.get_node_ip_address(), gpus, context.get_worker_id()

    def open(
        self, site: Sequence[ObjectRef], modules: Sequence[Source] = ()
    ) -> tuple[tuple[str, ...], str, Kind]:
        """Open the run; gives where that was, the device, the kind of hardware. A restarted actor must do it again.

        The user's `modules` are imported as they were when the run began: their files may have been edited since, or
        be others on this node.
        `site` is the reference to the run's site, in a list, so that this method waits for the data, not the actor's
        queue. It is no argument of the constructor: Ray cannot restart an actor whose constructor has arguments in the
        object store.
        """
        import_from(modules)
        device = device_given()
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(memory_cap(self._gpu_share))
        self._opened = Worker(ray.get(site[0]), device, ray.util.get_node_ip_address())
        return self.where(), str(device), self._opened.kind

    # The fields of a `Broadcast` are separate arguments, so that Ray fetches each tree once per node.

    def survey(self, tasks: Sequence[Task], *broadcast: Any) -> tuple[Any, ...]:
        with sendable():
            return _apart(self._worker.survey(Broadcast(*broadcast), tasks), memories=False)

    def fit(
        self,
        tasks: Sequence[Task],
        remembers: bool,
        remembered: Sequence[int],
        *broadcast_and_memories: Any,
    ) -> tuple[Any, ...]:
        """With new memories if the method `remembers`: each is an object of its own, so that it moves by reference.

        So are those of the clients that are `remembered`, the last arguments.
        """
        end = len(broadcast_and_memories) - len(remembered)
        broadcast, memories = broadcast_and_memories[:end], broadcast_and_memories[end:]
        by_client = dict(zip(remembered, memories, strict=True))
        with sendable():
            return _apart(
                self._worker.train(Broadcast(*broadcast), tasks, by_client), memories=remembers
            )

    def add(
        self,
        stage: str,
        replies: Sequence[TaskReply],
        summands: Sequence[ObjectRef],
        memories: Sequence[ObjectRef],
        limit: float,
    ) -> tuple[Any, ...]:
        """The sum of tasks' sums, on its way to the driver, out of their replies.

        The references come in lists: so the sums are fetched one by one, each while the one before it is added, and
        each in at most `limit` seconds. The memories get a copy on this node.
        """
        bring(memories)

        def fetched() -> Iterator[TaskReply]:
            for number, reply in enumerate(replies):
                bring(summands[number : number + 2])
                try:
                    yield replace(reply, summands=ray.get(summands[number], timeout=limit))
                except (
                    GetTimeoutError
                ):  # a silent node is as bad as a lost one, and Ray itself waits ten minutes
                    raise ObjectFetchTimedOutError(summands[number].hex(), None, "") from None

        with sendable():
            return [None], add_up(stage, fetched()).summands

    def evaluate(self, weights: Packed, pieces: Sequence[Piece], look: Look) -> list[list[Any]]:
        return [self._worker.evaluate(weights, pieces, look)]

    def measure_memory(self, site: Sequence[ObjectRef]) -> int:
        """The GPU memory in bytes that this process takes for the largest client; 0 on a pretended GPU."""
        device_given()  # refuses a GPU that torch does not see
        return peak_bytes(ray.get(site[0]))

    @property
    def _worker(self) -> Worker:
        if self._opened is None:
            raise Restarted(f"{self._name} was restarted, and has not been opened again")
        return self._opened


@contextmanager
def sendable() -> Iterator[None]:
    """An exception that is lost on the way, as its arguments are not those of its class, is raised in words."""
    try:
        yield
    except Exception as error:
        try:
            cloudpickle.loads(cloudpickle.dumps(error))
        except Exception:
            words = RuntimeError(f"{type(error).__name__}: {error}")
            client = at_client(error, ())
            if client is not None:
                name_client(words, client)
            raise words from error
        raise


def _apart(replies: Iterable[TaskReply], *, memories: bool) -> tuple[Any, ...]:
    """The replies of tasks as Ray sends them: in a list, and then, task by task, the summands and each memory."""
    light: list[TaskReply] = []
    objects: list[Packed | None] = []
    for reply in replies:
        objects.append(reply.summands)
        if memories:
            objects.extend(client.memory for client in reply.clients)
        clients = [replace(client, memory=client.memory is not None) for client in reply.clients]
        light.append(replace(reply, summands=NOTHING, clients=clients))
    return light, *objects


def bring(objects: Sequence[ObjectRef]) -> None:
    """Have objects brought to this node, and do not wait for them."""
    if objects:
        ray.wait(list(objects), num_returns=len(objects), timeout=0, fetch_local=True)


def together(reply: TaskReply, summands: Packed, memories: Sequence[ObjectRef]) -> TaskReply:
    """A task's reply with its objects again, as `_apart` has sent them; the memories stay references."""
    clients = [replace(client, memory=None) for client in reply.clients]
    if memories:
        pairs = zip(reply.clients, memories, strict=True)
        clients = [
            replace(client, memory=memory if client.memory else None) for client, memory in pairs
        ]
    return replace(reply, summands=summands, clients=clients)
