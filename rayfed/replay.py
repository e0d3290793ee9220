"""One client's round again, in this process: to look into what it did, or why it failed, with a debugger if need be."""

from __future__ import annotations

from pathlib import Path

from rayfed import rounds as engine
from rayfed.checkpoint import newest
from rayfed.experiment import job_of, prepare, threads
from rayfed.methods.part import Method
from rayfed.record import checkpoints_of, folder_of, read_table
from rayfed.rounds import ClientRow, open_round
from rayfed.runtime.here import Here
from rayfed.seeds import cohort
from rayfed.values import InputError
from rayfed.weights import state_of


def replay(run: str | Path, round: int, client: int, *, method: Method | None = None) -> tuple[ClientRow, float | None]:
    """Train a client of a round as the run did. Gives its row, and the training loss that the run recorded, if it did.

    Plays the rounds before that one again, from the newest checkpoint that is older. Raises what the client raised, and
    `InputError` where it was not in that round.
    """
    job = job_of(run, method=method)
    if job is None:
        raise InputError(f"'{run}' is no folder of a run")
    site = prepare(job)
    if round < 1:
        raise InputError(f"--round {round}: the first round is 1")
    clients = cohort(site.seed, round, site.federation.num_clients, site.training.clients_per_round)
    if client not in clients:
        raise InputError(f"--client {client}: not in round {round}, which has {', '.join(map(str, clients))}")
    with threads(job.ray.threads):
        workers = Here(site, gpu=job.ray.num_gpus != 0)
        saved = newest(checkpoints_of(job), before=round)
        last = saved.restore(site, workers) if saved else engine.start(site, state_of(site.model), workers)
        while last.round < round - 1:
            last = engine.play(site, last, workers)
        opening = open_round(site, last, workers)
        ((_, arrival),) = workers.train(opening.broadcast, [client], last.memories)
    recorded = {
        (row["round"], row["client"]): row["train_loss"] for row in read_table(folder_of(job), "clients").to_pylist()
    }
    return arrival.row, recorded.get((round, client))
