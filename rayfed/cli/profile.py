"""`--profile`: where the time of a run went, as a table after it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from rayfed.base.spans import Span
from rayfed.runtime.profile import ACTORS, BESIDE, DRIVER, Phase, Profile, profiling
from rayfed.screen.text import aligned


def _process_start() -> float:
    """When this process was started, on the monotonic clock, to 10 ms; now, where Linux's /proc is not there."""
    now = time.monotonic()
    with suppress(OSError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the boot
        return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return now


BEGAN = _process_start()  # read here, as the command goes on in a child process
NAMED = 8  # actors whose idle time is listed one by one
WORK = ("train", "teacher", "evaluate", "survey")
SECTIONS = {DRIVER: "the driver", BESIDE: "meanwhile, in other threads", ACTORS: "an actor, on average of {}"}


def _open(ctx: click.Context, _: click.Parameter, wanted: bool) -> bool:
    if wanted:
        ctx.with_resource(_printed())
    return wanted


profile_option = click.option(
    "--profile",
    is_flag=True,
    callback=_open,
    expose_value=False,
    help="Print where the time went.",
)


@contextmanager
def _printed() -> Iterator[None]:
    """Profile the command, and print the table of its run when it has ended, however it ended."""
    try:
        with profiling(BEGAN) as profile:
            profile.add(Span("Python starts", time.monotonic() - BEGAN))
            yield
    finally:
        if len(profile.phases) > 1:  # else nothing has run
            print(f"\n{profile_text(profile)}", flush=True)


def profile_text(profile: Profile) -> str:
    """The table of a profile, with a row per step. The seconds of the driver's rows add up to the wall time."""
    titles = [_title(number, phase) for number, phase in enumerate(profile.phases)]
    rows = [["seconds", *titles, f"{'all':>8}", f"{'share':>7}"]]
    for who, title in SECTIONS.items():
        section = _section(profile, who)
        if section:
            rows.append([title.format(len(profile.idle)), *[""] * (len(titles) + 2)])
            rows += section
    return "\n".join([aligned(rows), *_sentences(profile)])


def _section(profile: Profile, who: str) -> list[list[str]]:
    """The rows of those who spend time, and their sum."""
    phases = profile.phases
    steps = dict.fromkeys(step for phase in phases for spender, step in phase.seconds if spender == who)
    if not steps:
        return []
    count = len(profile.idle) if who == ACTORS else 1
    table = {step: [phase.seconds[who, step] / count for phase in phases] for step in steps}
    sums = [sum(column) for column in zip(*table.values(), strict=True)]
    if who == DRIVER:
        walls = [phase.wall for phase in phases]
        table["not accounted for"] = [wall - spent for wall, spent in zip(walls, sums, strict=True)]
        sums = walls
    if who != BESIDE:
        table["sum"] = sums
    rows = []
    for step, seconds in table.items():
        total = sum(seconds)
        share = "" if who == BESIDE else f"{total / sum(sums):7.1%}"
        rows.append([f"  {step}", *map(_cell, seconds), _cell(total), share])
    return rows


def _title(number: int, phase: Phase) -> str:
    if not phase.rounds:
        return f"{'end' if number else 'start':>8}"
    first, last = phase.rounds
    return f"{f'round {first}' if first == last else f'{first} to {last}':>8}"


def _cell(seconds: float) -> str:
    return f"{round(seconds, 2) + 0.0:8.2f}" if seconds else ""  # + 0.0: not -0.00


def _sentences(profile: Profile) -> Iterator[str]:
    start, first, *_ = profile.phases
    if first.rounds:
        spent = [*start.seconds.items(), *first.seconds.items()]
        work = sum(
            seconds for (who, step), seconds in spent if who == DRIVER and step.removeprefix("waiting: ") in WORK
        )
        wall = start.wall + first.wall
        yield f"until the first round had finished: {wall:.2f} s, {wall - work:.2f} s without training and evaluation"
    yield f"after the last round: {profile.phases[-1].wall:.2f} s"
    idle = sorted((seconds, actor) for actor, seconds in profile.idle.items())
    if idle:
        listed = idle if len(idle) <= NAMED else [idle[0], idle[-1]]
        yield f"idle: {', '.join(f'{actor} {seconds:.2f} s' for seconds, actor in listed)}"
