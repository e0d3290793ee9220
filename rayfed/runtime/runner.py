"""Run clients' work in one process: on an actor, or in the driver itself without Ray.

Values come and go broadcast, on the same wire in both cases.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rayfed.base.isolation import set_usual
from rayfed.measures.clients import Seen
from rayfed.methods.part import Parts, parts_at
from rayfed.rounds import client_work, evaluation
from rayfed.rounds.client_work import RoundContext
from rayfed.rounds.executor import Piece
from rayfed.rounds.messages import Assignment, Broadcast, ClientReply, Task, TaskReply
from rayfed.rounds.round import ClientRow
from rayfed.rounds.setup import Setup
from rayfed.rounds.tasks import TaskSum, name_client
from rayfed.runtime.hardware import (
    advising,
    keep_freed_memory,
    kind_of,
    make_cuda_repeatable,
    refuse_tf32,
)
from rayfed.runtime.repeat import bits_of, refuse_other_bits, refuse_other_numbers, users_own
from rayfed.tensors.trees import Tree, num_bytes
from rayfed.tensors.weights import Weights, in_evaluation, with_weights
from rayfed.tensors.wire import Packed, unpack


class Runner:
    """Serves any client of a setup.

    A broadcast comes with packed trees.
    """

    def __init__(self, setup: Setup, device: torch.device, node: str) -> None:
        # On an actor, a module of the user's may have changed the settings when it was imported
        # with the setup.
        set_usual(device)
        torch.set_num_threads(setup.job.ray.threads)
        keep_freed_memory()
        if setup.job.train.precision == "tf32":
            refuse_tf32(device)
        if device.type == "cuda":
            make_cuda_repeatable()
        if device != setup.device:
            setup = replace(setup, model=moved(setup.model, device), device=device)
        self.setup = replace(setup, node=node)
        self.kind = kind_of(device)
        # The model that clients train in turn.
        self._model: nn.Module | None = None
        # By round, what measures need of its global model, for all its messages.
        self._seen: dict[int, Seen] = {}
        # The parts whose hooks were watched, and for which work.
        self._watched: list[tuple[str, Parts]] = []
        # Whether code of the user's is still to be checked: does it give the same again?
        self._check_training = setup.job.ray.check_repeat
        self._check_evaluation = setup.job.ray.check_repeat
        self._users_modules = [
            module for module in users_own(self.setup, 1) if isinstance(module, nn.Module)
        ]

    def losses(
        self, weights: Packed, tasks: Sequence[Task], round: int, *, one_batch: bool
    ) -> Iterator[list[float]]:
        """Yield the loss of the weights at each client of each task."""
        values = unpack(weights, copy=False)
        model: nn.Module | None = None
        for task in tasks:
            losses = []
            for client in task:
                with Serving(client), advising():
                    # A module of the user's may keep something, so each client has its own copy.
                    if model is None or self._users_modules:
                        model = in_evaluation(with_weights(self.setup.model, values))
                    loss = client_work.loss_of(
                        self.setup, model, client, round, one_batch=one_batch
                    )
                losses.append(loss)
            yield losses

    def survey(self, broadcast: Broadcast, tasks: Sequence[Task]) -> Iterator[TaskReply]:
        """Survey the clients of each task, and yield the sum of what they say."""
        where = f"round {broadcast.round} (survey)"
        shared = self._shared_context(broadcast)
        for task in tasks:
            total = TaskSum(where, task)
            for client in task:
                with Serving(client), advising():
                    context = shared or self._fresh_context(broadcast)
                    watch = self._is_first("survey", broadcast.round)
                    summands = client_work.survey(context, client, watch=watch)
                total.add(client, summands, num_bytes(summands))
            yield total.reply()

    def train(
        self, broadcast: Broadcast, tasks: Sequence[Task], memories: Mapping[int, Packed]
    ) -> Iterator[TaskReply]:
        """Train the clients of each task, and yield the sum of what they send.

        The first client is trained again at the end, once in the life of the process, where code of
        the user's takes part: it must give the same bits.
        """
        where = f"round {broadcast.round}"
        shared = self._shared_context(broadcast)
        users_code = users_own(self.setup, broadcast.round) if self._check_training else []
        first_bits = None
        for task in tasks:
            total = TaskSum(where, task)
            replies: list[ClientReply] = []
            for client in task:
                reply = self._train_client(broadcast, shared, client, memories.get(client))
                if users_code and first_bits is None:
                    first_bits = bits_of(reply)
                # At once: the next client trains the same model, which the reply may hold.
                total.add(client, reply.summands, reply.bytes_up)
                memory = broadcast.write_memory(reply.memory)
                replies.append(replace(reply, summands={}, memory=memory))
            task_reply = total.reply(replies)
            if first_bits is not None and task is tasks[-1]:
                self._check_training = False
                client = tasks[0][0]
                reply = self._train_client(broadcast, shared, client, memories.get(client))
                with Serving(client):
                    refuse_other_bits(
                        f"client {client}, {where}", users_code, first_bits, bits_of(reply)
                    )
            yield task_reply
        if self._model is not None:
            # The gradients give their memory to what comes next.
            self._model.zero_grad()

    def local_models(
        self, broadcast: Broadcast, assignments: Sequence[Assignment]
    ) -> Iterator[tuple[ClientRow, Weights]]:
        """Train clients, each alone in its task; yield each one's row and weights."""
        shared = self._shared_context(broadcast)
        for assignment in assignments:
            (client,) = assignment.clients
            with Serving(client), advising():
                context = shared or self._fresh_context(broadcast)
                memory = broadcast.read_memory(assignment.memories.get(client))
                reply = client_work.train(context, client, memory)
                weights = context.trained()
            yield reply.row, weights

    def _train_client(
        self,
        broadcast: Broadcast,
        shared: RoundContext | None,
        client: int,
        memory: Packed | None,
    ) -> ClientReply:
        """Train a client, in the context that all share or in one of its own."""
        with Serving(client), advising():
            context = shared or self._fresh_context(broadcast)
            watch = self._is_first("train", broadcast.round)
            return client_work.train(context, client, broadcast.read_memory(memory), watch=watch)

    def evaluate(self, weights: Packed, pieces: Sequence[Piece], kind: str) -> list[Any]:
        """Evaluate the weights on ranges of test images, or see their activations there.

        Each range is by itself: it has the same numbers whichever process gets it.
        """
        values = unpack(weights, copy=False)
        results = []
        with advising():
            model = in_evaluation(with_weights(self.setup.model, values))
            for piece in pieces:
                # A module of the user's may keep something, so each range has a copy of its own.
                if self._users_modules and piece is not pieces[0]:
                    model = in_evaluation(with_weights(self.setup.model, values))
                results.append(self._evaluate_piece(model, piece, kind))
            if self._users_modules and self._check_evaluation and kind == "evaluation":
                self._check_evaluation = False
                model = in_evaluation(with_weights(self.setup.model, values))
                again = self._evaluate_piece(model, pieces[0], kind)
                refuse_other_numbers(self._users_modules, results[0], again)
        return results

    def _evaluate_piece(self, model: nn.Module, piece: Piece, kind: str) -> Any:
        """Evaluate a model on a range of test images, or see its activations there."""
        start, stop = piece
        if kind == "evaluation":
            return evaluation.evaluate(self.setup, model, start, stop)
        return evaluation.activations(self.setup, model, start, stop)

    def _is_first(self, work: str, round: int) -> bool:
        """Say whether such work is done for the first time here with the parts of a round."""
        parts = parts_at(self.setup.job.method, round)
        for known, before in self._watched:
            if work == known and parts is before:
                return False
        self._watched.append((work, parts))
        return True

    def _shared_context(self, broadcast: Broadcast) -> RoundContext | None:
        """Return the context that all clients share; None where each must have its own.

        A part or a module of the user's may write to anything that it is given. The parts of this
        package leave all as it was, as tests/methods/test_contract.py checks.
        """
        if broadcast.round not in self._seen:
            self._seen.clear()
        if users_own(self.setup, broadcast.round):
            return None
        if self._model is None:
            self._model = copy.deepcopy(self.setup.model)
        unpacked = broadcast.map(unpack_in_place)
        return RoundContext(self.setup, unpacked, self._seen, self._model)

    def _fresh_context(self, broadcast: Broadcast) -> RoundContext:
        """Return a context, with a copy of the broadcast and a model, for one client alone."""
        return RoundContext(self.setup, broadcast.map(unpack), self._seen)


def unpack_in_place(packed: Packed) -> Tree:
    """Return a packed tree whose tensors are read where they lie, without a copy."""
    return unpack(packed, copy=False)


class Serving:
    """Name the client in an exception of its work, for the context: the attribute `at_client`.

    It is no generator of `contextlib`, which would let a StopIteration through.
    """

    def __init__(self, client: int) -> None:
        self._client = client

    def __enter__(self) -> None:
        """Begin to serve the client."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: object
    ) -> None:
        if isinstance(error, StopIteration):
            # It would end the generator that this belongs to.
            missed = RuntimeError("a StopIteration, as of next(...), was not caught")
            raise name_client(missed, self._client) from error
        if isinstance(error, Exception):
            name_client(error, self._client)


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a model on another device, in the layout that is faster there.

    The layout that is faster on CPUs is slower on GPUs, in float32.
    """
    model = copy.deepcopy(model)
    # A user's `to` may return nothing, and take no layout.
    model.to(device)
    nn.Module.to(model, memory_format=torch.contiguous_format)
    return model
