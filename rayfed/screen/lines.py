"""Lines of a run's log."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayfed.rounds.round import Round


def round_line(round: "Round", num_rounds: int) -> str:
    """A finished round as a line of text."""
    words = [f"round {round.round:{len(str(num_rounds))}}/{num_rounds}", figures_text(round)]
    if round.train_loss is not None:
        words.append(f"loss {round.train_loss:.3f}")
    if round.round:
        words.append(f"{round.seconds:.1f} s")
    return "  ".join(words)


def figures_text(round: "Round") -> str:
    """The figures of a round's evaluation."""
    if round.test_accuracy is None:
        return "not evaluated"
    return f"accuracy {round.test_accuracy:.3f}  forgetting {round.forgetting:.3f}"


def cell_text(summary: dict[str, Any]) -> str:
    """How a run of a grid ended; `run 2/9  NAME` stands before it."""
    best, last = summary["best"], summary["last"]
    return f"best {best['test_accuracy']:.3f}  last {last['test_accuracy']:.3f}  forgetting {last['forgetting']:.3f}"
