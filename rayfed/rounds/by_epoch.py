"""Measure a client's model during its training, epoch by epoch (`measure = ["epochs"]`)."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from torch import nn

from rayfed.measures.clients import Seen, epoch
from rayfed.measures.failing import warn_of_failure
from rayfed.methods.views import ClientView
from rayfed.rounds.evaluation import evaluating, see_sample
from rayfed.rounds.setup import Setup
from rayfed.tensors.weights import in_evaluation, state, with_weights


class ByEpoch:
    """Measures a client's model before its training and after each local epoch.

    The numbers are notes: `epochs.2.in_local` is of the model after two epochs. If the training
    ends within an epoch, its last model is measured as well, for example as `epochs.2.5.in_local`.
    """

    def __init__(
        self, setup: Setup, client: ClientView, label_shares: np.ndarray, start: Callable[[], Seen]
    ) -> None:
        """Measure against the model at the `start`; `label_shares` (C,) are the client's."""
        self._setup, self._start, self._label_shares = setup, start, label_shares
        self._steps = client.steps
        self._steps_per_epoch = -(-client.num_examples // client.batch_size)
        self.numbers: dict[str, float] = {}
        # The seconds that all this took: they are no part of the training.
        self.seconds = 0.0

    def after(self, step: int, model: nn.Module) -> None:
        """Measure the model if `step` is 0, the last of an epoch or the last of all.

        A failure is only logged: a measure does not end a run.
        """
        if step % self._steps_per_epoch and step < self._steps:
            return
        began = time.perf_counter()
        try:
            # Generators and settings are the training's again afterwards.
            with evaluating(self._setup):
                start = self._start()
                now = self._see(model) if step else start
                found = dict(epoch(start, now, self._label_shares))
        except Exception as error:
            warn_of_failure("epochs", error)
            found = {}
        for key, value in found.items():
            self.numbers[f"epochs.{step / self._steps_per_epoch:g}.{key}"] = value
        self.seconds += time.perf_counter() - began

    def _see(self, model: nn.Module) -> Seen:
        """Show the images to a copy of the model, as a forward pass may change its buffers."""
        copied = with_weights(self._setup.model, state(model))
        return see_sample(self._setup, in_evaluation(copied))
