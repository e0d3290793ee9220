"""What a run's bits depend on is noted, and a run continues only where it is the same, or where
that is allowed.
"""

import json
import re
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import rayfed
from rayfed.base.errors import InputError
from rayfed.cli import main
from rayfed.folder import provenance
from rayfed.folder.recorder import PARTITION
from rayfed.folder.tables import read_table
from rayfed.runtime import hardware, runner

PART = """
from dataclasses import dataclass
from my_rules import SCALE
from rayfed.methods import Part
@dataclass(frozen=True)
class Pull(Part):
    def loss(self, batch, local):
        return SCALE * batch.logits.square().mean()
"""

RULE = """
from dataclasses import dataclass
import numpy as np
from rayfed.data.partition import Partition
@dataclass(frozen=True)
class Owners:
    file: str
    def split(self, labels, num_classes, groups=None):
        return Partition.of_owners(np.loadtxt(self.file, dtype=int), 4)
"""


def environment(path):
    return json.loads((path / "environment.json").read_text())


def test_another_version_of_torch_needs_leave(tables, monkeypatch):
    path = rayfed.run(tables, {"train.num_rounds": 2}).path
    here = provenance.versions()
    assert set(here) >= {"rayfed-distill", "torch", "numpy"}
    monkeypatch.setattr(provenance, "versions", lambda: {**here, "torch": "9.9", "timm": "1.0"})
    refused = rf"other bits: the version of torch is {re.escape(here['torch'])} there, 9\.9 here; "
    with pytest.raises(InputError, match=refused):
        rayfed.resume(path, {"train.num_rounds": 3})
    # There is nothing left to compute.
    rayfed.resume(path)
    rayfed.resume(path, {"train.num_rounds": 3}, other_bits=True)
    assert environment(path)["resumed"][-1]["other_bits"] == [
        f"the version of torch is {here['torch']} there, 9.9 here"
    ]


def test_hardware_is_noted_and_another_kind_needs_leave(tables, tmp_path, monkeypatch):
    path = rayfed.run(tables, {"train.num_rounds": 2}).path
    (kind,) = environment(path)["hardware"]
    usual = {
        "device",
        "instructions",
        "maker",
        "extensions",
        "variables",
        "float32",
        "deterministic",
    }
    assert usual == set(kind) and all(kind.values())
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    monkeypatch.setattr(runner, "kind_of", lambda device: {**kind, "instructions": "riscv64 RVV"})
    refused = (
        rf"continue to other bits: instructions is {kind['instructions']} there, riscv64 RVV here; "
        r".*--other-bits"
    )
    for again in (
        lambda: rayfed.resume(path, {"train.num_rounds": 3}),
        lambda: rayfed.run(tables, resume=True),
    ):
        with pytest.raises(InputError, match=refused):
            again()
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    # There is nothing left to compute.
    rayfed.resume(path)

    rayfed.resume(path, {"train.num_rounds": 3}, other_bits=True)
    (*_, resumed) = environment(path)["resumed"]
    assert resumed["other_bits"] == [
        f"instructions is {kind['instructions']} there, riscv64 RVV here"
    ]
    # Now it is the run's kind.
    rayfed.resume(path, {"train.num_rounds": 4})
    assert "other_bits" not in environment(path)["resumed"][-1]


@pytest.mark.parametrize(
    "name",
    ["DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR", "NPY_DISABLE_CPU_FEATURES"],
)
def test_variables_that_decide_bits_are_of_the_hardware(tables, tmp_path, monkeypatch, name):
    path = rayfed.run(tables, {"train.num_rounds": 2}).path
    for harmless in (
        "ONEDNN_VERBOSE",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "TORCH_HOME",
        "MKLROOT",
    ):
        monkeypatch.setenv(harmless, "0")
    rayfed.resume(path, {"train.num_rounds": 3})
    monkeypatch.setenv(name, "other")
    with pytest.raises(
        InputError,
        match=rf"other bits: variables is .* there, .*{name}=other.* here; .*--other-bits",
    ):
        rayfed.resume(path, {"train.num_rounds": 4})


def test_a_processor_without_proc_has_a_maker(monkeypatch):
    kind = hardware.kind_of(torch.device("cpu"))
    monkeypatch.setattr(hardware.Path, "read_text", Mock(side_effect=FileNotFoundError))
    other = hardware.kind_of(torch.device("cpu"))
    # Torch before 2.11 cannot tell.
    if not hasattr(torch.cpu, "get_capabilities"):
        assert other["extensions"] == "none"
        other["extensions"] = kind["extensions"]
    assert other["maker"] and {**other, "maker": kind["maker"]} == kind


@pytest.mark.parametrize(
    ("of_linux", "extensions"),
    [
        (
            "vendor_id\t: GenuineIntel\n"
            "flags\t\t: fpu sse2 avx512f avx_vnni avx512_vnni amx_tile\n",
            "amx_tile avx512_vnni avx_vnni",
        ),
        (
            "Features\t: fp asimd fphp asimdhp sve svei8mm svebf16 i8mm bf16\n"
            "CPU implementer\t: 0x41\n",
            "bf16 fp16_arith i8mm sve sve_bf16",
        ),
        ("flags\t\t: fpu sse2\n", "none"),
        ("", "none"),
    ],
)
def test_a_torch_that_cannot_tell_the_instructions_has_them_from_linux(
    monkeypatch, of_linux, extensions
):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr(hardware.Path, "read_text", lambda path: of_linux)
    assert hardware.kind_of(torch.device("cpu"))["extensions"] == extensions


@pytest.fixture
def own(tmp_path, tables, monkeypatch):
    """A job with a part of one's own, which imports a module of one's own.

    Gives a function that edits a module.
    """

    def edit(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        # As in a new process.
        for module in ("my_part", "my_rules"):
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
    assert kept == {
        f"{name}-{noted[name][:8]}.py": (tmp_path / f"{name}.py").read_text() for name in noted
    }
    assert set(noted) == {"my_part", "my_rules"}

    own(edited, (tmp_path / f"{edited}.py").read_text() + "# a change\n")
    words = ["resume", str(path), "-s", "train.num_rounds=3"]
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2, refused.output
    reason = f"the module {edited} has changed since the run began"
    assert f"other bits: {reason}; if you mended it on purpose: rayfed resume" in refused.stderr
    assert CliRunner().invoke(main, [*words, "--other-bits"]).exit_code == 0
    assert environment(path)["resumed"][-1]["other_bits"] == [reason]
    assert len(list((path / "modules").iterdir())) == 3


def test_modules_of_models_partitions_and_schedules_are_noted_and_libraries_only_where_named(
    tables, own, tmp_path
):
    own(
        "my_rules",
        "from rayfed.data.partition import Iid\nfrom rayfed.models.convnets import lenet\n",
    )
    own(
        "my_rates",
        "from dataclasses import dataclass\n@dataclass(frozen=True)\n"
        "class Same:\n    def factor(self, round):\n        return 1\n",
    )
    tables |= {"method": "fedavg", "model": "my_rules:lenet"}
    changes = {"train.num_rounds": 1, "train.schedule": "my_rates:Same", "train.lr_decay": 1.0}
    noted = environment(rayfed.run(tables, changes).path)["modules"]
    assert set(noted) == {"my_rules", "my_rates"}


def test_the_noted_partition_is_what_was_dealt_before_an_auxiliary_set_was_withdrawn(tables):
    plain, less = (
        rayfed.run(
            {**tables, "name": f"with-{count}", "method": "fedavg"},
            {"data.auxiliary_per_class": count},
        ).path
        for count in (0, 2)
    )
    assert environment(plain)["partition"] == environment(less)["partition"]
    held = [
        sum(row["count"] for row in read_table(path, "partition").to_pylist())
        for path in (plain, less)
    ]
    assert held == [40, 36]
    client = next(
        row["client"] for row in read_table(less, "clients").to_pylist() if row["round"] == 1
    )
    again, recorded = rayfed.replay(less, 1, client)
    assert again.train_loss == recorded
    # The job tells one set from another.
    with pytest.raises(InputError, match=r"auxiliary_per_class"):
        rayfed.resume(less, {"train.num_rounds": 9, "data.auxiliary_per_class": 1})


def test_a_round_in_which_no_client_trained_is_not_replayed(tables):
    method = [{"until": 1, "method": "fedavg"}, {"method": {"name": "ccvr", "steps": 1}}]
    run = rayfed.run({**tables, "method": method, "model": "cnn"}, {"train.num_rounds": 2})
    assert {row["round"] for row in read_table(run.path, "clients").to_pylist()} == {1}
    with pytest.raises(
        InputError, match=r"^round 2: no client trained in it, as its method works on the server"
    ):
        rayfed.replay(run.path, 2, 0)


def test_a_partition_that_has_changed_needs_leave_and_is_not_replayed(tables, own, tmp_path):
    """A user's rule reads a file, which is no module."""
    owners = np.arange(40) % 4
    np.savetxt(tmp_path / "owners.txt", owners, fmt="%d")
    own("my_rules", RULE)
    rule = {"name": "my_rules:Owners", "file": str(tmp_path / "owners.txt")}
    tables |= {"method": "fedavg", "data": {**tables["data"], "partition": rule}}
    path = rayfed.run(tables, {"train.num_rounds": 2}).path
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    np.savetxt(tmp_path / "owners.txt", 3 - owners, fmt="%d")
    for more in ({}, {"train.num_rounds": 3}):
        with pytest.raises(
            InputError,
            match=r"to other bits: the partition has changed, and clients .*--other-bits ",
        ):
            rayfed.resume(path, more)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before

    def replay(round):
        client = next(
            row["client"]
            for row in read_table(path, "clients").to_pylist()
            if row["round"] == round
        )
        again, recorded = rayfed.replay(path, round, client)
        assert again.train_loss == recorded

    with pytest.raises(
        InputError,
        match=r"^the partition is not the one of round 1 of the run .*; put back the rule",
    ):
        replay(1)
    rayfed.resume(path, {"train.num_rounds": 3}, other_bits=True)
    assert environment(path)["resumed"][-1]["other_bits"] == [PARTITION]
    replay(3)
    with pytest.raises(InputError, match="not the one of round 2"):
        replay(2)
    np.savetxt(tmp_path / "owners.txt", owners, fmt="%d")
    replay(2)


def test_a_finished_run_is_not_touched_and_says_that_ones_own_module_has_changed(
    tables, tmp_path, own, caplog
):
    path = rayfed.run(tables, {"train.num_rounds": 2}).path

    def origin():
        files = [
            path / "environment.json",
            path / "job.toml",
            *path.glob("modules/*"),
            *path.glob("checkpoints/*"),
        ]
        return {file: file.read_bytes() for file in files}

    before = origin()
    again = [
        lambda: rayfed.resume(path),
        lambda: rayfed.run(tables, {"train.num_rounds": 2}, resume=True),
    ]
    for go in again:
        go()
    assert "has changed" not in caplog.text
    own("my_rules", "SCALE = 0.25\n")
    for go in again:
        caplog.clear()
        go()
        (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert said == (
            "my_rules has changed since, and the results are of before; "
            f"to train again: rayfed run {path / 'job.toml'} --force"
        )
    assert origin() == before
