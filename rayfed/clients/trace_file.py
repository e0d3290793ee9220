"""A trace is read from Parquet, and checked. Apart from `Trace`, as actors need no Parquet."""

import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from rayfed.base.errors import InputError, did_you_mean
from rayfed.base.storage import locate, reach
from rayfed.clients.participation import DROPS, SPEEDS, Participation
from rayfed.clients.trace import Trace

log = logging.getLogger(__name__)
NEEDED = ("round", "client")
COLUMNS = (*NEEDED, *SPEEDS, DROPS)


def open_trace(settings: Participation, num_clients: int, num_rounds: int) -> Trace | None:
    """The trace that the settings name, checked; None where they name none. Warns where it will begin again."""
    if not settings.trace:
        return None
    trace = read_trace(settings.trace, num_clients)
    settings.refuse_idle(trace.columns)
    if (last := int(trace.rounds[-1])) < num_rounds:
        text = "clients.trace = '%s' ends with round %d of %d; from round %d on it begins again"
        log.warning(text, settings.trace, last, num_rounds, last + 1)
    return trace


def read_trace(path: str, num_clients: int) -> Trace:
    """A trace from a Parquet file, or a folder of such files. Raises `InputError` for all that is wrong with it."""
    where = f"clients.trace = '{path}'"
    try:
        fs, place = locate(path)
        found = reach(path, lambda: pq.read_table(place, filesystem=fs))
    except InputError as error:
        raise InputError(
            f"clients.trace: {error}; give a Parquet file with the columns round and client, each once"
        ) from None
    if missing := [name for name in NEEDED if name not in found.column_names]:
        raise InputError(f"{where}: there is no column '{missing[0]}'; it has {', '.join(found.column_names)}")
    for name in found.column_names:
        if name not in COLUMNS:
            hint = did_you_mean(name, COLUMNS)
            raise InputError(f"{where}: the column '{name}' has no meaning{hint} (columns: {', '.join(COLUMNS)})")
    if not found.num_rows:
        raise InputError(f"{where}: it has no rows, so that no client is ever there")
    columns = {name: _values(found.column(name), name, where) for name in COLUMNS if name in found.column_names}
    rounds, clients = columns.pop("round"), columns.pop("client")
    if rounds.min() < 1:
        raise InputError(f"{where}: there is a round {rounds.min()}; the first round is 1")
    if len(unknown := clients[(clients < 0) | (clients >= num_clients)]):
        raise InputError(f"{where}: there is a client {unknown[0]}; the partition has clients 0 to {num_clients - 1}")
    order = np.lexsort((clients, rounds))
    rounds, clients = rounds[order], clients[order]
    if len(twice := np.flatnonzero((np.diff(rounds) == 0) & (np.diff(clients) == 0))):
        both = f"client {clients[twice[0]]} is there twice in round {rounds[twice[0]]}"
        raise InputError(f"{where}: {both}; give each client of a round once")
    return Trace(rounds, clients, {name: values[order] for name, values in columns.items()})


def _values(column: pa.ChunkedArray, name: str, where: str) -> np.ndarray:
    """A column as int64, bool or float64, checked."""
    whole, truth = types.is_integer(column.type), types.is_boolean(column.type)
    number = whole or types.is_floating(column.type)
    right, wanted = (whole, "whole numbers") if name in NEEDED else (number, "numbers")
    if name == DROPS:
        right, wanted = truth, "true or false"
    if not right:
        raise InputError(f"{where}: the column '{name}' is of type {column.type}; give {wanted}")
    if column.null_count:
        raise InputError(f"{where}: {column.null_count} values of the column '{name}' are missing; give all")
    values = column.to_numpy()
    if name not in SPEEDS:
        return values if truth else values.astype(np.int64)
    if len(wrong := values[~(np.isfinite(values) & (values > 0))]):
        raise InputError(f"{where}: the column '{name}' has the value {wrong[0]}; give more than 0")
    return values.astype(np.float64)
