"""The end of the command: exit code 0, or a message and the exit code of the error."""

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from rayfed.base.errors import STOPPED, explained, for_commands, harmless, refuse_secrets
from rayfed.cli.usage import in_our_words, unknown_command


class Failure(click.ClickException):
    """Ends the command with a message on standard error, and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        print(harmless(self.message), file=sys.stderr)


@contextmanager
def failures() -> Iterator[None]:
    """Turn every error into a `Failure`."""
    try:
        yield
    except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
        raise
    except KeyboardInterrupt as error:
        notes = getattr(error, "__notes__", [])
        raise Failure(for_commands("; ".join(["stopped", *notes])), STOPPED) from None
    except Exception as error:
        raise Failure(explained(error), getattr(error, "exit_code", 1)) from None


class Commands(click.Group):
    """A group whose commands end with this package's exit codes."""

    def invoke(self, ctx: click.Context) -> Any:
        with failures():
            for word in ctx.args:
                refuse_secrets(word, word.partition("://")[0].rpartition("=")[0], "argument")
            try:
                return super().invoke(ctx)
            except click.UsageError as error:
                raise in_our_words(error) from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is named, or raise `UsageError` with the nearest one."""
        name = str(args[0])
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            ctx.fail(unknown_command(name, self.list_commands(ctx)))
        return super().resolve_command(ctx, args)


def end_at_once(end: SystemExit) -> NoReturn:
    """End the process as `end` would, although threads are still working.

    While they work, the interpreter does not end by itself.
    """
    atexit._run_exitfuncs()
    code = end.code or 0
    if not isinstance(code, int):
        # Python does the same if the exit code is not a number, as after `sys.exit("a message")`.
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
