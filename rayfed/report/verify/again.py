"""A run's weights evaluated again, and its rounds, or some clients of them, played again."""

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

# Of what, what was compared, and all that is wrong.
Check = tuple[str, str, list[str]]
# Columns that follow from a round's weights alone.
OF_WEIGHTS = {*EVALUATED, "accuracy", "predicted"} - {"forgetting"}


@dataclass(frozen=True)
class Again:
    """Plays a run again, in this process, and compares it with what was recorded."""

    setup: Setup
    workers: Executor
    # From checkpoints, by their number.
    kept: Mapping[int, Round]
    recorded: Numbers
    # Numbers may differ so much.
    within: float

    def play(self, rounds: Sequence[int], clients: int) -> Iterator[Check]:
        """Evaluate checkpoints, then play rounds, ascending; with `clients`, only so many of each
        train, alone.
        """
        last = engine.start(self.setup, self.workers)
        starts = {0: last, **self.kept}
        yield self._compare(last, "the initial model")
        for round in self.kept.values():
            if self.setup.job.train.evaluates(round.round):
                results = engine.begin_evaluation(self.setup, self.workers, round)
                again = engine.evaluated(self.setup, round, results)
                yield self._compare(
                    again, "weights evaluated again", lambda place: place[2] in OF_WEIGHTS
                )
        for number in rounds:
            # The newest checkpoint before the round.
            start = max(start for start in starts if start < number)
            last = last if start <= last.round < number else starts[start]
            while last.round < number - bool(clients):
                last = engine.play(self.setup, last, self.workers)
                yield self._compare(last, "played again")
            if clients:
                yield self._train(last, clients)

    def _train(self, last: Round, clients: int) -> Check:
        """So many clients of the round after `last`, drawn anew each time."""
        opening = engine.open_round(self.setup, last, self.workers)
        trained = [client for task in opening.to_train for client in task]
        drawn = sorted(random.sample(trained, min(clients, len(trained))))
        tasks = [(client,) for client in drawn]
        replies = engine.train(self.setup, self.workers, opening.broadcast, tasks, last.memories)
        rows = tuple(client.row for reply in replies for client in reply.clients)
        again = replace(last, round=last.round + 1, evaluation=None, clients=rows)
        what = f"clients {', '.join(map(str, drawn))} trained again"
        return self._compare(again, what, lambda place: place[1].startswith("clients"))

    def _compare(
        self, again: Round, what: str, wanted: Callable[[Key], bool] = lambda place: True
    ) -> Check:
        numbers = of_tables(round_rows(again, self.setup)) | of_checkpoint(again, self.workers)
        right = {
            place: number
            for place, number in numbers.items()
            if wanted(place) and self._is_due(place, number)
        }
        faults = differing(self.recorded, right, f"({what})", self.within)
        return f"round {again.round}", f"{what}: {len(right):,} numbers and tensors", faults

    def _is_due(self, place: Key, number: Any) -> bool:
        """Whether a number was recorded, or must be: what a run measures may change when it is
        resumed.
        """
        _, row, column = place
        if column == "forgetting" and number is None and self.recorded.get(place) == 0.0:
            # Earlier versions wrote 0.0 before anything could be forgotten.
            return False
        table = row.partition(",")[0]
        return place in self.recorded or (
            table != "confusions" and column in COLUMNS.get(table, ())
        )


def of_checkpoint(round: Round, workers: Executor) -> Numbers:
    """All that later rounds depend on."""
    states = {slot: held.state for slot, held in round.held.items()}
    memories = {client: unpack(workers.recall(memory)) for client, memory in round.memories.items()}
    tree = {"weights": round.weights, "evaluated": round.shown, "state": states, "memory": memories}
    return {(round.round, "checkpoint", dotted(path)): leaf for path, leaf in leaves(tree)}
