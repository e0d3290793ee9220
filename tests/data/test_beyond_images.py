"""Tokens, text and vectors of features: read, cut, padded, standardised, trained on; or refused
with the place.
"""

import re
import subprocess
import sys
import tomllib
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
import torch
from click.testing import CliRunner

from rayfed.base.errors import InputError
from rayfed.cli import main
from rayfed.data.federation import federate, open_federation
from rayfed.data.inputs import Tokens, Vectors
from rayfed.data.partition import Iid
from rayfed.data.settings import Data
from rayfed.data.sources import load
from rayfed.job import read_job
from rayfed.methods import RECIPES
from rayfed.models.classifier import has_features
from rayfed.models.registry import MODELS, build_model
from rayfed.rounds.engine import rounds
from rayfed.rounds.setup import open_setup
from rayfed.runtime.this_process import ThisProcess

CPU = torch.device("cpu")
DATA_GUIDE = Path(__file__).parents[2] / "docs/data.md"
# Classes, and words of the vocabulary beside the padding.
TOPICS, WORDS = 4, 40


@pytest.fixture
def folder(tmp_path):
    """Writes train.parquet and test.parquet into a folder."""

    def write(train, test=None):
        for name, columns in {"train": train, "test": test or train}.items():
            pq.write_table(
                columns if isinstance(columns, pa.Table) else pa.table(columns),
                tmp_path / f"{name}.parquet",
            )
        return str(tmp_path)

    return write


def topics(count, seed):
    """Lists of 3 to 12 tokens; a topic's own ten words are ten times as likely as the others."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, TOPICS, count)
    likely = np.where(np.arange(WORDS) // 10 == np.arange(TOPICS)[:, None], 10.0, 1.0)
    likely /= likely.sum(axis=1, keepdims=True)
    lists = [1 + rng.choice(WORDS, rng.integers(3, 13), p=likely[label]) for label in labels]
    return {"tokens": [each.tolist() for each in lists], "label": labels}


def people(count, seed):
    """A table whose label is whether a weighted sum of its columns, of very different units, is
    above its mean.
    """
    rng = np.random.default_rng(seed)
    age, income, scan = (
        rng.normal(40, 10, count),
        rng.normal(3e4, 1e4, count),
        rng.normal(0, 1e-3, (count, 2)),
    )
    score = (age - 40) / 10 + (income - 3e4) / 1e4 + scan @ [1e3, -1e3]
    columns = {
        "age": age,
        "income": income,
        "scan": [row.tolist() for row in scan.astype(np.float32)],
    }
    return {**columns, "label": ["above" if value > 0 else "below" for value in score]}


def job(source, method="fedavg", **data):
    model = {"name": "mlp" if "features" in data else "text"}
    if method == "fedwsq":
        model |= {"weight_standardisation": 0.1}
        method = {"name": "fedwsq", "ends": True}
    partition = {"name": "dirichlet", "alpha": 1.0, "num_clients": 5, "min_size": 3}
    train = {"num_rounds": 1, "clients_per_round": 3, "batch_size": 10, "lr": 0.5}
    tables = {"name": "beyond", "method": method, "model": model, "train": train}
    return read_job({**tables, "data": {"source": source, "partition": partition, **data}})


def of_topics(folder, method="fedavg", count=200):
    return job(folder(topics(count, 0), topics(100, 1)), method, tokens="tokens")


def of_people(folder, method="fedavg", count=200):
    return job(folder(people(count, 0), people(100, 1)), method, features=["age", "income", "scan"])


def inputs_of(data, rows=None):
    """What a model gets of the training set."""
    federation = federate(load(data), Iid(1))
    rows = np.arange(len(federation.train)) if rows is None else rows
    return torch.cat([inputs for inputs, _ in federation.batches(federation.train, rows, CPU)])


# --- what a model gets


def test_lists_are_cut_and_padded(folder):
    train = {"ids": [[5, 1, 2], [7], [], [3, 4]], "label": [0, 1, 0, 1]}
    source = folder(train, {"ids": [[1, 2, 3, 4]], "label": [0]})
    whole, cut = (
        load(Data(source, tokens="ids")),
        load(Data(source, tokens="ids", length=2, vocabulary=50)),
    )
    assert whole.train.examples.tolist() == [[5, 1, 2], [7, 0, 0], [0, 0, 0], [3, 4, 0]]
    # The training set's length.
    assert whole.test.examples.tolist() == [[1, 2, 3]]
    assert cut.train.examples.tolist() == [[5, 1], [7, 0], [0, 0], [3, 4]]
    kinds = [federate(dataset, Iid(1)).inputs for dataset in (whole, cut)]
    assert kinds == [Tokens(3, vocabulary=8), Tokens(2, vocabulary=50)]
    assert (whole.test.vocabulary, cut.test.vocabulary) == (8, 50)
    batch = inputs_of(Data(source, tokens="ids"), np.array([3, 1]))
    assert batch.dtype == torch.int64 and batch.tolist() == [[3, 4, 0], [7, 0, 0]]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int8()), pa.large_list(pa.uint32()), pa.list_(pa.int64(), 2)]
)
def test_lists_of_any_type_and_in_any_number_of_row_groups_are_the_same(folder, kind, tmp_path):
    table = pa.table({"ids": pa.array([[1, 2], [3, 4], [5, 6]], kind), "label": [0, 1, 0]})
    source = folder(table)
    pq.write_table(table, tmp_path / "train.parquet", row_group_size=1)
    assert load(Data(source, tokens="ids")).train.examples.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_words_are_hashed_to_the_same_numbers_in_every_process(folder):
    source = folder({"text": ["The goal, the GOAL!", "naïve Bär 2x", ""], "label": [0, 1, 0]})
    data = Data(source, text="text", vocabulary=1000)
    the, goal, *others = (
        zlib.crc32(word.encode()) % 999 + 1 for word in ("the", "goal", "naïve", "bär", "2x")
    )
    assert load(data).train.examples.tolist() == [[the, goal, the, goal], [*others, 0], [0] * 4]
    names = "from rayfed.data.settings import *; from rayfed.data.sources import load"
    script = f"{names}; print(load({data!r}).train.examples.tolist())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(load(data).train.examples.tolist())


def test_vectors_are_standardised_by_the_training_set(folder):
    train = {
        "age": [20, 40, 60],
        "scan": [[1.0, 5.0], [2.0, 5.0], [6.0, 5.0]],
        "smokes": [True, False, False],
    }
    source = folder(
        {**train, "label": [0, 1, 1]},
        {"age": [50], "scan": [[3.0, 6.0]], "smokes": [True], "label": [1]},
    )
    federation = federate(load(Data(source, features=["age", "scan", "smokes"])), Iid(1))
    raw = np.array([[20, 1, 5, 1], [40, 2, 5, 0], [60, 6, 5, 0]])
    # A constant feature is only centred.
    deviation = np.array([raw[:, 0].std(), raw[:, 1].std(), 1.0, raw[:, 3].std()])
    np.testing.assert_allclose(federation.std, deviation, rtol=1e-15)
    for samples, expected in (
        (federation.train, raw),
        (federation.test, np.array([[50, 3, 6, 1]])),
    ):
        ((batch, _),) = federation.batches(samples, np.arange(len(samples)), CPU)
        assert batch.dtype == torch.float32
        np.testing.assert_allclose(
            batch.numpy(), (expected - raw.mean(axis=0)) / deviation, rtol=1e-6
        )
    assert federation.inputs == Vectors(4)


def test_large_numbers_with_small_differences_keep_them(folder):
    """float32 has steps of 128 at the number of a date in seconds."""
    seconds = 1.7e9 + np.arange(4)
    found = inputs_of(Data(folder({"at": seconds, "label": [0, 1, 0, 1]}), features=["at"]))
    np.testing.assert_allclose(found[:, 0], (np.arange(4) - 1.5) / np.arange(4).std(), rtol=1e-6)


def test_constant_features_are_zero_however_their_mean_is_rounded(folder):
    assert not inputs_of(
        Data(folder({"x": [0.1] * 3001, "label": [0] * 3001}), features=["x"])
    ).any()


def test_float32_stays_float32(folder):
    data = load(
        Data(
            folder({"x": np.float32([1, 2]), "n": np.int16([1, 2]), "label": [0, 1]}),
            features=["x", "n"],
        )
    )
    assert data.train.examples.dtype == np.float32


@pytest.mark.parametrize("changed", [{"tokens": [[1, 2], [1, 3]]}, {"label": [1, 1]}])
def test_the_hash_covers_tokens_and_labels(folder, changed):
    table = {"tokens": [[1, 2], [3, 1]], "label": [0, 1]}
    first = federate(load(Data(folder(table), tokens="tokens")), Iid(1)).hash()
    assert (
        federate(load(Data(folder({**table, **changed}, table), tokens="tokens")), Iid(1)).hash()
        != first
    )


def test_clients_domains_and_class_names_are_as_with_images(folder):
    table = {
        "text": ["a b", "c", "d e f", "a"],
        "label": ["x", "y", "x", "y"],
        "who": ["m", "n", "n", "m"],
    }
    partition = {"name": "natural", "column": "who"}
    text = job(folder(table), text="text", vocabulary=20, domain="who", partition=partition)
    federation = open_federation(text.data)
    assert [federation.client(i).tolist() for i in range(2)] == [[0, 3], [1, 2]]
    assert federation.client_names == ("m", "n")
    assert federation.train.classes == ("x", "y") and federation.test.domain_names == ("m", "n")


@pytest.mark.parametrize("labels", [["x"] * 40, [2] * 40])
def test_nothing_is_learnt_from_a_single_class(folder, tmp_path, labels):
    tables = job(
        folder({"text": ["a b", "c"] * 20, "label": labels}), text="text", vocabulary=20
    ).table()
    with pytest.raises(
        InputError,
        match=f"all labels are '{labels[0]}', and with a single class there is nothing to",
    ):
        open_setup(read_job(tables))
    (tmp_path / "job.toml").write_text(tomli_w.dumps(tables))
    done = CliRunner().invoke(main, ["data", str(tmp_path / "job.toml")])
    assert (
        f"all labels are '{labels[0]}', and with a single class there is nothing to learn"
        in done.output
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            of_topics,
            ["examples   200 + 100 of 12 tokens, vocabulary 41", "classes    4: 0, 1, 2, 3"],
        ),
        (
            of_people,
            [
                "examples   200 + 100 of 4 features",
                "mean       40",
                "deviation  9",
                "2: above, below",
            ],
        ),
    ],
)
def test_the_command_describes_them(folder, tmp_path, make, said):
    (tmp_path / "job.toml").write_text(tomli_w.dumps(make(folder).table()))
    done = CliRunner().invoke(main, ["data", str(tmp_path / "job.toml")])
    assert all(line in done.output for line in said), done.output
    assert ("mean" in done.output) == (make is of_people)


# --- training


@pytest.mark.parametrize("make", [of_topics, of_people])
def test_a_run_learns_and_has_the_same_bits_twice(folder, make, bits):
    setup = open_setup(read_job(make(folder, count=600).table(), {"train.num_rounds": 8}))
    played = list(rounds(setup, ThisProcess(setup)))
    assert played[-1].test_accuracy > max(0.85, played[0].test_accuracy + 0.25)
    assert bits(played[-1]) == bits([*rounds(setup, ThisProcess(setup))][-1])


@pytest.mark.parametrize("make", [of_topics, of_people])
# No client changes the last two.
@pytest.mark.parametrize("name", sorted({*RECIPES} - {"fedbn", "ccvr", "local"}))
def test_every_method_trains_on_them(folder, name, make):
    if (name, make) == ("fedreg", of_topics):
        with pytest.raises(
            InputError, match="along a gradient, and those of this model are token numbers"
        ):
            open_setup(make(folder, name))
        return
    setup = open_setup(make(folder, name, count=400))
    *_, last = rounds(setup, ThisProcess(setup))
    assert all(np.isfinite(row.train_loss) for row in last.clients)
    assert any(
        not torch.equal(tensor, setup.model.state_dict()[key])
        for key, tensor in last.weights.items()
    )


def test_fedalign_takes_a_stage_that_begins_after_the_embedding(folder):
    tables = of_topics(folder, "fedalign").table() | {
        "model": {"name": "text", "embedding": 16, "hidden": 16}
    }
    *_, last = rounds(setup := open_setup(read_job(tables)), ThisProcess(setup))
    assert all(np.isfinite(row.train_loss) for row in last.clients)


def test_the_guides_text_and_job_learn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = DATA_GUIDE.read_text().partition("## Text, tokens and tables")[2]
    exec(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1], {})
    setup = open_setup(
        read_job(tomllib.loads(re.search(r"```toml\n(.*?)```", section, re.DOTALL)[1]))
    )
    assert [round.test_accuracy > 0.9 for round in rounds(setup, ThisProcess(setup))][-1]


def test_padding_changes_no_output():
    model = build_model("text", length=5, vocabulary=9, num_classes=3, seed=0).eval()
    short = torch.tensor([[4, 8], [1, 0], [0, 0]])
    long = torch.nn.functional.pad(short, (0, 3))
    torch.testing.assert_close(model(long), model(short))
    mean = model.features[0].embedding.weight[[4, 8]].mean(dim=0)
    torch.testing.assert_close(
        model.features[0](long),
        torch.stack([mean, model.features[0].embedding.weight[1], 0 * mean]),
    )


def test_every_key_of_tokens_is_in_the_lineage():
    plain = {"source": "x.parquet", "tokens": "a"}
    changes = [
        {},
        {"tokens": "b"},
        {"length": 3},
        {"vocabulary": 9},
        {"tokens": "", "text": "a", "vocabulary": 9},
    ]
    changes += [{"tokens": "", "features": ["a"]}, {"tokens": "", "features": ["b"]}]
    hashes = Counter(
        read_job({"name": "n", "data": {**plain, **change}}).hash() for change in changes
    )
    assert len(hashes) == len(changes)


# --- bad input

TOKENS = {
    "ids": [[1, 2], [3]],
    "text": ["a", "b"],
    "age": [20.0, 30.0],
    "income": [1, 2],
    "label": [0, 1],
}


def with_column(**columns):
    return {**TOKENS, **columns}


@pytest.mark.parametrize(
    ("columns", "data", "message"),
    [
        (
            {},
            {"tokens": "idz"},
            r"no column 'idz'; it has .*\(data.tokens, .*\); did you mean 'ids'\?$",
        ),
        (
            {},
            {"tokens": "text"},
            r"row 0: column 'text' is of type string; tokens are lists of whole numbers$",
        ),
        (
            {"ids": [[1.5], [2.0]]},
            {"tokens": "ids"},
            "row 0: column 'ids' is of type list<.*double>; tokens are lists",
        ),
        ({"ids": [[1], None]}, {"tokens": "ids"}, "train.parquet, row 1: no value in column 'ids'"),
        (
            {"ids": [[1], [2, None]]},
            {"tokens": "ids"},
            "train.parquet, row 1: no value in column 'ids'",
        ),
        (
            {"ids": [[1], [2, -3]]},
            {"tokens": "ids"},
            "row 1: token -3 in column 'ids'; tokens are from 0 to 2",
        ),
        (
            {},
            {"tokens": "ids", "vocabulary": 3},
            r"row 1: token 3 .* 0 to 2 \(data.vocabulary\)$",
        ),
        (
            {},
            {"text": "age", "vocabulary": 9},
            "row 0: column 'age' is of type double; data.text names a column of text",
        ),
        (
            {},
            {"features": ["age", "text"]},
            "row 0: column 'text' is of type string; features are numbers.*0 and 1$",
        ),
        (
            {"age": [1.0, float("nan")]},
            {"features": ["age"]},
            "train.parquet, row 1: nan in column 'age'; put a number",
        ),
        (
            {"age": [[1.0], [1.0, 2.0]]},
            {"features": ["age"]},
            "row 1: a list of 2 numbers in column 'age', .* has 1; all",
        ),
    ],
)
def test_a_column_that_cannot_be_read_is_refused(folder, columns, data, message):
    with pytest.raises(InputError, match=message):
        load(Data(folder(with_column(**columns)), **data))


def test_a_test_set_that_does_not_fit_is_refused(folder):
    source = folder(TOKENS, with_column(ids=[[1], [9]]))
    with pytest.raises(
        InputError, match=r"test.parquet, row 1: token 9 .*0 to 3 \(the training .*1\)$"
    ):
        load(Data(source, tokens="ids"))
    source = folder(TOKENS, {"ids": [[1]], "label": [0]})
    with pytest.raises(InputError, match=r"test.parquet: no column 'age'; it has ids, label"):
        load(Data(source, features=["age"]))
    source = folder(with_column(age=[[1.0], [2.0]]), with_column(age=[[1.0, 3.0], [2.0, 3.0]]))
    with pytest.raises(
        InputError, match="training and test set disagree in number of features: 1 and 2"
    ):
        load(Data(source, features=["age"]))


def test_image_files_are_no_tokens(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").touch()
    with pytest.raises(
        InputError, match=r"data.tokens names columns of Parquet files, and '.*1.png' is an image"
    ):
        load(Data(str(tmp_path), tokens="a"))


@pytest.mark.parametrize("inputs", [Tokens(6, 30), Vectors(5)])
def test_their_models_give_features_and_gradients(inputs):
    model = build_model(
        "text" if isinstance(inputs, Tokens) else "mlp",
        {"project": 7},
        **inputs._asdict(),
        num_classes=3,
        seed=0,
    )
    assert has_features(model) and model.features(inputs.some(2)).shape == (2, 7)
    model(inputs.some(2)).square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.any() for parameter in model.parameters()
    )
    assert "text" in MODELS and "mlp" in MODELS
