"""What is shown of a run in progress."""

from rayfed.rounds.round import Round
from rayfed.rounds.site import Site


class Display:
    """Shows a run in progress: override the methods that you need. This class shows nothing.

    >>> class Accuracies(Display):
    ...     def round(self, round):
    ...         print(round.round, round.test_accuracy)
    >>> rayfed.run("quickstart", display=Accuracies())  # doctest: +SKIP
    """

    def start(self, site: Site) -> None:
        """Everything is checked; workers are about to be started."""

    def ready(self, resumed: bool) -> None:
        """The workers have started. A resumed run now reads its checkpoint; a new one evaluates its initial model."""

    def restored(self, round: Round) -> None:
        """A resumed run has read its checkpoint, of this round."""

    def client(self, done: int, total: int) -> None:
        """A client of the round has trained."""

    def round(self, round: Round) -> None:
        """A round is finished, and recorded."""
