"""The same work on Ray: the same bits, whoever does it and whoever dies."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

from rayfed.job import RayOptions
from rayfed.local import ClientFailed
from rayfed.methods import RECIPES, Part, Proximal, compose, fedcsd, fedntd, scaffold
from rayfed.rounds import rounds, start
from rayfed.runtime import pool as pools
from rayfed.runtime.here import Here
from rayfed.runtime.pool import WorkersLost
from rayfed.runtime.session import workers
from rayfed.weights import state_of


@dataclass(frozen=True)
class Kill(Part):
    """Kills the process that trains a client, with SIGKILL, so many times; it counts in a file."""

    folder: str
    client: int
    round: int
    times: int = 1

    def begin(self, client):
        if (client.id, client.round) == (self.client, self.round):
            killed = len(list(Path(self.folder).iterdir()))
            if killed < self.times:
                Path(self.folder, str(killed)).touch()
                os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Fail(Part):
    """Raises an exception of its own at one client."""

    client: int

    def begin(self, client):
        if client.id == self.client:
            raise KeyError("no such thing at this client")


@dataclass(frozen=True)
class Trace(Part):
    """Writes down whose turn it is."""

    file: str

    def begin(self, client):
        with open(self.file, "a") as file:
            file.write(f"{client.num_examples}\n")


@dataclass(frozen=True)
class Vandal(Part):
    """Writes to everything that it is given."""

    def begin(self, client):
        for tensor in client.weights.values():
            tensor.zero_()


def on_ray(cluster, site, weights, actors, **options):
    """All rounds of a site on so many actors, the initial one first, each in comparable form."""
    with workers(RayOptions(address=cluster, actors=actors, **options), f"test-{os.urandom(4).hex()}", site) as pool:
        first = start(site, weights, pool)
        return [comparable(r, lambda m: ray.get(m)) for r in [first, *rounds(site, first, pool)]]


def here(site, weights):
    """The same in this process."""
    worker = Here(site)
    first = start(site, weights, worker)
    return [comparable(r, lambda m: m) for r in [first, *rounds(site, first, worker)]]


def comparable(round, get):
    return {
        "round": round.round,
        "weights": {name: tensor.numpy().tobytes() for name, tensor in round.weights.items()},
        "memories": {
            client: {dtype: buffer.tobytes() for dtype, buffer in get(memory).buffers.items()}
            for client, memory in round.memories.items()
        },
        "confusion": round.evaluation.confusion.tolist(),
        "loss": round.evaluation.loss,
        "rows": [(row.client, row.num_examples, row.train_loss) for row in round.clients],
        "bytes": (round.bytes_down, round.bytes_up),
    }


@pytest.mark.parametrize("method", [fedntd(), scaffold(), fedcsd()], ids=["fedntd", "scaffold", "fedcsd"])
def test_same_bits_for_any_number_of_actors(cluster, make_site, method):
    site = make_site(method, norm=True)
    weights = state_of(site.model)
    expected = here(site, weights)
    for actors in (1, 2, 3):
        assert on_ray(cluster, site, weights, actors) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_method_has_the_same_bits_on_ray(cluster, make_site, name):
    site = make_site(RECIPES[name](), norm=True)
    weights = state_of(site.model)
    assert on_ray(cluster, site, weights, 2) == here(site, weights)


@pytest.mark.parametrize("times", [1, 2])
def test_a_killed_actor_changes_nothing(cluster, make_site, tmp_path, caplog, times):
    (kills := tmp_path / "kills").mkdir()
    (none := tmp_path / "none").mkdir()
    method = [
        compose(scaffold(), Kill(str(folder), client=1, round=2, times=n)) for folder, n in ((kills, times), (none, 0))
    ]
    disturbed, undisturbed = (make_site(m, clients_per_round=6) for m in method)
    weights = state_of(disturbed.model)
    assert on_ray(cluster, disturbed, weights, 2) == here(undisturbed, weights)
    assert len(list(kills.iterdir())) == times  # it did happen
    assert "client 1, round 2" in caplog.text and "running it again" in caplog.text


def test_work_that_kills_every_worker_ends_the_run(cluster, make_site, tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "MAX_RETRIES", 1)
    site = make_site(compose(Kill(str(tmp_path), client=1, round=1, times=99)), clients_per_round=6)
    with pytest.raises(WorkersLost, match=r"client 1, round 1: lost with its worker 2 times"):
        on_ray(cluster, site, state_of(site.model), 2)


def test_a_clients_own_exception_ends_the_run_at_once(cluster, make_site):
    site = make_site(compose(Fail(client=3)), clients_per_round=6)
    with pytest.raises(ClientFailed, match=r"(?s)client 3, round 1 failed.*no such thing at this client"):
        on_ray(cluster, site, state_of(site.model), 2)


def test_a_client_that_writes_to_what_it_is_sent_harms_nobody_else(cluster, make_site):
    site = make_site(compose(Proximal(0.1), Vandal()))
    weights = state_of(site.model)
    assert on_ray(cluster, site, weights, 1) == on_ray(cluster, site, weights, 3) == here(site, weights)


def test_the_longest_client_goes_first(cluster, make_site, tmp_path):
    site = make_site(compose(Trace(str(tmp_path / "trace"))), clients_per_round=6, num_rounds=1)
    on_ray(cluster, site, state_of(site.model), 1)
    sizes = [int(line) for line in (tmp_path / "trace").read_text().split()]
    assert len(sizes) == 6
    assert sizes == sorted(sizes, reverse=True)


def test_only_our_actors_end_in_a_cluster_that_was_joined(cluster, make_site):
    site = make_site(fedntd(), num_rounds=1)
    free = ray.cluster_resources()["CPU"]
    on_ray(cluster, site, state_of(site.model), 2)
    assert ray.is_initialized()
    for _ in range(100):  # a killed actor's CPU comes back a moment later
        if ray.available_resources().get("CPU") == free:
            break
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] == free
    assert not [name for name in ray.util.list_named_actors() if name.startswith("test-")]
