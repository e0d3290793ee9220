"""The contract of a method: a tuple of parts, each with at most seven hooks.

A part is a frozen dataclass whose fields are its hyper-parameters. It keeps nothing on itself: the
server has `state`, a client has `memory`, and a client in a single round has `local`. Hooks return
these values, and later hooks get them, so that any piece of the work can run anywhere, or twice. In
the order in which a round runs:

    init(weights)                      server, once             -> state
    survey(client)                     client, before the round -> summands
    tell(state, server, surveyed)      server, before training  -> state, payload for the clients
    begin(client)                      client, once per round   -> local
    loss(batch, local)                 client, every batch      -> a scalar term
    report(client, local, fit)         client, after training   -> summands, memory
    update(state, total, step)         server, after clients    -> state, step

Summands are trees of tensors and numbers (`rayfed/tensors/trees.py`) that are added up in an order
that the job fixes.

FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, eq. 2), whole:

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Proximal(Part):
...     mu: float = 0.01
...     def begin(self, client):
...         return client.flat(client.weights)
...     def loss(self, batch, local):
...         return self.mu / 2 * (batch.flat - local).square().sum()
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args, get_type_hints

from torch import Tensor, nn

from rayfed.base.errors import InputError
from rayfed.base.values import Checked, snake_case
from rayfed.clients.settings import Training
from rayfed.methods.views import Batch, ClientView, Fit, ServerView, Step
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import Weights

HOOKS = ("init", "survey", "tell", "begin", "loss", "report", "update")
# What parts declared in earlier versions, and what is called now.
EARLIER = {
    "needs_features": "require_features(self, model)",
    "needs_sgd": "require_sgd(self, training)",
    "without_momentum": "warn_of_momentum(self, training)",
}
# Slots that `compose` fills where no part does.
ROLES = ("supervise", "average")

Parts = tuple["Part", ...]


class Part(Checked):
    """One ingredient of a method.

    Define the hooks that it needs; the others do nothing, and cost nothing.

    Beside its hooks it may say what it is: by the class variables, by `check`, `local_names` and
    `own_model`.
    """

    # Its role; two parts of one slot cannot be composed. The default is the class's name.
    slot: ClassVar[str]
    # Whether its `update` changes the new weights.
    changes_average: ClassVar[bool] = False
    auxiliary_per_class: ClassVar[int] = (
        # Samples of each class for the server to keep; may be a field.
        0
    )

    def __init_subclass__(cls) -> None:
        refuse_earlier_names(cls)
        refuse_misspelt_hooks(cls)
        if not hasattr(cls, "slot"):
            cls.slot = name_of(cls)

    def check(self, model: nn.Module, training: Training) -> None:
        """Raise `InputError` if this part cannot work with the model or with the `[train]` table.

        Called once, before anything is started. `requirements.py` has what parts often require.
        """

    def local_names(self, model: nn.Module) -> Collection[str]:
        """Names of entries of a model's state that stay at each client, which begins its next
        training with its own.

        They are not sent, and `batch.parameters` is without them. In the global model they keep
        their initial values, with which a client begins its first training. Such a part has no
        other memory.
        """
        return ()

    def own_model(self, weights: Weights, memory: Tree) -> Weights | None:
        """The weights of the model that a client has for its own beside the global model, for the
        measures.

        From the global model's weights at the client, and the part's memory of it: before its
        training, and after it.
        """
        return None

    def init(self, weights: Weights) -> Tree:
        """The server's state before the first round, from the initial weights."""
        return None

    def survey(self, client: ClientView) -> Tree:
        """Summands from a sampled client before training; `client.state` is the server's state."""
        return None

    def tell(self, state: Tree, server: ServerView, surveyed: Tree) -> tuple[Tree, Tree]:
        """The state, and a payload for every client of the round.

        `surveyed` is the sum of the survey's summands.
        """
        return state, None

    def begin(self, client: ClientView) -> Any:
        """The values that `loss` and `report` need in this round, on the client's device; by
        default the payload.
        """
        return client.payload

    def loss(self, batch: Batch, local: Any) -> Tensor | None:
        """A scalar term, added to the other parts' terms; None for no term."""
        return None

    def report(self, client: ClientView, local: Any, fit: Fit) -> tuple[Tree, Tree]:
        """The client's summands, and its memory until it is sampled again (None: no memory).

        Annotate `-> tuple[Tree, None]` where there never is a memory: then none is waited for.

        In a round in which no part has this hook or `local_names`, training would change nothing:
        no client trains.
        """
        return None, None

    def update(self, state: Tree, total: Tree, step: Step) -> tuple[Tree, Step]:
        """The new state, and the step towards the new weights; `total` is the sum of the cohort's
        summands.

        It may train, on `step.server.samples()`. The server's generators are seeded by the round.
        """
        return state, step


def refuse_earlier_names(cls: type[Part]) -> None:
    """Refuse what a part declared in earlier versions and requires in `check` now."""
    for name, call in EARLIER.items():
        if name in vars(cls):
            raise InputError(
                f"{cls.__name__}.{name} is no part of the contract any more: in its place, call "
                f"{call} in check(self, model, training); rayfed.methods has this function"
            )
    if "check" in vars(cls):
        refuse_other_parameters(cls, cls.check, ["self", "model", "training"])


def refuse_misspelt_hooks(cls: type[Part]) -> None:
    """Refuse a method that is named nearly as a hook and takes what the hook takes: it would never
    be called.
    """
    for name, method in vars(cls).items():
        near = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.75)
        if not near or name.startswith("_") or not inspect.isfunction(method):
            continue
        taken = [*inspect.signature(method).parameters]
        takes = [*inspect.signature(getattr(Part, near[0])).parameters]
        if name in HOOKS:
            refuse_other_parameters(cls, method, takes)
        elif len(taken) == len(takes) and taken[1] == takes[1]:
            raise InputError(
                f"{cls.__name__}.{name} is no hook; did you mean '{near[0]}'? Else begin it with _"
            )


def refuse_other_parameters(
    cls: type[Part], hook: Callable[..., Any], takes: Sequence[str]
) -> None:
    """Refuse a hook that cannot be called as it will be: else only a client's training would show
    it.
    """
    try:
        inspect.signature(hook).bind(*takes)
    except TypeError as error:
        raise InputError(
            f"{cls.__name__}.{hook.__name__} has to take ({', '.join(takes)}): {error}"
        ) from None


def name_of(cls: type) -> str:
    """A class's name as job files write it: server_momentum for ServerMomentum."""
    return snake_case(cls.__name__)


def names_of_terms(parts: Sequence[Part]) -> dict[str, str]:
    """By slot, the name of a part's term of the loss: the slot, or in a common slot the class, if
    no other has it.
    """
    names = {part.slot: name_of(type(part)) if part.slot in ROLES else part.slot for part in parts}
    return names if len({*names.values()}) == len(names) else {slot: slot for slot in names}


def defines(part: Part, hook: str) -> bool:
    """Whether a part has a hook of its own; the engine skips the others."""
    return getattr(type(part), hook) is not getattr(Part, hook)


@dataclass(frozen=True)
class Switch:
    """A method that changes in time: the first round and the parts of each of its stages."""

    stages: tuple[tuple[int, Parts], ...]


Method = Parts | Switch


def switch(before: Method, after: Method, at: int) -> Switch:
    """`before` in rounds 1 to `at - 1`, `after` from round `at` on (FedLMD, Fig. 8).

    Raises `InputError` where the rounds do not grow from 2 on.

    >>> from rayfed.methods import fedlmd, fedlmd_tf
    >>> method = switch(fedlmd_tf(), fedlmd(), at=51)
    >>> parts_at(method, 50) == fedlmd_tf(), parts_at(method, 51) == fedlmd()
    (True, True)
    """
    if at < 2:
        raise InputError(f"switch: at = {at}: a method can change at round 2 or later")
    earlier = [(first, parts) for first, parts in stages(before) if first < at]
    (_, changed), *later = stages(after)
    if later and later[0][0] <= at:
        raise InputError(
            f"switch: at = {at}, then at = {later[0][0]}: the second change must come later"
        )
    return Switch((*earlier, (at, changed), *later))


def stages(method: Method) -> tuple[tuple[int, Parts], ...]:
    """The parts that a method has in turn, those in force together in one tuple, each with their
    first round.
    """
    return method.stages if isinstance(method, Switch) else ((1, method),)


def in_turn(method: Method) -> tuple[Parts, ...]:
    """The parts of each stage."""
    return tuple(parts for _, parts in stages(method))


def parts_at(method: Method, round: int) -> Parts:
    """The parts in force in a round."""
    return [parts for first, parts in stages(method) if first <= round][-1]


def all_parts(method: Method) -> Parts:
    """Every part that a method has in any round."""
    return sum(in_turn(method), ())


def trains(parts: Parts) -> bool:
    """Whether clients train in a round with these parts: one reports on it, or leaves entries at
    the clients.
    """
    return any(defines(part, hook) for part in parts for hook in ("report", "local_names"))


@functools.cache
def gives_memory(report: Callable[..., Any]) -> bool:
    """Whether a part's `report` may give a memory: not where it is annotated as `-> tuple[Tree,
    None]`.
    """
    try:
        returned = get_args(get_type_hints(report).get("return"))
    except NameError:
        # A name that is imported for type checkers only.
        return True
    return report is not Part.report and returned[1:] not in ((None,), (type(None),))


def remembers(parts: Parts) -> bool:
    """Whether clients may have a memory after a round with these parts; entries that stay there are
    one.
    """
    return any(defines(part, "local_names") or gives_memory(type(part).report) for part in parts)


@dataclass(frozen=True, eq=False)
class Held:
    """A part in force, its first round in force without a break, and its state."""

    part: Part
    since: int
    state: Tree
