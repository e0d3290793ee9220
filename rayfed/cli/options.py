"""What several commands take: a job, and values that replace some of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rayfed.completion import JobFile, Override

if TYPE_CHECKING:
    from rayfed.job import Job

Overrides = tuple[tuple[str, Any], ...]

job_argument = click.argument("job", type=JobFile())
set_option = click.option(
    "-s",
    "--set",
    "overrides",
    type=Override(),
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a value of the job: -s train.num_rounds=2. May be given often.",
)


def read_base(job: str, overrides: Overrides) -> Job:
    """A job, or the job over which a grid is laid."""
    from rayfed.job import read_job, read_table

    return read_job({key: value for key, value in read_table(job).items() if key != "grid"}, dict(overrides))
