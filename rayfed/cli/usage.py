"""What to type in place of a command, an option or a word that the command line does not know."""

import re
from collections.abc import Iterable

import click

from rayfed.base.errors import nearest

# What other programs call our commands.
MEANT = {
    "train": "run",
    "start": "run",
    "fit": "run",
    "continue": "resume",
    "compare": "table",
    "results": "table",
    "plot": "figure",
    "draw": "figure",
    "datasets": "data",
    "cancel": "stop",
    "kill": "stop",
    "ls": "status",
}


def unknown_command(name: str, known: Iterable[str]) -> str:
    """Return the message about a command that does not exist.

    >>> unknown_command("train", ["run", "table"])
    "no command 'train'; did you mean 'run'? `rayfed --help` lists all"
    """
    known = list(known)
    near = MEANT.get(name) or nearest(name, known)
    meant = f"; did you mean '{near}'?" if near in known else ";"
    return f"no command '{name}'{meant} `rayfed --help` lists all"


def in_our_words(error: click.UsageError) -> click.UsageError:
    """Return the error with what to type, where that can be told; otherwise the error as it is."""
    message = _message(error)
    return click.UsageError(message, ctx=error.ctx) if message else error


def _message(error: click.UsageError) -> str:
    """Return what to type instead; '' if it cannot be told."""
    if isinstance(error, click.NoSuchOption):
        return _of_option(error.option_name)
    parameter = getattr(error, "param", None)
    if isinstance(error, click.MissingParameter) and parameter and parameter.name == "job":
        command = error.ctx.info_name if error.ctx else "run"
        return f"give a job file, or the example: rayfed {command} quickstart"
    extra = re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", error.message)
    if extra and "=" in extra[1]:
        words = extra[1].split()
        advice = "each setting as -s KEY=VALUE"
        # A value with spaces is several words here, which cannot be put together again.
        if all("=" in word for word in words):
            advice = " ".join(f"-s {word}" for word in words)
        return f"'{extra[1]}': write {advice}"
    return ""


def _of_option(option: str) -> str:
    """Return how to set the key of a job that was given as an option; '' if there is none."""
    from rayfed.job import key_meant

    key = key_meant(option.lstrip("-").replace("-", "_"))
    return f"no option {option}; write -s {key}=VALUE" if key else ""
