"""Runs of earlier versions of this package continue: `version-1` has checkpoints of version 1, `version-2` of 2."""

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import rayfed
from rayfed.cli import main
from rayfed.errors import InputError
from rayfed.folder.saved import newest
from rayfed.folder.storage import Folder
from rayfed.folder.summary import read_summary
from rayfed.folder.tables import read_table
from rayfed.job import read_job
from rayfed.local import open_site
from rayfed.report.page import write_report
from rayfed.runtime.here import Here

STORED = Path(__file__).parent  # its folders were made by running the old.toml in them


@pytest.fixture(params=["version-1", "version-2"])
def stored(request, tmp_path, monkeypatch, no_page):
    """A copy of the run, which ended after round 2."""
    monkeypatch.syspath_prepend(STORED / request.param)  # the job's model is tiny:net
    monkeypatch.delitem(sys.modules, "tiny", raising=False)
    return shutil.copytree(STORED / request.param, tmp_path / "stored")


def test_a_run_of_an_older_version_continues_with_a_warning(stored, caplog):
    rayfed.resume(stored, {"train.num_rounds": 3, "ray.mode": "off"}, other_bits=True)
    assert "the checkpoint is of an earlier rayfed" in caplog.text
    rows = read_table(stored, "clients").to_pylist()
    assert {row["round"]: row["notes"] is None for row in rows} == {1: True, 2: True, 3: False}
    assert pq.read_table(stored / "clients.parquet").to_pylist() == rows  # any reader finds all columns
    write_report(stored)


@pytest.mark.slow
def test_a_run_of_an_older_version_continues_to_the_same_weights(stored, play, bits):
    site = open_site(read_job(stored / "job.toml", {"train.num_rounds": 4}))
    weights = load_file(stored / "checkpoints/round-00002.safetensors")
    checkpoints = Folder(str(stored / "checkpoints"))
    restored = newest(checkpoints).restore(site, Here(site))
    assert restored.round == 2
    torch.testing.assert_close(restored.weights, weights, rtol=0, atol=0)

    done = CliRunner().invoke(main, ["resume", str(stored), "-s", "train.num_rounds=4"])
    assert done.exit_code == 0, done.output
    summary = read_summary(stored)
    assert (summary["status"], summary["rounds"]) == ("done", 4)
    assert read_table(stored, "rounds").column("round").to_pylist() == [0, 1, 2, 3, 4]

    fresh, near = play(site), {"rtol": 1e-5, "atol": 1e-5}  # another CPU may round differently
    if all(torch.equal(weights[name], tensor) for name, tensor in fresh[2].weights.items()):
        last, near = newest(checkpoints).restore(site, Here(site)), {"rtol": 0, "atol": 0}
        trained = {row.client for round in fresh[3:] for row in round.clients}
        assert last.memories.keys() - trained, "memories of the older version belong to the new checkpoint too"
        for kept in ("weights", "states", "memories", "evaluation"):
            assert [bits(round)[kept] for round in (restored, last)] == [bits(fresh[number])[kept] for number in (2, 4)]
    torch.testing.assert_close(load_file(stored / "checkpoints/round-00004.safetensors"), fresh[4].weights, **near)


@pytest.mark.slow
def test_a_job_from_before_a_key_existed_continues_with_its_default(stored, tmp_path):
    for path in (stored / "checkpoints").glob("*.json"):
        manifest = json.loads(path.read_text())["checkpoint"]
        del manifest["job"]["ray"]["patience"], manifest["job"]["train"]["weight_decay"]
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps({"checkpoint": manifest, "sha256": digest}))
    job = stored / "job.toml"
    older, dropped = re.subn(r"(?m)^(patience|weight_decay) = .*\n", "", job.read_text())
    assert dropped == 2
    job.write_text(older)
    with pytest.raises(InputError, match=r"another job: train\.weight_decay is 0\.0 there, 0\.1 here$"):
        rayfed.resume(stored, {"train.weight_decay": 0.1})
    assert rayfed.resume(stored, {"train.num_rounds": 3}).rounds.num_rows == 4
    # From the checkpoints alone, which also hold the job.
    found = rayfed.resume(stored / "checkpoints", {"train.num_rounds": 4, "output.path": str(tmp_path / "new")})
    assert found.rounds.num_rows == 5
