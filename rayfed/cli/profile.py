"""`--profile`: where the time of a run went, as a table after it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from rayfed.base.spans import ACTORS, BESIDE, DRIVER, Phase, Profile, Span, profiling
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


def _open(ctx: click.Context, _: click.Parameter, given: bool) -> bool:
    if given:
        ctx.with_resource(_printed())
    return given


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
            seconds = time.monotonic() - BEGAN
            profile.add(Span("Python starts", BEGAN, seconds, seconds))
            yield
    finally:
        if len(profile.phases) > 1:  # else nothing has run
            print(f"\n{profile_text(profile)}", flush=True)


def profile_text(profile: Profile) -> str:
    """The table of a profile, with a row per step. The seconds of the driver's rows add up to the wall time."""
    phases, actors = profile.phases, len(profile.idle)
    rows = [
        ["seconds", *(_title(number, phase) for number, phase in enumerate(phases)), f"{'all':>8}", f"{'share':>7}"]
    ]
    for who, title in SECTIONS.items():
        steps = dict.fromkeys(step for phase in phases for found, step in phase.seconds if found == who)
        if not steps:
            continue
        each = actors if who == ACTORS else 1
        table = {step: [phase.seconds[who, step] / each for phase in phases] for step in steps}
        sums = [sum(column) for column in zip(*table.values(), strict=True)]
        if who == DRIVER:
            table["not accounted for"] = [phase.wall - known for phase, known in zip(phases, sums, strict=True)]
            sums = [phase.wall for phase in phases]
        rows.append([title.format(actors), *[""] * (len(rows[0]) - 1)])
        for step, seconds in {**table, **({"sum": sums} if who != BESIDE else {})}.items():
            share = f"{sum(seconds) / sum(sums):7.1%}" if who != BESIDE else ""
            rows.append([f"  {step}", *(_cell(value) for value in (*seconds, sum(seconds))), share])
    return "\n".join([aligned(rows), *_sentences(profile)])


def _title(number: int, phase: Phase) -> str:
    words = f"{phase.rounds[0]} to {phase.rounds[1]}" if phase.rounds else "end" if number else "start"
    return f"{f'round {phase.rounds[0]}' if len({*phase.rounds}) == 1 else words:>8}"


def _cell(seconds: float) -> str:
    return f"{round(seconds, 2) + 0.0:8.2f}" if seconds else ""  # + 0.0: not -0.00


def _sentences(profile: Profile) -> Iterator[str]:
    start, *others = profile.phases
    begin = [start, *(phase for phase in others[:1] if phase.rounds)]
    spent = [(step, seconds) for phase in begin for (who, step), seconds in phase.seconds.items() if who == DRIVER]
    work = sum(seconds for step, seconds in spent if step.removeprefix("waiting: ") in WORK)
    first = sum(phase.wall for phase in begin)
    if len(begin) > 1:
        yield f"until the first round had finished: {first:.2f} s, {first - work:.2f} s without training and evaluation"
    yield f"after the last round: {profile.phases[-1].wall:.2f} s"
    if idle := sorted((seconds, actor) for actor, seconds in profile.idle.items()):
        listed = idle if len(idle) <= NAMED else [idle[0], idle[-1]]
        yield f"idle: {', '.join(f'{actor} {seconds:.2f} s' for seconds, actor in listed)}"
