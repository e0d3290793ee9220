"""The command `rayfed`.

`rayfed.base.errors` lists the exit codes. A command imports everything heavy that it needs itself,
so that help and completion answer at once.
"""

import gc
import io
import os
import sys
from collections.abc import Sequence

import click

from rayfed import __version__
from rayfed.base.aside import is_working
from rayfed.cli import clients, describe, manifest, report, status, submit, train, verify
from rayfed.cli.guard import guarded
from rayfed.cli.init import init
from rayfed.folder.log import logging_to
from rayfed.papers import figure, reproduce
from rayfed.cli.exits import Commands, end_at_once
from rayfed.base.console import StderrHandler


# The commands in the order of their help.
SECTIONS: dict[str, list[click.Command]] = {
    "Train": [init, train.run, train.resume, train.replay],
    "Look at results": [
        *(report.report, reproduce.table, figure.figure),
        *(clients.clients, verify.verify, reproduce.reproduce),
    ],
    "Look things up": [describe.methods, describe.keys, describe.data, describe.partition],
    "Use a cluster": [
        submit.submit,
        status.status,
        submit.logs,
        submit.stop,
        manifest.manifest,
    ],
}


class InSections(Commands):
    """The group of all commands, whose help lists them by what they are for."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in SECTIONS.items():
            rows = [(command.name or "", command.get_short_help_str(66)) for command in commands]
            with formatter.section(title):
                formatter.write_dl(rows)


@click.group(
    cls=InSections,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=(
        "Results lie in runs/NAME: report.html, tables as Parquet, the last weights, summary.json."
    ),
)
@click.version_option(__version__)
@click.pass_context
def main(ctx: click.Context) -> None:
    """Run, compare and reproduce federated-learning experiments.

    \b
    Examples:
      rayfed run quickstart                            train, on this machine
      rayfed run quickstart -s train.num_rounds=2 -s ray.mode=off -s name=short
      rayfed init my-project                           a job file and a method of your own
      rayfed table quickstart short                    compare the runs of these names
      _RAYFED_COMPLETE=bash_source rayfed >> ~/.bashrc complete what you type; also zsh, fish
    """
    here = os.getcwd()
    if here not in sys.path:
        # This finds the user's methods and models. It is last, as files here may have any names.
        sys.path.append(here)
    ctx.with_resource(logging_to(StderrHandler()))


for section in SECTIONS.values():
    for subcommand in section:
        main.add_command(subcommand)


def take_every_letter() -> None:
    """Let standard output and error spell out what their encoding lacks.

    An example is a class whose name has an ü, which ASCII lacks.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def command(arguments: Sequence[str] | None = None) -> None:
    """Run the command as it is typed: `main`, with a parent process that watches a training."""
    arguments = sys.argv[1:] if arguments is None else arguments
    take_every_letter()
    if list(arguments[:1]) in (["run"], ["reproduce"], ["resume"]):
        guarded(arguments)
        # On a terminal, a spinner says the same.
        if not sys.stderr.isatty() and not {"-h", "--help"} & {*arguments}:
            print("reading the job", file=sys.stderr, flush=True)
    try:
        main(arguments, prog_name="rayfed")
    except SystemExit as end:
        if is_working():
            end_at_once(end)
        raise
    finally:
        # Without this, the interpreter searches all objects that torch has made before it ends,
        # which takes half a second.
        gc.freeze()
