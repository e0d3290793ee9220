"""The results of a run in Python."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayfed.folder.summary import summarise
from rayfed.folder.tables import read_table
from rayfed.tensors.weights import Weights


@dataclass(frozen=True, eq=False)
class Result:
    """The results of a run, which a notebook shows as a card.

    >>> result.classes.filter(pc.field("round") == 2).to_pandas()  # doctest: +SKIP
    """

    # The run's folder.
    path: Path
    # A table with a row per round, round 0 first.
    rounds: pa.Table
    # The weights of the last global model, with what is frozen in it.
    weights: Weights

    @property
    def clients(self) -> pa.Table:
        """Return a table with a row per client and round."""
        return read_table(self.path, "clients")

    @property
    def classes(self) -> pa.Table:
        """Return a table with a row per class and round."""
        return read_table(self.path, "classes")

    @property
    def confusions(self) -> pa.Table:
        """Return a table with a row per round, client, class and predicted class.

        A job with `measure = ["confusion"]` fills it. The client of the global model is null.
        """
        return read_table(self.path, "confusions")

    def __repr__(self) -> str:
        summary = summarise(self.rounds.to_pylist())
        rounds = "1 round" if summary["rounds"] == 1 else f"{summary['rounds']} rounds"
        lines = [
            f"Result of {rounds}",
            f"  best  {_in_words(summary['best'])}",
            f"  last  {_in_words(summary['last'])}",
            f"  path  {self.path}",
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the numbers, and the accuracy by round."""
        # This import brings jinja2, which a script does not need.
        from rayfed.report.page import card

        return card(self.path)


def _in_words(of_round: dict[str, Any]) -> str:
    """Return the best or the last round of a summary in a line."""
    words = [f"accuracy {of_round['test_accuracy']:.1%}"]
    if of_round["forgetting"] is not None:
        words.append(f"forgetting {of_round['forgetting']:.1%}")
    words.append(f"in round {of_round['round']}")
    return ", ".join(words)
