"""The contract of a method: a tuple of parts, each with at most seven hooks, and the views that the hooks are given.

A part is a frozen dataclass whose fields are its hyper-parameters. It remembers nothing on itself: `state` is the
server's, `memory` one client's, `local` one client's in one round; each is returned by one hook and handed to the next,
so that any piece of the work can run anywhere, or twice. In the order in which a round runs:

    init(weights)                      server, once             -> state
    survey(client)                     client, before the round -> summands
    tell(state, server, surveyed)      server, before training  -> state, payload for the clients
    begin(client)                      client, once a round     -> local
    loss(batch, local)                 client, every batch      -> a scalar term
    report(client, local, fit)         client, after training   -> summands, memory
    update(state, total, step)         server, after clients    -> state, step

Summands are trees of tensors and numbers (see `weights.py`) that the engine adds in the order of the cohort.

FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, eq. 2), whole:

>>> from dataclasses import dataclass
>>> from rayfed.weights import squared_distance
>>> @dataclass(frozen=True)
... class Proximal(Part):
...     mu: float = 0.01
...     def begin(self, client):
...         return client.weights
...     def loss(self, batch, local):
...         return self.mu / 2 * squared_distance(batch.parameters, local)
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rayfed.models.classifier import has_features
from rayfed.values import InputError, checked
from rayfed.weights import Tree, Weights

Parts = tuple["Part", ...]
Method = Parts | Callable[[int], Parts]  # a tuple of parts, or a function of the round (1, 2, ...) that gives one


class Part:
    """One ingredient of a method. Define the hooks it needs; the others do nothing, and cost nothing."""

    # What it does in a method: two parts with one slot cannot be composed. If not said, its class's name.
    slot: ClassVar[str]
    # `update` runs in this order: 0 makes the new weights, 1 changes what was made, 2 is all the rest.
    order: ClassVar[int] = 2
    # Samples of each class that the server is to keep for itself; may be a field.
    auxiliary_per_class: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        if "slot" not in vars(cls) and all("slot" not in vars(base) for base in cls.__mro__[1:-2]):
            cls.slot = name_of(cls)

    def check(self, model: nn.Module) -> None:
        """Raise `InputError` where this part cannot work with a model; asked once, before anything is started."""

    def init(self, weights: Weights) -> Tree:
        """The server's state before the first round, from the initial weights."""
        return None

    def survey(self, client: ClientView) -> Tree:
        """Summands from a sampled client before training; `client.state` is the server's state."""
        return None

    def tell(self, state: Tree, server: ServerView, surveyed: Tree) -> tuple[Tree, Tree]:
        """The state, and what every client of the round is told beside the weights. `surveyed` is the survey's sum."""
        return state, None

    def begin(self, client: ClientView) -> Any:
        """Whatever `loss` and `report` need in this round, on the client's device."""
        return None

    def loss(self, batch: Batch, local: Any) -> Tensor | None:
        """A scalar to be added to the other parts' terms."""
        return None

    def report(self, client: ClientView, local: Any, fit: Fit) -> tuple[Tree, Tree]:
        """The client's summands, and what it remembers until it is sampled again (None: nothing)."""
        return None, None

    def update(self, state: Tree, total: Tree, step: Step) -> tuple[Tree, Step]:
        """The new state, and the step towards the new weights; `total` is the sum of the cohort's summands."""
        return state, step


def name_of(cls: type) -> str:
    """A class's name as job files write it.

    >>> name_of(type("ServerMomentum", (), {}))
    'server_momentum'
    """
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


def defines(part: Part, hook: str) -> bool:
    """Whether a part has a hook of its own, so that the engine may leave out what nobody asked for."""
    return getattr(type(part), hook) is not getattr(Part, hook)


def parts_at(method: Method, round: int) -> Parts:
    """The parts in force in a round."""
    return method(round) if callable(method) else method


@dataclass(frozen=True)
class Switch:
    """A method that changes in time: `before` in rounds 1 to `at - 1`, `after` from round `at` on."""

    before: Method
    after: Method
    at: int

    def __call__(self, round: int) -> Parts:
        return parts_at(self.before if round < self.at else self.after, round)


def switch(before: Method, after: Method, at: int) -> Switch:
    """`before` until round `at`, `after` from then on (FedLMD, Fig. 8)."""
    if at < 2:
        raise InputError(f"switch: at = {at}: the first round is 1, so a method can change at round 2 or later")
    if isinstance(after, Switch) and after.at <= at:
        raise InputError(f"switch: at = {at}, and then at = {after.at}: the second change must come after the first")
    return Switch(before, after, at)


def arrange(parts: Parts) -> Parts:
    """Parts in the order in which their `update` runs. Refuses two that fill one slot, and values out of range."""
    taken: dict[str, Part] = {}
    for part in parts:
        if not isinstance(part, Part):
            raise InputError(f"a method is made of parts; {part!r} is none")
        if not is_dataclass(part):
            raise InputError(f"{part!r} is no dataclass; put @dataclass(frozen=True) above its class")
        checked(part)
        if part.slot in taken:
            raise InputError(
                f"two parts fill the slot '{part.slot}': {taken[part.slot]!r} and {part!r}; keep one "
                "(to combine two methods, add the second one's own part rather than its whole recipe)"
            )
        taken[part.slot] = part
    return tuple(sorted(parts, key=lambda part: part.order))


# What hooks are given ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model makes of a batch."""

    features: Tensor | None  # (B, D), None where the model has none
    logits: Tensor  # (B, C)

    @property
    def of_features(self) -> Tensor:
        """The features, (B, D), for parts that have checked that there are any."""
        assert self.features is not None, "the model gives no features; a part that needs them says so in `check`"
        return self.features


def run_model(model: nn.Module, images: Tensor) -> Outputs:
    """A forward pass, (B, c, h, w) to features and logits."""
    if not has_features(model):
        return Outputs(None, model(images))
    features = model.features(images)
    return Outputs(features, model.head(features))


class Frozen:
    """Copies of the model with other weights, in eval mode and without gradients; one for each weights asked for."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._made: dict[int, tuple[Weights, nn.Module]] = {}

    def __call__(self, weights: Weights) -> nn.Module:
        if id(weights) not in self._made:  # the weights are kept beside the copy, so that no other takes their id
            model = copy.deepcopy(self._model).eval().requires_grad_(False)
            model.load_state_dict(weights)
            self._made[id(weights)] = weights, model
        return self._made[id(weights)][1]


@dataclass(frozen=True, eq=False)
class View:
    """What a hook may see of the round, on the server or on a client. Nothing in it may be written to."""

    round: int  # 1 is the first
    weights: Weights  # the round's global model
    num_classes: int
    frozen: Callable[[Weights], nn.Module]  # a model with these weights, in eval mode, that takes no gradient
    # Images and labels in batches of a size, un-augmented, always in one order.
    samples: Callable[..., Iterator[tuple[Tensor, Tensor]]]

    @property
    def global_model(self) -> nn.Module:
        """The round's global model, frozen: the usual teacher."""
        return self.frozen(self.weights)

    def outputs(self, model: nn.Module) -> Iterator[tuple[Outputs, Tensor]]:
        """A frozen model's outputs on all `samples`, with their labels, batch by batch."""
        with torch.no_grad():
            for images, labels in self.samples():
                yield run_model(model, images), labels


@dataclass(frozen=True, eq=False)
class ServerView(View):
    """What `tell` sees. `samples` are the auxiliary set that the server holds; none unless a part asks for one."""

    num_clients: int


@dataclass(frozen=True, eq=False)
class ClientView(View):
    """What a client's hooks see. `samples` are the client's own."""

    id: int
    num_clients: int
    num_examples: int
    label_counts: Tensor  # (C,) int64, on the client's device, as all tensors here
    lr: float  # of this round
    momentum: float
    batch_size: int
    state: Tree = None  # the server's, for a part that defines `survey`
    payload: Tree = None  # what this part's `tell` sent
    memory: Tree = None  # what this part's last `report` on this client returned; None the first time

    def of(self, slot: str, states: dict[str, Tree], payloads: dict[str, Tree], memory: dict[str, Tree]) -> ClientView:
        """The view that the part in `slot` gets."""
        return replace(self, state=states.get(slot), payload=payloads.get(slot), memory=memory.get(slot))


class Batch:
    """One batch in training. Lazy: a model runs on it only when somebody asks, and at most once."""

    def __init__(self, images: Tensor, labels: Tensor, model: nn.Module, parameters: Weights, client: View) -> None:
        self.images = images  # (B, c, h, w), augmented and normalised
        self.labels = labels  # (B,)
        self.parameters = parameters  # of the model in training, live
        self.model = model
        self._client = client
        self._frozen: dict[nn.Module, Outputs] = {}

    @cached_property
    def _outputs(self) -> Outputs:
        return run_model(self.model, self.images)

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
            with torch.no_grad():
                self._frozen[model] = run_model(model, self.images)
        return self._frozen[model]


@dataclass(frozen=True, eq=False)
class Fit:
    """What came out of a client's local training."""

    model: nn.Module  # as trained, in eval mode; its parameters take gradients
    weights: Weights  # its state, parameters and buffers, live: report them as they are, do not write to them
    steps: int  # SGD steps taken
    loss: float  # mean over the steps


@dataclass(frozen=True, eq=False)
class Step:
    """The server's step from the round's weights to the next. `proposed` is None until an average has made it."""

    weights: Weights
    proposed: Weights | None
    round: int
    num_clients: int  # of the population
    trainable: frozenset[str]  # the names in `weights` that are parameters; the others are buffers

    @property
    def averaged(self) -> Weights:
        """What has been proposed so far."""
        assert self.proposed is not None, "no part has averaged the clients yet"
        return self.proposed

    def parameters(self, weights: Weights) -> Weights:
        """Only the parameters of some weights."""
        return {name: tensor for name, tensor in weights.items() if name in self.trainable}

    def towards(self, proposed: Weights) -> Step:
        """The same step, to other weights."""
        return replace(self, proposed=proposed)
