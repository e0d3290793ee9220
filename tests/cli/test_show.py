"""Commands that only show: help, keys, methods, data and partition; and shell completion."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from rayfed.base.values import table
from rayfed.cli import main
from rayfed.cli.options import read_override
from rayfed.clients.sampling import SAMPLINGS, Oort
from rayfed.clients.schedules import SCHEDULES
from rayfed.data.partition import PARTITIONS
from rayfed.data.settings import SOURCES
from rayfed.grid.cells import Grid, expand
from rayfed.job import flat, read_job
from rayfed.methods.registry import PARTS, RECIPES
from rayfed.models.settings import Adapt
from rayfed.observers.display import partition_text
from rayfed.papers.cost import cost_of

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "ray", "pyarrow", "matplotlib", "pydantic", "numpy"}
# Not in a table: TOML has no null, and an empty table has no key.
NONE_BY_DEFAULT = {
    "train.local_steps",
    "ray.labels",
}
NONE_BY_DEFAULT |= {
    f"clients.{key}" for key in ("seconds_per_example", "bytes_per_second", "deadline")
}
# Keys of partitions, and the rules that take them.
ONE_LETTER = {"s": "shards", "k": "classes"}
# Keys that only one schedule, or one rule of sampling, takes, and that one.
OF_SCHEDULES = {
    "train.schedule.gamma": {"train.schedule": {"name": "step", "every": 2}},
    "train.schedule.floor": {"train.schedule": {"name": "cosine", "until": 20}},
    "clients.sampling.estimate": {
        "clients.sampling": {"name": "power_of_choice", "candidates": 20}
    },
}
OF_SCHEDULES["data.skew.variance"] = {"data.skew": "noise"}
OF_SCHEDULES["data.skew.turns"] = {"data.skew": "rotation"}
for field in fields(Oort):
    OF_SCHEDULES[f"clients.sampling.{field.name}"] = {"clients.sampling": "oort"}


def test_help_has_every_command_and_examples(rayfed):
    result = rayfed("--help")
    assert result.exit_code == 0
    assert "rayfed run quickstart" in result.stdout
    titles = re.findall(r"^(\S.*):$", result.stdout, re.MULTILINE)
    assert titles[-4:] == ["Train", "Look at results", "Look things up", "Use a cluster"]
    for name in main.commands:
        assert f"\n  {name} " in result.stdout
        assert rayfed(name, "--help").exit_code == 0
    assert "..." not in result.stdout.replace("[ARGS]...", ""), (
        "a command's first sentence is too long for the list"
    )


def imported_by(*words, **variables):
    """The top-level modules that a command imports, and its output."""
    command = [sys.executable, "-X", "importtime", "-m", "rayfed", *words]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})
    lines = [
        line.rpartition("|")[2].strip()
        for line in ended.stderr.splitlines()
        if line.startswith("import time:")
    ]
    return {name.partition(".")[0] for name in lines}, ended.stdout


# A command, or what is typed before Tab is pressed, and what is printed.
SHOWING = {
    "--help": "",
    "run --help": "",
    "keys": "",
    "figure": "",
    "status --address URL": "",
    "Tab: run job.toml -s ray.num": "plain,ray.num_cpus=\nplain,ray.num_gpus=\n",
}


@pytest.mark.parametrize("line", SHOWING)
def test_a_command_that_only_shows_and_completion_import_nothing_heavy(line, folder, cluster):
    words, typed = line.replace("URL", cluster.url).split(), line.removeprefix("Tab: ")
    if words[0] == "Tab:":
        completing = {"_RAYFED_COMPLETE": "bash_complete", "COMP_CWORD": str(len(typed.split()))}
        modules, shown = imported_by(**completing, COMP_WORDS=f"rayfed {typed}")
    else:
        modules, shown = imported_by(*words)
    assert "rayfed" in modules and (shown == SHOWING[line] if SHOWING[line] else shown)
    assert not modules & HEAVY - ({"numpy"} if words[0] in ("Tab:", "keys") else set())


def test_keys_lists_every_key_with_a_valid_default(rayfed):
    result = rayfed("keys")
    assert result.exit_code == 0
    shown = {line.split()[0]: line.split()[1] for line in result.stdout.splitlines()[1:]}
    partitions = {
        f"data.partition.{field.name}" for rule in PARTITIONS.values() for field in fields(rule)
    }
    schedules = {
        f"train.schedule.{field.name}" for kind in SCHEDULES.values() for field in fields(kind)
    }
    samplings = {
        f"clients.sampling.{field.name}" for kind in SAMPLINGS.values() for field in fields(kind)
    }
    of_grid = {f"grid.{field.name}" for field in fields(Grid)}
    # Written only where they are given.
    of_models = {f"model.{key}" for key in flat(table(Adapt()))}
    always = {
        *flat(read_job({"name": "any"}).table()),
        *partitions,
        *schedules,
        *samplings,
        "data.skew.variance",
        "data.skew.turns",
        *of_models,
        *of_grid,
    }
    assert set(shown) == always | NONE_BY_DEFAULT
    for key, value in shown.items():
        if value in ("(needed)", "(none)") or key in of_grid:
            continue
        last = key.rpartition(".")[2]
        rule = "natural" if last == "column" else ONE_LETTER.get(last, "dirichlet")
        name = {"data.partition.name": rule} if key.startswith("data.partition.") else {}
        name |= OF_SCHEDULES.get(key, {})
        read_job({"name": "any"}, {**name, **dict([read_override(f"{key}={value}")])})


@pytest.mark.parametrize(
    ("beginning", "keys"),
    [
        ("train.l", ["train.local_epochs", "train.local_steps", "train.lr", "train.lr_decay"]),
        # Not those that end so, such as model.name.
        ("name", ["name"]),
        # No key begins so: keys in whose meaning it stands.
        ("Learning rate", ["train.lr", "train.lr_decay", "train.schedule.name"]),
    ],
)
def test_keys_with_a_beginning_lists_the_keys_that_begin_so(rayfed, beginning, keys):
    shown = [line.split()[0] for line in rayfed("keys", beginning).stdout.splitlines()[1:]]
    assert sorted(shown) == keys


def test_methods_lists_every_recipe_and_part(rayfed):
    result = rayfed("methods")
    assert result.exit_code == 0
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    assert {*RECIPES, *PARTS} <= set(rows)
    assert [name for name in (*RECIPES, *PARTS) if not rows[name].endswith(".")] == [], (
        "whole sentences"
    )
    assert "over the classes other than the label" in rows["fedntd"]
    assert max(map(len, rows.values())) < 160, "a name and a sentence"


def test_methods_describes_a_method_and_a_users_part(folder, rayfed):
    lines = rayfed("methods", "FedProx").stdout.splitlines()
    assert lines[0].startswith("Pull a client's parameters") and lines[0].endswith(".")
    assert "FedProx (Li et al., MLSys 2020)" in lines[2]
    assert lines[-1].split()[:2] == ["mu", "0.01"]
    (folder / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom typing import Annotated\nfrom rayfed.methods "
        "import Part\n"
        '@dataclass(frozen=True)\nclass Mine(Part):\n    """A term.\n\n    Where it is from."""\n'
        '    mu: Annotated[float, "how much"] = 0.5\n'
    )
    shown = rayfed("methods", "mine:Mine")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[4] == 'to use it: -s method=mine:Mine, or in a job file: method = "mine:Mine"'
    assert lines[:4] == ["A term.", "", "Where it is from.", ""] and lines[7].split() == [
        "mu",
        "0.5",
        "how",
        "much",
    ]


def test_data_lists_the_sources(rayfed):
    assert [line.split()[0] for line in rayfed("data").stdout.splitlines()[1:]] == list(SOURCES)


def test_data_describes_the_data_of_a_job(folder, rayfed):
    result = rayfed("data", "job.toml", "-s", "data.partition.num_clients=5")
    assert result.exit_code == 0, result.output
    assert "images     40 + 20 of 1x4x4\nclasses    4: 0, 1, 2, 3\n" in result.stdout
    assert "partition  iid, num_clients = 5\nclients    5 with 8 images each\n" in result.stdout


def test_data_describes_a_source_and_data_that_cannot_be_dealt_as_the_job_says(folder, rayfed):
    assert "images     10,000 + 2,000 of 1x28x28" in rayfed("data", "Fashion-MNIST-mini").stdout
    shown = rayfed("data", "job.toml", "-s", "data.partition={name='iid', num_clients=41}")
    assert (
        shown.exit_code == 0
        and "clients    iid: 41 clients cannot be made of 40 images" in shown.stdout
    )


def test_reproduce_without_a_table_lists_them(folder, rayfed):
    listed = rayfed("reproduce")
    assert listed.exit_code == 0 and "\nfedntd/table1\n" in listed.stdout
    (entry,) = [each for each in listed.stdout.split("\n\n") if each.startswith("fedntd/table1\n")]
    _, shows, takes = entry.splitlines()
    assert shows.strip().startswith("Table 1: accuracy and forgetting of seven methods")
    assert re.search(
        r"7 methods x 14 settings, 294 runs of 200 rounds; .*mnist.*; about [\d,]+", takes
    )
    assert "(core-hours are rough: " in listed.stdout


def test_a_cost_is_that_of_all_images_of_all_rounds_and_names_the_data_that_are_not_here(tmp_path):
    tables = {
        "name": "grid",
        "data": {"source": "mnist", "root": str(tmp_path), "partition": {"num_clients": 100}},
        "model": "cnn",
        "train": {"num_rounds": 10, "clients_per_round": 5, "local_epochs": 2, "eval_every": 5},
        "grid": {"seeds": [0, 1], "method": ["fedavg", "fedntd"]},
    }
    cost = cost_of(expand(tables))
    trained, tested = 10 * 5 * 600 * 2, 2 * 10_000 / 3
    seconds = 4 * (trained + tested) * 0.002 * (28 / 32) ** 2
    assert cost.core_hours == pytest.approx(seconds / 3600)
    assert (
        cost.in_words()
        == "2 methods x 1 setting, 4 runs of 10 rounds; mnist (not here); about 7 core-minutes"
    )
    (tmp_path / "MNIST/raw").mkdir(parents=True)
    assert cost_of(expand(tables)).sources == {"mnist": True}
    assert "cost not known" in cost_of(expand({**tables, "model": "mine:net"})).in_words()


def test_a_partition_is_described_with_the_keys_that_a_job_file_changes():
    assert (
        partition_text(PARTITIONS["dirichlet"](alpha=0.3, seed=2))
        == "dirichlet, num_clients = 10, seed = 2, alpha = 0.3"
    )
    assert partition_text(PARTITIONS["dirichlet"]()) == "dirichlet, num_clients = 10, alpha = 0.5"
    assert partition_text(PARTITIONS["natural"](column="writer")) == "natural, column = 'writer'"


def test_an_exported_partition_is_another_jobs(folder, rayfed):
    exported = rayfed(
        "partition", "job.toml", "-s", "data.partition.seed=3", "--export", "new/who.json"
    )
    assert exported.exit_code == 0, exported.output
    file = ("-s", "data.partition.name=file", "-s", "data.partition.path=new/who.json")
    again = rayfed("partition", "job.toml", *file, "--export", "again.json")
    assert again.stdout == exported.stdout
    assert (folder / "again.json").read_text() == (folder / "new/who.json").read_text()


def test_partition_prints_a_table_which_is_short_and_draws_a_figure(folder, rayfed, write_images):
    result = rayfed("partition", "job.toml")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["client", "0", "1", "2", "3", "total"]
    assert lines[5].split() == ["total", "10", "10", "10", "10", "40"]
    assert (folder / "tiny.partition.png").read_bytes().startswith(b"\x89PNG")
    write_images(folder, 120, 20, pixels=16)
    result = rayfed(
        "partition", "job.toml", "-s", "data.partition.num_clients=60", "-o", "picture.svg"
    )
    assert result.exit_code == 0, result.output
    assert "\n10 more\n" in result.stdout and len(result.stdout.splitlines()) < 60
    assert "<svg" in (folder / "picture.svg").read_text()
    assert rayfed("partition", "job.toml", "-o", "picture.docx").exit_code == 2
    assert not (folder / "runs").exists()


OFFERED = {
    "ru": ["run"],
    "run job.toml -s ray.num": ["ray.num_cpus=", "ray.num_gpus="],
    "figure con": ["consistency", "confusion"],
}


def test_completion_offers_the_runs_of_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/first", "runs/grid/fedavg", "other/third"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "job.toml").touch()
    offered = {
        ("resume", ""): ["runs/first", "runs/grid/fedavg"],
        ("resume", "runs/fi"): ["runs/first"],
        ("replay", "other/"): ["other/third"],
        ("resume", "absent/"): [],
        **{(command, "gr"): ["grid/fedavg"] for command in ("status", "logs", "stop")},
    }
    completer = BashComplete(main, {}, "rayfed", "_RAYFED_COMPLETE")
    for (command, last), expected in offered.items():
        assert [item.value for item in completer.get_completions([command], last)] == expected, (
            command
        )


def test_completion_offers_commands_keys_and_values_of_options():
    completer = BashComplete(main, {}, "rayfed", "_RAYFED_COMPLETE")
    for typed, offered in OFFERED.items():
        *words, last = typed.split(" ")
        assert [item.value for item in completer.get_completions(words, last)] == offered, typed
