"""What a run gives in Python."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayfed.folder.summary import summarise
from rayfed.folder.tables import read_table
from rayfed.tensors.weights import Weights


@dataclass(frozen=True, eq=False)
class Result:
    """The results of a run. In a notebook it shows itself as a card.

    >>> result.classes.filter(pc.field("round") == 2).to_pandas()  # doctest: +SKIP
    """

    # Its folder.
    path: Path
    # A row per round, round 0 first.
    rounds: pa.Table
    # Of the last global model, with what is frozen in it.
    weights: Weights

    @property
    def clients(self) -> pa.Table:
        """A row per client and round."""
        return read_table(self.path, "clients")

    @property
    def classes(self) -> pa.Table:
        """A row per class and round."""
        return read_table(self.path, "classes")

    @property
    def confusions(self) -> pa.Table:
        """With `measure = ["confusion"]`: a row per round, client (null: global model), class and
        predicted class.
        """
        return read_table(self.path, "confusions")

    def __repr__(self) -> str:
        summary = summarise(self.rounds.to_pylist())
        best, last = (_in_words(summary[which]) for which in ("best", "last"))
        rounds = "1 round" if summary["rounds"] == 1 else f"{summary['rounds']} rounds"
        return f"Result of {rounds}\n  best  {best}\n  last  {last}\n  path  {self.path}"

    def _repr_html_(self) -> str:
        """What a notebook shows: the numbers, and the accuracy by round."""
        # Brings jinja2.
        from rayfed.report.page import card

        return card(self.path)


def _in_words(of_round: dict[str, Any]) -> str:
    """The best or the last round of a summary in a line."""
    words = [f"accuracy {of_round['test_accuracy']:.1%}"]
    if of_round["forgetting"] is not None:
        words.append(f"forgetting {of_round['forgetting']:.1%}")
    return ", ".join([*words, f"in round {of_round['round']}"])
