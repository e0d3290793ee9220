"""Show a client's model the sampled test images, and measure it.

None of this changes the training. Shapes have `N` images, `C` classes, `D` features or neurons.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.base.errors import InputError, did_you_mean
from rayfed.data.inputs import Inputs
from rayfed.measures.clients import FEATURES, MEASURES, Seen
from rayfed.measures.failing import warn_of_failure
from rayfed.methods.views import Run, run_on_copy
from rayfed.tensors.weights import in_evaluation, parameters_of

# Two functions that show a model the images, as it is before and after training.
Looks = tuple[Callable[[], Seen], Callable[[], Seen]]
# They do not compare a model before and after training: `by_epoch.py`, `measures/gradients.py`.
MEASURED_ELSEWHERE = ("epochs", "gradients")


def see(
    run: Run, layers: Sequence[str], batches: Iterable[tuple[Tensor, Tensor]], model: nn.Module
) -> Seen:
    """Return what a model in eval mode gives on batches of images and labels.

    `layers` are the names of the modules whose outputs count as well. Raise `ValueError` where a
    layer has another number of outputs than there are batches.
    """
    labels, logits, by_batch = [], [], []
    with torch.no_grad(), _outputs(model, layers) as by_layer:
        for images, answers in batches:
            outputs = run(model, images)
            labels.append(answers.cpu())
            logits.append(outputs.logits.cpu())
            if outputs.features is not None:
                by_batch.append(outputs.features.cpu())
    for layer, of_layer in by_layer.items():
        if len(of_layer) != len(labels):
            raise ValueError(
                f"the layer '{layer}' gave {len(of_layer)} outputs in {len(labels)} forward passes"
            )
    features = torch.cat(by_batch).numpy() if by_batch else None
    chosen = {layer: torch.cat(of_layer).numpy() for layer, of_layer in by_layer.items()}
    if not layers and features is not None:
        chosen = {FEATURES: features}
    return Seen(
        parameters_of(model), torch.cat(labels).numpy(), torch.cat(logits).numpy(), features, chosen
    )


@contextmanager
def _outputs(model: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Collect what layers give while the context lasts, (N, D) per forward pass.

    A map (N, D, h, w) counts as its mean.
    """
    by_layer: dict[str, list[Tensor]] = {layer: [] for layer in layers}

    def keep(layer: str, module: nn.Module, inputs: object, output: object) -> None:
        """Keep what a layer gives in a forward pass; raise `ValueError` where it has no neurons."""
        if not isinstance(output, Tensor) or output.ndim < 2:
            raise ValueError(
                f"the layer '{layer}' gives no tensor with a dimension of images and one of neurons"
            )
        values = output.float().flatten(2).mean(dim=2) if output.ndim > 2 else output
        # It is copied, as the next layer may write to it, as ReLU can.
        by_layer[layer].append(values.to("cpu", torch.float32, copy=True))

    hooks = [
        model.get_submodule(layer).register_forward_hook(functools.partial(keep, layer))
        for layer in layers
    ]
    try:
        yield by_layer
    finally:
        for hook in hooks:
            hook.remove()


def refuse_absent(
    layers: Sequence[str],
    model: nn.Module,
    inputs: Inputs,
) -> None:
    """Raise `InputError` for a layer that is not there, or cannot be measured."""
    names = [name for name, _ in model.named_modules() if name]
    for layer in layers:
        if layer not in names:
            raise InputError(
                f"measure_layers: the model has no layer '{layer}'{did_you_mean(layer, names)}"
            )
        two_examples = [(inputs.some(2), torch.zeros(2, dtype=torch.int64))]
        try:
            see(run_on_copy, [layer], two_examples, in_evaluation(copy.deepcopy(model)))
        except Exception as error:
            # The user's module may raise anything.
            raise InputError(
                f"measure_layers = ['{layer}']: {error}; choose another layer"
            ) from error


def measured(
    names: Sequence[str], looks: Mapping[str, Looks], p: np.ndarray
) -> tuple[dict[str, float], np.ndarray | None]:
    """Return the measures' numbers, `local.after.accuracy` and so on, and the confusion (C, C).

    The confusion is of the model after training, and None if nobody has asked for it. `looks` has
    for each name what shows the models their images. `p` (C,) is the client's label distribution.
    A measure that fails is left out, with a warning: it does not end a run.
    """
    numbers: dict[str, float] = {}
    confusion = None
    for name in names:
        if name in MEASURED_ELSEWHERE:
            continue
        before, after = looks[name]
        try:
            if name == "confusion":
                confusion = after().confusion
            else:
                numbers |= {
                    f"{name}.{key}": value for key, value in MEASURES[name](before(), after(), p)
                }
        except Exception as error:
            warn_of_failure(name, error)
    return numbers, confusion
