"""The observer that writes a run's page."""

import logging
from pathlib import Path

from rayfed.rounds.observer import Observer, Outcome
from rayfed.rounds.round import Round

log = logging.getLogger(__name__)


class Page(Observer):
    """Writes the page of a run when the run has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = False

    def restored(self, round: Round | None) -> None:
        self._began = True

    def ended(self, outcome: Outcome) -> None:
        # A run that was refused may have found another run in the folder, whose page is not ours.
        if self._began:
            write_page(self._path)


def write_page(path: Path) -> None:
    """Write the page of a run's folder, or log why it cannot be made.

    A run does not fail if its page cannot be made.
    """
    try:
        # This imports jinja2, which nothing before needs.
        from rayfed.report.page import write_report

        write_report(path)
    except Exception as error:
        log.warning("the run has no page, because %r; to try again: rayfed report %s", error, path)
