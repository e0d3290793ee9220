"""Compute a client's gradients at the global model (`measure = ["gradients"]`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rayfed.measures.failing import warn_of_failure
from rayfed.measures.gradients import ClassGradients
from rayfed.methods.views import ClientView
from rayfed.rounds.evaluation import evaluating, seeded
from rayfed.rounds.setup import Setup
from rayfed.tensors.weights import in_evaluation, parameters_of, with_weights


def measured_gradients(
    setup: Setup, client: ClientView, label_shares: np.ndarray
) -> ClassGradients | None:
    """Return the gradients of a client's loss at the model with which it begins.

    The loss is the cross-entropy on the client's training images, without augmentation, and the
    model is in eval mode. Return None where that fails, with a warning: a measure does not end a
    run.
    """
    try:
        with evaluating(setup):
            model = in_evaluation(with_weights(setup.model, client.weights))
            return ClassGradients(label_shares, by_class(setup, client, model))
    except Exception as error:
        warn_of_failure("gradients", error)
        return None


def by_class(setup: Setup, client: ClientView, model: nn.Module) -> Iterator[Tensor]:
    """Yield the mean gradient (P,) of the images of each class that the client has.

    Only one class's gradient is in memory at a time.
    """
    parameters = list(parameters_of(model).values())
    for label in client.label_counts.nonzero()[:, 0].tolist():
        total: list[Tensor] = [torch.zeros_like(p) for p in parameters]
        for images, labels in seeded(setup, client.samples(), 0):
            of_class = labels == label
            if not of_class.any():
                continue
            logits = setup.run(model, images[of_class]).logits
            loss = cross_entropy(logits, labels[of_class], reduction="sum")
            gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
            for added, gradient in zip(total, gradients, strict=True):
                added += gradient
        count = float(client.label_counts[label])
        yield torch.cat([gradient.flatten() for gradient in total]) / count
