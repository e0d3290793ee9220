"""Addresses with keys in them are refused before they are shown or written; names go to the path of
an address.
"""

import re

import pytest
from click.testing import CliRunner

from rayfed import read_job, run
from rayfed.base.errors import InputError, explained, refuse_secrets
from rayfed.base.storage import locate
from rayfed.cli import main
from rayfed.data.settings import Data
from rayfed.folder.places import checkpoints_of

SECRET = "hunter2"
WITH_SECRET = """
s3://ID:?@bucket/x s3://ID:a/b+?@bucket/x S3://ID%3A?@bucket/x s3://?@bucket s3://bucket/x?region=eu&secret_key=?
s3://bucket/x?X-Amz-Signature=? https://host/x?sv=1&sig=? https://me:?@host:8265 hdfs://me:?@host:8020/x
abfs://box:?@account.dfs.core.windows.net/x s3://ID:/?@bucket/x s3://ID:1/?@bucket/x s3://ID:22#?@bucket/x
s3a://?@bucket hf://?@datasets/x s3://bucket/x#secret_key=? hdfs://host/x?pwd=?
abfs://box@account.dfs.core.windows.net/x?account_key=? s3://bucket/x?endpoint_override=ID:?@minio:9000
"""
WITH_SECRET = [re.sub(r"\?(?=@|$)", SECRET, address) for address in WITH_SECRET.split()]
FINE = """
s3://bucket/x:y@z hdfs://host:8020/a@b hdfs://me@host/x gs://anonymous@bucket/x /a:b@c auto file:///x?a=1
abfs://box@account.dfs.core.windows.net/x hf://datasets/me/set@main http://127.0.0.1:8265
s3://bucket/x?endpoint_override=localhost:9000&scheme=http&region=eu
"""
KEYS = """
data.source data.test data.root output.path output.checkpoints ray.address model.weights clients.trace
data.partition.file model.file method.file grid.data.source name
"""


@pytest.mark.parametrize("address", WITH_SECRET)
def test_an_address_with_a_key_is_refused_without_showing_it(address):
    for call in (refuse_secrets, locate, Data):
        with pytest.raises(InputError, match="the key or password in it would be shown") as caught:
            call(address)
        assert SECRET not in str(caught.value)
    if "%" not in address:
        assert SECRET not in explained(RuntimeError(f"cannot open {address} now"))


@pytest.mark.parametrize("address", FINE.split())
def test_other_addresses_are_fine(address):
    refuse_secrets([{"x": address}])
    assert address in explained(RuntimeError(f"cannot open {address} now"))


@pytest.mark.parametrize("key", KEYS.split())
def test_no_key_of_a_job_takes_an_address_with_a_secret(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('name = "n"\n')
    value = WITH_SECRET[0] if not key.startswith("grid") else f'["{WITH_SECRET[0]}"]'
    ended = CliRunner().invoke(main, ["run", "job.toml", "-s", f"{key}={value}"])
    assert (
        ended.exit_code == 2 and SECRET not in ended.output and len(ended.output.splitlines()) == 1
    )
    assert (
        f"{key} = 's3://...': " in ended.output
        and "such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in ended.output
    )
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


COMMANDS = """
resume s3://?@bucket/x; submit job.toml --address http://me:?@host:8265; status --address me:?@host:6379
run job.toml -s ray.address=me:?@host:6379; run s3://?@bucket/x; report s3://?@bucket/x
"""


@pytest.mark.parametrize("command", re.split(r";|\n", COMMANDS.strip().replace("?", SECRET)))
def test_no_command_shows_the_secret_of_an_address(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('name = "n"\n')
    ended = CliRunner().invoke(main, command.split())
    assert (
        ended.exit_code == 2 and SECRET not in ended.output and "\nerror: " in f"\n{ended.output}"
    )


def test_two_runs_have_folders_of_their_own_below_an_address_with_parameters(tmp_path):
    tiny = {
        "name": "n",
        "train": {"num_rounds": 1, "local_epochs": 1, "clients_per_round": 1},
        "ray": {"mode": "off"},
    }
    tiny |= {"data": {"partition": {"name": "iid", "num_clients": 200}}, "model": "lenet"}
    kept = f"file://{tmp_path}/kept/?endpoint_override=localhost:9000"
    for name in ("one", "two"):
        job = read_job(
            tiny, {"name": name, "output.path": str(tmp_path / "runs"), "output.checkpoints": kept}
        )
        assert (
            checkpoints_of(job).place
            == f"file://{tmp_path}/kept/{name}?endpoint_override=localhost:9000"
        )
        run(job)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["one", "two"]
    with pytest.raises(
        InputError,
        match=r"output.path = 's3://b': give a folder; a URI can be given as output.check",
    ):
        run(read_job(tiny, {"output.path": "s3://b"}))
