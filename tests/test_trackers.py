"""Each tracker's curves, read back as its own readers do, are those of the Parquet tables."""

import logging
import math
import struct
import sys
import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

import rayfed
from rayfed.base.aside import is_working
from rayfed.base.errors import InputError
from rayfed.base.files import write_text
from rayfed.folder.places import folder_of
from rayfed.folder.tables import read_table, replace_table, write_round
from rayfed.job import read_job
from rayfed.observers import trackers
from rayfed.observers.trackers import Tracking, curves, plain_name
from rayfed.report.forgetting import by_round
from rayfed.report.read import classes_of
from rayfed.rounds.observer import observing

CLASSES = [
    "<script>alert(1)</script>",
    "a/b",
    "a:b",
    "../..",
    "",
    "naïve 猫",
    "tench, Tinca tinca",
    "x" * 300,
]


@contextmanager
def tracking(job):
    with observing([Tracking(name, job) for name in dict.fromkeys(job.track)]) as observers:
        yield lambda number: observers.round(SimpleNamespace(round=number))


every_tracker = pytest.mark.parametrize("name", trackers.TRACKERS)


@pytest.fixture(autouse=True)
def _local_stores(tmp_path, monkeypatch):
    for name in ("wandb", "mlflow", "tensorboard"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[{name}]'")
    values = {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CACHE_DIR": str(tmp_path / "cache"),
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns",
        # A server or a database would need more than the tests have.
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    for key, value in values.items():
        monkeypatch.setenv(key, value)
    # A busy machine may need longer than a run waits.
    monkeypatch.setattr(trackers, "PATIENCE", 240.0)
    yield
    if "wandb" in sys.modules:
        # It reads its environment once.
        sys.modules["wandb"].teardown()


@pytest.fixture
def make_job(tmp_path):
    """A tiny job with trackers."""

    def make(*names, **more):
        training = {
            "num_rounds": 2,
            "clients_per_round": 2,
            "local_steps": 1,
            "batch_size": 8,
            "eval_every": 2,
        }
        job = {
            "name": "grid/tiny",
            "model": "lenet",
            "train": training,
            "ray": {"mode": "off"},
            "track": list(names),
        }
        return read_job(job | {"output": {"path": str(tmp_path / "runs")}}, more)

    return make


def record(path, round, seconds=0.5, accuracy=0.25):
    """A round's rows, made by hand: the first is without training loss, odd rounds are not
    evaluated.
    """
    path.mkdir(parents=True, exist_ok=True)
    tested = round % 2 == 0
    row = {"round": round, "test_accuracy": accuracy + round / 100 if tested else None}
    row |= {"test_loss": math.inf if tested else None, "forgetting": -0.1 if tested else None}
    row |= {
        "train_loss": 0.1 + round if round else None,
        "seconds": seconds,
        "bytes_down": 2**40 + round,
    }
    row |= {
        "bytes_up": 7,
        "notes": [("drift.update_cosine", math.nan), ("domain.a b", 0.1 * round)],
    }
    shared = {"round": round, "seen": 1, "predicted": 2}
    classes = [
        {**shared, "class": name, "accuracy": k / 7 + round} for k, name in enumerate(CLASSES)
    ]
    write_round(path, round, {"rounds": [row], "classes": classes if tested else []})
    write_text(path / "summary.json", f'{{"status": "running", "rounds": {round}}}')


def tabled(path):
    """The curves as the Parquet tables have them: name -> round -> value."""
    found = {}
    for row in read_table(path, "rounds").to_pylist():
        numbers = {
            key: value for key, value in row.items() if key not in ("round", "notes", "forgetting")
        }
        numbers |= {f"notes/{name}": value for name, value in row["notes"]}
        for name, value in numbers.items():
            if value is not None:
                found.setdefault(name, {})[row["round"]] = value
    rows = read_table(path, "classes").to_pylist()
    classes = list(dict.fromkeys(row["class"] for row in rows))
    names = {name: f"class/{number} {plain_name(name)}" for number, name in enumerate(classes)}
    for row in rows:
        found.setdefault(names[row["class"]], {})[row["round"]] = row["accuracy"]
    _, *numbers = classes_of(path)
    for name, (rounds, values) in by_round(*numbers, eval_every=2, clients=[]).items():
        found[f"forgetting.{name}"] = dict(zip(rounds.tolist(), values.tolist(), strict=True))
    return found


def shown(name, path):
    """The curves as a tracker has them: name -> list of (round, value)."""
    read = {"tensorboard": of_tensorboard, "wandb": of_wandb, "mlflow": of_mlflow}[name]
    found = {}
    for curve, round, value in read(path):
        found.setdefault(curve, []).append((round, value))
    return found


def of_tensorboard(path):
    with warnings.catch_warnings():
        # Of its own imports.
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    for tag in events.Tags()["tensors"]:
        if tag != "job/text_summary":
            for event in events.Tensors(tag):
                assert event.tensor_proto.dtype == 1, (
                    "a float; the page of TensorBoard drops doubles"
                )
                yield tag, event.step, make_ndarray(event.tensor_proto).item()


def of_wandb(path):
    import json

    for record in wandb_records(path):
        items = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for name, value in items.items():
            if not name.startswith("_"):
                yield name, record.history.step.num, float(value)


def wandb_records(path):
    """What an offline run would send to the server, as `wandb sync` reads it: a log in LevelDB's
    format.
    """
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    # Waits until its process has written everything.
    wandb.teardown()
    for file in sorted(path.glob("wandb/offline-run-*/*.wandb")):
        content, parts, place = file.read_bytes(), b"", 7
        while place + 7 <= len(content):
            left = 2**15 - place % 2**15
            # Of a block.
            if left < 7:
                place += left
                continue
            length, kind = struct.unpack_from("<HB", content, place + 4)
            parts += content[place + 7 : place + 7 + length]
            place += 7 + length
            # Whole, or the last part.
            if kind in (1, 4):
                yield Record.FromString(parts)
                parts = b""


def of_mlflow(path):
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("rayfed").experiment_id])
    for name in run.data.metrics:
        yield from (
            (name, metric.step, metric.value)
            for metric in client.get_metric_history(run.info.run_id, name)
        )


def same(found, wanted, *but, exact=True):
    """Curves with the values of the tables, or as near as TensorBoard's single precision."""
    assert found.keys() == wanted.keys()
    for name, curve in wanted.items():
        rounds, values = zip(*found[name], strict=True)
        assert list(rounds) == list(curve), f"{name}: each round once, in order"
        assert name in but or values == pytest.approx(
            list(curve.values()), rel=0 if exact else 1e-6, abs=0, nan_ok=True
        ), name


def warned(caplog):
    """Our warnings; a tracker's library has a log of its own."""
    return [
        entry.message
        for entry in caplog.records
        if entry.name[:6] == "rayfed" and entry.levelno >= logging.WARNING
    ]


@every_tracker
def test_curves_are_those_of_the_tables_whatever_a_class_is_called(name, make_job, caplog):
    job = make_job(name)
    path = folder_of(job)
    with tracking(job) as recorded:
        for round in range(5):
            record(path, round)
            recorded(round)
    assert warned(caplog) == []
    found = shown(name, path)
    same(found, tabled(path), exact=name != "tensorboard")
    assert len([curve for curve in found if curve.startswith("class/")]) == len(CLASSES)
    assert {"class/1 a_b", "class/2 a_b"} <= found.keys()
    assert [round for round, _ in found["test_accuracy"]] == [0, 2, 4]
    assert found["bytes_down"][4] == (4, 2**40 if name == "tensorboard" else 2**40 + 4)


@every_tracker
def test_after_a_resume_a_curve_has_no_gap_and_no_round_twice(name, make_job, caplog):
    """The run was killed after round 4, and its checkpoint is of round 1; the second time, seconds
    are others.
    """
    job = make_job(name)
    path = folder_of(job)
    with tracking(job) as recorded:
        for round in range(5):
            record(path, round)
            recorded(round)
    for table in ("rounds", "classes"):
        replace_table(
            path,
            table,
            1,
            read_table(path, table).slice(0, 2 if table == "rounds" else len(CLASSES)),
        )
    with tracking(replace(job, track=[name, name])) as recorded:
        for round in range(2, 8):
            record(path, round, seconds=0.75)
            recorded(round)
    assert warned(caplog) == []
    same(
        shown(name, path),
        tabled(path),
        *(["seconds"] if name == "mlflow" else []),
        exact=name != "tensorboard",
    )


@every_tracker
def test_a_tracker_that_fails_warns_and_gets_the_rest_with_the_next_resume(
    name, make_job, caplog, monkeypatch
):
    job = make_job(name)
    path, make, failing = folder_of(job), trackers.TRACKERS[name], threading.Event()

    def made(*given):
        tracker = make(*given)

        def fail(round, values):
            if round == 2:
                failing.set()
                raise ConnectionError("the server is away")
            tracker.log(round, values)

        return tracker._replace(log=fail)

    with monkeypatch.context() as patch, tracking(job) as recorded:
        patch.setitem(trackers.TRACKERS, name, made)
        for round in range(5):
            record(path, round)
            recorded(round)
        assert failing.wait(60)
    (warning,) = warned(caplog)
    assert "ConnectionError: the server is away" in warning and f"rayfed resume {path}" in warning
    assert [round for round, _ in shown(name, path)["seconds"]] == [0, 1]
    # No round is left to play.
    with tracking(job):
        pass
    same(shown(name, path), tabled(path), exact=name != "tensorboard")


@pytest.mark.parametrize("where", ["made", "log", "close"])
def test_a_tracker_that_hangs_does_not_hold_up_the_run(where, make_job, caplog, monkeypatch):
    ever = threading.Event()
    monkeypatch.setattr(trackers, "PATIENCE", 0.2)
    make, hang = trackers.tensorboard, lambda *given: ever.wait()
    made = hang if where == "made" else lambda *given: make(*given)._replace(**{where: hang})
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", made)
    try:
        with tracking(job := make_job("tensorboard")) as recorded:
            for round in range(3):
                record(folder_of(job), round)
                recorded(round)
        (warning,) = warned(caplog)
        assert "did not answer within 0.2 seconds" in warning
    finally:
        ever.set()
        # What the tracker's thread says now is of this test.
        while is_working():
            time.sleep(0.01)


def test_a_tracker_that_cannot_begin_does_not_end_the_run(make_job, caplog, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", lambda *given: sys.exit("no disk"))
    result = rayfed.run(make_job("tensorboard"))
    assert result.rounds["round"].to_pylist() == [0, 1, 2]
    (warning,) = warned(caplog)
    assert "SystemExit: no disk" in warning and warning in (result.path / "log.txt").read_text()


@pytest.mark.slow
def test_a_run_is_shown_by_all_trackers_also_by_those_that_are_named_later(make_job, caplog):
    path = rayfed.run(make_job("tensorboard")).path
    result = rayfed.resume(path, {"train.num_rounds": 4, "track": ["tensorboard", "mlflow"]})
    # The run is done.
    rayfed.resume(path, {"track": [*trackers.TRACKERS]})
    assert warned(caplog) == []
    for name in trackers.TRACKERS:
        same(shown(name, path), tabled(path), exact=name != "tensorboard")
    plain = make_job(**{"name": "plain", "train.num_rounds": 4})
    assert plain.hash() == rayfed.read_job(path / "job.toml").hash()
    columns = ["test_accuracy", "test_loss", "train_loss", "forgetting"]
    assert rayfed.run(plain).rounds.select(columns) == result.rounds.select(columns)
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("rayfed").experiment_id])
    assert (run.info.run_name, run.info.status) == ("grid/tiny", "FINISHED")
    assert run.data.params["train.batch_size"] == "8" and run.data.params["method"] == "fedavg"
    (begun,) = (
        record.run for record in wandb_records(path) if record.WhichOneof("record_type") == "run"
    )
    assert (begun.display_name, begun.run_group, begun.project) == ("grid/tiny", "grid", "rayfed")
    rayfed.run(make_job("tensorboard"), force=True)
    assert [round for round, _ in shown("tensorboard", path)["seconds"]] == [0, 1, 2]
    assert not (path / "wandb").exists()


def test_the_round_that_is_being_written_waits(tmp_path):
    for round in range(3):
        record(tmp_path, round)
    assert [round for round, _ in curves(tmp_path, 1, after=0, end=1)] == [1]


def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    make_job, tmp_path, monkeypatch
):
    for name in trackers.TRACKERS:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(
                InputError,
                match=rf"{name} is not installed.*: pip install 'rayfed-distill\[{name}\]'",
            ):
                rayfed.run(job := make_job("tensorboard", "wandb", "mlflow"))
            assert not folder_of(job).exists()
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    # As Weights & Biases makes one where it is run.
    (tmp_path / "wandb").mkdir()
    with pytest.raises(InputError, match="wandb is not installed"):
        rayfed.run(make_job("wandb"))
