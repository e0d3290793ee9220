"""The command `rayfed`.

`rayfed.base.errors` lists the exit codes. Everything heavy is imported by the command that needs
it, so that help and completion answer at once.
"""

import gc
import io
import os
import sys
from collections.abc import Sequence

import click

from rayfed import __version__
from rayfed.base.aside import is_working
from rayfed.cli import clients, describe, report, status, submit, train, verify
from rayfed.cli.guard import guarded
from rayfed.cli.init import init
from rayfed.folder.log import logging_to
from rayfed.papers import figure, reproduce
from rayfed.cli.exits import Commands, end_at_once
from rayfed.base.console import StderrHandler


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=(
        "Results lie in runs/NAME: report.html, tables as Parquet, the last weights, summary.json."
    ),
)
@click.version_option(__version__)
@click.pass_context
def main(ctx: click.Context) -> None:
    """Federated learning on Ray: experiments as job files.

    \b
    Examples:
      rayfed run jobs/quickstart.toml                      train, on this machine
      rayfed run jobs/quickstart.toml -s train.num_rounds=2 -s ray.mode=off
      rayfed run jobs/quickstart.toml -s ray.address=auto  on the Ray cluster that runs here
      _RAYFED_COMPLETE=bash_source rayfed >> ~/.bashrc     complete commands, options and keys; also
                                                           zsh, fish
    """
    here = os.getcwd()
    if here not in sys.path:
        # For the user's own methods and models; last, as its files may have any names.
        sys.path.append(here)
    ctx.with_resource(logging_to(StderrHandler()))


for each in (
    *(init, train.run, train.resume, train.replay, clients.clients),
    *(submit.submit, status.status, submit.logs, submit.stop),
    *(describe.methods, describe.keys, describe.data, describe.partition),
    *(report.report, reproduce.table, reproduce.reproduce, figure.figure, verify.verify),
):
    main.add_command(each)


def take_every_letter() -> None:
    """Let standard output and error spell out what their encoding lacks, such as the ü of a class
    in ASCII.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def command(arguments: Sequence[str] | None = None) -> None:
    """The command as it is typed: `main`, with a parent process that watches a training."""
    arguments = sys.argv[1:] if arguments is None else arguments
    take_every_letter()
    if list(arguments[:1]) in (["run"], ["reproduce"], ["resume"]):
        guarded(arguments)
        # On a terminal, a spinner turns.
        if not sys.stderr.isatty() and not {"-h", "--help"} & {*arguments}:
            print("reading the job", file=sys.stderr, flush=True)
    try:
        main(arguments, prog_name="rayfed")
    except SystemExit as end:
        if is_working():
            end_at_once(end)
        raise
    finally:
        # Or the interpreter would search all that torch has made, for half a second, before it
        # ends.
        gc.freeze()
