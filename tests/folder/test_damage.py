"""Whatever becomes of a file in a run's folder: each command ends by itself, with a sentence or
with the right bits.
"""

import itertools
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest

import rayfed
from rayfed.base.errors import InputError, Resumable, RunFailed
from rayfed.cli.status import runs_in
from rayfed.folder.tables import read_table
from rayfed.job import read_job
from rayfed.report.page import legible, write_report
from rayfed.report.read import read_run
from rayfed.report.table import sheet
from rayfed.report.verify.checks import checks

DAMAGES = {
    "folder": os.mkdir,
    "empty": Path.touch,
    "cut": lambda file, content: file.write_bytes(content[: len(content) // 2]),
    "bit": lambda file, content: file.write_bytes(
        content[:99] + bytes([content[99] ^ 1]) + content[100:]
    ),
    "deeper": lambda file, content: file.write_bytes(b"[" * 100_000),
}


def outcome(path):
    found = [read_table(path, name).to_pylist() for name in ("rounds", "clients", "classes")]
    rows = [
        {key: value for key, value in row.items() if key not in ("seconds", "node")}
        for t in found
        for row in t
    ]
    return rows, (path / "checkpoints/round-00003.safetensors").read_bytes()


def a_table(path):
    with legible(path):
        sheet([read_run(path)], "text")


# Before the M-th command, the N-th file of the folder gets the damage N + M of the list; in the long
# version each of them in turn. So each command meets each damage, and in a finished run each file too.
SHIFTS = [
    pytest.param(shift, marks=pytest.mark.slow if shift == 0 else pytest.mark.chaos)
    for shift in range(len(DAMAGES))
]


def damaged(file, content, damage):
    """Put something else in the place of a file."""
    file.unlink()
    make = DAMAGES[damage]
    if damage in ("folder", "empty"):
        make(file)
    else:
        make(file, content.ljust(100))


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("rounds", [2, 3], ids=["stopped", "finished"])
def test_every_command_ends_whatever_becomes_of_a_file(tables, tmp_path, shift, rounds):
    tables["train"]["num_rounds"], tables["output"]["every"] = 3, 1
    want = outcome(rayfed.run(tables, {"output.path": str(tmp_path / "want")}).path)
    path = rayfed.run(tables, {"train.num_rounds": rounds}).path
    write_report(path)
    shutil.copytree(path, tmp_path / "kept")
    if rounds == 2:
        commands = {
            "resume": lambda: outcome(rayfed.resume(path, {"train.num_rounds": 3}).path) == want,
            "run": lambda: outcome(rayfed.run(read_job(tables), resume=True).path) == want,
        }
    else:
        commands = {
            "report": lambda: write_report(path),
            "table": lambda: a_table(path),
            "status": lambda: runs_in(path.parent),
            "replay": lambda: rayfed.replay(path, 2, 0),
            "resume": lambda: outcome(rayfed.resume(path).path) == want,
            "verify": lambda: list(checks(path)),
        }
    files = sorted(file for file in (tmp_path / "kept").rglob("*") if file.is_file())
    for (place, kept), (number, name) in itertools.product(enumerate(files), enumerate(commands)):
        damage = list(DAMAGES)[(place + number + shift) % len(DAMAGES)]
        shutil.rmtree(path)
        shutil.copytree(tmp_path / "kept", path)
        damaged(path / kept.relative_to(tmp_path / "kept"), kept.read_bytes(), damage)
        # Ends pytest where a command would never end.
        signal.alarm(60)
        with suppress(InputError, Resumable, RunFailed):
            assert commands[name]() is not False, (name, kept.name, damage)
        signal.alarm(0)
