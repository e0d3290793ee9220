"""The tables of a run as Parquet files.

Each round adds rows to the tables rounds, clients, classes and confusions. The tables partition and
own are written once.

    rounds.parquet/round-00000.parquet  the rows of the rounds from 0 on
    rounds.parquet/round-08192.parquet  the rows of the rounds from 8192 on

To add a round's rows, a longer file replaces the last file. When a file has `ROWS` rows, a new file
begins. So thousands of rounds are one file, and each row is in one file at any moment: no reader
finds a row twice or misses it, and no files have to be merged.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayfed.base.files import whole

# These import torch, which a reader of tables does not need.
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
# For each table: its columns and their types.
COLUMNS = {
    "rounds": {
        "round": INT,
        **dict.fromkeys(FIGURES, FLOAT),
        "bytes_down": INT,
        "bytes_up": INT,
        "notes": NOTES,
    },
    "clients": {
        "round": INT,
        "client": INT,
        "num_examples": INT,
        "train_loss": FLOAT,
        "seconds": FLOAT,
        "node": TEXT,
        "notes": NOTES,
    },
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
# A file with so many rows is full. A round replaces the last file, and to write so many rows takes
# no longer than to write a few.
ROWS = 2**13


def round_rows(round: Round, setup: Setup) -> dict[str, list[dict[str, Any]]]:
    """Return the rows that one round adds to each table.

    There are rows of confusions only if they are measured.
    """
    round_row = {column: getattr(round, column) for column in COLUMNS["rounds"]}
    round_row["notes"] = list(round.notes.items())
    client_rows = []
    for row in round.clients:
        notes = list(row.notes.items())
        client_rows.append({"round": round.round, **vars(row), "notes": notes})
    rows = {
        "rounds": [round_row],
        "clients": client_rows,
        "classes": list(_class_rows(round, setup)),
    }
    # The matrices by client. That of the global model has None.
    matrices: list[tuple[int | None, np.ndarray]] = []
    if round.evaluation is not None and "confusion" in setup.job.measures(round.round):
        matrices.append((None, round.evaluation.confusion))
    matrices.extend(round.confusions.items())
    if matrices:
        rows["confusions"] = list(_confusion_rows(round, matrices, setup))
    return rows


def _confusion_rows(
    round: Round, matrices: list[tuple[int | None, np.ndarray]], setup: Setup
) -> Iterator[dict[str, Any]]:
    """Yield a row for each cell of the confusion matrices that is not zero."""
    names = setup.federation.train.classes
    for client, counts in matrices:
        for label, predicted in np.argwhere(counts):
            yield {
                "round": round.round,
                "client": client,
                "class": names[label],
                "predicted": names[predicted],
                "count": int(counts[label, predicted]),
            }


def _class_rows(round: Round, setup: Setup) -> Iterator[dict[str, Any]]:
    """Yield a row for each class if the round is evaluated."""
    accuracies = round.class_accuracy
    if round.evaluation is None or accuracies is None:
        return
    seen = np.zeros(setup.federation.num_classes, dtype=np.int64)
    for row in round.clients:
        seen += setup.federation.label_counts(row.client)
    predicted = round.evaluation.confusion.sum(axis=0)
    for number, name in enumerate(setup.federation.train.classes):
        yield {
            "round": round.round,
            "class": name,
            "accuracy": float(accuracies[number]),
            "seen": int(seen[number]),
            "predicted": int(predicted[number]),
        }


def write_round(path: Path, round: int, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Add a round's rows to the tables in a run's folder.

    To add the same round again changes nothing.
    """
    for name, table in rows.items():
        _append(path / f"{name}.parquet", round, pa.Table.from_pylist(table, SCHEMAS[name]))


def replace_table(path: Path, name: str, round: int, table: pa.Table) -> None:
    """Give a table in a run's folder the rows of a checkpoint of this round.

    The files may be damaged, for example by a power cut. They are written one by one, so that a
    reader finds each row up to this round once at any time. Raises `OSError` if the table's folder
    is a link.
    """
    folder = path / f"{name}.parquet"
    if folder.is_symlink():
        raise OSError(f"'{folder}' is a link")
    if not table.num_rows and not folder.exists():
        # Not every run has every table.
        return
    folder.mkdir(exist_ok=True)
    files = _files(folder)
    # Later files are deleted from the end, so that no reader finds a gap.
    for start in sorted(files, reverse=True):
        if start > round:
            files.pop(start).unlink()
    files = files or {0: folder / _name(0)}
    starts = list(files)
    starts[0] = 0
    ends = starts[1:]
    ends.append(round + 1)
    for file, start, end in zip(files.values(), starts, ends, strict=True):
        is_in_file = (pc.field("round") >= start) & (pc.field("round") < end)
        _write(file, table.filter(is_in_file))


def without_extra(name: str, table: pa.Table, training: Training) -> pa.Table:
    """Return a table without the evaluations that this training does not ask for.

    A shorter run evaluates its last round in any case. If the run is extended, this evaluation is
    removed. So the tables and the report are the same as in a run that never stopped.
    """
    rounds = pc.unique(table["round"]).to_pylist()
    unwanted = [number for number in rounds if not training.evaluates(number)]
    extra = pc.is_in(table["round"], pa.array(unwanted, INT))
    if name == "rounds" and pc.any(extra).as_py():
        rows = table.to_pylist()
        for row in rows:
            if not training.evaluates(row["round"]):
                notes = [note for note in row["notes"] if not note[0].startswith("domain.")]
                row.update(dict.fromkeys(EVALUATED), notes=notes)
        return pa.Table.from_pylist(rows, table.schema)
    if name == "confusions":
        # The matrices of clients stay, because they do not evaluate the global model.
        extra = pc.and_(extra, pc.is_null(table["client"]))
    return table.filter(pc.invert(extra)) if name in ("classes", "confusions") else table


def without_early_forgetting(rounds: pa.Table, eval_every: int) -> pa.Table:
    """Return the table of rounds with no forgetting where nothing could be forgotten yet.

    The first evaluation that counts is in round `eval_every`. Up to this round, earlier versions
    wrote 0.0.
    """
    number = rounds.schema.get_field_index("forgetting")
    can_forget = pc.greater(rounds["round"], eval_every)
    forgetting = pc.if_else(can_forget, rounds["forgetting"], pa.scalar(None, FLOAT))
    return rounds.set_column(number, SCHEMAS["rounds"].field(number), forgetting)


def write_partition(path: Path, federation: Federation) -> None:
    """Write which images of each class each client holds."""
    _write(path / "partition.parquet", partition_table(federation))


def partition_table(federation: Federation) -> pa.Table:
    """Return the table of the images that each client holds, with a row per client and class."""
    clients, labels, counts = federation.cells()
    classes = pa.array(federation.train.classes).take(pa.array(labels))
    partition = federation.partition
    owners = np.repeat(np.arange(partition.num_clients), partition.sizes)
    order = np.lexsort((federation.train.labels[partition.indices], owners))
    ends = np.cumsum([0, *counts], dtype=np.int32)
    images = pa.ListArray.from_arrays(ends, partition.indices[order])
    client_names = pa.array(federation.client_names or [None] * federation.num_clients, TEXT)
    names = client_names.take(pa.array(clients))
    columns = [pa.array(clients), names, classes, pa.array(counts), images]
    return pa.table(columns, schema=SCHEMAS["partition"])


def write_own(path: Path, rows: Sequence[OwnRow]) -> None:
    """Write what `rayfed clients` measured of each client's own model."""
    _write(path / "own.parquet", pa.Table.from_pylist([vars(row) for row in rows], SCHEMAS["own"]))


def read_table(path: Path, name: str, after: int = -1) -> pa.Table:
    """Read a table of a run's folder by its name in `SCHEMAS`; empty if there is none yet.

    The rows are in the order of the rounds. With `after`, only the rows of later rounds are
    returned, and only the files that may have such rows are read. Raises `ArrowInvalid` if a file
    is damaged.
    """
    place, schema = path / f"{name}.parquet", SCHEMAS[name]
    if place.is_file():
        return pq.read_table(place, schema=schema)
    files = _files(place)
    while files:
        _refuse_pipes(files.values())
        # The first round after each file.
        ends = [*list(files)[1:], math.inf]
        wanted = [file for file, end in zip(files.values(), ends, strict=True) if end > after + 1]
        try:
            table = pq.read_table(wanted, schema=schema).combine_chunks()
        except FileNotFoundError:
            # A run that was resumed has meanwhile deleted the rounds after its checkpoint.
            files_now = _files(place)
            if files_now == files:
                raise
            files = files_now
        except OSError as error:
            # Arrow raises it for some damaged pages.
            raise pa.ArrowInvalid(str(error)) from None
        else:
            return table.filter(pc.field("round") > after) if after >= 0 else table
    return schema.empty_table()


def _refuse_pipes(files: Iterable[Path]) -> None:
    """Raise `ArrowInvalid` if a path is no file: to open a pipe would wait for ever."""
    for file in files:
        if file.exists() and not file.is_file():
            raise pa.ArrowInvalid(f"'{file}' is no file")


def confusions(folder: Path, classes: Sequence[str], after: int = -1) -> Columns:
    """Return the cells of the confusion matrices of the rounds after `after`.

    Each column has a value per cell: round, client (-1: the global model), class, predicted and
    count. Classes are indices in `classes`.
    """
    table = read_table(folder, "confusions", after)
    class_names = pa.array(classes, pa.string())
    cells = {
        "round": table["round"],
        "client": pc.fill_null(table["client"], -1),
        "class": pc.index_in(table["class"], class_names),
        "predicted": pc.index_in(table["predicted"], class_names),
        "count": table["count"],
    }
    return columns_of(pa.table(cells))


def matrices(cells: Columns, round: int, num_classes: int) -> dict[int, np.ndarray]:
    """Return the confusion matrices (C, C) of a round by client, in the order of the cells.

    `cells` are the columns that `confusions` returns.
    """
    in_round = {name: column[cells["round"] == round] for name, column in cells.items()}
    clients, places, index = np.unique(in_round["client"], return_index=True, return_inverse=True)
    counts = np.zeros((len(clients), num_classes, num_classes), dtype=np.int64)
    counts[index, in_round["class"], in_round["predicted"]] = in_round["count"]
    return {int(clients[number]): counts[number] for number in np.argsort(places)}


def columns_of(table: pa.Table) -> Columns:
    """Return a table's columns as arrays, except its notes, which do not fit into an array."""
    return {name: table[name].to_numpy() for name in table.column_names if name != "notes"}


def to_parquet(table: pa.Table) -> bytes:
    """Return a table as the content of a Parquet file."""
    # Only texts go into a dictionary: numbers in a dictionary take more time.
    texts = [column.name for column in table.schema if column.type == TEXT]
    content = io.BytesIO()
    pq.write_table(table, content, use_dictionary=texts)
    return content.getvalue()


def _files(folder: Path) -> dict[int, Path]:
    """Return the files of a table by the first round in each, in the order of these rounds."""
    files = {}
    for file in folder.glob("round-*.parquet"):
        number = file.stem.removeprefix("round-")
        if number.isdecimal():
            files[int(number)] = file
    return dict(sorted(files.items()))


def _append(folder: Path, round: int, rows: pa.Table) -> None:
    """Write the last file with a round's rows in addition, or a new file if it is full."""
    files = _files(folder)
    if files and rows.num_rows == 0:
        return
    folder.mkdir(exist_ok=True)
    file = folder / _name(round)
    if files:
        last_file = list(files.values())[-1]
        with pq.ParquetFile(last_file) as opened:
            # Other threads would wait for actors that are at work.
            earlier = opened.read(use_threads=False)
        earlier = earlier.filter(pc.less(earlier["round"], round))
        if earlier.num_rows < ROWS:
            file, rows = last_file, pa.concat_tables([earlier, rows])
    _write(file, rows)


def _name(round: int) -> str:
    """Return the name of a table's file by the first round in it."""
    return f"round-{round:05d}.parquet"


def _write(file: Path, table: pa.Table) -> None:
    """Write a table to a Parquet file, which is complete or absent at any moment."""
    with whole(file) as opened:
        opened.write(to_parquet(table))
