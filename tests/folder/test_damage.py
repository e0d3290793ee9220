"""Whatever becomes of a file in a run's folder: each command ends by itself, with a sentence or
with the right bits.
"""

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


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("rounds", [2, 3], ids=["stopped", "finished"])
def test_every_command_ends_whatever_becomes_of_a_file(tables, tmp_path, damage, rounds):
    tables["train"]["num_rounds"], tables["output"]["every"] = 3, 1
    want = outcome(rayfed.run(tables, {"output.path": str(tmp_path / "want")}).path)
    path = rayfed.run(tables, {"train.num_rounds": rounds}).path
    write_report(path)
    shutil.copytree(path, tmp_path / "kept")
    for kept in sorted(file for file in (tmp_path / "kept").rglob("*") if file.is_file()):
        if rounds == 2:
            commands = {
                "resume": lambda: (
                    outcome(rayfed.resume(path, {"train.num_rounds": 3}).path) == want
                ),
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
        for name, command in commands.items():
            shutil.rmtree(path)
            shutil.copytree(tmp_path / "kept", path)
            (file := path / kept.relative_to(tmp_path / "kept")).unlink()
            make = DAMAGES[damage]
            make(file) if damage in ("folder", "empty") else make(
                file, kept.read_bytes().ljust(100)
            )
            # Ends pytest where a command would never end.
            signal.alarm(60)
            with suppress(InputError, Resumable, RunFailed):
                assert command() is not False, (name, kept.name)
            signal.alarm(0)
