"""`rayfed verify`: a good folder passes and stays as it is; whatever is changed in it is named."""

import hashlib
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import rayfed
from rayfed.base.errors import InputError
from rayfed.cli import main
from rayfed.folder.checkpoint import digest_of
from rayfed.report.verify.checks import WITHIN, checks

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("make_record", ROOT / "docs/results/make_record.py")
TOOL = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TOOL)
RECORDS = sorted(file.parent for file in (ROOT / "docs/results").glob("*/job.toml"))


RUNS = {}  # (method, settings) -> the folder of the run, which is made once


@pytest.fixture
def run(tables, tmp_path, tmp_path_factory):
    """Run a job that a method, measures and other settings change; gives its folder, with
    checkpoints of 4 and 5.
    """

    def run(method="scaffold", **changed):
        key = repr((method, changed))
        if key not in RUNS:
            there = {"output.path": str(tmp_path_factory.mktemp("runs"))}
            RUNS[key] = rayfed.run({**tables, "method": method}, changed | there).path
        return shutil.copytree(RUNS[key], tmp_path / "run")

    return run


def faults(path, **how):
    return [fault for *_, wrong in checks(path, **how) for fault in wrong]


def contents(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def change(file, column, number, row=-1):
    """Put another number into a table; gives the number that was there."""
    table = pq.read_table(file)
    values = table[column].to_pylist()
    before, values[row] = values[row], number
    place = table.schema.get_field_index(column)
    pq.write_table(
        table.set_column(place, table.schema.field(column), pa.array(values, table[column].type)),
        file,
    )
    return before


def flip(file, place=-1):
    """Flip the lowest bit of a byte, near the end of a number of a file of tensors."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def seal(path, round):
    """Let a checkpoint name the hashes of its files as they are now: a change that is no
    accident.
    """
    file = path / f"checkpoints/round-{round:05d}.json"
    manifest = json.loads(file.read_text())["checkpoint"]
    for name in manifest["files"]:
        manifest["files"][name] = hashlib.sha256((file.parent / name).read_bytes()).hexdigest()
    file.write_text(json.dumps({"checkpoint": manifest, "sha256": digest_of(manifest)}))


def elsewhere(path):
    """Let a run say that it was made on another processor."""
    file = path / "environment.json"
    environment = json.loads(file.read_text())
    environment["hardware"][0]["maker"] = "another"
    file.write_text(json.dumps(environment))


# What is good
# ------------------------------------------------------------------------------------------


def test_a_runs_folder_passes_and_stays_as_it_is(run):
    path = run()
    before = contents(path)
    done = list(checks(path))
    names = (
        "checkpoints, origin, tables, tables, comparison, round 0, round 4, round 5, round 1, "
        "round 5"
    )
    assert ", ".join(name for name, *_ in done) == names
    assert not any(wrong for *_, wrong in done)
    assert done[4][1] == "bit for bit: hardware and versions are the run's"
    assert contents(path) == before


def test_all_rounds_or_some_clients_of_each_are_played_again(run):
    path = run()
    every = list(checks(path, every=True))
    assert [name for name, what, _ in every if "played again" in what] == [
        f"round {n}" for n in range(1, 6)
    ]
    some = list(checks(path, clients=1))
    assert [name for name, what, _ in some if "trained again" in what] == ["round 1", "round 5"]
    assert not any(wrong for *_, wrong in every + some)


BN = {"model.name": "lenet", "model.batch_norm": True}
MEASURED = {"measure": ["local", "epochs", "drift", "confusion"], "measure_every": 1}


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        (["fedntd", "server_momentum"], MEASURED),
        ("fedbn", BN),
        ({"name": "fedssd", "auxiliary_per_class": 3}, {"train.eval_every": 2}),
        ("fedcsd", {"clients.dropout": 0.3}),
        ([{"until": 4, "method": "fedlmd_tf"}, {"method": "fedlmd"}], {"train.patience": 3}),
        ([{"until": 4, "method": "fedavg"}, {"method": "ccvr"}], {}),
    ],
)
def test_runs_of_many_kinds_pass(run, method, changed):
    path = run(method, **changed)
    assert faults(path, every=True) == faults(path, clients=2) == []


def test_a_run_that_was_resumed_with_other_measures_passes(run):
    path = run(**{"train.num_rounds": 3})
    rayfed.resume(path, {"train.num_rounds": 6, **MEASURED})
    assert faults(path, every=True) == []


@pytest.mark.slow
def test_a_run_on_ray_passes(tables, run_apart):
    ray = {"mode": "on", "actors": 2, "num_cpus": 1}
    done = run_apart({**tables, "method": "fedntd", "ray": ray})
    assert faults(done.path, every=True) == []


# What is wrong
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "column", "words"),
    [
        ("rounds", "test_loss", "round 5, rounds, test_loss"),
        ("clients", "train_loss", r"round 5, clients, client \d, train_loss"),
        ("classes", "predicted", r"round 5, classes, class \w+, predicted"),
    ],
)
def test_a_changed_number_of_a_table_is_named_with_both_values(run, table, column, words):
    path = run()
    before = change(path / f"{table}.parquet/round-00000.parquet", column, 7)
    wrong = faults(path)
    assert re.fullmatch(f"{words}: 7(\\.0)? recorded, {before} in the checkpoint", wrong[0])
    done = CliRunner().invoke(main, ["verify", str(path)])
    assert done.exit_code == 1 and wrong[0] in done.output
    assert (
        f"error: what was recorded is not what its job gives: {len(wrong)} differences"
        in done.output
    )


def test_a_number_that_is_changed_in_the_checkpoint_too_does_not_follow_from_the_others(run):
    path = run()
    files = ["rounds.parquet/round-00000.parquet", "checkpoints/round-00005.rounds.parquet"]
    for column in ("test_accuracy", "test_loss"):
        for file in files:
            before = change(path / file, column, 0.75, row=3 if column == "test_accuracy" else -1)
    seal(path, 5)
    wrong = faults(path)
    assert (
        wrong[0].startswith("round 3, rounds, test_accuracy: 0.75 recorded, 0.")
        and "by the classes" in wrong[0]
    )
    assert wrong[-2:] == [
        f"round 5, rounds, test_loss: 0.75 recorded, {before} ({words})"
        for words in ("weights evaluated again", "played again")
    ]


def test_a_flipped_bit_of_a_weight_is_caught_and_by_playing_also_where_the_hashes_are_new(run):
    path = run()
    flip(path / "checkpoints/round-00005.safetensors")
    assert faults(path) == [
        "the checkpoint of round 5: 'round-00005.safetensors' is not as it was written"
    ]
    seal(path, 5)
    assert "round 5, checkpoint, weights.head.weight: other bits (played again)" in faults(path)


@pytest.mark.parametrize("file", ["best.safetensors"])
def test_damaged_best_weights_and_a_damaged_copy_of_a_memory_are_named(run, file):
    path = run()
    flip(path / "checkpoints" / file)
    (wrong,) = faults(path)
    assert wrong.startswith(f"'{file}'") and wrong.endswith("not as it was written")


def again(rows, **changed):
    return [*rows, rows[-1] | changed]


@pytest.mark.parametrize(
    ("table", "rows", "words"),
    [
        ("clients", again, "{row}: 2 rows"),
        ("classes", lambda rows: again(rows, seen=999), "{row}: 2 rows"),
        (
            "clients",
            lambda rows: again(rows, round=99),
            "{row}: a row of a round that is not in rounds",
        ),
        (
            "clients",
            lambda rows: again(rows, client=99),
            "{row}, train_loss: {loss} recorded, nothing in the checkpoint",
        ),
    ],
)
def test_a_row_too_many_is_named(run, table, rows, words):
    path = run()
    file = path / f"{table}.parquet/round-00000.parquet"
    before = pq.read_table(file)
    changed = rows(before.to_pylist())
    pq.write_table(pa.Table.from_pylist(changed, before.schema), file)
    kind = "client" if table == "clients" else "class"
    row = f"round {changed[-1]['round']}, {table}, {kind} {changed[-1][kind]}"
    assert words.format(row=row, loss=changed[-1].get("train_loss")) in faults(path)


def test_a_row_that_is_lost_is_named_also_where_no_checkpoint_has_it(run):
    path = run()
    shutil.rmtree(path / "checkpoints")
    (path / "summary.json").write_text(
        json.dumps({**json.loads((path / "summary.json").read_text()), "status": "failed"})
    )
    file = path / "clients.parquet/round-00000.parquet"
    table = pq.read_table(file)
    client = table["client"][0].as_py()
    pq.write_table(table.slice(1), file)
    assert f"round 1, clients, client {client}, num_examples: nothing recorded" in faults(path)[0]


@pytest.mark.parametrize("harm", ["count", "images", "gone"])
def test_another_table_of_the_partition_is_named(run, harm):
    path = run()
    file = path / "partition.parquet"
    rows = pq.read_table(file).to_pylist()
    if harm == "count":
        rows[0]["count"] += 1
    elif harm == "images":
        rows[0]["images"][0] += 1
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(file)), file)
    if harm == "gone":
        file.unlink()
    assert faults(path) == [
        "partition.parquet is missing, or has other clients, counts or images than the job deals"
    ]


def edit(path, **changed):
    """Change values of a run's job.toml, by their lines, and the job's hash with them."""
    text = (path / "job.toml").read_text()
    for key, value in changed.items():
        text, count = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", text, count=1)
        assert count == 1
    (path / "job.toml").write_text(text)
    file = path / "environment.json"
    file.write_text(
        json.dumps(
            json.loads(file.read_text()) | {"job": rayfed.read_job(path / "job.toml").hash()}
        )
    )


def test_a_job_that_was_changed_with_its_hash_is_not_that_of_the_checkpoints(run):
    path = run()
    before = rayfed.read_job(path / "job.toml").train.lr
    edit(path, lr=0.0302)
    assert faults(path) == [
        f"train.lr is {before} in the checkpoint of round {number}, 0.0302 in job.toml"
        for number in (4, 5)
    ]
    edit(path, lr=before, num_rounds=6)
    assert faults(path) == ["status is done in summary.json, with 5 of 6 rounds in the tables"]


def test_a_record_whose_hash_still_has_the_paths_is_known(run):
    path = run()
    file = path / "environment.json"
    job = rayfed.read_job(path / "job.toml")
    own = json.loads(file.read_text())
    assert own["job"] == job.hash()
    file.write_text(json.dumps(own | {"job": job.hash(with_paths=True)}))
    assert faults(path) == []


def test_data_that_were_others_before_a_resume_are_named(run):
    path = run()
    file = path / "environment.json"
    own = json.loads(file.read_text())
    file.write_text(json.dumps(own | {"data": "0" * 64, "resumed": [own | {"after_round": 1}]}))
    assert faults(path) == [
        f"the hash of data is {'0' * 64} in environment.json, {own['data']} here"
    ]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("environment.json", {"hardware": None}, "see hardware in it"),
        ("environment.json", {"resumed": ["x"]}, "see resumed.0 in it"),
        ("environment.json", {"checkpoints": ["x"]}, "see checkpoints.0 in it"),
        ("summary.json", {"best": None}, "see best in it"),
        ("summary.json", {"rounds": [3]}, "see rounds in it"),
    ],
)
def test_a_file_that_is_not_as_a_run_writes_it_ends_with_code_1(run, file, content, words):
    path = run() / file
    path.write_text(json.dumps(json.loads(path.read_text()) | content))
    done = CliRunner().invoke(main, ["verify", str(path.parent)])
    assert (
        done.exit_code == 1
        and f"error: '{path}' is missing, or not as a run writes it: {words}" in done.output
    )


def test_of_several_runs_each_is_checked_or_named(run, tmp_path):
    path = run()
    for name in ("changed", "lost", "odd"):
        shutil.copytree(path, tmp_path / "runs" / name)
    assert (
        CliRunner()
        .invoke(main, ["verify", str(path), str(tmp_path / "runs/lost")])
        .output.endswith("\n2 runs: all that was checked agrees with the record\n")
    )
    change(tmp_path / "runs/changed/rounds.parquet/round-00000.parquet", "test_loss", 7)
    (tmp_path / "runs/lost/job.toml").unlink()
    (tmp_path / "runs/odd/job.toml").write_text("no job")
    done = CliRunner().invoke(main, ["verify", str(tmp_path / "runs")])
    assert done.exit_code == 1 and done.output.count("  not checked") == 2
    assert "lost' is neither the folder of a run nor a record of one" in done.output
    assert "differences, as listed; 2 of 3 runs could not be checked" in done.output
    shutil.rmtree(tmp_path / "runs/changed")
    assert CliRunner().invoke(main, ["verify", str(tmp_path / "runs")]).exit_code == 2


@pytest.mark.parametrize(
    "name", ["round-00004.json", "round-00005.json", "round-00005.state.safetensors"]
)
def test_a_missing_checkpoint_is_named(run, name):
    path = run()
    (path / "checkpoints" / name).unlink()
    assert f"the checkpoint of round {name[10]}: '{name}' is missing" in faults(path)


def test_a_run_or_a_record_without_any_checkpoint_lacks_those_that_it_had(run, tmp_path):
    path = run()
    TOOL.make_record(path, tmp_path / "record")
    for folder in (path, tmp_path / "record"):
        shutil.rmtree(folder / "checkpoints")
    last = "the checkpoint of round 5: 'round-00005.json' is missing"
    assert faults(path) == [last]
    assert faults(tmp_path / "record") == [
        "the checkpoint of round 4: 'round-00004.json' is missing",
        last,
    ]


def test_other_data_and_another_hash_are_named(tables, tmp_path):
    path = rayfed.run(tables).path
    file = path / "environment.json"
    own = json.loads(file.read_text())
    for key in ("data", "partition", "job"):
        file.write_text(json.dumps(own | {key: "0" * 64}))
        assert faults(path) == [
            f"the hash of {key} is {'0' * 64} in environment.json, {own[key]} here"
        ]
    file.write_text(json.dumps(own))
    flip_pixel(tmp_path / "data/test.parquet")
    assert [fault.split()[3] for fault in faults(path)] == ["data"] * 3
    done = CliRunner().invoke(main, ["verify", str(path)])
    assert done.exit_code == 1 and "  origin      DIFFERS" in done.output


def flip_pixel(file):
    table = pq.read_table(file)
    images = table["image"].to_pylist()
    images[0][0] ^= 1
    pq.write_table(
        table.set_column(0, table.schema.field("image"), pa.array(images, table["image"].type)),
        file,
    )


def test_a_summary_that_is_not_that_of_the_tables_is_named(run):
    path = run()
    summary = json.loads((path / "summary.json").read_text())
    before, summary["best"]["test_accuracy"] = summary["best"]["test_accuracy"], 0.99
    (path / "summary.json").write_text(json.dumps(summary))
    assert faults(path) == [f"best.test_accuracy is 0.99 in summary.json, {before} in the tables"]


def test_a_table_that_cannot_be_read_ends_with_code_1(run):
    path = run()
    (path / "rounds.parquet/round-00000.parquet").write_bytes(b"no table")
    done = CliRunner().invoke(main, ["verify", str(path)])
    assert done.exit_code == 1 and f"error: the tables in '{path}' cannot be read" in done.output


def test_what_is_no_run_is_bad_input(tmp_path):
    with pytest.raises(InputError, match="is neither the folder of a run nor a record of one"):
        faults(tmp_path)
    assert CliRunner().invoke(main, ["verify", str(tmp_path)]).exit_code == 2


# Other hardware, and records
# ------------------------------------------------------------------------------------------


def test_on_other_hardware_numbers_may_differ_by_a_little(run):
    path = run()
    elsewhere(path)
    files = [
        path / "rounds.parquet/round-00000.parquet",
        path / "checkpoints/round-00005.rounds.parquet",
    ]
    before = change(files[0], "test_loss", 0)
    size = max(before, 1.0)
    for apart, wrong in ((0.0195, 0), (0.0205, 2)):
        for file in files:
            change(file, "test_loss", before - apart * size)
        seal(path, 5)
        done = list(checks(path, every=True))
        mismatch = [fault for *_, found in done for fault in found if "summary" not in fault]
        assert len(mismatch) == wrong
        assert "maker is another there" in done[4][1] and done[4][1].startswith(
            f"within {WITHIN:g}, "
        )
        assert [name for name, what, _ in done if "played again" in what] == ["round 1", "round 5"]


def test_a_record_is_small_has_no_place_of_this_machine_and_passes(tables, tmp_path):
    path = rayfed.run(tables).path
    size = TOOL.make_record(path, tmp_path / "record")
    files = contents(tmp_path / "record")
    assert size == sum(map(len, files.values())) and not any(
        file.name == "best.safetensors" for file in files
    )
    assert not any(str(path).encode() in content for content in files.values())
    assert [*checks(tmp_path / "record")] == [*checks(path)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_our_records_pass(record):
    """With the tolerance for other hardware where this is other hardware than theirs: `make
    test-other-cpus`.
    """
    done = list(checks(record))
    assert [(name, wrong) for name, _, wrong in done if wrong] == []
    assert [what for _, what, _ in done if "played again" in what]
    assert sum(map(len, contents(record).values())) < 500_000


def test_the_page_has_a_row_for_each_record():
    rows = re.findall(
        r"^\| `(\S+)` \|.*\d \|$", (ROOT / "docs/verify.md").read_text(), re.MULTILINE
    )
    assert sorted(rows) == [record.name for record in RECORDS]


def test_a_changed_number_of_a_record_is_caught_on_any_hardware(tmp_path):
    shutil.copytree(RECORDS[0], tmp_path / "record")
    before = change(tmp_path / "record/rounds.parquet/round-00000.parquet", "train_loss", 0.625)
    assert (
        f"train_loss: 0.625 recorded, {before} in the checkpoint" in faults(tmp_path / "record")[0]
    )
