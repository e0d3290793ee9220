"""The command: what it prints, how it ends, and that bad input changes nothing."""

import io
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner, Result
from PIL import Image
from rich.console import Console
from rich.progress import Task, TaskID

from rayfed import run
from rayfed.cli import main
from rayfed.completion import all_keys
from rayfed.display import Bar, TimeLeft, bar_on
from rayfed.job import read_job, read_override

ROOT = Path(__file__).resolve().parents[1]
JOB = """
name = "tiny"
method = "fedntd"
[data]
source = "data"
shape = [1, 4, 4]
[data.partition]
name = "iid"
num_clients = 4
[model]
name = "tiny_models:linear"
[train]
num_rounds = 2
clients_per_round = 2
batch_size = 8
[ray]
mode = "off"
"""
MODELS = """
from torch import nn
def linear(image_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a tiny data set, a model of its own, and a job; what tests do to sys.path is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "tiny_models", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    rng = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for split, rows in (("train", 40), ("test", 20)):
        write(tmp_path / f"data/{split}.parquet", list(rng.integers(0, 256, (rows, 16), np.uint8)), np.arange(rows) % 4)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "tiny_models.py").write_text(MODELS)
    return tmp_path


def write(path: Path, images: list, labels, classes: str = "") -> None:
    table = pa.table({"image": images, "label": pa.array(labels)})
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table.replace_schema_metadata({"classes": classes} if classes else None), path)


def rayfed(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="rayfed")


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


# A run ---------------------------------------------------------------------------------------------------------------


def test_a_run_prints_a_header_a_line_a_round_and_where_the_results_are(folder):
    result = rayfed("run", "job.toml", "-s", "train.num_rounds=3")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "name     tiny"
    assert lines[1] == "method   Average + CrossEntropy + NotTrueDistill"
    assert lines[2] == "data     data: 40 + 20 of 1x4x4; Iid(num_clients=4)"
    assert lines[3] == "clients  4 with 10 to 10 images each; 2 a round"
    assert lines[5] == "ray      off: in this process"
    assert [line.split("  ")[0] for line in lines[6:10]] == [f"round {r}/3" for r in range(4)]
    assert {"accuracy", "forgetting", "loss", "s"} <= set(lines[9].split())
    assert [line.split()[0] for line in lines[10:]] == ["best", "last", "results"]
    assert lines[-1].endswith("runs/tiny")
    assert "\r" not in result.output
    assert result.stderr == ""


def test_warnings_of_the_package_go_to_standard_error(folder, monkeypatch):
    from rayfed import rounds

    play = rounds.play

    def warn(*arguments):
        logging.getLogger("rayfed.somewhere").warning("a thing")
        return play(*arguments)

    monkeypatch.setattr(rounds, "play", warn)
    result = rayfed("run", "job.toml")
    assert result.stderr == "warning: a thing\n" * 2
    assert "a thing" not in result.stdout
    assert (folder / "runs/tiny/log.txt").read_text().count("WARNING a thing") == 2
    assert not logging.getLogger("rayfed").handlers


def test_results_are_replaced_only_with_force(folder):
    assert rayfed("run", "job.toml").exit_code == 0
    before = files(folder)
    result = rayfed("run", "job.toml", "-s", "seed=1")
    assert result.exit_code == 2
    assert "holds the results of a run; give --force" in result.stderr
    assert files(folder) == before
    assert rayfed("run", "job.toml", "-s", "seed=1", "--force").exit_code == 0
    assert "seed = 1" in (folder / "runs/tiny/job.toml").read_text()


BROKEN = """
from dataclasses import dataclass
from rayfed.methods import Part
@dataclass(frozen=True)
class Broken(Part):
    def begin(self, client):
        if client.round == 2:
            raise {error}
"""


def test_a_failing_client_ends_with_its_traceback_and_code_1(folder, monkeypatch):
    (folder / "my_broken.py").write_text(BROKEN.format(error="ZeroDivisionError('my own mistake')"))
    result = rayfed("run", "job.toml", "-s", "method=my_broken:Broken")
    assert result.exit_code == 1
    assert "error: " in result.stderr
    assert "in begin" in result.stderr
    assert "ZeroDivisionError: my own mistake" in result.stderr
    assert f"rounds up to 1 are recorded in {folder}/runs/tiny" in result.stderr
    summary = json.loads((folder / "runs/tiny/summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("failed", 1)


def test_ctrl_c_ends_with_130_and_says_what_was_written(folder):
    (folder / "my_stop.py").write_text(BROKEN.format(error="KeyboardInterrupt"))
    result = rayfed("run", "job.toml", "-s", "method=my_stop:Broken")
    assert result.exit_code == 130
    run = f"{folder}/runs/tiny"
    assert result.stderr == (
        f"stopped; rounds up to 1 are recorded in {run}; to go on after round 1: rayfed resume {run}\n"
    )
    assert json.loads((folder / "runs/tiny/summary.json").read_text())["status"] == "stopped"


def test_a_loss_that_is_no_number_ends_with_one_message(folder):
    result = rayfed("run", "job.toml", "-s", "train.lr=3e38")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "the loss became inf at client" in result.stderr
    assert "Traceback" not in result.stderr


def test_on_a_terminal_a_bar_moves_with_each_client(folder):
    screen = io.StringIO()
    sys.path.insert(0, str(folder))
    with bar_on(Console(file=screen, force_terminal=True, width=100)) as progress:
        run("job.toml", display=Bar(progress))
        task = progress.tasks[0]
        assert (task.completed, task.total, task.finished) == (2, 2, True)
    written = screen.getvalue()
    for words in ("round 0/2", "starting", "round 1/2", "clients 1/2", "accuracy 0.", "round 2/2", "taken"):
        assert words in written, words


def test_the_time_left_is_in_proportion_to_the_time_taken():
    task = Task(TaskID(0), "", total=4, completed=0, _get_time=lambda: 30.0)
    task.start_time = 0.0
    assert TimeLeft().render(task).plain == ""
    task.completed = 1
    assert TimeLeft().render(task).plain == "0:01:30 left"


# Bad input -----------------------------------------------------------------------------------------------------------


def png() -> bytes:
    data = io.BytesIO()
    Image.new("L", (4, 4)).save(data, "PNG")
    return data.getvalue()


def other_columns(folder: Path) -> None:
    for split in ("train", "test"):
        table = pq.read_table(folder / f"data/{split}.parquet").rename_columns(["picture", "class"])
        pq.write_table(table, folder / f"data/{split}.parquet")


def undecodable_image(folder: Path) -> None:
    for split in ("train", "test"):
        write(folder / f"data/{split}.parquet", [*[png()] * 7, b"no image", *[png()] * 32], np.arange(40) % 4)


def labels_outside(folder: Path) -> None:
    for split in ("train", "test"):
        write(folder / f"data/{split}.parquet", [bytes(16)] * 3, [0, 1, 2], classes="cat,dog")


def no_data(folder: Path) -> None:
    for file in (folder / "data").iterdir():
        file.unlink()


def broken_toml(folder: Path) -> None:
    (folder / "job.toml").write_text("name = ")


def results_are_there(folder: Path) -> None:
    (folder / "runs/tiny").mkdir(parents=True)
    (folder / "runs/tiny/job.toml").write_text(JOB)


def something_else_is_there(folder: Path) -> None:
    (folder / "runs/tiny").mkdir(parents=True)
    (folder / "runs/tiny/thesis.txt").write_text("three years")


def a_file_is_in_the_way(folder: Path) -> None:
    (folder / "runs").write_text("")


def nothing(folder: Path) -> None:
    pass


BAD = {
    "unknown key": (nothing, ["train.num_round=2"], "train: unknown key 'num_round'; did you mean 'num_rounds'?"),
    "unknown section": (nothing, ["trian.lr=2"], "unknown key 'trian' in the job; did you mean 'train'?"),
    "unknown method": (nothing, ["method=fednt"], "unknown method 'fednt'; did you mean 'fedntd'?"),
    "unknown model": (nothing, ["model.name=cn"], "unknown model 'cn'; did you mean 'cnn'?"),
    "unknown partition": (nothing, ["data.partition.name=shard"], "'shard'; did you mean 'shards'?"),
    "parameter of a method": (nothing, ['method={name="fedntd",tua=2}'], "unknown key 'tua'; did you mean 'tau'?"),
    "out of range": (nothing, ["train.momentum=1"], "train.momentum = 1: input should be less than 1"),
    "wrong type": (nothing, ["train.num_rounds=many"], "train.num_rounds = 'many': input should be a valid integer"),
    "not a table": (nothing, ["train=3"], "train = 3: this is a table, [train]"),
    "no override": (nothing, ["train.lr"], "'train.lr': write an override as key.sub=value"),
    "broken TOML": (broken_toml, [], "job file 'job.toml' cannot be read: Invalid value"),
    "missing data": (nothing, ["data.source=./no/where.parquet"], "data.source = './no/where.parquet': no such file"),
    "unknown source": (nothing, ["data.source=cifar11"], "no such source or file; did you mean 'cifar10'?"),
    "empty folder": (no_data, [], "neither Parquet files"),
    "columns": (other_columns, [], "train.parquet: no column 'image'; it has picture, class"),
    "image": (undecodable_image, [], "train.parquet, row 7: cannot be decoded as an image"),
    "labels": (labels_outside, [], "train.parquet, row 2: label 2 is outside 0..1 (cat, dog)"),
    "too many clients": (nothing, ["data.partition.num_clients=41"], "41 clients cannot be made of 40 images"),
    "shards": (nothing, ['data.partition={name="shards",s=20,num_clients=4}'], "shards"),
    "dirichlet": (
        nothing,
        ['data.partition={name="dirichlet",alpha=0.01,num_clients=4,cap=false,max_draws=5}'],
        "dirichlet: none of 5 draws with alpha = 0.01 gave each of 4 clients min_size = 10",
    ),
    "image size": (nothing, ["model.name=alexnet"], "images of 15x15 pixels or more, not 4x4"),
    "too many a round": (nothing, ["train.clients_per_round=5"], "train.clients_per_round = 5: the partition has 4"),
    "too many actors": (nothing, ["ray.mode=on", "ray.actors=999"], "ray.actors = 999, each with 1 CPU"),
    "no GPU": (nothing, ["ray.mode=on", "ray.num_gpus=64"], "no actor with 1 CPU and 64 GPU fits: there are"),
    "results": (results_are_there, [], "holds the results of a run; give --force to replace them"),
    "something else": (something_else_is_there, [], "exists and is no rayfed run; give the job another name"),
    "file in the way": (a_file_is_in_the_way, [], "is no folder that can be written to"),
    "escaping name": (nothing, ["name=../x"], "name = '../x': a job needs a name that can be a folder's"),
    "absolute name": (nothing, ["name=/x"], "name = '/x': a job needs a name that can be a folder's"),
    "no name": (nothing, ['name=""'], "name = '': a job needs a name"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message_code_2_and_nothing_written(case, folder, monkeypatch):
    import ray

    def refuse(*_, **__):
        raise AssertionError("Ray was started")

    monkeypatch.setattr(ray, "init", refuse)
    prepare, overrides, message = BAD[case]
    prepare(folder)
    before = files(folder)
    result = rayfed("run", "job.toml", *(word for override in overrides for word in ("-s", override)))
    assert result.exit_code == 2, result.output
    assert result.stdout == "" or case in ("too many actors", "no GPU"), result.stdout
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert files(folder) == before


def test_a_missing_job_file_is_bad_input(folder):
    result = rayfed("run", "jobb.toml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: no job file 'jobb.toml'")


def test_force_does_not_replace_what_is_no_run(folder):
    something_else_is_there(folder)
    result = rayfed("run", "job.toml", "--force")
    assert result.exit_code == 2
    assert (folder / "runs/tiny/thesis.txt").read_text() == "three years"


# Other commands ------------------------------------------------------------------------------------------------------


def test_help_has_every_command_and_examples():
    result = rayfed("--help")
    assert result.exit_code == 0
    assert "rayfed run jobs/quickstart.toml" in result.stdout
    for name in main.commands:
        assert f"\n  {name} " in result.stdout
        assert rayfed(name, "--help").exit_code == 0
    assert "..." not in result.stdout.replace("[ARGS]...", ""), "a command's first sentence is too long for the list"


def test_version_is_the_packages():
    import rayfed as package

    assert rayfed("--version").stdout == f"rayfed, version {package.__version__}\n"


def test_help_and_version_import_nothing_heavy():
    heavy = ("torch", "ray", "numpy", "pyarrow", "matplotlib")
    code = f"import sys, rayfed.cli; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_keys_lists_every_key_with_a_default_that_can_be_given():
    result = rayfed("keys")
    assert result.exit_code == 0
    shown = {line.split()[0]: line.split()[1] for line in result.stdout.splitlines()[1:]}
    assert set(shown) == set(all_keys())
    given = {key: value for key, value in shown.items() if value not in ("(needed)", "(none)")}
    for key, value in given.items():
        rule = (
            "natural"
            if key.endswith("column")
            else {"s": "shards", "k": "classes"}.get(key.rpartition(".")[2], "dirichlet")
        )
        name = {"data.partition.name": rule} if key.startswith("data.partition.") else {}
        read_job({"name": "any"}, {**name, **dict([read_override(f"{key}={value}")])})
    assert [line.split()[0] for line in rayfed("keys", "output").stdout.splitlines()[1:]] == [
        "output.path",
        "output.checkpoints",
        "output.every",
    ]
    assert "no key begins with 'outputs'; `rayfed keys` lists all" in rayfed("keys", "outputs").stderr


def test_methods_lists_every_recipe_and_part():
    from rayfed.methods.registry import PARTS, RECIPES

    result = rayfed("methods")
    assert result.exit_code == 0
    assert {*RECIPES, *PARTS} <= {line.split()[0] for line in result.stdout.splitlines() if line}
    assert "Lee et al." in result.stdout
    assert 'form="kl"' in result.stdout


def test_methods_describes_one():
    result = rayfed("methods", "fedprox")
    assert result.stdout.splitlines()[0].startswith("Li et al.")
    assert result.stdout.splitlines()[-3].split()[:2] == ["mu", "0.01"]
    assert result.stdout.splitlines()[-1] == "A client gets 1.0 and sends 1.0 times the model's size in a round."


def test_methods_offers_the_nearest():
    result = rayfed("methods", "fedproxx")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: unknown method 'fedproxx'; did you mean 'fedprox'?")


def test_data_lists_the_sources_and_whether_they_are_here(folder):
    (folder / "MNIST/raw").mkdir(parents=True)
    result = rayfed("data", "-s", f"data.root={folder}")
    here = {line.split()[0]: line.split()[1] for line in result.stdout.splitlines()[1:]}
    assert here == {
        "fashion-mnist-mini": "yes",
        "mnist": "yes",
        **dict.fromkeys(("fashion-mnist", "emnist", "cifar10", "cifar100"), "no"),
    }


def test_data_describes_a_jobs(folder):
    result = rayfed("data", "job.toml", "-s", "data.partition.num_clients=5")
    assert result.exit_code == 0, result.output
    assert "images     40 + 20 of 1x4x4\nclasses    4: 0, 1, 2, 3\n" in result.stdout
    assert "clients    5 with 8 to 8 images each" in result.stdout


def test_partition_prints_a_table_and_draws_it_beside_the_runs(folder):
    result = rayfed("partition", "job.toml")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].split() == ["client", "0", "1", "2", "3", "total"]
    assert result.stdout.splitlines()[5].split() == ["total", "10", "10", "10", "10", "40"]
    assert (folder / "runs/tiny.partition.png").read_bytes().startswith(b"\x89PNG")
    assert rayfed("run", "job.toml").exit_code == 0, "the picture is not in the way of the run"


def test_partition_abridges_many_clients_and_draws_where_it_is_told(folder):
    write(folder / "data/train.parquet", [np.arange(16)] * 120, np.arange(120) % 4)
    result = rayfed("partition", "job.toml", "-s", "data.partition.num_clients=60", "-o", "picture.svg")
    assert result.exit_code == 0, result.output
    assert "... and 10 more clients" in result.stdout
    assert len(result.stdout.splitlines()) < 60
    assert "<svg" in (folder / "picture.svg").read_text()
    assert rayfed("partition", "job.toml", "-o", "picture.docx").exit_code == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_shells_script(shell):
    result = rayfed("completion", shell)
    assert result.exit_code == 0
    assert f"_RAYFED_COMPLETE={shell}_complete" in result.stdout


def completions(*words: str) -> list[str]:
    completer = BashComplete(main, {}, "rayfed", "_RAYFED_COMPLETE")
    return [item.value for item in completer.get_completions(list(words[:-1]), words[-1])]


def test_completion_offers_job_files_keys_and_methods(folder):
    (folder / "jobs").mkdir()
    (folder / "jobs/more.toml").write_text(JOB)
    assert completions("ru") == ["run"]
    assert completions("run", "") == ["job.toml", "jobs/more.toml"]
    assert completions("run", "jobs/") == ["jobs/more.toml"]
    keys = ["train.num_rounds=", "train.clients_per_round=", "train.batch_size="]
    assert completions("run", "job.toml", "-s", "train.") == keys, "those of the file are enough"
    assert completions("run", "job.toml", "-s", "seed=1", "-s", "train.") == keys
    assert completions("run", "job.toml", "-s", "ray.num") == ["ray.num_cpus=", "ray.num_gpus="], "not in the file"
    assert completions("run", "job.toml", "-s", "method=fedn") == ["method=fedntd", "method=fednova"]
    assert completions("methods", "fedpro") == ["fedprox", "fedproto"]


def test_every_key_that_is_offered_is_known(folder):
    from rayfed.completion import all_keys, dotted
    from rayfed.job import read_job

    table = read_job(folder / "job.toml").table()
    assert set(dotted(table)) <= set(all_keys())


# As a script ---------------------------------------------------------------------------------------------------------


def test_a_killed_run_leaves_readable_tables_and_the_script_of_a_cluster_runs_the_command(folder):
    from rayfed.record import read_summary, read_table

    script = [sys.executable, str(ROOT / "jobs/train.py"), "job.toml", "-s", "train.num_rounds=100000"]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("round      3/"))
        process.send_signal(signal.SIGKILL)
    run = folder / "runs/tiny"
    rounds = read_table(run, "rounds").column("round").to_pylist()
    assert rounds == list(range(len(rounds)))
    assert len(rounds) > 3
    assert len(read_table(run, "classes")) >= 4 * (len(rounds) - 1)
    assert read_summary(run)["status"] == "running"
