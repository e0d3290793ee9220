"""What a public host reads: metadata, citation, workflows, templates, and the checks before a
commit.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

import rayfed
from rayfed.runtime import hardware

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
by_name = {"ids": lambda path: path.name}


def load(path):
    return yaml.safe_load(path.read_text())


def steps(path):
    return [step for job in load(path)["jobs"].values() for step in job["steps"]]


def test_the_version_is_the_same_everywhere():
    cited = load(ROOT / "CITATION.cff")
    assert {cited["version"], PROJECT["version"], rayfed.__version__} == {rayfed.__version__}
    assert {"cff-version", "message", "title", "authors"} <= cited.keys(), (
        "what the format requires"
    )
    assert [author["name"] for author in cited["authors"]] == [
        author["name"] for author in PROJECT["authors"]
    ]
    assert f"To be {rayfed.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_page_on_an_index_has_no_links_that_only_a_clone_has():
    page = ROOT / PROJECT["readme"]
    assert not re.findall(r"\]\((?!https:)", page.read_text())


def test_each_command_of_a_workflow_is_a_target_of_make():
    commands = [step["run"] for path in WORKFLOWS for step in steps(path) if "run" in step]
    named = {
        re.fullmatch(r"make ([\w-]+)( PYTHON=python)?( CONSTRAINTS=)?", command)[1]
        for command in commands
    }
    assert {"demo", "test", "docs", "test-wheel", "test-lowest", "image"} <= named <= TARGETS
    assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in TARGETS)


@pytest.mark.parametrize("path", WORKFLOWS, **by_name)
def test_a_workflow_may_only_read_and_ends(path):
    workflow = load(path)
    # `on`
    assert (
        workflow["permissions"] == {"contents": "read"}
        and {"push", "pull_request"} <= workflow[True].keys()
    )
    assert all(
        job["runs-on"] in ("ubuntu-latest", "macos-15") and job["timeout-minutes"] <= 120
        for job in workflow["jobs"].values()
    )
    for step in steps(path):
        assert "run" in step or re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])


def test_the_workflows_have_each_python_that_the_package_says_it_runs_on():
    tested = load(ROOT / ".github/workflows/tests.yml")["jobs"]["two-commands"]["strategy"][
        "matrix"
    ]["python"]
    classified = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert tested == classified and PROJECT["requires-python"] == f">={tested[0]}"


@pytest.mark.parametrize("path", FORMS, **by_name)
def test_a_form_asks_for_something(path):
    form = load(path)
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
    else:
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert (
            form["name"]
            and form["description"]
            and len({field["id"] for field in fields}) == len(fields) > 1
        )
        assert any(field["validations"]["required"] for field in fields)


def test_what_is_checked_before_a_commit_is_what_make_test_checks():
    (local,) = load(ROOT / ".pre-commit-config.yaml")["repos"]
    lines = (
        re.search(r"^test: .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]
        .replace("$(BIN)", ".venv/bin")
        .split("\n\t")
    )
    commands = [line.strip() for line in lines]
    assert [hook["entry"] for hook in local["hooks"]] == [
        line for line in commands if "pytest" not in line
    ]
    assert local["repo"] == "local" and not any(hook["pass_filenames"] for hook in local["hooks"])


def test_llms_txt_links_pages_that_exist():
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text())
    assert len(links) > 10 and all((ROOT / link).is_file() for link in links)


# Code -> the error that it has in rayfed on a Mac; '' where it works there.
LINUXS = {
    "open('/proc/cpuinfo')": "FileNotFoundError",
    "Path('/proc/cpuinfo').read_text()": "FileNotFoundError",
    "os.listdir('/proc')": "FileNotFoundError",
    "os.sched_getaffinity(0)": "AttributeError",
    "ctypes.CDLL(None).prctl": "AttributeError",
    "Path('/etc/passwd').read_text()": "",
}
AS_ON_A_MAC = """
import ctypes, json, os, sys
from pathlib import Path
import psutil

def error_of(code, file):
    try:
        exec(compile(code, file, "exec"))
    except (FileNotFoundError, AttributeError) as error:
        return type(error).__name__
    return ""

codes = json.loads(sys.argv[2])
for folder in ("rayfed", "tests"):
    file = f"{sys.argv[1]}/{folder}/any.py"
    print(json.dumps({code: error_of(code, file) for code in codes}))
psutil.Process().name()
"""


@pytest.mark.skipif(
    sys.platform != "linux" or "no_linux" in os.environ.get("PYTHONPATH", ""),
    reason="as on a Mac",
)
def test_other_tests_have_what_linux_has():
    """The import of tests/no_linux by pytest, in search of examples, once hid it from rayfed."""
    vendor = re.search(
        r"(?:vendor_id|CPU implementer)\s*:\s*(\S+)", Path("/proc/cpuinfo").read_text()
    )
    assert hardware.kind_of(torch.device("cpu"))["maker"] == vendor[1]


@pytest.mark.skipif(sys.platform != "linux", reason="makes of Linux what is no Linux")
def test_without_linux_rayfeds_own_code_fails_where_others_do_not():
    """`make test-no-linux` shows something only if this holds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/no_linux")}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AS_ON_A_MAC, ROOT, json.dumps(list(LINUXS))],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    in_rayfed, in_tests = map(json.loads, run.stdout.splitlines())
    assert in_rayfed == LINUXS
    assert in_tests == dict.fromkeys(LINUXS, "")
