"""A worker serves clients in packed values: the same work and the same wire on an actor and in this
process.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rayfed.base.isolation import set_usual
from rayfed.base.noted import at
from rayfed.measures.clients import Seen
from rayfed.measures.updates import UPDATES
from rayfed.methods.part import Parts, parts_at
from rayfed.rounds import client_work, evaluation
from rayfed.rounds.client_work import RoundContext
from rayfed.rounds.executor import Piece
from rayfed.rounds.messages import Broadcast, ClientReply, Task, TaskReply
from rayfed.rounds.setup import Setup
from rayfed.rounds.tasks import name_client, refusing
from rayfed.runtime.hardware import (
    advising,
    keep_freed_memory,
    kind_of,
    make_cuda_repeatable,
    refuse_tf32,
)
from rayfed.runtime.repeat import (
    Bits,
    bits_of,
    refuse_other_bits,
    refuse_other_numbers,
    users_caches,
    users_own,
)
from rayfed.tensors.sums import OrderedSum, checked
from rayfed.tensors.trees import Tree, num_bytes
from rayfed.tensors.weights import in_evaluation, with_weights
from rayfed.tensors.wire import Packed, pack, unpack


class Runner:
    """Serves any client of a setup. A broadcast comes with packed trees."""

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
            # The layout that is faster on CPUs is slower on GPUs, in float32.
            # A user's `to` may return nothing, and take no layout.
            model = copy.deepcopy(setup.model)
            model.to(device)
            nn.Module.to(model, memory_format=torch.contiguous_format)
            setup = replace(setup, model=model, device=device)
        self.setup = replace(setup, node=node)
        self.kind = kind_of(device)
        # The modules of the user's, until their numbers of test images were compared with those of
        # a second look.
        self._users_modules = [
            one for one in users_own(self.setup, 1) if isinstance(one, nn.Module)
        ]
        # The parts whose hooks were watched, and for which work.
        self._watched: list[tuple[str, Parts]] = []
        self._looks_twice = setup.job.ray.check_repeat
        # For the clients to train.
        self._model: nn.Module | None = None
        # The round -> what measures need of its global model, for all its messages.
        self._seen: dict[int, Seen] = {}
        # Until the first client of the user's own code was served again.
        self._repeats = setup.job.ray.check_repeat

    def survey(self, packed: Broadcast, tasks: Sequence[Task]) -> Iterator[TaskReply]:
        """For each task its reply, with the sum of its clients' summands before training."""
        context_of = self._contexts(packed)

        def surveyed(client: int) -> Tree:
            watch = self._is_first("survey", packed.round)
            return client_work.survey(context_of(), client, watch=watch)

        for task in tasks:
            yield _summed(f"round {packed.round} (survey)", task, surveyed)

    def train(
        self, packed: Broadcast, tasks: Sequence[Task], memories: Mapping[int, Packed]
    ) -> Iterator[TaskReply]:
        """For each task its reply, with the sum of its clients' summands and each client's new
        memory.
        """
        where = f"round {packed.round}"
        context_of = self._contexts(packed)
        users_code = users_own(self.setup, packed.round) if self._repeats else []
        # Of the task.
        replies: list[ClientReply] = []
        # Of the first client.
        first_bits: Bits = {}

        def serve(client: int) -> ClientReply:
            watch = self._is_first("train", packed.round)
            memory = packed.read_memory(memories.get(client))
            return client_work.train(context_of(), client, memory, watch=watch)

        def trained(client: int) -> Tree:
            reply = serve(client)
            if users_code and not first_bits:
                first_bits.update(bits_of(reply))
            replies.append(replace(reply, summands={}, memory=packed.write_memory(reply.memory)))
            return reply.summands

        def again(client: int) -> Tree:
            reply = serve(client)
            refuse_other_bits(f"client {client}, {where}", users_code, first_bits, bits_of(reply))
            return reply.summands

        for task in tasks:
            replies.clear()
            reply = replace(_summed(where, task, trained), clients=list(replies))
            if users_code and task is tasks[-1]:
                self._repeats = False
                _summed(where, tasks[0][:1], again)
            yield reply
        if self._model is not None:
            # What comes next has their memory.
            self._model.zero_grad()

    def _is_first(self, work: str, round: int) -> bool:
        """Whether this worker does such work for the first time with the parts of a round."""
        parts = parts_at(self.setup.job.method, round)
        if any(work == known and parts is before for known, before in self._watched):
            return False
        self._watched.append((work, parts))
        return True

    def _contexts(self, packed: Broadcast) -> Callable[[], RoundContext]:
        """Gives each client its context.

        A part or a module of the user's may write to anything there: then each client has a context,
        and a model, of its own. The parts of this package leave all as it was, as
        tests/methods/test_contract.py checks.
        """
        if packed.round not in self._seen:
            self._seen.clear()
        users_code = users_own(self.setup, packed.round)
        if not users_code:
            self._model = self._model or copy.deepcopy(self.setup.model)
            shared = RoundContext(
                self.setup, packed.map(partial(unpack, copy=False)), self._seen, self._model
            )
            return lambda: shared
        caches = users_caches(users_code)

        def fresh() -> RoundContext:
            for empty in caches:
                empty()
            return RoundContext(self.setup, packed.map(unpack), self._seen)

        return fresh

    def evaluate(self, weights: Packed, pieces: Sequence[Piece], look: str) -> list[Any]:
        """What a look at the weights gives for some ranges of test images, each by itself."""
        values = unpack(weights, copy=False)
        with at(f"the {look}"), advising():
            model = in_evaluation(with_weights(self.setup.model, values))
            found = [self._look(model, piece, look) for piece in pieces[:1]]
            for piece in pieces[1:]:
                # A module of the user's may keep something: each piece has a copy, so that it has
                # the same numbers whichever worker gets it.
                if self._users_modules:
                    model = in_evaluation(with_weights(self.setup.model, values))
                found.append(self._look(model, piece, look))
            if self._users_modules and self._looks_twice and look == "evaluation":
                self._looks_twice = False
                again = self._look(
                    in_evaluation(with_weights(self.setup.model, values)), pieces[0], look
                )
                refuse_other_numbers(self._users_modules, found[0], again)
            return found

    def _look(self, model: nn.Module, piece: Piece, look: str) -> Any:
        work = evaluation.evaluate if look == "evaluation" else evaluation.activations
        return work(self.setup, model, *piece)


def _summed(where: str, task: Task, work: Callable[[int], Tree]) -> TaskReply:
    """A task's reply: the summands of its clients, checked and added up.

    A single client's summands stay as they are: in float32, where a sum has twice the bytes. An
    exception of a client's work gets the client's number, `at_client`.
    """
    total, bytes_up = OrderedSum(), 0
    for client in task:
        try:
            with at(f"client {client}, {where}"), advising():
                summand = work(client)
        except StopIteration as error:
            # It would end the generator that this belongs to.
            raise name_client(
                RuntimeError("a StopIteration, as of next(...), was not caught"), client
            ) from error
        except Exception as error:
            name_client(error, client)
            raise
        with refusing(where, client, task[0]):
            layout = checked(summand)
            if len(task) > 1:
                total.add(summand, layout)
        # A measure is sent by no real client.
        bytes_up += num_bytes(summand) - num_bytes(summand.get(UPDATES))
    return TaskReply(task[0], layout, bytes_up, total.packed() if len(task) > 1 else pack(summand))
