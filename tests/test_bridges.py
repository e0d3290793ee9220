"""The examples of docs/bridges.md run on a small run, and what they leave is right.

A section whose library is not installed is skipped: no extra of rayfed has these libraries.
"""

import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import rayfed
from rayfed import read_job
from rayfed.rounds.setup import open_setup
from tests.test_docs import DOCS, FEW, run_few, snippets_in

PAGE = DOCS / "bridges.md"
RUN = Path("runs/quickstart")
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", PAGE.read_text(), re.MULTILINE))


def blocks(section, language="python"):
    return [code for _, code in snippets_in(SECTIONS[section], language)]


def played(code):
    """The names that an example has defined when it ends."""
    space = {}
    exec(code, space)
    return space


def needs_library(*names):
    """Skip the test if a library of its section is missing."""
    for name in names:
        pytest.importorskip(name, reason=f"{name} is not installed; docs/bridges.md names it")


@pytest.fixture(scope="module")
def around(tmp_path_factory):
    """A folder with the run that all sections use."""
    folder = tmp_path_factory.mktemp("bridges")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_few(patch)("quickstart")
    return folder


@pytest.fixture
def run(around, monkeypatch):
    """`rayfed.run` with few rounds, in that folder."""
    monkeypatch.chdir(around)
    return run_few(monkeypatch)


@pytest.fixture
def last(run):
    """The row of the last round."""
    return pq.read_table(RUN / "rounds.parquet").to_pylist()[-1]


def final_weights():
    return load_file(RUN / f"checkpoints/round-{FEW['train.num_rounds']:05d}.safetensors")


def test_each_section_with_python_has_its_test_here():
    assert {section: len(blocks(section)) for section in SECTIONS if blocks(section)} == {
        "pandas and polars": 2,
        "flwr-datasets": 1,
        "The Hugging Face hub": 2,
        "Export to ONNX": 1,
        "Optuna": 1,
    }


@pytest.mark.slow
def test_pandas_joins_clients_with_their_rounds(last):
    needs_library("pandas")
    left = played(blocks("pandas and polars")[0])
    joined, by_client = left["joined"], left["by_client"]
    assert len(joined) == FEW["train.num_rounds"] * FEW["train.clients_per_round"]
    losses = {row["round"]: row["train_loss"] for row in left["rounds"].to_dict("records")}
    assert joined["train_loss_of_round"].tolist() == [losses[round] for round in joined["round"]]
    assert by_client["count"].sum() == len(joined)
    weighted = joined["excess"] * joined["num_examples"]
    assert weighted.groupby(joined["round"]).sum().abs().max() < 1e-9, "the mean is by images"


@pytest.mark.slow
def test_polars_finds_the_forgetting_that_the_run_has_recorded(last):
    needs_library("polars")
    left = played(blocks("pandas and polars")[1])
    rounds = pq.read_table(RUN / "rounds.parquet").to_pylist()[1:]
    assert left["by_round"]["round"].to_list() == [row["round"] for row in rounds]
    recorded = [row["forgetting"] for row in rounds]
    assert recorded[0] is None and recorded[-1] == last["forgetting"] != 0
    assert left["by_round"]["forgotten"].to_list() == [None, *map(pytest.approx, recorded[1:])]
    assert len(left["last"]) == 10


@pytest.mark.slow
def test_a_run_has_the_clients_of_a_flower_partitioner(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    needs_library("datasets", "flwr_datasets")
    (example,), (job,) = blocks("flwr-datasets"), blocks("flwr-datasets", "toml")
    partitioner = played(example)["partitioner"]
    result = run(tomllib.loads(job))
    held = {}
    for row in pq.read_table(result.path / "partition.parquet").to_pylist():
        held.setdefault(row["client"], []).extend(row["images"])
    theirs = [partitioner.load_partition(i) for i in range(partitioner.num_partitions)]
    assert {client: sorted(images) for client, images in held.items()} == {
        client: sorted(of_client["row"]) for client, of_client in enumerate(theirs)
    }
    federation = open_setup(read_job(result.path / "job.toml")).federation
    counts = [np.bincount(of_client["label"], minlength=10).tolist() for of_client in theirs]
    assert [federation.label_counts(i).tolist() for i in range(len(theirs))] == counts


@pytest.mark.slow
def test_the_folder_for_the_hub_has_the_final_weights_and_a_card_and_is_what_is_uploaded(
    last, monkeypatch
):
    hub = pytest.importorskip("huggingface_hub", reason="pip install -e '.[hf]' installs it")
    write, upload = blocks("The Hugging Face hub")
    folder = played(write)["folder"]
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "job.toml",
        "model.safetensors",
    }
    saved, weights = load_file(folder / "model.safetensors"), final_weights()
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weights[name]) for name in weights)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["rayfed"])["round"] == last["round"]
    card = hub.ModelCard.load(folder / "README.md")
    (result,) = card.data.eval_results
    assert result.metric_value == last["test_accuracy"] and "nan" not in card.text
    assert (folder / "job.toml").read_text() in card.text

    uploaded = []

    class Api:
        def create_repo(self, repo_id, **how):
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, *, repo_id, folder_path):
            uploaded.append((repo_id, Path(folder_path)))

    monkeypatch.setattr(hub, "HfApi", Api)
    exec(upload, {})
    assert uploaded == [("YOUR-NAME/quickstart", folder)]


@pytest.mark.slow
def test_onnx_has_the_outputs_of_torch_and_the_accuracy_of_the_run(last):
    needs_library("onnx", "onnxscript", "onnxruntime")
    (example,) = blocks("Export to ONNX")
    left = played(example)
    assert left["logits"].shape == (2000, 10) and left["logits"].std() > 0
    np.testing.assert_allclose(left["logits"], left["expected"], rtol=1e-4, atol=1e-5)
    accuracy = (left["logits"].argmax(axis=1) == left["data"].test.labels).mean()
    assert accuracy == pytest.approx(last["test_accuracy"], abs=0.002)
    assert not Path("quickstart.onnx.data").exists()


@pytest.mark.slow
def test_a_search_by_optuna_is_continued_with_the_values_of_one_without_a_stop(
    run, tmp_path, monkeypatch
):
    needs_library("optuna")
    (example,) = blocks("Optuna")
    names = []

    def stopped_in_the_third(job, overrides, **more):
        names.append(overrides["name"])
        if len(names) == 3:
            raise KeyboardInterrupt
        return run(job, overrides, **more)

    monkeypatch.setattr(rayfed, "run", stopped_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        exec(example, {})
    left = played(example)
    trials = [f"optuna/trial-{number}" for number in range(8)]
    assert names == [*trials[:3], *trials[2:], "optuna-winner"], "the third goes on, no other twice"

    study = left["study"]
    results = {}
    for trial in study.trials:
        folder = Path("runs") / trials[trial.number]
        job = read_job(folder / "job.toml")
        assert job.train.lr == trial.params["train.lr"] and job.data.test_fraction == 0.1
        rounds = pq.read_table(folder / "rounds.parquet")
        assert trial.value == rounds["test_accuracy"].to_pylist()[-1]
        results[tuple(trial.params.items())] = rayfed.Result(folder, rounds, {})
    assert len(results) == 8 and study.best_value == max(trial.value for trial in study.trials)
    winner = read_job("runs/optuna-winner/job.toml")
    assert winner.train.lr == study.best_params["train.lr"] and not winner.data.test_fraction

    def recorded(job, overrides, **more):
        values = {key: overrides[key] for key in left["space"] if key in overrides}
        return results[tuple(values.items())]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rayfed, "run", recorded)
    again = played(example)["study"]
    assert [trial.params for trial in again.trials] == [trial.params for trial in study.trials]
