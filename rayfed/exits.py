"""How the command ends: with 0, or with one message and the exit code of what went wrong."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from rayfed.values import InputError


class Failure(click.ClickException):
    """How the command ends if not well: with a message, and the exit code of its kind."""

    def show(self, file: Any = None) -> None:
        print(self.message, file=sys.stderr)


class BadInput(Failure):
    exit_code = 2


class RunFailed(Failure):
    exit_code = 1


class Resumable(Failure):
    """The run itself is sound; what it ran on was lost."""

    exit_code = 75  # as sysexits.h has it: a temporary failure, try again


class Stopped(Failure):
    exit_code = 130


@contextmanager
def failures() -> Iterator[None]:
    """Turns what goes wrong into a `Failure`."""
    try:
        yield
    except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
        raise
    except InputError as error:
        raise BadInput(f"error: {error}") from None
    except KeyboardInterrupt as error:
        raise Stopped("; ".join(["stopped", *notes_of(error)])) from None
    except Exception as error:
        kind = Resumable if getattr(error, "resumable", False) else RunFailed
        raise kind(f"error: {explained(error)}") from None


def explained(error: Exception) -> str:
    """What ended a run. An error of this package says it all, with a client's traceback; any other needs its own."""
    if type(error).__module__.partition(".")[0] == "rayfed":
        return "\n".join([str(error), *notes_of(error)])
    return "the run failed\n" + "".join(traceback.format_exception(error)).rstrip()


def notes_of(error: BaseException) -> list[str]:
    """What was added to an error on its way: where the results so far are."""
    return getattr(error, "__notes__", [])


class Commands(click.Group):
    """A group whose commands end with this package's exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        with failures():
            return super().invoke(ctx)
