"""docs/cluster.md and cluster/README.md: every command, option and file that they name exists."""

import re
import shlex
from pathlib import Path

import click
import pytest
from ray.scripts.scripts import cli as ray

from rayfed.cli import main as rayfed

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "cluster.md"
TEXT = GUIDE.read_text()
BLOCKS = re.findall(r"^```console\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines()]
COMMANDS = [re.sub(r"^\w*\$ ", "", line) for line in LINES]
TOOLS = {
    "ray": ["aws.yaml", "gcp.yaml", "on-premise.yaml"],
    "sbatch": ["slurm.sh"],
    "docker": ["Dockerfile"],
    "kubectl": [f"kubernetes/{name}.yaml" for name in ("storage", "redis", "network", "raycluster", "rayjob")],
}
HEADERS = {  # the comments at the head of each file, which say how to run it
    name: re.findall(rf"^# ((?:{tool}) .*)$", (ROOT / "cluster" / name).read_text(), re.MULTILINE)
    for tool, names in TOOLS.items()
    for name in names
}


def parse(group, words):
    """Raises click.UsageError if the group has no such command, option or argument."""
    context = click.Context(group)
    name, command, rest = group.resolve_command(context, words)
    if isinstance(command, click.Group):
        parse(command, rest)
    else:
        with command.make_context(name, rest, parent=context):
            pass


def calls(tool, text):
    """The words of each call of a tool in a line of shell."""
    for part in re.split(r"&&|;|\s{3,}|\n", text.replace(" &\n", "\n").removesuffix(" &")):
        part = part.strip().removeprefix("(umask 077").strip().removesuffix(")")
        words = shlex.split(part.split(">")[0], comments=True)
        if words[:1] == [tool]:
            yield words[1:]


def test_every_line_is_a_command():
    assert LINES and all(re.match(r"(head|worker)?\$ ", line) for line in LINES)


@pytest.mark.parametrize("tool", ["rayfed", "ray"])
def test_commands_exist_with_their_options(tool, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = [words for command in COMMANDS for words in calls(tool, command)]
    found += [words for lines in HEADERS.values() for line in lines for words in calls(tool, line)]
    assert len(found) > 5
    for words in found:
        parse({"rayfed": rayfed, "ray": ray}[tool], words)


def test_slurm_runs_commands_that_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    lines = [*COMMANDS, *HEADERS["slurm.sh"]]
    found = [words for line in lines for words in calls("sbatch", line)]
    assert len(found) == 4
    for script, *words in found:
        assert Path(script).is_file()
        parse(rayfed, [word for word in words if not word.startswith("(")][:2])


def test_every_file_says_how_to_run_it():
    for name, lines in HEADERS.items():
        assert any(f"cluster/{name}" in line for line in lines)


def test_every_file_that_is_named_exists():
    texts = [TEXT, *(line for lines in HEADERS.values() for line in lines)]
    named = {path for text in texts for path in re.findall(r"(?:cluster|jobs)/[\w./-]*\.(?:yaml|toml|sh|txt)", text)}
    assert len(named) > 10
    assert not [path for path in named if not (ROOT / path).is_file()]


def test_every_step_says_whether_it_was_tried():
    steps = re.split(r"^## (?=\d\. )", TEXT, flags=re.MULTILINE)[1:]
    assert len(steps) == 7
    for number, step in enumerate(steps, start=1):
        assert step.startswith(f"{number}. ")
        assert re.search(r"\*\*(Tried|[Nn]ot\s+tried)\b", step)


def test_the_versions_are_those_that_were_tested(pinned):
    minor = re.search(r"on Python (\d\.\d+)", TEXT)[1]
    assert f"is {pinned['ray']}, on Python {minor}:" in TEXT
    assert set(re.findall(r"rayfed:(\S+)", TEXT)) == {f"ray{pinned['ray']}-py{minor}"}
    assert "KubeRay 1.6.2" in TEXT and (ROOT / "tests/cluster/kuberay-1.6.2.json").exists()
    assert "Kubernetes 1.37" in TEXT and (ROOT / "tests/cluster/kubernetes-1.37.json.gz").exists()


def test_the_readme_links_to_every_file():
    readme = (ROOT / "cluster" / "README.md").read_text()
    linked = set(re.findall(r"\]\(([^)]+)\)", readme)) - {"../docs/cluster.md"}
    there = {path for path in (ROOT / "cluster").rglob("*") if path.is_file() and path.name != "README.md"}
    there = {path.relative_to(ROOT / "cluster").as_posix() for path in there}
    folders = {path.rstrip("/") for path in linked if (ROOT / "cluster" / path).is_dir()}
    assert folders == {"launchers", "monitoring"}
    assert linked - folders == {path for path in there if path.split("/")[0] not in folders}
