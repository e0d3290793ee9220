"""What the documentation says is true: snippets run, commands, links and files exist, costs are as
measured.
"""

import ast
import importlib
import os
import re
import shlex
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import click
import pytest
import torch
from torch import nn

import rayfed
from rayfed import read_job
from rayfed.base.seeds import cohort
from rayfed.cli import main
from rayfed.clients.settings import Training
from rayfed.data.settings import Augment, Data
from rayfed.grid.cells import expand
from rayfed.job import Job
from rayfed.methods import RECIPES, Batch, read_method
from rayfed.methods.registry import PARTS, parameters
from rayfed.models.classifier import Classifier
from rayfed.rounds import client_work
from rayfed.rounds.engine import rounds
from rayfed.rounds.setup import Setup
from rayfed.runtime.private import STEPS
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.trees import num_bytes

ROOT = Path(__file__).parents[1]
DOCS, README, CLUSTER = ROOT / "docs", ROOT / "README.md", ROOT / "cluster"
OVERVIEW = DOCS / "methods/README.md"
METHODS = {path.stem: path for path in sorted(OVERVIEW.parent.glob("*.md")) if path != OVERVIEW}
CONTRIBUTING, PACKAGE, OWN_METHOD = (
    ROOT / "CONTRIBUTING.md",
    ROOT / "PACKAGE.md",
    DOCS / "own-method.md",
)
BESIDE = [README, CONTRIBUTING, PACKAGE, ROOT / "jobs/papers/README.md", CLUSTER / "README.md"]
BESIDE += [ROOT / "CHANGELOG.md", *sorted((ROOT / ".github").glob("*.md"))]
EVERY = [*BESIDE, *sorted(DOCS.rglob("*.md"))]
FEW = {
    "train.num_rounds": 2,
    "train.clients_per_round": 3,
    "train.local_steps": 1,
    "ray.mode": "off",
}
PLAYED = {
    "quickstart",
    "mine",
    "news",
    "people",
    "measured",
    "own-model",
    "own-partition",
    "own-sampling",
    "darker",
    "phones",
    "oort",
    "day",
}
# The pages whose Python runs, with the jobs in PLAYED, and what it prints, line by line. That of
# docs/bridges.md needs libraries that rayfed does not: tests/test_bridges.py runs it.
PRINTED = {
    "README.md": [r"fedavg 0\.\d+", r"fedntd 0\.\d+"],
    "PACKAGE.md": [r"\[0\.\d+, .*runs/pull"],
    "docs/own-method.md": [r"\w+: neutral is FedAvg: True, strong is not: True"] * 5,
    "docs/data.md": [],
    "docs/methods/README.md": [],
    "docs/models.md": [r"\[0, \d+, \d+\] \['head.bias', 'head.weight'\]"],
    "docs/own.md": [r"\[\[.*\]\]"],
    "docs/participation.md": [r" +0\.0 s +0\..*", *[r" +\d+\.\d s +0\..*"] * 2],
    "docs/results.md": [
        r"\[None, None, .*\]",
        r"\[\{'run': '.*', 'test_accuracy_max': 0\..*\}\]",
        r"client \d+ of 20: 0\.\d{3}",
        *[r"client \d+: 0\.\d{3}"] * 3,
        r"[12] [A-Z][\w/ -]+",
        r"1663370",
        r"\[\d.*\]",
        r"\[\]",
    ],
}

every_file = pytest.mark.parametrize("path", EVERY, ids=lambda path: str(path.relative_to(ROOT)))


def snippets_in(text, *languages):
    """Language and text of each block of code in these languages."""
    return re.findall(rf"^```({'|'.join(languages)})\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def snippets(path, *languages):
    """The blocks of a page."""
    return snippets_in(path.read_text(), *languages)


def prose(path):
    """A file's text without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def run_few(monkeypatch):
    """Let `rayfed.run` play few rounds without Ray, whatever the job says; return it."""
    play = rayfed.run

    def run(job, overrides=None, **more):
        return play(job, {**(overrides or {}), **FEW}, **more)

    monkeypatch.setattr(rayfed, "run", run)
    return run


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Run in a folder with the project's jobs and the modules that the pages define."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("jobs").symlink_to(ROOT / "jobs")
    before = set(sys.modules)
    for page in (README, OVERVIEW, DOCS / "own.md", DOCS / "data.md", OWN_METHOD):
        for _, code in snippets(page, "python"):
            if name := re.match(r"# (\w+\.py)\n", code):
                Path(name[1]).write_text(code)
    importlib.invalidate_caches()
    yield
    for name in set(sys.modules) - before:
        if name.startswith("my_") or name == "mine":
            del sys.modules[name]


@pytest.mark.usefixtures("modules")
@every_file
def test_job_snippets_are_valid(path):
    for _, text in snippets(path, "toml"):
        given = tomllib.loads(text)
        if set(given) == {"method"}:
            read_method(given["method"])
        elif "grid" in given:
            runs = 9 if path.name == "tutorial.md" else 8
            assert len([cell.job() for cell in expand(given)]) == runs
        else:
            read_job(given)


@pytest.mark.slow
@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("page", PRINTED)
def test_python_snippets_run(page, capsys, monkeypatch):
    """From the first to the last, with few rounds and without Ray; and so do the jobs that they
    need.
    """
    run = run_few(monkeypatch)
    blocks = snippets(ROOT / page, "toml", "python")
    if page == "docs/results.md":
        run("jobs/quickstart.toml")
    for language, code in sorted(
        blocks, key=lambda block: "day.parquet" in block[1] and block[0] == "toml"
    ):
        if language == "toml" and (job := tomllib.loads(code)).get("name") in PLAYED:
            run(job)
        if language == "python" and not re.match(r"# \w+\.py\n", code):
            exec(code, {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(PRINTED[page]), printed
    assert all(map(re.fullmatch, PRINTED[page], printed)), printed


@every_file
def test_links_and_files_exist_and_no_path_is_of_a_certain_machine(path):
    text = prose(path)
    assert not re.search(r"(?<![\w.])/(home|root|work|Users|mnt)\b", path.read_text())
    for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", text):
        ours = (ROOT / "rayfed" / name).parent.is_dir()
        assert not ours or any(
            (at / name).is_file() for at in (ROOT / "rayfed", ROOT / "tests", ROOT)
        ), name
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = path.parent / file if file else path
        # Not resolved: rayfed/ may be a wheel's, linked.
        inside = Path(os.path.normpath(linked)).is_relative_to(ROOT)
        assert linked.exists() and inside, f"{target}: there is no such file"
        headings = re.findall(r"^#+ (.*)$", prose(linked), re.MULTILINE) if anchor else []
        anchors = {
            re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings
        }
        assert not anchor or anchor in anchors, f"{target}: the page has {sorted(anchors)}"


def test_no_message_names_a_page_which_only_a_clone_has():
    page = re.compile(r"docs/|\b(?!README)\w+\.md\b")
    for path in sorted((ROOT / "rayfed").rglob("*.py")):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        documents = {node.value for node in nodes if isinstance(node, ast.Expr)}
        texts = [
            node.value for node in nodes if isinstance(node, ast.Constant) and node not in documents
        ]
        assert not [text for text in texts if isinstance(text, str) and page.search(text)], path


# Commands
# ------------------------------------------------------------------------------------------


def typed_in(path):
    """The lines that a page says to type: after `$ ` where output follows, else all of a block."""
    for language, text in snippets(path, "console", "bash"):
        joined = re.sub(r" *\\\n *", " ", text)
        yield from re.findall(
            r"^\w*\$ (.*)$" if language == "console" else r"^([^#\n].*)$", joined, re.M
        )


def commands():
    """The words of each command of rayfed, Ray or Slurm in the pages and in the comments of
    cluster/.
    """
    typed = [line for path in EVERY for line in typed_in(path)]
    files = [
        path
        for path in CLUSTER.rglob("*")
        if path.suffix in (".yaml", ".sh") or path.name == "Dockerfile"
    ]
    comments = [
        line for path in files for line in re.findall(r"^# (.*)$", path.read_text(), re.MULTILINE)
    ]
    for line in [*typed, *comments]:
        for part in re.split(r"&&|;|\s{3,}", line.removesuffix(" &")):
            command = part.strip().removeprefix("(umask 077").strip().removesuffix(")")
            if command.split(" ")[0] in ("rayfed", "ray", "sbatch"):
                yield shlex.split(command.split(">")[0], comments=True)


@pytest.mark.parametrize("page", [DOCS / "security.md", DOCS / "cluster.md"], ids=str)
def test_each_place_that_starts_a_ray_starts_one_that_only_its_user_can_use(page):
    """A reader types what the first page shows: without a token, that would be a Ray for
    everyone.
    """
    lines = [re.sub(r"\s+#.*", "", line) for line in typed_in(page)]
    first = lines.index(STEPS[0])
    assert tuple(lines[first : first + len(STEPS)]) == STEPS
    assert not any("$USER" in line for line in lines)


def parse(group, words):
    """Raises click.UsageError if the group has no such command, option or argument."""
    context = click.Context(group)
    name, command, rest = group.resolve_command(context, words)
    if isinstance(command, click.Group):
        parse(command, rest)
    else:
        with command.make_context(name, rest, parent=context):
            pass


def test_commands_exist_with_their_options_and_files(monkeypatch):
    # Which takes two seconds.
    from ray.scripts.scripts import cli as ray

    monkeypatch.chdir(ROOT)
    found = list(commands())
    assert {tool for tool, *_ in found} == {"rayfed", "ray", "sbatch"} and len(found) > 40
    for tool, *words in found:
        if tool == "sbatch":
            assert Path(words[0]).is_file()
        parse(
            ray if tool == "ray" else main,
            [w for w in words[1:] if w[0] != "("][:2] if tool == "sbatch" else words,
        )


def test_the_clients_of_replay_examples_were_in_those_rounds():
    """`rayfed replay` refuses other clients, so an example must name a client that the quickstart's
    seed draws.
    """
    job = read_job(ROOT / "jobs/quickstart.toml")
    pages = (DOCS / "cheat-sheet.md", DOCS / "troubleshooting.md", ROOT / "rayfed/cli/train.py")
    for path in pages:
        for number, client in re.findall(
            r"rayfed replay runs/\S+ --round (\d+) --client (\d+)", path.read_text()
        ):
            drawn = cohort(
                job.seed, int(number), job.data.partition.num_clients, job.train.clients_per_round
            )
            assert int(client) in drawn


def test_messages_that_troubleshooting_quotes_are_said_by_the_code():
    """Where a name or a number stands, the page has three dots."""
    texts = []
    for path in sorted((ROOT / "rayfed").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    page = (DOCS / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]*\.\.\.[^`]*)` \|", page, re.MULTILINE)
    assert len(quoted) > 15
    for message in quoted:
        for words in filter(str.strip, re.split(r"\.\.\.|\(\.\.\.\)", message)):
            assert any(words.strip(" ();,") in text for text in texts), words


# Lists
# ------------------------------------------------------------------------------------------


def test_the_tree_has_a_line_for_each_room_and_each_file_beside_them():
    tree = re.search(r"## Where things are\n.*?```\n(.*?)```", CONTRIBUTING.read_text(), re.DOTALL)[
        1
    ]
    rooms = {f"{path.parent.name}/" for path in (ROOT / "rayfed").glob("*/__init__.py")}
    beside = {
        path.name for path in (ROOT / "rayfed").glob("*.py") if not path.name.startswith("__")
    }
    assert sorted(re.findall(r"^  (\S+)", tree, re.MULTILINE)) == sorted(rooms | beside)


def test_the_readme_counts_the_methods_and_parts_that_there_are():
    text = README.read_text()
    assert f"{len(RECIPES)} methods, built from {len(PARTS)} parts" in text
    counted = {int(number) for number in re.findall(r"(\d+) methods\b", text)}
    # The comparison has 17.
    assert counted == {len(RECIPES), 17}


def overview():
    """Method -> the cells of its row in the overview."""
    rows = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.md\) \|(.*)\|$", OVERVIEW.read_text(), re.MULTILINE)
    assert [name for name, _, _ in rows] == [link for _, link, _ in rows] == list(RECIPES)
    return {name: [cell.strip() for cell in cells.split("|")] for name, _, cells in rows}


@pytest.mark.parametrize("name", RECIPES)
def test_a_method_has_a_row_and_a_page_with_a_job_and_parameters_of_its_own(name):
    assert name in overview() and set(METHODS) == set(RECIPES)
    ((_, job),) = snippets(METHODS[name], "toml")
    method = tomllib.loads(job)["method"]
    # Ccvr is for the last round.
    last = method[-1]["method"] if isinstance(method, list) else method
    assert name == (last if isinstance(last, str) else last["name"])
    text = METHODS[name].read_text()
    line = re.search(
        r"^Parameters: `rayfed methods (\w+)`(.*?)\n\n", text, re.MULTILINE | re.DOTALL
    )
    assert bool(parameters(name)) == bool(line)
    if line:
        assert line[1] == name
        assert {*re.findall(r"`(\w+)`\s+\d", line[2])} <= {key for key, *_ in parameters(name)}


# Passes more for each batch.
THROUGH_A_TRAINED_MODEL = dict.fromkeys(
    (
        "fedalign",
        "fedsam",
        "fedsol",
        "fedspeed",
        "fedsmoo",
        "ditto",
        "mofedsam",
        "fedgamma",
        "fedlesam",
    ),
    1,
) | {"fedreg": 3}


@pytest.mark.parametrize("name", RECIPES)
def test_cost_is_as_measured(name, make_federation, monkeypatch):
    """In the last round, with all clients.

    The model is so large that terms in C and D are small.
    """
    runs, passes, batches = [], [], []
    inside, view, outputs_of = Batch.__init__, client_work.view_of, Batch.outputs_of

    def counted_batch(self, *given):
        batches.append(self)
        inside(self, *given)

    def counted_outputs(self, model):
        runs.extend([model] if model not in self._frozen else [])
        return outputs_of(self, model)

    def counted_view(*given):
        made = view(*given)
        return replace(made, samples=lambda *size: passes.append(made.id) or made.samples(*size))

    monkeypatch.setattr(Batch, "__init__", counted_batch)
    monkeypatch.setattr(Batch, "outputs_of", counted_outputs)
    monkeypatch.setattr(client_work, "view_of", counted_view)

    torch.manual_seed(0)
    layers = nn.Sequential(
        # The first layer is small, as FedWSQ does not compress it.
        *(nn.Flatten(), nn.Linear(16, 16), nn.ReLU()),
        *(nn.Linear(16, 2048), nn.ReLU(), nn.Linear(2048, 16), nn.ReLU()),
    )
    every_client_lacks_two = [
        [9, 3, 0, 0],
        [0, 8, 0, 2],
        [0, 0, 1, 0],
        [2, 0, 0, 2],
        [0, 0, 12, 1],
        [1, 0, 0, 6],
    ]
    model, data = Classifier(layers, nn.Linear(16, 4)), make_federation(every_client_lacks_two)
    # It keeps five older models.
    num_rounds = 7 if name == "fedgkd" else 3
    training = Training(
        num_rounds, clients_per_round=data.num_clients, local_steps=1, batch_size=5, lr=0.01
    )
    # Else a teacher runs once per round.
    every_batch = Data(augment=Augment(flip=True))
    setup = Setup(
        model,
        data,
        Job("cost", method=RECIPES[name](), data=every_batch, train=training),
        torch.device("cpu"),
    )
    history = [
        (round, len(batches), len(runs), len(passes)) for round in rounds(setup, ThisProcess(setup))
    ]
    (_, *before), (last, *now) = history[-2:]
    steps, in_batches, in_round = (
        after - earlier for earlier, after in zip(before, now, strict=True)
    )

    unit = num_bytes(last.weights)
    measured = [
        # Ccvr trains no client.
        in_batches / max(1, steps) + THROUGH_A_TRAINED_MODEL.get(name, 0),
        in_round / data.num_clients,
        last.bytes_down / data.num_clients / unit,
        last.bytes_up / data.num_clients / unit,
        max((packed.num_bytes for packed in last.memories.values()), default=0) / unit,
        num_bytes([hold.state for hold in last.held.values()]) / unit,
    ]
    cells = overview()[name][1:]
    stated = [float(re.match(r"[\d.]+", cell)[0]) for cell in cells]
    assert measured == pytest.approx(stated, abs=0.05)
    for cell, number in zip(cells[2:], measured[2:], strict=True):
        assert bool(re.search(r"\+|less", cell)) == (number != round(number)), (
            "small terms are stated"
        )
