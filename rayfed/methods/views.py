"""The views that a part's hooks are given: the round as a client or the server sees it, a batch, a
finished training.

Shapes: `B` batch, `C` classes, `D` features, images of `c` x `h` x `w`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real

import torch
from torch import Tensor, nn

from rayfed.base.errors import BrokenContract, told
from rayfed.models.classifier import features_and_logits
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import (
    Weights,
    flat,
    in_evaluation,
    like,
    parameters_of,
    with_weights,
)


@dataclass(frozen=True, eq=False)
class Outputs:
    """A model's outputs on a batch."""

    features: Tensor | None  # (B, D), None where the model has none
    logits: Tensor  # (B, C)

    @property
    def of_features(self) -> Tensor:
        """The features, (B, D), for parts that have checked that there are any."""
        assert self.features is not None, (
            "the model gives no features; a part that needs them says so in `check`"
        )
        return self.features


def run_model(model: nn.Module, images: Tensor) -> Outputs:
    """A forward pass, (B, c, h, w) to features and logits.

    Raises `BrokenContract` where the model writes to the images: others see them too, such as a
    teacher.
    """
    before = _writes(images)
    features, logits = features_and_logits(model, images)
    if _writes(images) != before:
        raise BrokenContract(
            f"the model ({told(type(model))}) has written to the images that it was given, and in "
            "its trial it did not; let it write to a clone(): x = x.clone()"
        )
    return Outputs(features, logits)


def _writes(images: Tensor) -> int:
    """How often a tensor was written to, as torch counts it; inference tensors are not counted."""
    return 0 if images.is_inference() else images._version


def run_on_copy(model: nn.Module, images: Tensor) -> Outputs:
    """A forward pass of a model that writes to its input: it gets a copy."""
    features, logits = features_and_logits(model, images, copied=True)
    return Outputs(features, logits)


def run_in_bf16(model: nn.Module, images: Tensor) -> Outputs:
    """A forward pass in bfloat16, where torch's autocast takes it for an operation; the outputs are
    float32.
    """
    with torch.autocast(images.device.type, torch.bfloat16):
        outputs = run_model(model, images)
    return _in_float32(outputs)


def run_on_copy_in_bf16(model: nn.Module, images: Tensor) -> Outputs:
    """The same of a model that writes to its input: it gets a copy."""
    with torch.autocast(images.device.type, torch.bfloat16):
        outputs = run_on_copy(model, images)
    return _in_float32(outputs)


def _in_float32(outputs: Outputs) -> Outputs:
    return Outputs(
        None if outputs.features is None else outputs.features.float(), outputs.logits.float()
    )


Run = Callable[[nn.Module, Tensor], Outputs]
# By `train.precision`.
RUNS: dict[str, Run] = {
    "float32": run_model,
    "bf16": run_in_bf16,
    "tf32": run_model,
}
# Of models that write to their input.
RUNS_ON_COPIES: dict[str, Run] = {
    "float32": run_on_copy,
    "bf16": run_on_copy_in_bf16,
    "tf32": run_on_copy,
}


class Frozen:
    """Copies of the model with other weights, in eval mode and without gradients; one copy per
    weights.

    Entries that stay at a client, `own`, are in each copy the client's, whatever the weights say.
    """

    def __init__(self, model: nn.Module, own: Weights | None = None) -> None:
        self._model, self._own = model, own or {}
        self._made: dict[int, tuple[Weights, nn.Module]] = {}

    def __call__(self, weights: Weights) -> nn.Module:
        # The copy keeps the weights alive, so that no other weights get their id.
        if id(weights) not in self._made:
            model = in_evaluation(with_weights(self._model, {**weights, **self._own}))
            model.requires_grad_(False)
            self._made[id(weights)] = weights, model
        return self._made[id(weights)][1]

    def keep_only(self, weights: Weights) -> Frozen:
        """Drop the copies of all other weights; gives itself."""
        self._made = {key: made for key, made in self._made.items() if key == id(weights)}
        return self

    def __contains__(self, model: nn.Module) -> bool:
        """Whether a model is one of these copies."""
        return any(model is made for _, made in self._made.values())


class Known:
    """The outputs of frozen models on all samples of a client: each model runs once, when it is
    first asked for.
    """

    def __init__(self, client: View) -> None:
        self._client = client
        self._outputs: dict[nn.Module, Outputs] = {}

    def __call__(self, rows: Tensor, model: nn.Module) -> Outputs | None:
        """The outputs on some samples; None of a model that a part made itself, which may change."""
        if model not in self._client.frozen:
            return None
        if model not in self._outputs:
            self._outputs[model], _ = self._client.all_outputs(model)
        outputs = self._outputs[model]
        return Outputs(
            None if outputs.features is None else outputs.features[rows], outputs.logits[rows]
        )


@dataclass(frozen=True, eq=False)
class View:
    """The round as a hook sees it, on the server or on a client. Do not write to anything in it."""

    # 1 is the first.
    round: int
    # The round's global model; at a client with entries of its own, with these.
    weights: Weights
    num_classes: int
    # Of the population: all clients but those that are held out.
    num_clients: int
    # Images per client, over the population.
    mean_examples: float
    # Called with weights: a model with them, in eval mode, that takes no gradient.
    frozen: Frozen
    # A forward pass, in the job's precision.
    run: Run
    # un-augmented batches of a size, always in the same order.
    samples: Callable[..., Iterator[tuple[Tensor, Tensor]]]

    @property
    def global_model(self) -> nn.Module:
        """The round's global model, frozen: the usual teacher."""
        return self.frozen(self.weights)

    def outputs(self, model: nn.Module) -> Iterator[tuple[Outputs, Tensor]]:
        """A frozen model's outputs on all `samples`, with their labels, batch by batch."""
        with torch.no_grad():
            for images, labels in self.samples():
                yield self.run(model, images), labels

    def all_outputs(self, model: nn.Module) -> tuple[Outputs, Tensor]:
        """The same on all `samples` at once: of N samples, features (N, D), logits (N, C) and
        labels (N,).
        """
        outputs, labels = zip(*self.outputs(model), strict=True)
        features = [each.features for each in outputs if each.features is not None]
        logits = torch.cat([each.logits for each in outputs])
        return Outputs(torch.cat(features) if features else None, logits), torch.cat(labels)


@dataclass(frozen=True, eq=False)
class ServerView(View):
    """The view of `tell` and `update`.

    `samples` are the auxiliary set, which is empty unless a part asks for it.
    """


@dataclass(frozen=True, eq=False)
class ClientView(View):
    """The view of a client's hooks. `samples` are the client's own."""

    id: int
    num_examples: int
    label_counts: Tensor  # (C,) int64, on the client's device, as all tensors here
    # Of this round.
    lr: float
    momentum: float
    batch_size: int
    # That it will take in this round.
    steps: int
    # Of parameters: a function that does a step on a loss.
    stepper: Callable[[Weights], Callable[[Tensor], None]]
    # The names of `batch.parameters`.
    trained: tuple[str, ...]
    # The server's, for a part that defines `survey`.
    state: Tree = None
    # From this part's `tell`.
    payload: Tree = None
    # From this part's last `report` on this client; None the first time.
    memory: Tree = None
    # The first round in which this part acts, of a method that changes in time.
    since: int = 1

    def flat(self, weights: Weights) -> Tensor:
        """The trained parameters among some weights as one vector, (P,), in the order of
        `batch.flat`.
        """
        return flat({name: weights[name] for name in self.trained})

    def for_part(self, slot: str, since: dict[str, int], *by_slot: dict[str, Tree]) -> ClientView:
        """The view that the part in `slot` gets of what all slots have: the state, the payload and
        the memory.
        """
        state, payload, memory = (of.get(slot) for of in by_slot)
        return replace(self, since=since[slot], state=state, payload=payload, memory=memory)


# Beginnings of the names of terms and measures.
RESERVED = ("loss.", "local.", "drift.")


class Notes:
    """Numbers that parts record while a client trains; they change nothing in the training.

    >>> note = Notes()
    >>> note("mask_rate", 0.5), note("mask_rate", torch.tensor(1.0))
    (None, None)
    >>> note.means()
    {'mask_rate': 0.75}
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def __call__(self, name: str, value: Tensor | float) -> None:
        """Raises TypeError for a name or a value that cannot be recorded."""
        if (
            not isinstance(name, str)
            or not name.isprintable()
            or not 0 < len(name) <= 100
            or name.startswith(RESERVED)
        ):
            raise TypeError(
                f"batch.note({told(name)}, ...): a name has 1 to 100 printable characters that do "
                f"not begin with {', '.join(RESERVED)}, which are rayfed's own"
            )
        if not isinstance(value, Tensor | Real) or (
            isinstance(value, Tensor) and (value.ndim or value.is_complex())
        ):
            kind = (
                f"a tensor ({value.dtype}, {tuple(value.shape)})"
                if isinstance(value, Tensor)
                else told(value)
            )
            raise TypeError(
                f"batch.note('{name}', ...) got {kind}; give a number, such as a mean over the "
                "batch"
            )
        self.add(name, value)

    def add(self, name: str, value: Tensor | Real) -> None:
        """A number of any name, such as a part's term of the loss."""
        number = (
            value.detach()
            if isinstance(value, Tensor)
            else torch.tensor(float(value), dtype=torch.float64)
        )
        # Its owner may change it.
        self._values.setdefault(name, []).append(number.to(torch.float64, copy=True))

    def not_finite(self, batches: int) -> list[str]:
        """The names of which one of the first numbers, of so many batches, is NaN or infinite."""
        return [
            name
            for name, numbers in self._values.items()
            if not torch.stack(numbers[:batches]).isfinite().all()
        ]

    def means(self) -> dict[str, float]:
        """Of each name, over the batches that noted it.

        To be read at the end: each read waits for the GPU.
        """
        return {
            name: float(
                torch.stack(
                    [value.to(values[-1].device, non_blocking=True) for value in values]
                ).mean()
            )
            for name, values in self._values.items()
        }


@dataclass(eq=False)
class Batch:
    """One batch in training. Lazy: a model runs on it only when a part asks, and at most once."""

    images: (
        Tensor  # (B, c, h, w), augmented and normalised; or tokens, int64 (B, L); or vectors (B, D)
    )
    labels: Tensor  # (B,)
    # In training.
    model: nn.Module
    # Of this model, live, less those that stay at the client.
    parameters: Weights
    _client: ClientView
    _known: Callable[[nn.Module], Outputs | None] | None = (
        # A frozen model's outputs on it, where they are known.
        None
    )
    note: Notes = field(default_factory=Notes)
    _frozen: dict[nn.Module, Outputs] = field(init=False, default_factory=dict)

    @cached_property
    def _outputs(self) -> Outputs:
        return self.run(self.model, self.images)

    def run(self, model: nn.Module, images: Tensor) -> Outputs:
        """A forward pass, in the job's precision."""
        return self._client.run(model, images)

    @property
    def label_counts(self) -> Tensor:
        """(C,) int64: how many samples of each class the client has, not the batch."""
        return self._client.label_counts

    @property
    def flat(self) -> Tensor:
        """The parameters as one vector, (P,): a term of it takes as few operations as one of a
        single parameter.

        Made anew for each use, so that each use has a gradient of its own, and they are added in
        the order of the uses.
        """
        return flat(self.parameters)

    @property
    def logits(self) -> Tensor:
        """(B, C), of the model in training."""
        return self._outputs.logits

    @property
    def features(self) -> Tensor:
        """(B, D), penultimate, of the model in training."""
        return self._outputs.of_features

    @property
    def teacher(self) -> Outputs:
        """The round's global model on this batch."""
        return self.outputs_of(self._client.global_model)

    def outputs_of(self, model: nn.Module) -> Outputs:
        """A frozen model on this batch."""
        if model not in self._frozen:
            outputs = self._known and self._known(model)
            if outputs is None:
                with torch.no_grad():
                    outputs = self.run(model, self.images)
            self._frozen[model] = outputs
        return self._frozen[model]


@dataclass(frozen=True, eq=False)
class Fit:
    """The outcome of a client's local training."""

    # As trained, in eval mode; its parameters take gradients.
    model: nn.Module
    # Its state less what stays at the client, live: report it as it is, and do not write to it.
    weights: Weights
    # SGD steps taken.
    steps: int
    # Mean over the steps.
    loss: float

    @property
    def parameters(self) -> Weights:
        """The trainable parameters among the weights, live, with gradients."""
        return {name: p for name, p in parameters_of(self.model).items() if name in self.weights}


@dataclass(frozen=True, eq=False)
class Step:
    """The server's step from the round's weights to the next.

    `proposed` is None until an average has made it.
    """

    # As in `tell`: for an `update` that trains on the server.
    server: ServerView
    proposed: Weights | None
    # The parameters in `weights`; the others are buffers, or stay at the clients.
    trainable: frozenset[str]
    # To be evaluated in place of the new weights, which are sent.
    shown: Weights | None = None

    @property
    def weights(self) -> Weights:
        """The round's global model."""
        return self.server.weights

    @property
    def averaged(self) -> Weights:
        """The weights that the parts before have proposed."""
        assert self.proposed is not None, "no part has averaged the clients yet"
        return self.proposed

    def parameters(self, weights: Weights) -> Weights:
        """Only the parameters of some weights."""
        return {name: tensor for name, tensor in weights.items() if name in self.trainable}

    def towards(self, proposed: Weights) -> Step:
        """The same step, to other weights, which are evaluated too."""
        return replace(self, proposed=proposed, shown=None)

    def showing(self, values: Weights) -> Step:
        """The same step, after which these weights are evaluated; what they lack is as in the
        proposed weights.
        """
        return replace(self, shown={**self.averaged, **like(values, self.weights)})

    def changed(self, values: Weights) -> Step:
        """The same step, with some entries of the proposed weights changed, in the model's dtypes."""
        return self.towards({**self.averaged, **like(values, self.weights)})
