"""The tables of a run as Parquet: rounds, clients and classes, to which each round adds a file, and the partition."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayfed.folder.storage import whole

if TYPE_CHECKING:  # these bring torch, which a reader of tables does not need
    from rayfed.data.federation import Federation
    from rayfed.engine import Round

INT, FLOAT, TEXT = pa.int64(), pa.float64(), pa.string()
FIGURES = ("test_accuracy", "test_loss", "forgetting", "train_loss", "seconds")
COLUMNS = {
    "rounds": {"round": INT, **dict.fromkeys(FIGURES, FLOAT), "bytes_down": INT, "bytes_up": INT},
    "clients": dict(round=INT, client=INT, num_examples=INT, train_loss=FLOAT, seconds=FLOAT, node=TEXT),
    "classes": {"round": INT, "class": TEXT, "accuracy": FLOAT},
    "partition": {"client": INT, "class": TEXT, "count": INT},
}
SCHEMAS = {name: pa.schema(list(columns.items())) for name, columns in COLUMNS.items()}
RESULTS = ("rounds", "clients", "classes")  # the tables to which each round adds rows


def round_rows(round: Round, classes: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """The rows that one round adds to each table."""
    return {
        "rounds": [{column: getattr(round, column) for column in COLUMNS["rounds"]}],
        "clients": [{"round": round.round, **asdict(client)} for client in round.clients],
        "classes": [
            {"round": round.round, "class": name, "accuracy": float(accuracy)}
            for name, accuracy in zip(classes, round.class_accuracy, strict=True)
        ],
    }


def write_round(path: Path, round: int, rows: dict[str, list[dict[str, Any]]]) -> None:
    """Add a round's rows to the tables in a run's folder. Adding the same round again changes nothing."""
    for name, table in rows.items():
        _write_part(path / f"{name}.parquet", round, pa.Table.from_pylist(table, SCHEMAS[name]))


def replace_table(path: Path, name: str, round: int, table: pa.Table) -> None:
    """Replace a table by a single file with all rows up to a round, from a checkpoint."""
    folder = path / f"{name}.parquet"
    if folder.exists():
        shutil.rmtree(folder)  # the checkpoint stays, should this process die here
    _write_part(folder, round, table)


def write_partition(path: Path, federation: Federation) -> None:
    """Write the number of images of each class that each client holds."""
    clients, labels, counts = federation.cells()
    names = pa.array(federation.train.classes).take(pa.array(labels))
    table = pa.table([pa.array(clients), names, pa.array(counts)], schema=SCHEMAS["partition"])
    pq.write_table(table, path / "partition.parquet")


def read_table(path: Path, name: str) -> pa.Table:
    """A table of a run's folder by its name in `SCHEMAS`, in the order of the rounds; empty if there is none yet."""
    if not (path / f"{name}.parquet").exists():
        return SCHEMAS[name].empty_table()
    return pq.read_table(path / f"{name}.parquet", schema=SCHEMAS[name]).combine_chunks()


def _write_part(folder: Path, round: int, table: pa.Table) -> None:
    if table.num_rows == 0 and folder.exists():
        return
    folder.mkdir(exist_ok=True)
    with whole(folder / f"round-{round:05d}.parquet") as aside:
        pq.write_table(table, aside)
