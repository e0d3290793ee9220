"""A trace: which clients are there in which round, and what is known of them there; read from
Parquet, and checked.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rayfed.base.errors import InputError, did_you_mean
from rayfed.clients.participation import DROPS, SPEEDS, Participation

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)
# A column: its type, and what to give.
COLUMNS = {
    "round": ("int64", "whole numbers"),
    "client": ("int64", "whole numbers"),
    **dict.fromkeys(SPEEDS, ("float64", "numbers")),
    DROPS: ("bool", "true or false"),
}


@dataclass(frozen=True, eq=False)
class Trace:
    """Rows in the order of round and client.

    After its last round it begins again with its first.
    """

    # int64 (rows,), from 1 on.
    rounds: np.ndarray
    # int64 (rows,).
    clients: np.ndarray
    columns: Mapping[
        str, np.ndarray
    ]  # (rows,) each: those of `SPEEDS`, and `drops`, that the file has

    def rows(self, round: int) -> slice:
        """The rows of a round."""
        place = (round - 1) % int(self.rounds[-1]) + 1
        return slice(*np.searchsorted(self.rounds, [place, place + 1]).tolist())

    def hash(self) -> str:
        """SHA-256 of all that the trace says."""
        digest = hashlib.sha256(repr([*self.columns]).encode())
        for column in (self.rounds, self.clients, *self.columns.values()):
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()


def open_trace(settings: Participation, num_clients: int, num_rounds: int) -> Trace | None:
    """The trace that the settings name, checked; None where they name none.

    Warns where it will begin again.
    """
    if not settings.trace:
        return None
    trace = read_trace(settings.trace, num_clients)
    settings.refuse_idle(trace.columns)
    last = int(trace.rounds[-1])
    if last < num_rounds:
        text = "clients.trace = '%s' ends with round %d of %d; from round %d on it begins again"
        log.warning(text, settings.trace, last, num_rounds, last + 1)
    return trace


def read_trace(path: str, num_clients: int) -> Trace:
    """A trace from a Parquet file, or a folder of such files.

    Raises `InputError` for all that is wrong with it.
    """
    # Actors are sent the trace, and need no Parquet.
    import pyarrow.parquet as pq

    from rayfed.base.storage import locate, reach

    where = f"clients.trace = '{path}'"
    try:
        fs, place = locate(path)
        table = reach(path, lambda: pq.read_table(place, filesystem=fs))
    except InputError as error:
        raise InputError(
            f"clients.trace: {error}; give a Parquet file with the columns round and client, each "
            "once"
        ) from None
    for name in ("round", "client"):
        if name not in table.column_names:
            raise InputError(
                f"{where}: there is no column '{name}'; it has {', '.join(table.column_names)}"
            )
    for name in table.column_names:
        if name not in COLUMNS:
            raise InputError(
                f"{where}: the column '{name}' has no meaning{did_you_mean(name, COLUMNS)}"
            )
    if not table.num_rows:
        raise InputError(f"{where}: it has no rows, so no client is ever there")
    columns = {
        name: _values(table.column(name), name, where)
        for name in COLUMNS
        if name in table.column_names
    }
    rounds, clients = columns.pop("round"), columns.pop("client")
    if rounds.min() < 1:
        raise InputError(f"{where}: there is a round {rounds.min()}; the first round is 1")
    unknown = clients[(clients < 0) | (clients >= num_clients)]
    if len(unknown):
        raise InputError(
            f"{where}: there is a client {unknown[0]}; the partition has clients 0 to "
            f"{num_clients - 1}"
        )
    order = np.lexsort((clients, rounds))
    rounds, clients = rounds[order], clients[order]
    twice = np.flatnonzero((np.diff(rounds) == 0) & (np.diff(clients) == 0))
    if len(twice):
        client, round = clients[twice[0]], rounds[twice[0]]
        raise InputError(
            f"{where}: client {client} is there twice in round {round}; give each client of a "
            "round once"
        )
    return Trace(rounds, clients, {name: values[order] for name, values in columns.items()})


def _values(column: pa.ChunkedArray, name: str, where: str) -> np.ndarray:
    """A column in the type that `COLUMNS` gives it, checked."""
    if column.null_count:
        raise InputError(
            f"{where}: {column.null_count} values of the column '{name}' are missing; give all"
        )
    kind, wanted = COLUMNS[name]
    try:
        values = column.cast(kind).to_numpy()
    except (ValueError, NotImplementedError):
        # Arrow's own.
        raise InputError(
            f"{where}: the column '{name}' is of type {column.type}; give {wanted}"
        ) from None
    wrong = values[~(np.isfinite(values) & (values > 0))] if name in SPEEDS else values[:0]
    if len(wrong):
        raise InputError(f"{where}: the column '{name}' has the value {wrong[0]}; give more than 0")
    return values
