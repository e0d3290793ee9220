"""Runs of the version before continue, with a warning; those of older versions are refused by name."""

import json

import pytest

import rayfed
from rayfed.errors import InputError
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


def test_a_run_of_the_version_before_continues_with_a_warning(run, caplog):
    changed(run, lambda manifest: manifest.update(version=3))
    assert rayfed.resume(run, {"train.num_rounds": 2}).rounds.num_rows == 3
    assert "the checkpoint is of an earlier rayfed" in caplog.text


def test_older_versions_are_refused(run):
    changed(run, lambda manifest: manifest.update(version=2))
    with pytest.raises(InputError, match="it has version 2, and this rayfed reads versions 3, 4"):
        rayfed.resume(run, {"train.num_rounds": 2})


def test_a_job_from_before_a_key_existed_continues_with_its_default(run, tmp_path):
    changed(run, lambda manifest: manifest["job"]["train"].pop("weight_decay"))
    job = run / "job.toml"
    older = [line for line in job.read_text().splitlines() if not line.startswith("weight_decay")]
    job.write_text("\n".join(older))
    with pytest.raises(InputError, match=r"another job: train\.weight_decay is .* there, 0\.1 here$"):
        rayfed.resume(run, {"train.weight_decay": 0.1})
    # From the checkpoints alone, which also hold the job.
    found = rayfed.resume(run / "checkpoints", {"train.num_rounds": 2, "output.path": str(tmp_path / "new")})
    assert found.rounds.num_rows == 3
