"""What a run's bits depend on is noted, and a run continues only where it is the same, or where that is allowed."""

import json
import sys

import pytest
from click.testing import CliRunner

import rayfed
from rayfed.cli import main
from rayfed.errors import InputError
from rayfed.runtime import worker

pytestmark = pytest.mark.usefixtures("no_page")

PART = """
from dataclasses import dataclass
from my_rules import SCALE
from rayfed.methods import Part
@dataclass(frozen=True)
class Pull(Part):
    def loss(self, batch, local):
        return SCALE * batch.logits.square().mean()
"""


def environment(path):
    return json.loads((path / "environment.json").read_text())


def test_hardware_is_noted_and_another_kind_needs_leave(tables, tmp_path, monkeypatch):
    path = rayfed.run(tables, {"train.num_rounds": 2}).path
    (kind,) = environment(path)["hardware"]
    assert {"device", "instructions", "float32", "deterministic"} == set(kind)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    monkeypatch.setattr(worker, "kind_of", lambda device: {**kind, "instructions": "riscv64 RVV"})
    refused = rf"continue to other bits: instructions is {kind['instructions']} there, riscv64 RVV here; .*--other-bits"
    for again in (lambda: rayfed.resume(path, {"train.num_rounds": 3}), lambda: rayfed.run(tables, resume=True)):
        with pytest.raises(InputError, match=refused):
            again()
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    rayfed.resume(path)  # there is nothing left to compute

    rayfed.resume(path, {"train.num_rounds": 3}, other_bits=True)
    (*_, resumed) = environment(path)["resumed"]
    assert resumed["other_bits"] == [f"instructions is {kind['instructions']} there, riscv64 RVV here"]
    rayfed.resume(path, {"train.num_rounds": 4})  # now it is the run's kind
    assert "other_bits" not in environment(path)["resumed"][-1]


@pytest.fixture
def own(tmp_path, tables, monkeypatch):
    """A job with a part of one's own, which imports a module of one's own. Gives a function that edits a module."""

    def edit(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        for module in ("my_part", "my_rules"):  # as in a new process
            monkeypatch.delitem(sys.modules, module, raising=False)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    edit("my_rules", "SCALE = 0.5\n")
    edit("my_part", PART)
    tables["method"] = ["fedavg", {"name": "my_part:Pull"}]
    return edit


@pytest.mark.parametrize("edited", ["my_part", "my_rules"])
def test_ones_own_modules_are_kept_and_changed_ones_need_leave(tables, tmp_path, own, edited):
    path = rayfed.run(tables, {"train.num_rounds": 2}).path
    noted = environment(path)["modules"]
    kept = {file.name: file.read_text() for file in (path / "modules").iterdir()}
    assert kept == {f"{name}-{noted[name][:8]}.py": (tmp_path / f"{name}.py").read_text() for name in noted}
    assert set(noted) == {"my_part", "my_rules"}

    own(edited, (tmp_path / f"{edited}.py").read_text() + "# a change\n")
    words = ["resume", str(path), "-s", "train.num_rounds=3"]
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2, refused.output
    assert f"other bits: the module {edited} has changed" in refused.stderr
    assert CliRunner().invoke(main, [*words, "--other-bits"]).exit_code == 0
    assert environment(path)["resumed"][-1]["other_bits"] == [f"the module {edited} has changed"]
    assert len(list((path / "modules").iterdir())) == 3


def test_modules_of_models_and_partitions_are_noted_and_libraries_only_where_named(tables, own, tmp_path):
    own("my_rules", "from rayfed.data.partition import Iid\nfrom rayfed.models.convnets import lenet\n")
    tables |= {"method": "fedavg", "model": "my_rules:lenet"}
    assert set(environment(rayfed.run(tables, {"train.num_rounds": 1}).path)["modules"]) == {"my_rules"}
