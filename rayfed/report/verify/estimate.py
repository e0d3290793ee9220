"""An estimate of how long it takes to check runs, by the seconds that they have recorded."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayfed.base.errors import InputError, Resumable
from rayfed.experiment import job_of
from rayfed.folder.places import Folders
from rayfed.folder.summary import read_environment
from rayfed.folder.tables import read_table
from rayfed.report.verify.checks import CHECKPOINT, to_play


def seconds_of(folder: Path, *, every: bool, clients: int, quick: bool) -> float:
    """Return the seconds that one process needs to play a run's rounds again.

    They are 0 for a folder that cannot be read. Clients that trained side by side are trained one
    after the other here: a round takes the sum of their seconds, or the round's own seconds if
    these are more.
    """
    with suppress(
        InputError, Resumable, OSError, pa.ArrowException, KeyError, TypeError, ValueError
    ):
        job = job_of(folder, None, None)
        if job is None:
            return 0.0
        names = Folders.of(job).checkpoints.names()
        saved = {int(match[1]) for match in map(CHECKPOINT.fullmatch, names) if match}
        saved |= set(read_environment(folder).get("checkpoints", ()))
        rounds = read_table(folder, "rounds")
        of_clients = read_table(folder, "clients")
        numbers = rounds["round"].to_pylist()
        of_round = dict(zip(numbers, rounds["seconds"].to_pylist(), strict=True))
        trained_in = of_clients["round"].to_numpy()
        seconds = of_clients["seconds"].to_numpy()
        training = np.bincount(trained_in, seconds, max(numbers, default=0) + 1)
        played = to_play(numbers, saved, every=every, quick=quick)
        if clients:
            counts = np.maximum(np.bincount(trained_in, minlength=len(training)), 1)
            return float(sum(clients * training[number] / counts[number] for number in played))
        return float(sum(max(training[number], of_round[number] or 0.0) for number in played))
    return 0.0
