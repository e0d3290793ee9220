"""The command `rayfed`.

Bad input ends with exit code 2 and one message, a run that failed with 1, one that lost what it ran on with 75 (it can
be resumed), Ctrl-C with 130. Everything heavy is imported by the command that needs it, so that help and completion
answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click
from click.shell_completion import get_completion_class

from rayfed import __version__
from rayfed.cli import cluster, show, status, train
from rayfed.cli.guard import guarded
from rayfed.display import log_to_stderr
from rayfed.exits import Commands


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Results lie in runs/NAME: report.html, tables as Parquet, the last weights, summary.json.",
)
@click.version_option(__version__)
@click.pass_context
def main(ctx: click.Context) -> None:
    """Federated learning on Ray: experiments as job files.

    \b
    Examples:
      rayfed run jobs/quickstart.toml                      train, on this machine
      rayfed run jobs/quickstart.toml -s train.num_rounds=2 -s ray.mode=off
      rayfed run jobs/quickstart.toml -s method=fedavg -s name=quickstart-fedavg
      rayfed run jobs/quickstart.toml -s ray.address=auto  on the Ray cluster that runs here
      rayfed resume runs/quickstart                        go on with a run that was stopped
      rayfed submit jobs/quickstart.toml --follow          as a job, on a Ray cluster
      rayfed status                                        what was submitted, and what has run here
      rayfed partition jobs/quickstart.toml                who holds how much of which class
      rayfed report runs/fedavg runs/fedntd                compare runs on a page
      rayfed methods fedntd                                a method's paper and parameters
      rayfed keys ray                                      what a job file can say of where the work is done
      rayfed completion bash >> ~/.bashrc                  complete job files, keys and methods
    """
    if (here := os.getcwd()) not in sys.path:  # for a method or model of one's own; Ray tells its workers
        sys.path.insert(0, here)
    ctx.with_resource(log_to_stderr())


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes this command.

    \b
    Once, for every shell to come:
      rayfed completion bash >> ~/.bashrc
      rayfed completion zsh >> ~/.zshrc
      rayfed completion fish > ~/.config/fish/completions/rayfed.fish
    """
    if script := get_completion_class(shell):
        print(script(main, {}, "rayfed", "_RAYFED_COMPLETE").source())


of_runs = (train.run, train.resume, train.replay, cluster.submit, status.status, cluster.logs, cluster.stop)
for one in (*of_runs, show.methods, show.keys, show.data, show.partition, show.report):
    main.add_command(one)


def command(arguments: Sequence[str] | None = None) -> None:
    """What is typed: `main`, and where it trains, in a process that is watched over."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments[:1]) in (["run"], ["resume"]):
        guarded(arguments)
    main(arguments, prog_name="rayfed")
