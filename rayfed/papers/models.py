"""The models of runs, and what they give on test images, for figures that need weights.

A figure plays the rounds since the newest older checkpoint again, and trains clients again. Nothing
is written into a run's folder.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rayfed.base.errors import InputError
from rayfed.measures.clients import Seen, sampled
from rayfed.report.models import Again, RoundAgain, replaying
from rayfed.report.read import Run
from rayfed.report.words import listed
from rayfed.rounds import measuring
from rayfed.rounds.evaluation import batches_of_test, evaluating
from rayfed.rounds.setup import Setup
from rayfed.tensors.weights import Weights, in_evaluation, with_weights

# The key of the global model among clients.
GLOBAL = -1
# Local models that are shown if no clients are given.
FIRST = 10
# The value of --clients without local models.
NONE = "none"
# The seed of the test images, of t-SNE and of noise: the same in every figure.
SEED = 0


class Shown(NamedTuple):
    """The models of a round, and what each gives on some test images."""

    round: int
    # By client; the global model that the clients were sent is `GLOBAL`.
    seen: dict[int, Seen]
    # How many clients trained in the round.
    trained: int


@contextmanager
def opened(run: Run) -> Iterator[Again]:
    """Open a run for a replay. Raises `InputError`, with the run, where that is not possible."""
    try:
        with replaying(run.folder) as again:
            yield again
    except InputError as error:
        if str(run.folder) in str(error):
            raise
        raise InputError(f"'{run.folder}': {error}") from None


def shown(
    run: Run,
    round: int | None,
    clients: str,
    images: int,
    layers: Sequence[str] = (),
    most: int = FIRST,
) -> Shown:
    """Return what the global model and local models of a round give on test images.

    `clients` are numbers or names with commas between them, or 'none' for the global model after
    the round alone. If there are none, they are the first `most` clients of the round. Raises
    `InputError` if the model has no features, or if a client was not in the round.
    """
    with opened(run) as again:
        number = again.last_round if round is None else round
        if clients == NONE:
            model = again.global_model(number)
            return Shown(number, {GLOBAL: look(again.setup, model, images, layers)}, 0)
        of_round = again.open(number)
        chosen = chosen_clients(of_round, clients, most)
        seen = {GLOBAL: look(again.setup, of_round.start, images, layers)}
        for client, weights in of_round.train(chosen):
            seen[client] = look(again.setup, weights, images, layers)
        return Shown(number, seen, len(of_round.chosen(None)))


def chosen_clients(of_round: RoundAgain, clients: str, most: int) -> list[int]:
    """Return the clients that a text names, or the first `most` of the round for an empty text."""
    names = [name.strip() for name in clients.split(",") if name.strip()]
    if not names:
        return of_round.chosen(None)[:most]
    return of_round.chosen(names)


def look(setup: Setup, weights: Weights, images: int, layers: Sequence[str] = ()) -> Seen:
    """Return what a model gives on so many test images, the same for all models of the data.

    Raises `InputError` if the model has no features.
    """
    rows = sampled(len(setup.federation.test), images, SEED)
    model = in_evaluation(with_weights(setup.model, weights))
    with evaluating(setup):
        seen = measuring.see(setup.run, layers, batches_of_test(setup, rows, 0), model)
    if seen.features is None:
        raise InputError(
            f"model '{setup.job.model.name}' has no methods `features` and `head`, and this figure "
            "draws features: give it features(x), (B, D), and head(h), (B, C)"
        )
    # The parameters would keep every model in memory.
    return replace(seen, parameters={})


def model_name(run: Run, client: int) -> str:
    """Return the words for a model."""
    return "global model" if client == GLOBAL else f"client {run.called(client)}"


def of_models(of_runs: Sequence[Shown]) -> str:
    """Return the end of a caption: which models are drawn."""
    rounds = listed(dict.fromkeys(shown.round for shown in of_runs))
    if not any(shown.trained for shown in of_runs):
        return f"the global model after round {rounds}"
    counts = [len(shown.seen) - 1 for shown in of_runs]
    trained = [shown.trained for shown in of_runs]
    local = f"{listed(dict.fromkeys(counts))} of {listed(dict.fromkeys(trained))} local models"
    return f"the global model that was sent in round {rounds}, and {local} of that round"


def features_of(shown: Shown) -> np.ndarray:
    """Return the features of all models one below the other, float32 (models * N, D)."""
    features = []
    for seen in shown.seen.values():
        assert seen.features is not None, "`look` refuses models without features"
        features.append(seen.features)
    return np.concatenate(features)
