"""What is measured before a run's actors are created: by numbers, and on a real Ray."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfed.base.errors import InputError, WorkersLost
from rayfed.job import RayOptions
from rayfed.methods import fedavg, scaffold, switch
from rayfed.runtime import measuring, rehearsal, slots
from rayfed.runtime.measuring import ask, measured, memory_as_measured
from rayfed.runtime.placement import actor_text, num_actors
from rayfed.runtime.rehearsal import Needs, needs_of, peak_bytes, rehearse

MB = 10**6
CPUS = {"CPU": 4.0, "memory": 10_000.0 * MB}
GPUS = {**CPUS, "GPU": 2.0}


def test_the_largest_client_is_rehearsed_in_the_first_and_the_last_round(make_setup):
    setup = make_setup(switch(fedavg(), scaffold(), at=3), num_rounds=3)
    last = rehearse(setup, gpu=False)
    sizes = [
        setup.federation.num_examples(client) for client in range(setup.federation.num_clients)
    ]
    assert last.round == 3
    assert [row.num_examples for row in last.clients] == [max(sizes)]
    assert len(last.memories) == 1, "scaffold is the method of the last round"


def test_what_a_process_has_had_counts_without_the_pages_of_the_store(monkeypatch, tmp_path):
    status = tmp_path / "status"
    monkeypatch.setattr(rehearsal, "STATUS", status)
    assert peak_bytes() == 0, "as on macOS"
    status.write_text(
        "Name:\tray::probe\nVmPeak:\t 9000 kB\nVmHWM:\t  900 kB\nVmRSS:\t  800 kB\n"
        "RssAnon:\t  300 kB\nRssFile:\t  100 kB\nRssShmem:\t  400 kB\n"
    )
    assert peak_bytes() == 500 * 1024


def test_memory_that_is_given_back_counts_too(make_setup):
    before = peak_bytes()
    if not before:
        pytest.skip("needs a system that tells what a process takes")
    # More than any test before it may have given back.
    size = before + 200 * MB
    torch.ones(size, dtype=torch.uint8)
    needs = needs_of(make_setup(fedavg()), torch.device("cpu"))
    assert needs.gpu_memory == 0 and needs.memory >= size


@given(st.integers(1, 8000 * MB))
def test_an_actor_gets_a_quarter_more_than_was_measured(needed):
    aside = RayOptions(memory=memory_as_measured(needed, [CPUS])).memory_bytes
    assert 1.25 * needed <= aside < 1.25 * needed + 10 * MB + 1


def test_what_was_measured_is_logged_and_refused_where_no_node_has_it(caplog):
    caplog.set_level("INFO")
    small, large = {"CPU": 1.0, "memory": 450.0 * MB}, {"CPU": 1.0, "memory": 510.0 * MB}
    assert memory_as_measured(404 * MB, [small, large]) == 0.51
    assert (
        "the largest client takes 404.0 MB of memory: ray.memory = 0.51, 510.0 MB for each actor"
        in caplog.text
    )
    words = (
        r"^ray.memory = 'auto': a client takes 404.0 MB, so that an actor gets 510.0 MB, and a "
        r"node has at most 450.0 MB for actors; try .*, or ray.memory = 0 to set none aside$"
    )
    with pytest.raises(InputError, match=words):
        memory_as_measured(404 * MB, [small])
    with pytest.raises(InputError, match="only Linux tells what a process takes; give a number"):
        memory_as_measured(0, [large])


def test_memory_is_not_asked_for_before_it_is_measured(caplog):
    options = RayOptions(num_gpus=0, memory="auto", actors=9)
    assert options.memory_bytes == 0
    assert actor_text(options) == "1 CPU and 0 GPU"
    # Too many, perhaps: that is told once the memory is known.
    assert num_actors(options, [CPUS], clients_per_round=9) == 9
    with pytest.raises(InputError, match="no actor with 1 CPU and 0 GPU fits"):
        num_actors(options, [{"CPU": 0.0}], clients_per_round=9)


@pytest.mark.parametrize(
    ("asked", "node", "keys", "probe_gpus", "found"),
    [
        ({"num_gpus": 0, "memory": "auto"}, CPUS, ["ray.memory"], 0, (0, 1.0)),
        ({"num_gpus": 0.25, "memory": "auto"}, GPUS, ["ray.memory"], 0.25, (0.25, 1.0)),
        ({"memory": "auto", "actors": 2}, GPUS, ["ray.memory"], 1, (1, 1.0)),
        ({"memory": "auto"}, GPUS, ["ray.num_gpus", "ray.memory"], 1, (0.5, 1.0)),
        ({"memory": 3}, GPUS, ["ray.num_gpus"], 1, (0.5, 3.0)),
        # Enough GPUs, and memory that is known: nothing is measured.
        ({"actors": 2}, GPUS, [], None, (1, 0.0)),
        ({"num_gpus": 0, "memory": 3}, CPUS, [], None, (0, 3.0)),
    ],
)
def test_only_what_is_auto_is_measured(monkeypatch, asked, node, keys, probe_gpus, found):
    created, questions = [], []

    def answer(probe, setup, options, nodes, keys):
        questions.extend(keys)
        return Needs(gpu_memory=4000 * MB, memory=800 * MB), [([9000 * MB] * 2, 4)]

    monkeypatch.setattr(measuring, "new_actor", lambda options, name: created.append(options))
    monkeypatch.setattr(measuring, "ask", answer)
    options = RayOptions(**asked)
    most = 8 if options.actors == "auto" else options.actors
    given = measured(options, "run", None, {"node": node}, most)
    assert questions == keys
    assert [options.gpu_share for options in created] == (
        [] if probe_gpus is None else [probe_gpus]
    )
    assert (given.num_gpus, given.memory) == found
    assert replace(given, num_gpus=options.num_gpus, memory=options.memory) == options


@pytest.mark.parametrize(
    ("share", "keys", "words"),
    [
        (
            1.0,
            ["ray.num_gpus", "ray.memory"],
            r"^ray.num_gpus = 'auto' and ray.memory = 'auto': for 5 s \(ray.patience\) no whole GPU "
            r"was free.*or give ray.num_gpus = 0.25 and ray.memory = 4, for example$",
        ),
        (
            0.0,
            ["ray.memory"],
            r"^ray.memory = 'auto': for 5 s \(ray.patience\) no place for an actor was free.*"
            r"or give ray.memory = 4, for example$",
        ),
    ],
)
def test_a_probe_without_a_place_is_told_with_what_to_give_instead(monkeypatch, share, keys, words):
    probe = SimpleNamespace(where=SimpleNamespace(remote=lambda: None))

    def late(*given, **options):
        raise ray.exceptions.GetTimeoutError

    killed = []
    monkeypatch.setattr(measuring, "got", late)
    monkeypatch.setattr(measuring.ray, "kill", killed.append)
    with pytest.raises(WorkersLost, match=words):
        ask(probe, None, RayOptions(num_gpus=share, patience=5), {}, keys)
    assert killed == [probe]


def test_runs_at_once_are_told_that_they_are_not_measured(make_setup, monkeypatch, caplog):
    def no_room(job):
        raise KeyboardInterrupt

    nothing = SimpleNamespace(running={}, has_room=no_room, close=lambda: None)
    monkeypatch.setattr(slots, "Slots", lambda *given: nothing)
    for memory, warned in ((4, False), ("auto", True)):
        job = make_setup(fedavg(), ray=RayOptions(memory=memory)).job
        with pytest.raises(KeyboardInterrupt):
            list(slots.in_slots([job], None, None, None))
        assert ("runs at once are not measured, and no memory" in caplog.text) == warned


@pytest.mark.slow
def test_ray_sets_aside_what_was_measured(cluster, make_setup, pool_on, here, played, caplog):
    setup = make_setup(scaffold(), num_rounds=2)
    caplog.set_level("INFO")
    with pool_on(setup, "test-memory", actors=2, memory="auto") as pool:
        aside = pool._group.options.memory_bytes
        held = [actor_memory(member.actor) for member in pool._group._workers]
        assert played(setup, pool) == here(setup)
        peaks = ray.get(
            [
                member.actor.__ray_call__.remote(lambda actor: peak_bytes())
                for member in pool._group._workers
            ]
        )
    assert held == [aside, aside]
    assert max(peaks) < aside < 2 * max(peaks)
    assert f"ray.memory = {aside / 1e9:g}" in caplog.text


def actor_memory(actor):
    """The bytes of memory that Ray has set aside for an actor."""
    resources = ray.get(
        actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_assigned_resources())
    )
    return math.floor(resources["memory"])


@pytest.mark.slow
def test_a_node_with_less_memory_than_was_measured_is_refused_and_nothing_is_left(
    a_cluster, make_setup, pool_on
):
    setup = make_setup(fedavg())
    with a_cluster(num_cpus=2, memory=200 * MB):
        for memory, words in (
            ("auto", r"^ray.memory = 'auto': a client takes .* at most 200.0 MB for actors"),
            (0.3, r"no actor with 1 CPU and 0 GPU and 300.0 MB of memory fits: .* 200.0 MB"),
        ):
            with pytest.raises(InputError, match=words):
                with pool_on(setup, "test-full", actors=2, memory=memory):
                    pass
            assert not ray.util.list_named_actors()
