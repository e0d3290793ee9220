"""Lines of a run's log: `run` prints them, `status` reads them again."""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayfed.rounds.round import Round

ROUND = re.compile(r"^round +(\d+)/(\d+)  (?:accuracy ([\d.]+)|not evaluated)", re.MULTILINE)
CELL = re.compile(r"^(run \d+/\d+)  \S+ +best ([\d.]+)", re.MULTILINE)


def round_line(round: "Round", num_rounds: int) -> str:
    """A finished round as a line of text."""
    words = [f"round {round.round:{len(str(num_rounds))}}/{num_rounds}", figures_text(round)]
    if round.train_loss is not None:
        words.append(f"loss {round.train_loss:.3f}")
    if round.round:
        words.append(f"{round.seconds:.1f} s")
    return "  ".join(words)


def figures_text(round: "Round", arrow: str = " ") -> str:
    """The figures of a round's evaluation; an arrow may follow the accuracy."""
    if round.test_accuracy is None:
        return "not evaluated"
    return f"accuracy {round.test_accuracy:.3f}{arrow} forgetting {round.forgetting:.3f}"


def cell_text(summary: dict[str, Any]) -> str:
    """How a run of a grid ended; `run 2/9  NAME` stands before it."""
    best, last = summary["best"], summary["last"]
    return f"best {best['test_accuracy']:.3f}  last {last['test_accuracy']:.3f}  forgetting {last['forgetting']:.3f}"


def progress(log: str) -> tuple[str, str]:
    """The last round in a run's log, and the last accuracy; for a grid, the last finished run, and its best.

    >>> progress("round  4/12  accuracy 0.512  forgetting 0.100\\n")
    ('4/12', '0.512')
    >>> progress("round  4/12  accuracy 0.512  forgetting 0.100\\nround  5/12  not evaluated  loss 1.234\\n")
    ('5/12', '0.512 in round 4')
    >>> progress("run 2/9  g/iid/seed-0  best 0.512  last 0.500  forgetting 0.100  0:01:02 left\\n")
    ('run 2/9', '0.512')
    """
    cells = CELL.findall(log)
    if cells:
        return cells[-1]
    rounds = ROUND.findall(log)
    if not rounds:
        return "", ""
    number, total, accuracy = rounds[-1]
    evaluated = [f"{earlier} in round {at}" for at, _, earlier in rounds if earlier]
    return f"{number}/{total}", accuracy or (evaluated[-1] if evaluated else "")
