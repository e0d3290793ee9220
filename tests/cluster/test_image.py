"""The Dockerfile, checked as text (the tests cannot build it), and the version of the image in all files."""

import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "cluster"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TAG = re.compile(r"registry\.example\.com/rayfed:(\S+)")


@pytest.fixture(scope="module")
def steps():
    """The instructions, with continued lines joined: [(FROM, python:...), ...]."""
    text = re.sub(r"^#.*\n", "", (CLUSTER / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def test_the_base_is_pinned_and_has_the_tested_python(steps):
    kind, base = steps[0]
    minor = PROJECT["tool"]["mypy"]["python_version"]
    assert kind == "FROM" and re.fullmatch(rf"python:{re.escape(minor)}\.\d+-slim-bookworm", base)
    assert f"python{minor}" in (ROOT / "Makefile").read_text()


def test_every_file_names_the_same_image(pinned):
    found = {path.name: set(TAG.findall(path.read_text())) for path in CLUSTER.rglob("*") if path.is_file()}
    tags = {name: tags for name, tags in found.items() if tags}
    assert tags.keys() >= {"Dockerfile", "aws.yaml", "gcp.yaml", "on-premise.yaml", "raycluster.yaml", "rayjob.yaml"}
    tested = f"ray{pinned['ray']}-py{PROJECT['tool']['mypy']['python_version']}"
    assert tags == {name: {tested} for name in tags}


def test_kuberay_gets_the_version_of_ray(documents, pinned):
    assert documents("kubernetes/raycluster.yaml")[0]["spec"]["rayVersion"] == pinned["ray"]


def test_the_image_has_the_packages_dependencies_at_the_tested_versions(steps, tmp_path):
    (install,) = [step for kind, step in steps if kind == "RUN" and "tomllib" in step]
    listing, pip = install.split(">/tmp/requirements.txt")
    code = re.search(r'python -c "(.*)"', listing)[1]
    listed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert listed.stdout.split("\n")[:-1] == PROJECT["project"]["dependencies"]
    assert "--constraint constraints.txt --requirement /tmp/requirements.txt" in pip


@pytest.mark.parametrize("path", sorted((CLUSTER / "launchers").glob("*.txt")), ids=lambda path: path.stem)
def test_launchers_pin_their_own_requirements(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert lines and all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines)


def test_the_image_runs_as_a_numbered_user(steps):
    users = [given for kind, given in steps if kind == "USER"]
    made = next(given for kind, given in steps if "useradd" in given)
    assert users == ["1000"] and "--uid 1000 ray" in made
    assert steps[-1][0] == "USER", "no instruction follows USER"


def test_copied_files_exist_and_the_build_gets_no_others(steps):
    """.dockerignore excludes every file that COPY does not name, so no data, result or token is sent to the build."""
    copied = [source for kind, given in steps if kind == "COPY" for source in given.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*" and lines[-1] == "**/__pycache__"
    assert {line.removeprefix("!") for line in lines[1:-1]} == set(copied)
    assert not any(fnmatch(source, pattern) for source in copied for pattern in ("runs*", "*.pem", "*token*", ".*"))


def test_the_image_has_no_secret(steps):
    assert not [given for kind, given in steps if kind in ("ENV", "ARG") and re.search("TOKEN|PASSWORD|KEY", given)]
