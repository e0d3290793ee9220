"""The law of a run's folder: stopped at any event and resumed anywhere, a run is the run that never
stopped.
"""

import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import rayfed
from rayfed import Observer
from rayfed.base.storage import Folder
from rayfed.folder.checkpoint import newest
from rayfed.folder.summary import read_summary

MEASURED = {
    "measure": ["local", "drift", "confusion"],
    "measure_images": 7,
    "measure_layers": ["features.0"],
}
# Nobody is there in round 3, and after round 4 the trace begins again.
TRACE = {
    "round": [1, 1, 2, 2, 4, 4, 4],
    "client": [0, 1, 2, 3, 0, 1, 2],
    "drops": [False, True, True, False, False, True, False],
    "seconds_per_example": [0.5, 1.0, 2.0, 0.25, 0.125, 1.0, 4.0],
}
FIVE = {"num_rounds": 5, "clients_per_round": 2, "lr": 0.1}
# What differs between jobs: a method's state and memories; measures, seldom evaluated; an early
# end; who takes part.
JOBS = {
    "memories": {"method": "scaffold", "train": FIVE},
    "measures": {"method": "moon", "train": {**FIVE, "eval_every": 3}, **MEASURED},
    "evaluated average": {"method": ["fedacg", "smoothed"], "train": FIVE},
    "early end": {"method": "fedavg", "train": {**FIVE, "num_rounds": 12, "patience": 2}},
    "trace": {"method": "scaffold", "train": FIVE, "clients": {"deadline": 30.0}},
}


class Killed(BaseException):
    """In place of SIGKILL: no checkpoint is written after it."""


@dataclass
class Stop(Observer):
    """Stops the run at its n-th event: a client or a round that is finished, or a file of a
    checkpoint.
    """

    event: str
    number: int
    how: type[BaseException]

    def came(self, event):
        if event == self.event:
            self.number -= 1
        if self.number == 0 or (self.number < 0 and self.how is Killed):
            raise self.how

    def client(self, done, total):
        self.came("client")

    def round(self, round):
        self.came("round")


STOPS = st.builds(
    Stop,
    event=st.sampled_from(["client", "round", "file"]),
    number=st.integers(1, 14),
    how=st.sampled_from([KeyboardInterrupt, RuntimeError, Killed]),
)
NEVER = Stop("file", 10**6, Killed)
WAYS = st.sampled_from(["resume", "run", "moved", "from its checkpoints"])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The jobs, and what each gives without a stop."""
    path = tmp_path_factory.mktemp("law")
    rng = np.random.default_rng(0)
    for split, rows in (("train", 40), ("test", 10)):
        images = pa.array(list(rng.integers(0, 256, (rows, 784), np.uint8)))
        pq.write_table(
            pa.table({"image": images, "label": np.arange(rows) % 2}), path / f"{split}.parquet"
        )
    pq.write_table(pa.table(TRACE), path / "trace.parquet")
    data = {
        "source": str(path / "train.parquet"),
        "test": str(path / "test.parquet"),
        "domain": "label",
    }
    data |= {"partition": {"name": "iid", "num_clients": 4}}
    world = {}
    for name, job in JOBS.items():
        output = {"path": str(path / "whole"), "every": 2, "every_seconds": 1e9}
        job = {
            **job,
            "name": "run",
            "data": data,
            "model": "lenet",
            "ray": {"mode": "off"},
            "output": output,
        }
        if name == "trace":
            job["clients"] = {**job["clients"], "trace": str(path / "trace.parquet")}
        world[name] = job, outcome(rayfed.run(job, force=True))
    return world


def outcome(result):
    """All that must not depend on stops: the rows of all tables without durations, the weights, the
    best round.
    """
    tables = result.rounds, result.clients, result.classes, result.confusions
    rows = [row for table in tables for row in table.to_pylist()]
    numbers = [
        {column: value for column, value in row.items() if column != "seconds"} for row in rows
    ]
    summary = read_summary(result.path)
    ended = (
        summary["status"],
        summary["rounds"],
        summary["best"]["round"],
        summary.get("ended_early"),
    )
    return (
        numbers,
        {name: tensor.numpy().tobytes() for name, tensor in result.weights.items()},
        ended,
    )


def go_on(way, job, place, display):
    """Continue the run in a folder, in one of the ways in which a user may."""
    if way == "run" or newest(Folder(str(place / "checkpoints"))) is None:
        return rayfed.run(job, {"output.path": str(place.parent)}, resume=True, observers=[display])
    overrides = {"train.num_rounds": job["train"]["num_rounds"]}
    if way == "moved":
        moved = place.parent / "moved/run"
        shutil.move(place, moved)
        return rayfed.resume(moved, overrides, observers=[display])
    if way == "from its checkpoints":
        kept = place.parent / "kept"
        shutil.move(place / "checkpoints", kept)
        shutil.rmtree(place)
        return rayfed.resume(
            kept, {**overrides, "output.path": str(place.parent)}, observers=[display]
        )
    return rayfed.resume(place, overrides, observers=[display])


def stopped(stop, play):
    """Call a function with a display that stops it."""
    stop, write = replace(stop), Folder.write

    def counted(folder, name, *content):
        stop.came("file")
        write(folder, name, *content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "write", counted)
        with suppress(Killed, KeyboardInterrupt, RuntimeError):
            play(stop)


@settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([*JOBS]),
    st.sampled_from([4, 5, 12]),
    STOPS,
    st.lists(st.tuples(WAYS, STOPS), max_size=2),
    WAYS,
)
# Round 4 was its last.
@example("measures", 4, NEVER, [("resume", Stop("client", 2, KeyboardInterrupt))], "run")
@example("early end", 12, NEVER, [], "moved")
@example("trace", 4, Stop("client", 2, RuntimeError), [], "from its checkpoints")
def test_stopped_at_any_event_and_resumed_anywhere_is_never_stopped(
    world, tmp_path_factory, name, num_rounds, first, later, way
):
    job, whole = world[name]
    path = tmp_path_factory.mktemp("stopped")
    place = path / "run"
    at_first = {
        "output.path": str(path),
        "train.num_rounds": min(num_rounds, job["train"]["num_rounds"]),
    }
    stopped(first, lambda display: rayfed.run(job, at_first, observers=[display]))
    for next_way, stop in later:
        stopped(stop, partial(go_on, next_way, job, place))
        if (place.parent / "moved/run").is_dir():
            place = place.parent / "moved/run"
    assert outcome(go_on(way, job, place, Observer())) == whole
