"""`best.safetensors` holds the weights of the best round at every checkpoint, wherever the run is
killed.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import rayfed
from rayfed.base.storage import Folder
from rayfed.data.federation import federate
from rayfed.data.partition import Iid
from rayfed.data.samples import Dataset, Samples
from rayfed.data.settings import Data
from rayfed.data.sources import load
from rayfed.folder.checkpoint import newest
from rayfed.folder.places import checkpoints_of, folder_of
from rayfed.folder.recorder import Recorder as Keeper
from rayfed.folder.summary import read_summary
from rayfed.folder.tables import read_table
from rayfed.job import make_job
from rayfed.measures import metrics
from rayfed.measures.metrics import Evaluation
from rayfed.models.registry import build_model
from rayfed.rounds.evaluation import evaluate
from rayfed.rounds.round import Round
from rayfed.rounds.setup import Setup, open_setup
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.weights import with_weights

# Of 4 cats, after rounds 0 to 9; None: not evaluated.
RIGHT = [4, 1, 0, 2, 2, None, 1, 3, 2, 3]
# By the round that the run has come to.
BEST = {
    1: 1,
    2: 1,
    3: 3,
    4: 3,
    5: 3,
    6: 3,
    7: 7,
    8: 7,
    9: 7,
}


class Killed(BaseException):
    """In place of SIGKILL: nothing is written after it."""


@pytest.fixture
def setup(tmp_path):
    # Checkpoints after 1, 4, 8, and the end.
    output = {
        "path": str(tmp_path / "runs"),
        "every": 4,
        "every_seconds": 1e9,
    }
    job = make_job({"name": "run", "output": output, "ray": {"mode": "off"}})
    samples = Samples(np.zeros((8, 1, 4, 4), np.uint8), np.arange(8) % 2, ("cat", "dog"))
    return Setup(
        nn.Linear(1, 1),
        federate(Dataset(samples, samples), Iid(num_clients=4)),
        job,
        torch.device("cpu"),
    )


def a_round(number):
    right, weights = RIGHT[number], {"w": torch.ones(1) * number}
    evaluation = None if right is None else Evaluation(np.array([[right, 4 - right], [0, 4]]), 8.0)
    return Round(number, weights, {}, {}, evaluation, np.ones(2), None if right is None else 0.0)


def keep(setup, until=9, saved=None, force=False):
    """Keep the rounds after a checkpoint, or all of them."""
    with Keeper(setup, ThisProcess(setup), saved, force=force) as keeper:
        for number in range(saved.round + 1 if saved else 0, until + 1):
            keeper.round(a_round(number))
    return keeper.path


def assert_best(path, number):
    """File and summary agree on the best round."""
    file = path / "checkpoints/best.safetensors"
    assert load_file(file)["w"].item() == number
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["rayfed"])
    assert about["round"] == number and about["classes"] == ["cat", "dog"]
    best = read_summary(path)["best"]
    assert (best["round"], best["weights"]) == (number, str(file))


def assert_none(path):
    assert "weights" not in read_summary(path)["best"]
    assert not (path / "checkpoints/best.safetensors").exists()


@pytest.mark.parametrize("until", BEST)
def test_the_file_has_the_first_of_the_best_rounds_and_stays_when_checkpoints_go(setup, until):
    path = keep(setup, until)
    assert_best(path, BEST[until])
    last = {
        f"round-{number:05d}"
        for number in ({1: [0, 1], 2: [1, 2], 3: [1, 3], 4: [1, 4]}.get(until, [4, until]))
    }
    last = {"round-00008", "round-00009"} if until == 9 else last
    assert {file.name.partition(".")[0] for file in (path / "checkpoints").iterdir()} == {
        "best"
    } | last


def test_it_is_written_with_checkpoints_only_and_only_where_there_is_a_better_round(
    setup, monkeypatch
):
    write, written = Folder.write, []
    monkeypatch.setattr(Folder, "write", lambda *given: (written.append(given[1]), write(*given)))
    keep(setup)
    kinds = [
        name.rpartition(".")[0][:11]
        for name in written
        if name.endswith((".json", "best.safetensors"))
    ]
    assert kinds == [
        "round-00000",
        "best",
        "round-00001",
        "best",
        "round-00004",
        "best",
        "round-00008",
        "round-00009",
    ]


@pytest.mark.slow
def test_it_is_right_wherever_the_run_is_killed(setup, monkeypatch):
    """At each file that it writes; then it is opened and closed, then it goes on to the end."""
    write, place, count = Folder.write, 0, 0

    def counted(self, *given):
        nonlocal count
        count += 1
        if count > place:
            raise Killed
        write(self, *given)

    path, survived, states = folder_of(setup.job), False, set()
    while not survived:
        place, count = place + 1, 0
        with monkeypatch.context() as patch:
            patch.setattr(Folder, "write", counted)
            try:
                keep(setup, force=True)
                survived = True
            except Killed:
                pass
        if (saved := newest(checkpoints_of(setup.job))) is None:
            continue
        keep(setup, saved.round, saved)
        states.add((saved.round, there := (path / "checkpoints/best.safetensors").exists()))
        (assert_best if there else assert_none)(path, *([BEST[saved.round]] if there else []))
        keep(setup, 9, saved)
        assert_best(path, 7)
    # Also between the file and its checkpoint: round 1 was the best then.
    assert {(1, True), (1, False), (4, True), (4, False), (9, True)} <= states


def test_it_moves_with_the_run_to_another_folder_of_checkpoints(setup, tmp_path):
    keep(setup, 5)
    output = replace(setup.job.output, checkpoints=str(tmp_path / "elsewhere"))
    moved = replace(setup, job=replace(setup.job, name="moved", output=output))
    path = keep(moved, 6, newest(checkpoints_of(setup.job)))
    file = tmp_path / "elsewhere/moved/best.safetensors"
    assert load_file(file)["w"].item() == 3 and read_summary(path)["best"]["weights"] == str(file)


@pytest.mark.parametrize("damage", ["empty", "bit", "folder", "missing"])
def test_a_damaged_file_is_not_used_and_a_better_round_writes_it_again(setup, damage, caplog):
    path = keep(setup, 5)
    file = path / "checkpoints/best.safetensors"
    content = file.read_bytes()
    file.unlink()
    {
        "empty": file.touch,
        "bit": lambda: file.write_bytes(content[:-1] + bytes([content[-1] ^ 1])),
        "folder": file.mkdir,
        "missing": lambda: None,
    }[damage]()
    keep(setup, 6, newest(checkpoints_of(setup.job)))
    assert (
        "'best.safetensors' is damaged, missing, or of a round after 5: it is not used"
        in caplog.text
    )
    assert "weights" not in read_summary(path)["best"]
    keep(setup, 9, newest(checkpoints_of(setup.job)))
    assert_best(path, 7)


def test_a_new_run_over_it_has_its_own(setup):
    keep(setup)
    assert_best(keep(setup, 2, force=True), 1)


def test_a_run_that_was_extended_has_the_best_of_a_run_that_never_stopped(setup, monkeypatch):
    """The extra evaluations at its old ends are the best of all, and count as long as the run ends
    there.
    """
    monkeypatch.setattr(f"{__name__}.RIGHT", [1, 4, 4, 3, 4, 4, 2, 4, 4, 3])

    def extended(*ends):
        for end in ends:
            training = replace(setup.job.train, num_rounds=end, eval_every=3)
            ending = replace(
                setup,
                job=replace(setup.job, train=training, output=replace(setup.job.output, every=1)),
            )
            saved = newest(checkpoints_of(setup.job)) if end != ends[0] else None
            with Keeper(ending, ThisProcess(ending), saved, force=saved is None) as keeper:
                for number in range(saved.round + 1 if saved else 0, end + 1):
                    round = a_round(number)
                    keeper.round(
                        round if training.evaluates(number) else replace(round, evaluation=None)
                    )
            best = read_summary(keeper.path)["best"]
            assert best["round"] == (3 if end == 9 else end)
            assert load_file(best["weights"])["w"].item() == best["round"]
        rows = [
            (row["round"], row["test_accuracy"])
            for row in read_table(keeper.path, "rounds").to_pylist()
        ]
        return (
            rows,
            read_summary(keeper.path),
            (keeper.path / "checkpoints/best.safetensors").read_bytes(),
        )

    assert extended(5, 9) == extended(4, 5, 7, 9) == extended(9)


def test_the_best_and_the_final_weights_are_those_that_were_evaluated(tmp_path):
    """FedACG sends other weights than it evaluates: each file gives the accuracy of its row, and a
    resumed run too.
    """
    train = {"num_rounds": 3, "clients_per_round": 2, "local_steps": 5, "lr": 0.05, "momentum": 0.9}
    job = {
        "name": "ahead",
        "method": "fedacg",
        "model": "lenet",
        "train": train,
        "ray": {"mode": "off"},
    }
    result = rayfed.run({**job, "output": {"path": str(tmp_path)}})
    setup, best = open_setup(make_job(job)), read_summary(result.path)["best"]
    of_rounds = result.rounds.column("test_accuracy").to_pylist()
    for weights, number in ((result.weights, 3), (load_file(best["weights"]), best["round"])):
        evaluation = evaluate(setup, with_weights(setup.model, weights).eval(), 0, 10_000)
        assert metrics.accuracy(evaluation.confusion) == of_rounds[number]
    again = rayfed.resume(result.path)
    assert all(torch.equal(again.weights[name], w) for name, w in result.weights.items())


def test_a_file_says_what_one_needs_to_use_its_weights_without_rayfed(tmp_path):
    """Images prepared by its metadata alone give the accuracy that the run recorded."""
    train = {"num_rounds": 1, "clients_per_round": 2, "local_steps": 20, "lr": 0.05}
    job = {"name": "plain", "model": "lenet", "train": train, "ray": {"mode": "off"}}
    result = rayfed.run({**job, "output": {"path": str(tmp_path)}})
    model, test = (
        build_model("lenet", image_shape=(1, 28, 28), num_classes=10, seed=9),
        load(Data()).test,
    )
    for name in ("best", "round-00001"):
        path = result.path / f"checkpoints/{name}.safetensors"
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["rayfed"])
        model.load_state_dict(load_file(path))
        mean, deviation = (torch.tensor(about[key]).view(-1, 1, 1) for key in ("mean", "deviation"))
        images = (torch.from_numpy(test.examples) / 255 - mean) / deviation
        with torch.no_grad():
            right = int((model.eval()(images).argmax(1).numpy() == test.labels).sum())
        # In float32.
        assert right / len(test) == pytest.approx(
            result.rounds["test_accuracy"][1].as_py(), abs=0.001
        )
        assert (about["model"]["name"], about["image_shape"], about["round"]) == (
            "lenet",
            [1, 28, 28],
            1,
        )
        assert about["classes"] == [*test.classes]
