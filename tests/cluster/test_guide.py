"""docs/cluster.md, docs/jobs.md and the files of cluster/: every command, option and file that they name exists."""

import re
import shlex
from pathlib import Path

import click
import pytest
from ray.scripts.scripts import cli as ray

from rayfed.cli import main as rayfed

ROOT = Path(__file__).resolve().parents[2]
GUIDE = "\n".join((ROOT / "docs" / page).read_text() for page in ("cluster.md", "jobs.md"))
BLOCKS = re.findall(r"^```console\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
COMMANDS = [re.sub(r"^\w*\$ ", "", line) for block in BLOCKS for line in block.splitlines()]
FILES = [path for path in (ROOT / "cluster").rglob("*") if path.suffix in (".yaml", ".sh") or path.name == "Dockerfile"]
COMMENTS = [line for path in FILES for line in re.findall(r"^# (.*)$", path.read_text(), re.MULTILINE)]
LINES = COMMANDS + COMMENTS


def parse(group, words):
    """Raises click.UsageError if the group has no such command, option or argument."""
    context = click.Context(group)
    name, command, rest = group.resolve_command(context, words)
    if isinstance(command, click.Group):
        parse(command, rest)
    else:
        with command.make_context(name, rest, parent=context):
            pass


def calls(tool):
    """The words of each call of a tool in `LINES`."""
    for line in LINES:
        for part in re.split(r"&&|;|\s{3,}", line.removesuffix(" &")):
            command = part.strip().removeprefix("(umask 077").strip().removesuffix(")")
            if command.startswith(f"{tool} "):
                yield shlex.split(command.split(">")[0], comments=True)[1:]


@pytest.mark.parametrize("tool", [rayfed, ray], ids=["rayfed", "ray"])
def test_commands_exist_with_their_options(tool, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = list(calls("rayfed" if tool is rayfed else "ray"))
    assert len(found) > 4
    for words in found:
        parse(tool, words)


def test_slurm_runs_commands_that_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = list(calls("sbatch"))
    assert len(found) >= 4
    for script, *words in found:
        assert Path(script).is_file()
        parse(rayfed, [word for word in words if not word.startswith("(")][:2])


def test_every_file_that_is_named_exists():
    named = re.findall(r"(?:cluster|jobs)/[\w./-]*\.(?:yaml|toml|sh|txt)", "\n".join([GUIDE, *LINES]))
    assert len(named) > 10
    assert not [path for path in named if not (ROOT / path).is_file()]
