"""Work on Ray gives the same bits as work in this process, with any number of actors."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray.exceptions import RayError

import rayfed
from rayfed.base.errors import RunFailed, WorkersLost
from rayfed.clients.schedules import Cosine
from rayfed.job import RayOptions, read_job
from rayfed.methods import (
    RECIPES,
    Part,
    Proximal,
    ccvr,
    compose,
    fedavg,
    feddf,
    fedntd,
    scaffold,
    switch,
)
from rayfed.rounds.executor import Survey
from rayfed.rounds.setup import open_setup
from rayfed.runtime import slots
from rayfed.runtime.items import MapCall, QueuedItem
from rayfed.runtime.policy import WORKER_FATES, Decision, ItemFate, Tries, Trouble, decide
from rayfed.runtime.worker_group import Worker, WorkerGroup, WorkerState

# A large client, and small ones.
MANY = [[20, 20, 20, 20], *[[2, 2, 2, 2]] * 12]


@dataclass(frozen=True)
class Trace(Part):
    """Writes the size of each client to a file, when it is its turn."""

    file: str

    def begin(self, client):
        with open(self.file, "a") as file:
            file.write(f"{client.num_examples}\n")


@dataclass(frozen=True)
class Vandal(Part):
    """Overwrites the weights that it is given: at each client, or at one client from round 2 on."""

    only: int | None = None

    def begin(self, client):
        if self.only is None or (client.id == self.only and client.round > 1):
            for tensor in client.weights.values():
                tensor.zero_()


@dataclass(frozen=True)
class WhoIsThere(Part):
    """Surveys, and so goes to the clients twice in a round."""

    def survey(self, client):
        return {"clients": 1, "images": client.num_examples}


def test_same_bits_on_ray(cluster, make_setup, here, on_ray):
    setup = make_setup(scaffold(), norm=True)
    assert on_ray(setup, 2) == here(setup)


@pytest.mark.slow
@pytest.mark.parametrize("actors", [1, 2])
def test_measures_are_the_same_numbers_on_ray(cluster, make_setup, here, on_ray, actors):
    setup = make_setup(scaffold(), norm=True)
    chosen = {"measure_images": 25, "measure_every": 2, "measure_layers": ["features.0", "head"]}
    setup = replace(
        setup,
        job=replace(
            setup.job,
            measure=["local", "train", "epochs", "drift", "gradients", "confusion"],
            **chosen,
        ),
    )
    assert on_ray(setup, actors) == (rounds := here(setup))
    assert [len(round["notes"]) for round in rounds] == [0, 0, 9, 0]
    assert [len(round["confusions"]) for round in rounds] == [0, 0, 4, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"name": "power_of_choice", "candidates": 3},
        {"name": "power_of_choice", "candidates": 3, "estimate": "batch"},
        {"name": "power_of_choice", "candidates": 3, "estimate": "last"},
        {"name": "oort", "exploration": 0.5, "least": 0.1, "window": 1, "quantile": 0.5},
    ],
    ids=["pow", "cpow", "rpow", "oort"],
)
def test_a_rule_that_looks_at_losses_chooses_the_same_clients_on_ray(
    cluster, make_setup, here, on_ray, options
):
    clients = {"seconds_per_example": 0.1, "spread": 1.0, "sampling": options}
    setup = make_setup(fedavg(), num_rounds=4, clients_per_round=2)
    clients = read_job({"name": "tiny", "clients": clients}).clients
    setup = replace(setup, job=replace(setup.job, clients=clients))
    assert on_ray(setup, 2) == here(setup)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ditto", "fedbn", "fedcsd", "fedcurv", "feddyn", "fedgkd", "fedper", "moon"]
)
def test_what_a_method_sends_and_keeps_has_the_same_bits_on_ray(
    cluster, make_setup, here, on_ray, name
):
    setup = make_setup(RECIPES[name](), norm=True)
    assert on_ray(setup, 2) == here(setup)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [feddf(steps=10), switch(fedavg(), ccvr(), at=3)], ids=["feddf", "ccvr"]
)
def test_what_the_server_trains_has_the_same_bits_on_ray(cluster, make_setup, here, on_ray, method):
    setup = make_setup(method, norm=True)
    assert on_ray(setup, 1) == on_ray(setup, 2) == here(setup)


@pytest.mark.slow
def test_what_a_client_trains_with_has_the_same_bits_on_ray(cluster, make_setup, here, on_ray):
    adam = {
        "optimizer": "adamw",
        "momentum": 0.0,
        "lr": 0.01,
        "lr_decay": 1.0,
        "schedule": Cosine(until=4, warmup=1),
    }
    setup = make_setup(fedntd(), norm=True, clip=0.5, local_epochs=1.5, clients_per_round=6, **adam)
    assert on_ray(setup, 2) == here(setup)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "data"), [("text", {"text": "words", "vocabulary": 50}), ("mlp", {"features": ["x"]})]
)
def test_text_and_tables_have_the_same_bits_on_ray(cluster, here, on_ray, tmp_path, model, data):
    rng = np.random.default_rng(0)
    for split, count in (("train", 120), ("test", 40)):
        words = [
            " ".join(f"w{number}" for number in rng.integers(0, 60, size))
            for size in rng.integers(1, 9, count)
        ]
        columns = {
            "words": words,
            "x": rng.normal(9, 5, (count, 3)).tolist(),
            "label": rng.integers(0, 3, count),
        }
        pq.write_table(pa.table(columns), tmp_path / f"{split}.parquet")
    partition = {"name": "dirichlet", "alpha": 1.0, "num_clients": 6, "min_size": 2}
    tables = {"name": "beyond", "method": "scaffold", "model": model, "measure": ["local", "drift"]}
    training = {"num_rounds": 3, "clients_per_round": 4, "batch_size": 8, "lr": 0.2}
    source = {"source": str(tmp_path), "partition": partition}
    setup = open_setup(read_job({**tables, "train": training, "data": {**source, **data}}))
    assert on_ray(setup, 2) == (rounds := here(setup))
    assert rounds[0]["weights"] != rounds[1]["weights"]


@pytest.mark.slow
def test_virtual_time_and_drop_outs_have_the_same_rounds_on_ray(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("rayfed.observers.page.write_page", lambda path: None)
    job = {
        "method": "scaffold",
        "data": {"partition": {"name": "shards", "s": 2, "num_clients": 10}},
        "model": "lenet",
        "train": {"num_rounds": 3, "clients_per_round": 3, "local_steps": 1, "batch_size": 10},
        "clients": {
            "available": 0.8,
            "dropout": 0.3,
            "oversample": 1.4,
            "deadline": 6.0,
            "seconds_per_example": 0.1,
        },
        "output": {"path": str(tmp_path)},
    }
    job["clients"] |= {"bytes_per_second": 1e5, "spread": 0.5}

    def rounds(name, **ray):
        return (
            rayfed.run({**job, "name": name, "ray": ray}).rounds.drop_columns("seconds").to_pylist()
        )

    here = rounds("here", mode="off")
    assert (
        rounds("one", address=cluster, actors=1)
        == rounds("three", address=cluster, actors=3)
        == here
    )
    dropped, late = (
        sum(dict(row["notes"])[f"clients.{name}"] for row in here[1:])
        for name in ("dropped", "late")
    )
    assert dropped and late


@pytest.mark.slow
def test_a_part_that_overwrites_weights_is_refused_here_and_on_ray(
    cluster, make_setup, here, on_ray
):
    setup = make_setup(compose(Proximal(0.1), Vandal()))
    refused = []
    for play in (here, lambda setup: on_ray(setup, 1), lambda setup: on_ray(setup, 3)):
        with pytest.raises(RunFailed) as error:
            play(setup)
        refused.append("Vandal.begin wrote to client.weights" in str(error.value))
    assert refused == [True, True, True]


@pytest.mark.slow
def test_a_client_that_overwrites_its_weights_harms_no_other_client(
    cluster, make_setup, here, on_ray
):
    """The first client of a stage alone is watched; in round 2 the first that is served does
    harm.
    """
    options = {"clients_per_round": 6, "num_rounds": 2}
    quiet = make_setup(compose(Proximal(0.1), Vandal(only=-1)), **options)
    largest = int(np.argmax(quiet.federation.partition.sizes))
    setup = make_setup(compose(Proximal(0.1), Vandal(only=largest)), **options)
    calm = here(quiet)
    of_calm = {row[0]: row for row in calm[2]["clients"]}
    for played in (here(setup), on_ray(setup, 1)):
        of_harmed = {row[0]: row for row in played[2]["clients"]}
        assert len(of_harmed) == 6
        changed = {client for client, row in of_harmed.items() if row != of_calm[client]}
        assert changed == {largest}


@pytest.mark.slow
def test_the_longest_client_goes_first(cluster, make_setup, on_ray, tmp_path):
    setup = make_setup(compose(Trace(str(tmp_path / "trace"))), clients_per_round=6, num_rounds=1)
    # No client is served twice.
    on_ray(setup, 1, check_repeat=False)
    sizes = [int(line) for line in (tmp_path / "trace").read_text().split()]
    assert len(sizes) == 6
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("actors", [1, 2])
@pytest.mark.parametrize(
    ("work", "large", "small"), [({"local_epochs": 2}, 160, 16), ({"local_steps": 10}, 50, 40)]
)
def test_tasks_that_go_together_have_the_same_bits_on_ray(
    cluster, make_setup, here, on_ray, monkeypatch, actors, work, large, small
):
    """With `local_steps`, clients of few images do nearly as much work as a client of many."""
    messages = []

    def next_message(call, actors, evenly, next_message=MapCall.next_message):
        items = next_message(call, actors, evenly=evenly)
        messages.append(items)
        return items

    monkeypatch.setattr(MapCall, "next_message", next_message)
    setup = make_setup(
        compose(scaffold(), WhoIsThere()), counts=MANY, clients_per_round=13, task_images=20, **work
    )
    assert on_ray(setup, actors) == here(setup)
    assert {item.size for items in messages for item in items if item.clients} == {large, small}
    assert (max(map(len, messages)) > 1) == (large >= 2 * small), (
        "some go together where they are small enough"
    )


WORK = Survey(1, {})


def _call(sizes, most=4):
    items = [QueuedItem(WORK, (number,), size, number) for number, size in enumerate(sizes)]
    return MapCall(WORK, {}, items, most)


@pytest.mark.parametrize("actors", range(1, 6))
@pytest.mark.parametrize("most", [1, 4, 99])
@pytest.mark.parametrize(
    "sizes", [[60] * 40, [480] * 5 + [420, 300, 180] + [60] * 15, [900, 10, 10, 10], [7], [0, 0]]
)
def test_a_message_is_no_longer_than_the_largest_call_and_half_an_even_share(sizes, most, actors):
    call, sent = _call(sizes, most), []
    while call.waiting:
        room = min(max(sizes), sum(sizes[len(sent) :]) / (2 * actors))
        message = [item.number for item in call.next_message(actors, evenly=False)]
        assert message == [*range(len(sent), len(sent) + len(message))], "in their order"
        assert len(message) == 1 or sum(sizes[i] for i in message) <= room
        one_more = sum(sizes[message[0] : message[-1] + 2])
        assert len(message) == most or message[-1] + 1 == len(sizes) or one_more > room, (
            "and no shorter"
        )
        assert len(message) <= most
        sent += message
    assert sent == [*range(len(sizes))]


# All that a worker group without a Ray reads of its setup.
A_SITE = SimpleNamespace(job=read_job({"name": "tiny"}))


def group_of(count, other_bits, monkeypatch):
    """A group of so many workers, without a Ray; and the actors that it has killed."""
    killed = []
    monkeypatch.setattr(ray, "kill", killed.append)
    group = WorkerGroup(RayOptions(), "tiny", A_SITE, None, count, None, other_bits)
    for number in range(count):
        group._workers.append(Worker(f"actor-{number}", f"actor-{number}", WorkerState.OPENING))
    return group, killed


@pytest.mark.parametrize("differs", ["instructions", "maker", "torch", "more", "fewer"])
def test_a_worker_on_another_kind_of_hardware_is_given_up(differs, monkeypatch):
    first = {"instructions": "AVX2", "maker": "one", "torch": "2"}
    changed = {"more": {**first, "new": "x"}, "fewer": {"maker": "one", "torch": "2"}}
    other = changed.get(differs, {**first, differs: "another"})
    group, killed = group_of(3, False, monkeypatch)
    one, two, three = group._workers
    assert group._admit(one, first) and group._admit(two, dict(first))
    assert not group._admit(three, other)
    assert (killed, group._workers, group.most) == (["actor-2"], [one, two], 2)
    assert group.kinds == [first]
    assert group._mixed.startswith("actor-2 is on other hardware than the run, ")
    group._workers = [two]
    with pytest.raises(WorkersLost, match="resume on hardware as before, or allow the other with"):
        group._admit(two, other)


def test_workers_on_other_hardware_are_taken_where_other_bits_are_allowed(monkeypatch):
    group, killed = group_of(2, True, monkeypatch)
    one, two = group._workers
    kinds = [{"maker": "one"}, {"maker": "two"}]
    assert (
        group._admit(one, kinds[0]) and group._admit(two, kinds[1]) and group._admit(one, kinds[1])
    )
    assert (group.kinds, killed, group._mixed) == (kinds, [], "")


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_run_of_a_grid_is_begun_again_exactly_as_often_as_the_job_says(limit, monkeypatch):
    """As far as no Ray is needed: its tasks are names, which are all lost."""

    def get(reference):
        raise RayError("its node is gone")

    fake = SimpleNamespace(wait=lambda references, **_: (list(references), []), get=get)
    monkeypatch.setattr(slots, "ray", fake)
    runs, begun = slots.Slots(None, None, 1, {}), []

    def begin(job):
        begun.append(job)
        runs.running[f"task-{len(begun)}"] = job

    monkeypatch.setattr(runs, "begin", begin)
    job = read_job({"name": "tiny", "ray": {"max_retries": limit}})
    runs.running["task-0"] = job
    for _ in range(limit):
        assert list(runs.ended()) == []
    assert begun == [job] * limit
    (ended,) = runs.ended()
    assert (ended.job, ended.exit_code, runs.running) == (job, 75, {})
    assert f"was lost or locked out {limit + 1} times, the last time: its node is" in ended.message


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_an_item_is_tried_again_exactly_as_often_as_the_job_says(limit):
    for times_lost in range(limit):
        assert (
            decide(Trouble.WORKER, Tries(times_lost=times_lost, max_retries=limit)).items
            is ItemFate.RETRY
        )
    assert (
        decide(Trouble.WORKER, Tries(times_lost=limit, max_retries=limit)).items is ItemFate.GIVE_UP
    )


def test_a_lost_item_is_tried_alone_and_only_then_a_loss_counts():
    call = _call([100, *[10] * 30])
    assert len(call.next_message(1, evenly=False)) == 1
    lost = call.next_message(1, evenly=False)
    assert [item.number for item in lost] == [1, 2, 3, 4]
    assert decide(Trouble.WORKER, Tries(together=4, max_retries=1)) == Decision(
        WORKER_FATES[Trouble.WORKER], ItemFate.RETRY, False
    )
    call.wait_again(lost)
    assert [[item.number for item in call.next_message(1, evenly=False)] for _ in range(4)] == [
        [1],
        [2],
        [3],
        [4],
    ]
    assert len(call.next_message(1, evenly=False)) > 1
    assert decide(Trouble.WORKER, Tries(times_lost=1, max_retries=1)).items is ItemFate.GIVE_UP
