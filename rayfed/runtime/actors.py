"""The actor that does the clients' work.

It imports torch and this package, but not torchvision, which is slow.
"""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray import ObjectRef, cloudpickle

from rayfed.base.code import Source, import_from
from rayfed.base.errors import Restarted
from rayfed.rounds.executor import Work
from rayfed.rounds.round import HardwareKind
from rayfed.rounds.tasks import at_client, name_client
from rayfed.runtime.gpus import device_given, memory_cap
from rayfed.runtime.rehearsal import Needs, needs_of
from rayfed.runtime.remote import apart, received
from rayfed.runtime.runner import Runner


@ray.remote
class ClientActor:
    """Serves any client of the run, task by task.

    Ray's dashboard shows the names of these methods.
    """

    def __init__(self, name: str, threads: int, gpu_share: float) -> None:
        # Ray's handler raises SystemExit. In a hook, that would look like an error of the user's.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Ray sets fewer threads, and the number of threads can change the last bits of results.
        torch.set_num_threads(threads)
        self._name = name
        self._gpu_share = gpu_share
        self._opened: Runner | None = None

    def __repr__(self) -> str:
        return self._name

    def where(self) -> tuple[str, str, str, str]:
        """Return where this actor is: its node, its GPU and its process.

        These are Ray's id of the node, the node's address, the GPU's number there ('' without
        one), and Ray's id of the process.
        """
        context = ray.get_runtime_context()
        gpus = ",".join(map(str, ray.get_gpu_ids()))
        return context.get_node_id(), ray.util.get_node_ip_address(), gpus, context.get_worker_id()

    def open(
        self, setup: Sequence[ObjectRef], modules: Sequence[Source] = ()
    ) -> tuple[tuple[str, ...], str, HardwareKind]:
        """Open the run; return where that was, the device and the kind of hardware.

        A restarted actor must do it again.

        The user's `modules` are imported as they were when the run began: their files may have been
        edited since, or be others on this node. `setup` is the reference to the run's setup, in a
        list, so that this method waits for the data, not the actor's queue. It is no argument of
        the constructor: Ray cannot restart an actor whose constructor has arguments in the object
        store.
        """
        import_from(modules)
        device = device_given()
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(memory_cap(self._gpu_share))
        self._opened = Runner(ray.get(setup[0]), device, ray.util.get_node_ip_address())
        return self.where(), str(device), self._opened.kind

    def do(self, work: Work, values: Sequence[Any], names: Sequence[str], *objects: Any) -> Any:
        """Do items of one kind of work; return a list of small results, and then all large results.

        The shared trees are the first objects, each by itself, so that Ray fetches each once per
        node. The others belong to the items.
        """
        shared = dict(zip(names, objects[: len(names)], strict=True))
        items = received(work, values, objects[len(names) :])
        with sendable():
            return apart(work, work.run(self._runner, shared, items))

    def measure(self, setup: Sequence[ObjectRef]) -> Needs:
        """Return the memory that this process takes for the largest client.

        Raise `InputError` for a GPU that torch does not see.
        """
        device = device_given()
        return needs_of(ray.get(setup[0]), device)

    @property
    def _runner(self) -> Runner:
        """Return the runner; raise `Restarted` where it must be opened again."""
        if self._opened is None:
            raise Restarted(f"{self._name} was restarted, and has not been opened again")
        return self._opened


@contextmanager
def sendable() -> Iterator[None]:
    """Raise an exception as words where it would be lost on the way to the driver.

    That is so where its arguments are not those that its class takes: it cannot be unpickled.
    """
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
