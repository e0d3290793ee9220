"""The tables of a run as Parquet: the partition, and rounds, clients, classes, confusions, where
each round adds rows.

    rounds.parquet/round-00000.parquet  the rows of the rounds from 0 on
    rounds.parquet/round-08192.parquet  and from 8192 on: a file that has `ROWS` rows is not touched
                                        again

A round's rows are added by putting a longer file in the place of the last file. So thousands of
rounds are one file, and each row is in one file at any moment: no reader finds it twice or misses
it, and nothing has to be merged.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayfed.base.files import whole

# These bring torch, which a reader of tables does not need.
if TYPE_CHECKING:
    from rayfed.clients.settings import Training
    from rayfed.data.federation import Federation
    from rayfed.rounds.own import OwnRow
    from rayfed.rounds.round import Round
    from rayfed.rounds.setup import Setup

Columns = dict[str, np.ndarray]
INT, FLOAT, TEXT, NOTES = pa.int64(), pa.float64(), pa.string(), pa.map_(pa.string(), pa.float64())
EVALUATED = ("test_accuracy", "test_loss", "forgetting", "macro_f1", "calibration_error")
FIGURES = (*EVALUATED, "train_loss", "seconds")
OWN = ("accuracy", "in_local", "tuned_accuracy", "tuned_in_local")
COLUMNS = {
    "rounds": {
        "round": INT,
        **dict.fromkeys(FIGURES, FLOAT),
        "bytes_down": INT,
        "bytes_up": INT,
        "notes": NOTES,
    },
    "clients": dict(
        round=INT,
        client=INT,
        num_examples=INT,
        train_loss=FLOAT,
        seconds=FLOAT,
        node=TEXT,
        notes=NOTES,
    ),
    "classes": {"round": INT, "class": TEXT, "accuracy": FLOAT, "seen": INT, "predicted": INT},
    "confusions": {"round": INT, "client": INT, "class": TEXT, "predicted": TEXT, "count": INT},
    "own": {
        "client": INT,
        "name": TEXT,
        "num_examples": INT,
        "held_out": pa.bool_(),
        **dict.fromkeys(OWN, FLOAT),
    },
    "partition": {
        "client": INT,
        "name": TEXT,
        "class": TEXT,
        "count": INT,
        "images": pa.list_(INT),
    },
}
SCHEMAS = {name: pa.schema(list(columns.items())) for name, columns in COLUMNS.items()}
# The tables to which each round adds rows.
RESULTS = ("rounds", "clients", "classes", "confusions")
# After which a file is full; a round replaces the last file, and so many rows cost as much as a
# few.
ROWS = 2**13


def round_rows(round: Round, setup: Setup) -> dict[str, list[dict[str, Any]]]:
    """The rows that one round adds to each table.

    There is a table of confusions only where they are measured.
    """
    number = round.round
    of_round = {column: getattr(round, column) for column in COLUMNS["rounds"]}
    of_round["notes"] = list(round.notes.items())
    rows = {
        "rounds": [of_round],
        "clients": [
            {"round": number, **vars(row), "notes": list(row.notes.items())}
            for row in round.clients
        ],
        "classes": [{"round": number, **row} for row in _of_classes(round, setup)],
    }
    # By client; None: the global model's.
    matrices: list[tuple[int | None, np.ndarray]] = []
    if round.evaluation is not None and "confusion" in setup.job.measures(number):
        matrices.append((None, round.evaluation.confusion))
    matrices.extend(round.confusions.items())
    if matrices:
        names = setup.federation.train.classes
        rows["confusions"] = [
            {
                "round": number,
                "client": client,
                "class": names[c],
                "predicted": names[k],
                "count": int(counts[c, k]),
            }
            for client, counts in matrices
            for c, k in np.argwhere(counts)
        ]
    return rows


def _of_classes(round: Round, setup: Setup) -> Iterator[dict[str, Any]]:
    """A row per class of an evaluated round."""
    accuracies = round.class_accuracy
    if round.evaluation is None or accuracies is None:
        return
    seen = np.zeros(setup.federation.num_classes, dtype=np.int64)
    for row in round.clients:
        seen += setup.federation.label_counts(row.client)
    predicted = round.evaluation.confusion.sum(axis=0)
    for number, name in enumerate(setup.federation.train.classes):
        yield {
            "class": name,
            "accuracy": float(accuracies[number]),
            "seen": int(seen[number]),
            "predicted": int(predicted[number]),
        }


def write_round(path: Path, round: int, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Add a round's rows to the tables in a run's folder.

    Adding the same round again changes nothing.
    """
    for name, table in rows.items():
        _append(path / f"{name}.parquet", round, pa.Table.from_pylist(table, SCHEMAS[name]))


def replace_table(path: Path, name: str, round: int, table: pa.Table) -> None:
    """Give a table the rows of a checkpoint of this round, also where a power cut has damaged
    files.

    File by file, so that a reader finds each row up to this round once at any time. Nothing goes
    through a link.
    """
    folder = path / f"{name}.parquet"
    if folder.is_symlink():
        raise OSError(f"'{folder}' is a link")
    if not table.num_rows and not folder.exists():
        # A table that not all runs have.
        return
    folder.mkdir(exist_ok=True)
    files = _files(folder)
    # From the end, so that no reader finds a gap.
    for first in sorted(files, reverse=True):
        if first > round:
            files.pop(first).unlink()
    files = files or {0: folder / _name(0)}
    starts = [0, *list(files)[1:], round + 1]
    for file, first, after in zip(files.values(), starts, starts[1:], strict=False):
        _write(file, table.filter((pc.field("round") >= first) & (pc.field("round") < after)))


def without_extra(name: str, table: pa.Table, training: Training) -> pa.Table:
    """A table without the evaluations that this training does not ask for: those of the last round
    of a shorter run.

    So a run that was extended has the rows of a run that never stopped, and so all that is made of
    them.
    """
    numbers = pc.unique(table["round"]).to_pylist()
    extra = pc.is_in(
        table["round"],
        pa.array([number for number in numbers if not training.evaluates(number)], INT),
    )
    if name == "rounds" and pc.any(extra).as_py():
        rows = table.to_pylist()
        for row in rows:
            if not training.evaluates(row["round"]):
                notes = [note for note in row["notes"] if not note[0].startswith("domain.")]
                row.update(dict.fromkeys(EVALUATED), notes=notes)
        return pa.Table.from_pylist(rows, table.schema)
    if name == "confusions":
        # A client's own is no evaluation of the global model.
        extra = pc.and_(extra, pc.is_null(table["client"]))
    return table.filter(pc.invert(extra)) if name in ("classes", "confusions") else table


def without_early_forgetting(rounds: pa.Table, eval_every: int) -> pa.Table:
    """The table of rounds without a forgetting where nothing could be forgotten yet.

    The first evaluation that counts is that of round `eval_every`. Earlier versions wrote 0.0 up to
    there.
    """
    number = rounds.schema.get_field_index("forgetting")
    can_forget = pc.greater(rounds["round"], eval_every)
    known = pc.if_else(can_forget, rounds["forgetting"], pa.scalar(None, FLOAT))
    return rounds.set_column(number, SCHEMAS["rounds"].field(number), known)


def write_partition(path: Path, federation: Federation) -> None:
    """Write which images of each class each client holds."""
    _write(path / "partition.parquet", partition_table(federation))


def partition_table(federation: Federation) -> pa.Table:
    """Which images of each class each client holds."""
    clients, labels, counts = federation.cells()
    names = pa.array(federation.train.classes).take(pa.array(labels))
    held = federation.partition
    owners = np.repeat(np.arange(held.num_clients), held.sizes)
    order = np.lexsort((federation.train.labels[held.indices], owners))
    images = pa.ListArray.from_arrays(np.cumsum([0, *counts], dtype=np.int32), held.indices[order])
    called = pa.array(federation.client_names or [None] * federation.num_clients, TEXT).take(
        pa.array(clients)
    )
    return pa.table(
        [pa.array(clients), called, names, pa.array(counts), images], schema=SCHEMAS["partition"]
    )


def write_own(path: Path, rows: Sequence[OwnRow]) -> None:
    """Write what `rayfed clients` measured of each client's own model."""
    _write(path / "own.parquet", pa.Table.from_pylist([vars(row) for row in rows], SCHEMAS["own"]))


def read_table(path: Path, name: str, after: int = -1) -> pa.Table:
    """A table of a run's folder by its name in `SCHEMAS`, in the order of the rounds; empty if
    there is none yet.

    With `after`, only the rows of later rounds, and only the files that may have such rows are
    read.
    """
    place, schema = path / f"{name}.parquet", SCHEMAS[name]
    if place.is_file():
        return pq.read_table(place, schema=schema)
    while files := _files(place):
        # The first round after each file.
        ends = [*list(files)[1:], math.inf]
        if odd := [file for file in files.values() if file.exists() and not file.is_file()]:
            # To open a pipe would wait for ever.
            raise pa.ArrowInvalid(f"'{odd[0]}' is no file")
        wanted = [file for file, end in zip(files.values(), ends, strict=True) if end > after + 1]
        try:
            found = pq.read_table(wanted, schema=schema).combine_chunks()
        # A run that was resumed has dropped the rounds after its checkpoint.
        except FileNotFoundError:
            if _files(place) == files:
                raise
        except OSError as error:
            # Arrow says so of some damaged pages.
            raise pa.ArrowInvalid(str(error)) from None
        else:
            return found.filter(pc.field("round") > after) if after >= 0 else found
    return schema.empty_table()


def confusions(folder: Path, classes: Sequence[str], after: int = -1) -> Columns:
    """A value per cell of the confusion matrices: round, client (-1: the global model), class,
    predicted and count.

    Of the rounds after `after`. Classes are indices.
    """
    table = read_table(folder, "confusions", after)
    client = pc.fill_null(table["client"], -1)
    codes = {
        name: pc.index_in(table[name], pa.array(classes, pa.string()))
        for name in ("class", "predicted")
    }
    return columns_of(
        pa.table({"round": table["round"], "client": client, **codes, "count": table["count"]})
    )


def matrices(cells: Columns, round: int, num_classes: int) -> dict[int, np.ndarray]:
    """The confusion matrices (C, C) of a round by client, as `confusions` has them, in that order."""
    of_round = {name: column[cells["round"] == round] for name, column in cells.items()}
    clients, first, index = np.unique(of_round["client"], return_index=True, return_inverse=True)
    counts = np.zeros((len(clients), num_classes, num_classes), dtype=np.int64)
    counts[index, of_round["class"], of_round["predicted"]] = of_round["count"]
    return {int(clients[number]): counts[number] for number in np.argsort(first)}


def columns_of(table: pa.Table) -> Columns:
    """A table's columns but for its notes, which need more than an array."""
    return {name: table[name].to_numpy() for name in table.column_names if name != "notes"}


def to_parquet(table: pa.Table) -> bytes:
    """The content of a Parquet file."""
    # Numbers in a dictionary cost more time.
    texts = [column.name for column in table.schema if column.type == TEXT]
    content = io.BytesIO()
    pq.write_table(table, content, use_dictionary=texts)
    return content.getvalue()


def _files(folder: Path) -> dict[int, Path]:
    """The files of a table by the first round in each, in order."""
    found = folder.glob("round-*.parquet")
    return dict(sorted((int(file.stem[6:]), file) for file in found if file.stem[6:].isdecimal()))


def _append(folder: Path, round: int, rows: pa.Table) -> None:
    files = _files(folder)
    if files and rows.num_rows == 0:
        return
    folder.mkdir(exist_ok=True)
    file = folder / _name(round)
    if files:
        last = [*files.values()][-1]
        with pq.ParquetFile(last) as opened:
            # Other threads would wait for actors that are at work.
            before = opened.read(use_threads=False)
        before = before.filter(pc.less(before["round"], round))
        if before.num_rows < ROWS:
            file, rows = last, pa.concat_tables([before, rows])
    _write(file, rows)


def _name(round: int) -> str:
    return f"round-{round:05d}.parquet"


def _write(file: Path, table: pa.Table) -> None:
    with whole(file) as opened:
        opened.write(to_parquet(table))
