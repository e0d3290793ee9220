"""Evaluating a run's weights again, and playing its rounds, or some clients of them, again."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayfed.folder.tables import COLUMNS, EVALUATED, round_rows
from rayfed.report.verify.numbers import Key, Numbers, differing, of_tables
from rayfed.rounds import engine
from rayfed.rounds.executor import Executor
from rayfed.rounds.round import Round
from rayfed.rounds.setup import Setup
from rayfed.tensors.trees import dotted, leaves
from rayfed.tensors.wire import unpack

# What was checked, what was compared in it, and all that is wrong.
Check = tuple[str, str, list[str]]
# Columns that follow from a round's weights alone.
OF_WEIGHTS = {*EVALUATED, "accuracy", "predicted"} - {"forgetting"}


@dataclass(frozen=True)
class Again:
    """Plays a run again, in this process, and compares it with what was recorded."""

    setup: Setup
    executor: Executor
    # The rounds that checkpoints hold, by their numbers.
    saved: Mapping[int, Round]
    recorded: Numbers
    # How much numbers may differ.
    within: float

    def play(self, rounds: Sequence[int], clients: int) -> Iterator[Check]:
        """Evaluate checkpoints, then play rounds in ascending order.

        With `clients`, only so many clients of each round train, one after another.
        """
        current = engine.start(self.setup, self.executor)
        starts = {0: current, **self.saved}
        yield self._compare(current, "the initial model")
        for round in self.saved.values():
            if self.setup.job.train.evaluates(round.round):
                results = engine.begin_evaluation(self.setup, self.executor, round)
                again = engine.with_evaluation(self.setup, round, results)
                yield self._compare(
                    again, "weights evaluated again", lambda place: place[2] in OF_WEIGHTS
                )
        for number in rounds:
            # Begin at the newest checkpoint before the round, unless a later round is at hand.
            start = max(start for start in starts if start < number)
            if not start <= current.round < number:
                current = starts[start]
            while current.round < number - bool(clients):
                current = engine.play(self.setup, current, self.executor)
                yield self._compare(current, "played again")
            if clients:
                yield self._train(current, clients)

    def _train(self, before: Round, clients: int) -> Check:
        """Train so many clients of the round after `before`, drawn anew each time."""
        opening = engine.open_round(self.setup, before, self.executor)
        trained: list[int] = []
        for task in opening.to_train:
            trained += task
        drawn = sorted(random.sample(trained, min(clients, len(trained))))
        tasks = [(client,) for client in drawn]
        replies = engine.begin_training(
            self.setup, self.executor, opening.broadcast, tasks, before.memories
        )
        rows = []
        for reply in replies:
            rows += [client.row for client in reply.clients]
        again = replace(before, round=before.round + 1, evaluation=None, clients=tuple(rows))
        subject = f"clients {', '.join(map(str, drawn))} trained again"
        return self._compare(again, subject, lambda place: place[1].startswith("clients"))

    def _compare(
        self, again: Round, subject: str, wanted: Callable[[Key], bool] = lambda place: True
    ) -> Check:
        """Compare a round that was played again with what was recorded, at the wanted places."""
        numbers = of_tables(round_rows(again, self.setup)) | of_checkpoint(again, self.executor)
        right = {}
        for place, number in numbers.items():
            if wanted(place) and self._is_due(place, number):
                right[place] = number
        faults = differing(self.recorded, right, f"({subject})", self.within)
        return f"round {again.round}", f"{subject}: {len(right):,} numbers and tensors", faults

    def _is_due(self, place: Key, number: Any) -> bool:
        """Say whether a number was recorded, or must be.

        What a run measures may change when it is resumed.
        """
        _, row, column = place
        if column == "forgetting" and number is None and self.recorded.get(place) == 0.0:
            # Earlier versions wrote 0.0 before anything could be forgotten.
            return False
        if place in self.recorded:
            return True
        table = row.partition(",")[0]
        return table != "confusions" and column in COLUMNS.get(table, ())


def of_checkpoint(round: Round, executor: Executor) -> Numbers:
    """Return all that later rounds depend on, by its place."""
    states = {slot: held.state for slot, held in round.held.items()}
    memories = {
        client: unpack(executor.recall(memory)) for client, memory in round.memories.items()
    }
    tree = {"weights": round.weights, "evaluated": round.shown, "state": states, "memory": memories}
    return {(round.round, "checkpoint", dotted(path)): leaf for path, leaf in leaves(tree)}
