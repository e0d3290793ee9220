"""Local models that are made again after a run have the bits of the run."""

import hashlib
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import rayfed
from rayfed.base.errors import InputError
from rayfed.folder.tables import read_table
from rayfed.methods import Part, compose, fedbn, fedntd, scaffold
from rayfed.report import models
from rayfed.report.models import replaying

CAUGHT = {}


def digest(weights):
    """The SHA-256 of a state's names and bytes."""
    sha = hashlib.sha256()
    for name, tensor in weights.items():
        sha.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return sha.hexdigest()


@dataclass(frozen=True)
class Catch(Part):
    """Keeps the hash of the global model that each client got, and of its model after training."""

    def report(self, client, local, fit):
        trained = fit.model.state_dict()
        CAUGHT[client.round, client.id] = digest(client.weights), digest(trained)
        return None, None


@pytest.fixture
def run(tables):
    """A run, and the hashes of its local models by round and client."""

    def start(method, **changes):
        CAUGHT.clear()
        path = rayfed.run({**tables, **changes}, method=method).path
        return path, dict(CAUGHT)

    return start


@pytest.mark.parametrize("recipe", [fedntd, scaffold, fedbn])
def test_the_local_models_of_every_round_have_the_bits_of_the_run(run, recipe, caplog):
    """With a memory of each client, with weights that stay there, before and after checkpoints."""
    method = compose(recipe(), Catch())
    path, caught = run(method, model={"name": "lenet", "batch_norm": recipe is fedbn})
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    for round in range(1, 6):
        found = rayfed.local_models(path, round=round, method=method)
        of_round = {
            client: hashes for (number, client), hashes in caught.items() if number == round
        }
        assert {client: digest(weights) for client, weights in found.clients.items()} == {
            client: trained for client, (_, trained) in of_round.items()
        }
        assert found.round == round and not found.differing and found.names == {}
        if recipe is not fedbn:
            assert {digest(found.start)} == {start for start, _ in of_round.values()}
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    assert not [record for record in caplog.records if record.name == models.__name__]


def test_some_clients_of_the_last_round_and_the_global_model(run):
    method = compose(fedntd(), Catch())
    path, caught = run(method)
    chosen = sorted(client for round, client in caught if round == 5)[1:]
    found = rayfed.local_models(path, clients=chosen, method=method)
    assert (found.round, [*found.clients]) == (5, chosen)
    named = rayfed.local_models(path, clients=[str(chosen[0])], method=method)
    assert [*named.clients] == chosen[:1]
    with replaying(path, method) as again:
        assert digest(again.global_model(4)) == digest(found.start)
        with pytest.raises(InputError, match="round 6: the run has 5 finished rounds"):
            again.global_model(6)
    other = next(client for client in range(4) if (5, client) not in caught)
    with pytest.raises(InputError, match=f"^client {other}: not in round 5, which has"):
        rayfed.local_models(path, clients=[other], method=method)
    with pytest.raises(InputError, match=r"^there is no client zoe; the clients are 0 to 3"):
        rayfed.local_models(path, clients=["zoe"], method=method)
    with pytest.raises(InputError, match="round 7: the run has 5 finished rounds"):
        rayfed.local_models(path, round=7, method=method)


def test_a_loss_that_the_run_did_not_record_is_told(tables, caplog):
    path = rayfed.run(tables).path
    table = read_table(path, "clients")
    changed = pc.if_else(pc.equal(table["round"], 5), 0.125, table["train_loss"])
    place = table.column_names.index("train_loss")
    for file in (path / "clients.parquet").iterdir():
        file.unlink()
    edited = table.set_column(place, "train_loss", changed.cast(pa.float64()))
    pq.write_table(edited, path / "clients.parquet/round-00000.parquet")
    found = rayfed.local_models(path)
    assert [*found.differing] == [*found.clients]
    assert all(recorded == 0.125 for _, recorded in found.differing.values())
    (told,) = [record.getMessage() for record in caplog.records if record.name == models.__name__]
    assert told.startswith("round 5: clients ") and "instead of 0.125, so these" in told


def test_more_local_models_than_memory_holds_are_refused_with_how_many_fit(tables, monkeypatch):
    path = rayfed.run(tables).path
    size = sum(tensor.nbytes for tensor in rayfed.local_models(path).start.values())

    class Memory:
        available = size + 1

    monkeypatch.setattr(models.psutil, "virtual_memory", lambda: Memory)
    with pytest.raises(InputError, match=r"round 5: \d local models of .* do not fit .*; 1 fit: "):
        rayfed.local_models(path)
    client = read_table(path, "clients").to_pylist()[-1]["client"]
    assert [*rayfed.local_models(path, clients=[client]).clients] == [client]


def test_what_is_no_run_or_has_no_round_is_refused(tables, tmp_path):
    with pytest.raises(InputError, match="is not the folder of a run"):
        rayfed.local_models(tmp_path)
    path = rayfed.run(tables).path
    for file in (path / "rounds.parquet").iterdir():
        file.unlink()
    with pytest.raises(InputError, match="has no finished round, and so no model"):
        rayfed.local_models(path)


def test_a_model_of_the_clients_loads_and_is_the_one_whose_average_is_the_next_global_model(tables):
    """FedAvg's next model is the mean over the clients' images."""
    path = rayfed.run({**tables, "method": "fedavg"}).path
    found = rayfed.local_models(path, round=4)
    rows = {
        row["client"]: row["num_examples"]
        for row in read_table(path, "clients").to_pylist()
        if row["round"] == 4
    }
    with replaying(path) as again:
        after = again.global_model(4)
        again.setup.model.load_state_dict(found.clients[next(iter(rows))])
    for name, tensor in after.items():
        total = sum(found.clients[client][name] * count for client, count in rows.items())
        assert torch.allclose(tensor, total / sum(rows.values()), atol=1e-6)
