"""The views that a part's hooks receive: of the server, a client, a batch and a finished training.

Shapes: `B` batch, `C` classes, `D` features, images of `c` x `h` x `w`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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

    # (B, D); None where the model has no features.
    features: Tensor | None
    logits: Tensor  # (B, C)

    @property
    def of_features(self) -> Tensor:
        """Return the features, (B, D), for parts whose `check` requires a model that has them."""
        assert self.features is not None, (
            "the model gives no features; a part that needs them says so in `check`"
        )
        return self.features


def run_model(model: nn.Module, images: Tensor) -> Outputs:
    """Run a forward pass, from images (B, c, h, w) to features and logits.

    Raise `BrokenContract` if the model writes to the images: other models see them too, for example
    a teacher.
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
    """Return how often torch has counted a write to a tensor; inference tensors are not counted."""
    return 0 if images.is_inference() else images._version


def run_on_copy(model: nn.Module, images: Tensor) -> Outputs:
    """Run a forward pass of a model that writes to its input: it gets a copy."""
    features, logits = features_and_logits(model, images, copied=True)
    return Outputs(features, logits)


def run_in_bf16(model: nn.Module, images: Tensor) -> Outputs:
    """Run a forward pass in bfloat16, for the operations that torch's autocast casts to it.

    The outputs are float32.
    """
    with torch.autocast(images.device.type, torch.bfloat16):
        outputs = run_model(model, images)
    return _in_float32(outputs)


def run_on_copy_in_bf16(model: nn.Module, images: Tensor) -> Outputs:
    """Run a forward pass as `run_in_bf16` of a model that writes to its input: it gets a copy."""
    with torch.autocast(images.device.type, torch.bfloat16):
        outputs = run_on_copy(model, images)
    return _in_float32(outputs)


def _in_float32(outputs: Outputs) -> Outputs:
    """Return the outputs as float32."""
    features = None if outputs.features is None else outputs.features.float()
    return Outputs(features, outputs.logits.float())


Run = Callable[[nn.Module, Tensor], Outputs]
# The function that runs a model, by `train.precision`.
RUNS: dict[str, Run] = {
    "float32": run_model,
    "bf16": run_in_bf16,
    "tf32": run_model,
}
# The same for models that write to their input.
RUNS_ON_COPIES: dict[str, Run] = {
    "float32": run_on_copy,
    "bf16": run_on_copy_in_bf16,
    "tf32": run_on_copy,
}


class Frozen:
    """Copies of the model with other weights, in eval mode and without gradients.

    There is one copy per weights. Entries that stay at a client (`local`) are the client's in each
    copy, whatever the weights say.
    """

    def __init__(self, model: nn.Module, local: Weights | None = None) -> None:
        self._model, self._local = model, local or {}
        # By the id of weights, these weights and the copy with them.
        self._copies: dict[int, tuple[Weights, nn.Module]] = {}

    def __call__(self, weights: Weights) -> nn.Module:
        """Return the copy with these weights."""
        # The weights are kept with the copy, so that no other weights get their id.
        if id(weights) not in self._copies:
            model = in_evaluation(with_weights(self._model, {**weights, **self._local}))
            model.requires_grad_(False)
            self._copies[id(weights)] = weights, model
        return self._copies[id(weights)][1]

    def keep_only(self, weights: Weights) -> Frozen:
        """Drop the copies of all other weights, and return this object."""
        self._copies = {key: pair for key, pair in self._copies.items() if key == id(weights)}
        return self

    def __contains__(self, model: nn.Module) -> bool:
        """Say whether a model is one of these copies."""
        return any(model is copy for _, copy in self._copies.values())


class Known:
    """The outputs of frozen models on all samples of a client.

    Each model runs once, when its outputs are first needed.
    """

    def __init__(self, client: View) -> None:
        self._client = client
        self._outputs: dict[nn.Module, Outputs] = {}

    def __call__(self, rows: Tensor, model: nn.Module) -> Outputs | None:
        """Return the outputs on some samples.

        It is None for a model that a part made itself, because such a model may change.
        """
        if model not in self._client.frozen:
            return None
        if model not in self._outputs:
            self._outputs[model], _ = self._client.all_outputs(model)
        outputs = self._outputs[model]
        features = None if outputs.features is None else outputs.features[rows]
        return Outputs(features, outputs.logits[rows])


@dataclass(frozen=True, eq=False)
class View:
    """The round as a hook sees it, on the server or on a client.

    Do not write to anything in it.
    """

    # The number of the round; 1 is the first.
    round: int
    # The round's global model. Entries that stay at a client are the client's.
    weights: Weights
    num_classes: int
    # The size of the population: all clients except those that are held out.
    num_clients: int
    # Images per client, on average over the population.
    mean_examples: float
    # `frozen(weights)` is a model with these weights, in eval mode, that takes no gradient.
    frozen: Frozen
    # A forward pass, in the job's precision.
    run: Run
    # `samples(size)` yields un-augmented batches of this size, always in the same order.
    samples: Callable[..., Iterator[tuple[Tensor, Tensor]]]

    @property
    def global_model(self) -> nn.Module:
        """Return the round's global model, frozen: the usual teacher."""
        return self.frozen(self.weights)

    def outputs(self, model: nn.Module) -> Iterator[tuple[Outputs, Tensor]]:
        """Yield a frozen model's outputs on all `samples`, with their labels, batch by batch."""
        with torch.no_grad():
            for images, labels in self.samples():
                yield self.run(model, images), labels

    def all_outputs(self, model: nn.Module) -> tuple[Outputs, Tensor]:
        """Return a frozen model's outputs on all N `samples`, and the labels (N,).

        Features are (N, D), logits (N, C).
        """
        features, logits, labels = [], [], []
        for outputs, batch_labels in self.outputs(model):
            if outputs.features is not None:
                features.append(outputs.features)
            logits.append(outputs.logits)
            labels.append(batch_labels)
        joined = Outputs(torch.cat(features) if features else None, torch.cat(logits))
        return joined, torch.cat(labels)


@dataclass(frozen=True, eq=False)
class ServerView(View):
    """The view of `tell` and `update`.

    `samples` are the auxiliary set, which is empty unless a part asks for it.
    """


@dataclass(frozen=True, eq=False)
class ClientView(View):
    """The view of a client's hooks.

    `samples` are the client's own. All tensors are on the client's device.
    """

    id: int
    num_examples: int
    # The client's number of samples of each class, int64 (C,).
    label_counts: Tensor
    # The learning rate of this round.
    lr: float
    momentum: float
    batch_size: int
    # The number of SGD steps that the client will take in this round.
    steps: int
    # `stepper(parameters)` is a function that takes a step of the job's optimizer on a loss.
    stepper: Callable[[Weights], Callable[[Tensor], None]]
    # The names of `batch.parameters`.
    trained: tuple[str, ...]
    # The server's state of a part that defines `survey`.
    state: Tree = None
    # The payload from this part's `tell`.
    payload: Tree = None
    # The memory from this part's last `report` on this client; None the first time.
    memory: Tree = None
    # The first round in which this part acts, if the method changes in time.
    since: int = 1

    def flat(self, weights: Weights) -> Tensor:
        """Return the trained parameters among some weights as one vector, (P,).

        They are in the order of `batch.flat`.
        """
        return flat({name: weights[name] for name in self.trained})

    def for_part(
        self,
        slot: str,
        since: dict[str, int],
        states: dict[str, Tree],
        payloads: dict[str, Tree],
        memories: dict[str, Tree],
    ) -> ClientView:
        """Return the view of the part in `slot`; the dicts hold the values of all slots."""
        return replace(
            self,
            since=since[slot],
            state=states.get(slot),
            payload=payloads.get(slot),
            memory=memories.get(slot),
        )


# The names of terms and measures begin with these words.
RESERVED = ("loss.", "local.", "train.", "epochs.", "drift.", "gradients.")


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
        """Record a number under a name.

        Raise TypeError for a name or a value that cannot be recorded.
        """
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
        if isinstance(value, Tensor):
            is_number = value.ndim == 0 and not value.is_complex()
            kind = f"a tensor ({value.dtype}, {tuple(value.shape)})"
        else:
            is_number = isinstance(value, Real)
            kind = "" if is_number else told(value)
        if not is_number:
            raise TypeError(
                f"batch.note('{name}', ...) got {kind}; give a number, such as a mean over the "
                "batch"
            )
        self.add(name, value)

    def add(self, name: str, value: Tensor | float) -> None:
        """Record a number under any name, for example a part's term of the loss."""
        if isinstance(value, Tensor):
            number = value.detach()
        else:
            number = torch.tensor(float(value), dtype=torch.float64)
        # The copy is needed because the caller may change the tensor later.
        self._values.setdefault(name, []).append(number.to(torch.float64, copy=True))

    def not_finite(self, batches: int) -> list[str]:
        """Return the names that have a NaN or an infinity in the first `batches` batches."""
        names = []
        for name, numbers in self._values.items():
            if not torch.stack(numbers[:batches]).isfinite().all():
                names.append(name)
        return names

    def means(self) -> dict[str, float]:
        """Return the mean of each name over the batches that noted it.

        Call it once, at the end: each read waits for the GPU.
        """
        means: dict[str, float] = {}
        for name, values in self._values.items():
            device = values[-1].device
            together = torch.stack([value.to(device, non_blocking=True) for value in values])
            means[name] = float(together.mean())
        return means


@dataclass(eq=False)
class Batch:
    """One batch in training.

    It is lazy: a model runs on it only when a part asks for its outputs, and at most once.
    """

    # (B, c, h, w), augmented and normalised; or tokens, int64 (B, L); or vectors (B, D).
    images: Tensor
    labels: Tensor  # (B,)
    # The model in training.
    model: nn.Module
    # The parameters of this model that train, without those that stay at the client.
    parameters: Weights
    _client: ClientView
    # Returns a frozen model's outputs on this batch, or None where they are not known.
    _known: Callable[[nn.Module], Outputs | None] | None = None
    note: Notes = field(default_factory=Notes)
    _frozen: dict[nn.Module, Outputs] = field(init=False, default_factory=dict)

    @cached_property
    def _outputs(self) -> Outputs:
        """Return the outputs of the model in training."""
        return self.run(self.model, self.images)

    def run(self, model: nn.Module, images: Tensor) -> Outputs:
        """Run a forward pass, in the job's precision."""
        return self._client.run(model, images)

    @property
    def label_counts(self) -> Tensor:
        """Return how many samples of each class the client (not the batch) has, int64 (C,)."""
        return self._client.label_counts

    @property
    def flat(self) -> Tensor:
        """Return the parameters as one vector, (P,).

        A term of this vector takes as few operations as a term of a single parameter. The vector is
        made anew for each use. So each use has a gradient of its own, and these are added in the
        order of the uses.
        """
        return flat(self.parameters)

    @property
    def logits(self) -> Tensor:
        """Return the logits (B, C) of the model in training."""
        return self._outputs.logits

    @property
    def features(self) -> Tensor:
        """Return the penultimate features (B, D) of the model in training."""
        return self._outputs.of_features

    @property
    def teacher(self) -> Outputs:
        """Return the outputs of the round's global model on this batch."""
        return self.outputs_of(self._client.global_model)

    def outputs_of(self, model: nn.Module) -> Outputs:
        """Return a frozen model's outputs on this batch."""
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

    # The trained model, in eval mode; its parameters take gradients.
    model: nn.Module
    # The model's state without the entries that stay at the client. It shares the model's memory:
    # report it as it is, and do not write to it.
    weights: Weights
    # The number of SGD steps that were taken.
    steps: int
    # The mean loss over the steps.
    loss: float

    @property
    def parameters(self) -> Weights:
        """Return the model's trainable parameters among the weights; they take gradients."""
        return {name: p for name, p in parameters_of(self.model).items() if name in self.weights}


@dataclass(frozen=True, eq=False)
class Step:
    """The server's step from the round's weights to the next.

    `proposed` is None until an average has made it.
    """

    # The view that `tell` had, for an `update` that trains on the server.
    server: ServerView
    proposed: Weights | None
    # The names of the parameters in `weights`; other entries are buffers, or stay at the clients.
    trainable: frozenset[str]
    # These weights are evaluated instead of the new weights, which are sent.
    shown: Weights | None = None
    # Numbers of the round that parts note; the round's row records them.
    notes: Mapping[str, float] = field(default_factory=dict)

    @property
    def weights(self) -> Weights:
        """Return the round's global model."""
        return self.server.weights

    @property
    def averaged(self) -> Weights:
        """Return the weights that earlier parts have proposed."""
        assert self.proposed is not None, "no part has averaged the clients yet"
        return self.proposed

    def parameters(self, weights: Weights) -> Weights:
        """Return only the trainable parameters of some weights."""
        return {name: tensor for name, tensor in weights.items() if name in self.trainable}

    def towards(self, proposed: Weights) -> Step:
        """Return a step to other weights, which are also evaluated."""
        return replace(self, proposed=proposed, shown=None)

    def showing(self, values: Weights) -> Step:
        """Return the same step, but these weights are evaluated.

        Entries that `values` lacks are the proposed ones.
        """
        return replace(self, shown={**self.averaged, **like(values, self.weights)})

    def noting(self, notes: Mapping[str, float]) -> Step:
        """Return the same step with numbers of the round to record."""
        return replace(self, notes={**self.notes, **notes})

    def changed(self, values: Weights) -> Step:
        """Return a step with some entries of the proposed weights changed.

        The values are converted to the model's dtypes.
        """
        return self.towards({**self.averaged, **like(values, self.weights)})
