"""A trace: which clients are there in which round, and what is known of them there.

It is read from Parquet, and checked.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rayfed.base.errors import InputError, did_you_mean
from rayfed.clients.participation import DROPS, SPEEDS, Participation

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)
# Each column has a type, and words for a message that say what to give.
COLUMNS = {
    "round": ("int64", "whole numbers"),
    "client": ("int64", "whole numbers"),
    **dict.fromkeys(SPEEDS, ("float64", "numbers")),
    DROPS: ("bool", "true or false"),
}


@dataclass(frozen=True, eq=False)
class Trace:
    """Rows in the order of round and client; after its last round a trace begins again."""

    # Rounds have the type int64 and the shape (rows,), and begin with 1.
    rounds: np.ndarray
    # Clients have the type int64 and the shape (rows,).
    clients: np.ndarray
    # The columns of `SPEEDS`, and `drops`, that the file has; each has the shape (rows,).
    columns: Mapping[str, np.ndarray]

    def rows(self, round: int) -> slice:
        """Return the rows of a round."""
        place = (round - 1) % int(self.rounds[-1]) + 1
        start, end = np.searchsorted(self.rounds, [place, place + 1]).tolist()
        return slice(start, end)

    def hash(self) -> str:
        """Return a SHA-256 of everything that the trace says."""
        digest = hashlib.sha256(repr(list(self.columns)).encode())
        columns = [self.rounds, self.clients]
        columns.extend(self.columns.values())
        for column in columns:
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()


def open_trace(settings: Participation, num_clients: int, num_rounds: int) -> Trace | None:
    """Return the trace that the settings name, checked; None if they name none.

    Warns if the trace has fewer rounds than the run, and so begins again.
    """
    if not settings.trace:
        return None
    trace = read_trace(settings.trace, num_clients)
    settings.refuse_idle(trace.columns)
    last_round = int(trace.rounds[-1])
    if last_round < num_rounds:
        text = "clients.trace = '%s' ends with round %d of %d; from round %d on it begins again"
        log.warning(text, settings.trace, last_round, num_rounds, last_round + 1)
    return trace


def read_trace(path: str, num_clients: int) -> Trace:
    """Return the trace in a Parquet file, or in a folder of such files.

    Raises `InputError` for everything that is wrong with it.
    """
    # Actors are sent the trace and need no Parquet, so only a reader imports it.
    import pyarrow.parquet as pq

    from rayfed.base.storage import locate, reach

    label = f"clients.trace = '{path}'"
    try:
        fs, place = locate(path)
        table = reach(path, lambda: pq.read_table(place, filesystem=fs))
    except InputError as error:
        raise InputError(
            f"clients.trace: {error}; give a Parquet file with the columns round and client, each "
            "once"
        ) from None
    _refuse_other_columns(table.column_names, label)
    if not table.num_rows:
        raise InputError(f"{label}: it has no rows, so no client is ever there")
    columns = {
        name: _values(table.column(name), name, label)
        for name in COLUMNS
        if name in table.column_names
    }
    rounds, clients = columns.pop("round"), columns.pop("client")
    if rounds.min() < 1:
        raise InputError(f"{label}: there is a round {rounds.min()}; the first round is 1")
    unknown = clients[(clients < 0) | (clients >= num_clients)]
    if len(unknown):
        raise InputError(
            f"{label}: there is a client {unknown[0]}; the partition has clients 0 to "
            f"{num_clients - 1}"
        )
    order = np.lexsort((clients, rounds))
    rounds, clients = rounds[order], clients[order]
    repeated = np.flatnonzero((np.diff(rounds) == 0) & (np.diff(clients) == 0))
    if len(repeated):
        client, round = clients[repeated[0]], rounds[repeated[0]]
        raise InputError(
            f"{label}: client {client} is there twice in round {round}; give each client of a "
            "round once"
        )
    return Trace(rounds, clients, {name: values[order] for name, values in columns.items()})


def _refuse_other_columns(names: Sequence[str], label: str) -> None:
    """Raise `InputError` if a column is missing, or has no meaning here."""
    for name in ("round", "client"):
        if name not in names:
            raise InputError(f"{label}: there is no column '{name}'; it has {', '.join(names)}")
    for name in names:
        if name not in COLUMNS:
            raise InputError(
                f"{label}: the column '{name}' has no meaning{did_you_mean(name, COLUMNS)}"
            )


def _values(column: pa.ChunkedArray, name: str, label: str) -> np.ndarray:
    """Return a column in the type that `COLUMNS` gives it.

    Raises `InputError` for values that are missing, of another type or not above 0.
    """
    if column.null_count:
        raise InputError(
            f"{label}: {column.null_count} values of the column '{name}' are missing; give all"
        )
    dtype, advice = COLUMNS[name]
    try:
        values = column.cast(dtype).to_numpy()
    except (ValueError, NotImplementedError):
        # Arrow raises both errors.
        raise InputError(
            f"{label}: the column '{name}' is of type {column.type}; give {advice}"
        ) from None
    if name in SPEEDS:
        refused = values[~(np.isfinite(values) & (values > 0))]
        if len(refused):
            raise InputError(
                f"{label}: the column '{name}' has the value {refused[0]}; give more than 0"
            )
    return values
