"""The global model on test images: its evaluation, and what its layers say of the classes.

A range of test images is a piece of work that any worker may do. `N` images, `C` classes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.base.isolation import isolated, seed_generators
from rayfed.base.seeds import Purpose, seed_of
from rayfed.data.federation import EVALUATION_BATCH
from rayfed.measures import metrics
from rayfed.measures.clients import Activations, Seen, sampled
from rayfed.measures.failing import warn_of_failure
from rayfed.measures.metrics import Evaluation
from rayfed.methods.views import ClientView
from rayfed.rounds import measuring
from rayfed.rounds.setup import Setup


def evaluate(setup: Setup, model: nn.Module, start: int, stop: int) -> Evaluation:
    """Evaluate a model on the test images `start` to `stop`.

    The model is in eval mode and on the setup's device.
    """
    started = time.perf_counter()
    test = setup.federation.test
    rows = np.arange(start, min(stop, len(test.labels)))
    # By batch; they stay on the device, as each read would wait for it.
    losses: list[Tensor] = []
    confidences: list[Tensor] = []
    right: list[Tensor] = []
    answers: list[Tensor] = []
    with evaluating(setup), torch.no_grad():
        for images, labels in batches_of_test(setup, rows, start):
            logits = setup.run(model, images).logits
            losses.append(nn.functional.cross_entropy(logits, labels, reduction="sum"))
            confidence, predicted = logits.float().softmax(dim=1).max(dim=1)
            confidences.append(confidence)
            right.append(predicted == labels)
            answers.append(logits.argmax(dim=1))

    # Added up from the first batch to the last, in float64.
    loss = sum(torch.stack(losses).tolist())
    overconfidence = np.zeros(metrics.BINS)
    sizes = [len(of_batch) for of_batch in answers]
    of_confidence = torch.cat(confidences).cpu().split(sizes)
    of_right = torch.cat(right).cpu().split(sizes)
    for confidence, is_right in zip(of_confidence, of_right, strict=True):
        overconfidence += metrics.overconfidence(confidence.numpy(), is_right.numpy())
    truth = test.labels[rows]
    predictions = torch.cat(answers).cpu().numpy()
    confusion = metrics.confusion_matrix(truth, predictions, setup.federation.num_classes)
    domains = np.stack([test.by_domain(rows[truth == predictions]), test.by_domain(rows)])
    seconds = time.perf_counter() - started
    return Evaluation(confusion, loss, domains, overconfidence, seconds)


def activations(setup: Setup, model: nn.Module, start: int, stop: int) -> Activations | None:
    """Return what the measured layers say of the classes, on a range of the sampled test images.

    Return None where that fails, with a warning: a measure does not end a run.
    """
    try:
        with evaluating(setup):
            return see_sample(setup, model, slice(start, stop)).activations
    except Exception as error:
        warn_of_failure("drift", error)
        return None


def see_sample(setup: Setup, model: nn.Module, places: slice = slice(0, None)) -> Seen:
    """Show a model the sampled test images, or those at some places among them."""
    batches = batches_of_test(setup, sample(setup)[places], places.start)
    return measuring.see(setup.run, setup.job.measure_layers, batches, model)


def sample(setup: Setup) -> np.ndarray:
    """Return the rows of the test images to measure on, int64, ascending."""
    seed = seed_of(setup.job.seed, Purpose.MEASURE)
    return sampled(len(setup.federation.test), setup.job.measure_images, seed)


def evaluating(setup: Setup) -> AbstractContextManager[None]:
    """Isolate a model that is only looked at, as hooks are isolated in training.

    `batches_of_test` seeds what the model draws.
    """
    return isolated(seed_of(setup.job.seed, Purpose.EVALUATION), setup.device)


def batches_of_test(setup: Setup, rows: np.ndarray, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of the test images `rows`; `first` is the place of the first of them.

    The generators are seeded before each batch, by the place of its first image. So what a model
    draws does not depend on the ranges of images that a worker is given, nor on what was computed
    before.
    """
    yield from seeded(
        setup, setup.federation.batches(setup.federation.test, rows, setup.device), first
    )


def see_own_data(setup: Setup, client: ClientView, model: nn.Module) -> Seen:
    """Show a model in eval mode a client's own training images, without augmentation."""
    return measuring.see(setup.run, (), seeded(setup, client.samples(), 0), model)


def seeded(
    setup: Setup, batches: Iterable[tuple[Tensor, Tensor]], first: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of images, of which `first` is the place of the first image.

    The generators are seeded before each batch.
    """
    for number, batch in enumerate(batches):
        place = first + number * EVALUATION_BATCH
        seed_generators(seed_of(setup.job.seed, Purpose.EVALUATION, place), setup.device)
        yield batch
