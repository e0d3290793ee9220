"""Checkpoints of another version are refused by name."""

import json

import pytest

import rayfed
from rayfed.base.errors import InputError
from rayfed.folder.saved import digest_of

JOB = {"model": "lenet", "train": {"num_rounds": 1, "clients_per_round": 1, "local_steps": 1}, "ray": {"mode": "off"}}


def changed(run, change):
    """Change the manifest of each checkpoint, and seal it again."""
    for path in (run / "checkpoints").glob("*.json"):
        change(manifest := json.loads(path.read_text())["checkpoint"])
        path.write_text(json.dumps({"checkpoint": manifest, "sha256": digest_of(manifest)}))


@pytest.fixture
def run(tmp_path, no_page):
    partition = {"name": "iid", "num_clients": 5}
    job = {**JOB, "name": "old", "data": {"partition": partition}, "output": {"path": str(tmp_path)}}
    return rayfed.run(job).path


def test_another_version_is_refused(run):
    changed(run, lambda manifest: manifest.update(version=3))
    with pytest.raises(InputError, match="it has version 3, and this rayfed reads version 4 alone"):
        rayfed.resume(run, {"train.num_rounds": 2})
