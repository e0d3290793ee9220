"""A file of the working folder with the name of one of Python's modules is imported nowhere, in no
process.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rayfed.base.errors import InputError
from rayfed.submit.package import chosen

BIN = Path(sys.executable).parent
JOB = """
name = "run"
method = "mine:Mine"
data.source = "data"
data.shape = [1, 16, 16]
data.partition = {name = "iid", num_clients = 4}
model = "lenet"
train = {num_rounds = 2, clients_per_round = 2, local_steps = 1, batch_size = 8}
"""
MINE = """
import queue, statistics
from dataclasses import dataclass
from torch import nn
from rayfed.methods import Part

@dataclass(frozen=True)
class Mine(Part):
    def loss(self, batch, local):
        import random, colorsys
        return (statistics.mean([1, 2]) + random.random()) * nn.functional.cross_entropy(batch.logits, batch.labels)
"""
HIDING = (
    "import os, sys\nwith open(os.environ['MARKS'], 'a') as marks:\n    marks.write(f'{__name__} "
    "{sys.argv}\\n')\n"
)
FEW = ("random", "statistics", "queue", "colorsys", "dataclasses", "numpy", "torch")


@pytest.fixture
def environment(tmp_path, short_folder, monkeypatch, write_images):
    """Of a working folder with such files. RAY_TMPDIR is where a Ray that is started here lives."""
    write_images(tmp_path, 20, 20, pixels=256)
    for name in {
        *FEW,
        *(name for name in sys.stdlib_module_names if find_spec(name) and name != "sys"),
    }:
        (tmp_path / f"{name}.py").write_text(HIDING)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    own = {"RAY_TMPDIR": short_folder, "MARKS": f"{tmp_path}/marks"}
    # The last is set while a test's Ray runs.
    others = (
        "RAY_ADDRESS",
        "PYTHONPATH",
        "PYTHONSAFEPATH",
    )
    return {**{key: value for key, value in os.environ.items() if key not in others}, **own}


def run(environment, command, *settings):
    words = [word for setting in settings for word in ("-s", setting)]
    done = subprocess.run(
        [*command, "run", "job.toml", *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not Path("marks").exists(), Path("marks").read_text()
    return json.loads(Path("runs/run/summary.json").read_text())["last"]


@pytest.mark.slow
def test_no_process_of_ours_or_of_rays_imports_a_file_that_is_named_as_a_module_of_pythons(
    environment, ray_head
):
    expected = run(environment, [BIN / "rayfed"], "ray.mode=off", "ray.num_gpus=0")
    Path("runs").rename("off")
    assert run(environment, [BIN / "rayfed"], "ray.actors=2", "ray.num_gpus=0") == expected
    Path("runs").rename("on")
    joined = {**environment, "RAY_AUTH_MODE": "disabled"}
    head = "--num-cpus=2", "--node-ip-address=127.0.0.1"
    # As docs/own.md says.
    with ray_head({**joined, "PYTHONSAFEPATH": "1"}, *head) as ports:
        # Of `python -m` Python itself imports some modules from here first.
        for file in Path().glob("*.py"):
            if file.stem not in (*FEW, "mine"):
                file.unlink()
        where = f"ray.address=127.0.0.1:{ports['port']}", "ray.actors=2", "ray.num_gpus=0"
        assert run(joined, [sys.executable, "-m", "rayfed"], *where) == expected


@pytest.mark.slow
def test_a_script_beside_such_a_file_is_refused_before_ray_starts(environment):
    """Python itself puts the script's folder first."""
    for file in Path().glob("*.py"):
        if file.stem not in ("mine", "statistics"):
            file.unlink()
    script = (
        "import sys, rayfed\nrayfed.run('job.toml', {'ray.mode': sys.argv[1], 'name': "
        "sys.argv[1]})\n"
    )
    Path("script.py").write_text(script)
    Path("statistics.py").write_text("mean = max\n")
    for mode, said in (
        ("off", ""),
        ("on", f"'{Path('statistics.py').resolve()}' hides Python's own module"),
    ):
        done = subprocess.run(
            [sys.executable, "script.py", mode], env=environment, capture_output=True, text=True
        )
        assert said in done.stderr and bool(said) == (done.returncode != 0), done.stderr


@pytest.mark.parametrize("name", ["random.py", "statistics/__init__.py", "numpy.py"])
def test_a_folder_with_such_a_file_is_not_submitted(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested/random.py").touch()
    with pytest.raises(
        InputError, match=f"^'{name}' would hide the module '.*--exclude {name.partition('/')[0]}$"
    ):
        chosen(tmp_path)
    assert [*chosen(tmp_path, patterns=[f"/{name}"]).sent] in (["nested/random.py"], [])
