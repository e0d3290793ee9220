"""Addresses with keys in them are refused before they are shown or written; names go to the path of an address."""

import pytest
from click.testing import CliRunner

from rayfed import read_job, run
from rayfed.base.errors import InputError, explained, refuse_secrets
from rayfed.base.storage import locate
from rayfed.cli import main
from rayfed.data.settings import Data
from rayfed.folder.places import checkpoints_of

SECRET = "hunter2"
WITH_SECRET = [
    f"s3://ID:{SECRET}@bucket/x",
    f"s3://ID:a/b+{SECRET}@bucket/x",
    f"S3://ID%3A{SECRET}@bucket/x",
    f"s3://{SECRET}@bucket",
    f"s3://bucket/x?region=eu&secret_key={SECRET}",
    f"s3://bucket/x?X-Amz-Signature={SECRET}",
    f"https://host/x?sv=1&sig={SECRET}",
    f"https://me:{SECRET}@host:8265",
    f"abfs://box:{SECRET}@account.dfs.core.windows.net/x",
    f"hdfs://me:{SECRET}@host:8020/x",
    f"s3://ID:/{SECRET}@bucket/x",
    f"s3://ID:1/{SECRET}@bucket/x",
    f"s3://ID:22#{SECRET}@bucket/x",
    f"s3a://{SECRET}@bucket",
    f"hf://{SECRET}@datasets/x",
    f"s3://bucket/x#secret_key={SECRET}",
    f"abfs://box@account.dfs.core.windows.net/x?account_key={SECRET}",
    f"hdfs://host/x?pwd={SECRET}",
    f"s3://bucket/x?endpoint_override=ID:{SECRET}@minio:9000",
]
FINE = [
    *("s3://bucket/x:y@z", "hdfs://host:8020/a@b", "hdfs://me@host/x", "gs://anonymous@bucket/x", "/a:b@c", "auto"),
    *(
        "abfs://box@account.dfs.core.windows.net/x",
        "hf://datasets/me/set@main",
        "http://127.0.0.1:8265",
        "file:///x?a=1",
    ),
    "s3://bucket/x?endpoint_override=localhost:9000&scheme=http&region=eu",
]
KEYS = [
    *("data.source", "data.test", "data.root", "output.path", "output.checkpoints", "ray.address", "model.weights"),
    *("clients.trace", "data.partition.file", "model.file", "method.file", "grid.data.source", "name"),
]


@pytest.mark.parametrize("address", WITH_SECRET)
def test_an_address_with_a_key_is_refused_without_showing_it(address):
    for call in (refuse_secrets, locate, Data):
        with pytest.raises(InputError, match="the key or password in it would be shown") as caught:
            call(address)
        assert SECRET not in str(caught.value)
    if "%" not in address:
        assert SECRET not in explained(RuntimeError(f"cannot open {address} now"))


@pytest.mark.parametrize("address", FINE)
def test_other_addresses_are_fine(address):
    refuse_secrets([{"x": address}])
    assert address in explained(RuntimeError(f"cannot open {address} now"))


@pytest.mark.parametrize("key", KEYS)
def test_no_key_of_a_job_takes_an_address_with_a_secret(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('name = "n"\n')
    value = WITH_SECRET[0] if not key.startswith("grid") else f'["{WITH_SECRET[0]}"]'
    ended = CliRunner().invoke(main, ["run", "job.toml", "-s", f"{key}={value}"])
    assert ended.exit_code == 2 and SECRET not in ended.output and len(ended.output.splitlines()) == 1
    assert f"{key} = 's3://...': " in ended.output and "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in ended.output
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


@pytest.mark.parametrize(
    "words",
    [
        ["resume", WITH_SECRET[0]],
        ["submit", "job.toml", "--address", f"http://me:{SECRET}@host:8265"],
        ["status", "--address", f"me:{SECRET}@host:6379"],
        ["run", "job.toml", "-s", f"ray.address=me:{SECRET}@host:6379"],
        ["run", WITH_SECRET[0]],
        ["report", WITH_SECRET[0]],
    ],
)
def test_no_command_shows_the_secret_of_an_address(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('name = "n"\n')
    ended = CliRunner().invoke(main, words)
    assert ended.exit_code == 2 and SECRET not in ended.output and "\nerror: " in f"\n{ended.output}"


def test_two_runs_have_folders_of_their_own_below_an_address_with_parameters(tmp_path):
    tiny = {"name": "n", "train": {"num_rounds": 1, "local_epochs": 1, "clients_per_round": 1}, "ray": {"mode": "off"}}
    tiny |= {"data": {"partition": {"name": "iid", "num_clients": 200}}}
    kept = f"file://{tmp_path}/kept/?endpoint_override=localhost:9000"
    for name in ("one", "two"):
        job = read_job(tiny, {"name": name, "output.path": str(tmp_path / "runs"), "output.checkpoints": kept})
        assert checkpoints_of(job).place == f"file://{tmp_path}/kept/{name}?endpoint_override=localhost:9000"
        run(job)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["one", "two"]
    with pytest.raises(InputError, match=r"output.path = 's3://b': give a folder; a URI can be given as output.check"):
        run(read_job(tiny, {"output.path": "s3://b"}))
