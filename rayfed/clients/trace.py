"""A trace: which clients are there in which round, and what is known of them there."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Trace:
    """Rows in the order of round and client. After its last round it begins again with its first."""

    rounds: np.ndarray  # int64 (rows,), from 1 on
    clients: np.ndarray  # int64 (rows,)
    columns: Mapping[str, np.ndarray]  # (rows,) each: those of `SPEEDS`, and `drops`, that the file has

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
