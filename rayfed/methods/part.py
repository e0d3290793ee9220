"""The contract of a method: a tuple of parts, each with at most seven hooks.

A part is a frozen dataclass whose fields are its hyper-parameters. It stores nothing on itself: the
server has `state`, a client has `memory`, and a client in a single round has `local`. Hooks return
these values, and later hooks get them, so that any piece of the work can run anywhere, or twice.
The hooks, in the order in which a round runs:

    init(weights)                      server, once             -> state
    survey(client)                     client, before the round -> summands
    tell(state, server, surveyed)      server, before training  -> state, payload for the clients
    begin(client)                      client, once per round   -> local
    loss(batch, local)                 client, every batch      -> a scalar term
    report(client, local, fit)         client, after training   -> summands, memory
    update(state, total, step)         server, after clients    -> state, step

Summands are trees of tensors and numbers (`rayfed/tensors/trees.py`) that are added up in an order
that the job fixes.

All of FedProx (Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, eq. 2):

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
from rayfed.tensors.trees import Tree, num_bytes
from rayfed.tensors.weights import Weights

HOOKS = ("init", "survey", "tell", "begin", "loss", "report", "update")
# Class variables of parts in earlier versions, and the call that `check` makes now.
EARLIER = {
    "needs_features": "require_features(self, model)",
    "needs_sgd": "require_sgd(self, training)",
    "without_momentum": "warn_of_momentum(self, training)",
}
# Slots that `compose` fills if no part does.
ROLES = ("supervise", "average")

Parts = tuple["Part", ...]


class Part(Checked):
    """One ingredient of a method.

    Define the hooks that it needs; the others do nothing, and cost nothing.

    A part may also set the class variables, and define `check`, `local_names`, `own_model` and
    `bytes_sent`.
    """

    # The part's role: two parts of one slot cannot be composed. The default is the class's name.
    slot: ClassVar[str]
    # Whether the part's `update` changes the new weights.
    changes_average: ClassVar[bool] = False
    # Whether a client whose training diverges counts as one that has not moved. Without such a
    # part it ends the run.
    skips_diverged: ClassVar[bool] = False
    # The number of samples of each class that the server keeps; this may be a field.
    auxiliary_per_class: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        refuse_earlier_names(cls)
        refuse_misspelt_hooks(cls)
        if not hasattr(cls, "slot"):
            cls.slot = name_of(cls)

    def check(self, model: nn.Module, training: Training) -> None:
        """Raise `InputError` if this part cannot work with the model or with the `[train]` table.

        It is called once, before anything is started. `requirements.py` has what parts often
        require.
        """

    def local_names(self, model: nn.Module) -> Collection[str]:
        """Return the names of the entries of a model's state that stay at each client.

        A client begins its next training with its own values of these entries. They are not sent,
        and `batch.parameters` is without them. In the global model they keep their initial values,
        with which a client begins its first training. Such a part has no other memory.
        """
        return ()

    def bytes_sent(self, summands: Tree) -> int:
        """Return the bytes of what a client sends for its summands of `report`.

        Define it where the message is shorter than the tensors that are added up, as with
        compression. It only counts, and changes nothing that is sent.
        """
        return num_bytes(summands)

    def own_model(self, weights: Weights, memory: Tree) -> Weights | None:
        """Return the weights of the model that a client has in addition to the global model.

        They are for the measures. `weights` are the global model's at the client, and `memory` is
        the part's memory of the client. It is called with both before the client's training, and
        after it.
        """
        return None

    def init(self, weights: Weights) -> Tree:
        """Return the server's state before the first round in which the part acts.

        `weights` are the global model's at that time: the initial ones, but for a part that comes
        later (`switch`).
        """
        return None

    def survey(self, client: ClientView) -> Tree:
        """Return summands from a sampled client before training.

        `client.state` is the server's state.
        """
        return None

    def tell(self, state: Tree, server: ServerView, surveyed: Tree) -> tuple[Tree, Tree]:
        """Return the state, and a payload for every client of the round.

        `surveyed` is the sum of the survey's summands.
        """
        return state, None

    def begin(self, client: ClientView) -> Any:
        """Return the values that `loss` and `report` need in this round, on the client's device.

        By default they are the payload.
        """
        return client.payload

    def loss(self, batch: Batch, local: Any) -> Tensor | None:
        """Return a scalar term, which is added to the other parts' terms; None for no term."""
        return None

    def report(self, client: ClientView, local: Any, fit: Fit) -> tuple[Tree, Tree]:
        """Return the client's summands, and its memory until it is sampled again.

        The memory is None if there is none. If there never is one, annotate `-> tuple[Tree, None]`:
        then the engine does not wait for it.

        If no part of a round has this hook or `local_names`, training would change nothing, so no
        client trains.
        """
        return None, None

    def update(self, state: Tree, total: Tree, step: Step) -> tuple[Tree, Step]:
        """Return the new state, and the step towards the new weights.

        `total` is the sum of the summands of the round's clients. `update` may train on
        `step.server.samples()`. The server's generators are seeded by the round.
        """
        return state, step


def refuse_earlier_names(cls: type[Part]) -> None:
    """Raise `InputError` for a class variable of earlier versions, which `check` replaces now."""
    for name, call in EARLIER.items():
        if name in vars(cls):
            raise InputError(
                f"{cls.__name__}.{name} is no part of the contract any more: in its place, call "
                f"{call} in check(self, model, training); rayfed.methods has this function"
            )
    if "check" in vars(cls):
        refuse_other_parameters(cls, cls.check, ["self", "model", "training"])


def refuse_misspelt_hooks(cls: type[Part]) -> None:
    """Raise `InputError` for a method whose name and parameters are nearly those of a hook.

    It would never be called. A hook must also take the parameters with which it is called.
    """
    for name, method in vars(cls).items():
        matches = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.75)
        if not matches or name.startswith("_") or not inspect.isfunction(method):
            continue
        hook = matches[0]
        parameters = list(inspect.signature(method).parameters)
        hook_parameters = list(inspect.signature(getattr(Part, hook)).parameters)
        if name in HOOKS:
            refuse_other_parameters(cls, method, hook_parameters)
        elif len(parameters) == len(hook_parameters) and parameters[1] == hook_parameters[1]:
            raise InputError(
                f"{cls.__name__}.{name} is no hook; did you mean '{hook}'? Else begin it with _"
            )


def refuse_other_parameters(
    cls: type[Part], hook: Callable[..., Any], parameters: Sequence[str]
) -> None:
    """Raise `InputError` for a hook that cannot be called with these parameters.

    Without this check, the error would appear only in a client's training.
    """
    try:
        inspect.signature(hook).bind(*parameters)
    except TypeError as error:
        raise InputError(
            f"{cls.__name__}.{hook.__name__} has to take ({', '.join(parameters)}): {error}"
        ) from None


def name_of(cls: type) -> str:
    """Return a class's name as job files write it.

    >>> from rayfed.methods import ServerMomentum
    >>> name_of(ServerMomentum)
    'server_momentum'
    """
    return snake_case(cls.__name__)


def names_of_terms(parts: Sequence[Part]) -> dict[str, str]:
    """Return, by slot, the name of a part's term of the loss.

    The name is the slot. In the slots `supervise` and `average` it is the class, unless another
    part has this name.
    """
    names: dict[str, str] = {}
    for part in parts:
        names[part.slot] = name_of(type(part)) if part.slot in ROLES else part.slot
    if len(set(names.values())) < len(names):
        return {slot: slot for slot in names}
    return names


def defines(part: Part, hook: str) -> bool:
    """Say whether a part defines a hook; the engine skips the others."""
    return getattr(type(part), hook) is not getattr(Part, hook)


@dataclass(frozen=True)
class Switch:
    """A method that changes in time: the first round and the parts of each of its stages."""

    stages: tuple[tuple[int, Parts], ...]


Method = Parts | Switch


def switch(before: Method, after: Method, at: int) -> Switch:
    """Return a method that is `before` in rounds 1 to `at - 1`, and `after` from round `at` on.

    FedLMD, Fig. 8. Raise `InputError` if `at` is less than 2, or not less than the next change.

    >>> from rayfed.methods import fedlmd, fedlmd_tf
    >>> method = switch(fedlmd_tf(), fedlmd(), at=51)
    >>> parts_at(method, 50) == fedlmd_tf(), parts_at(method, 51) == fedlmd()
    (True, True)
    """
    if at < 2:
        raise InputError(f"switch: at = {at}: a method can change at round 2 or later")
    earlier = [(first_round, parts) for first_round, parts in stages(before) if first_round < at]
    (_, changed), *later = stages(after)
    if later and later[0][0] <= at:
        raise InputError(
            f"switch: at = {at}, then at = {later[0][0]}: the second change must come later"
        )
    return Switch((*earlier, (at, changed), *later))


def stages(method: Method) -> tuple[tuple[int, Parts], ...]:
    """Return the stages of a method: the first round of each, and its parts."""
    return method.stages if isinstance(method, Switch) else ((1, method),)


def in_turn(method: Method) -> tuple[Parts, ...]:
    """Return the parts of each stage."""
    return tuple(parts for _, parts in stages(method))


def parts_at(method: Method, round: int) -> Parts:
    """Return the parts that act in a round."""
    return [parts for first_round, parts in stages(method) if first_round <= round][-1]


def all_parts(method: Method) -> Parts:
    """Return every part that a method has in any round."""
    collected: list[Part] = []
    for parts in in_turn(method):
        collected.extend(parts)
    return tuple(collected)


def trains(parts: Parts) -> bool:
    """Say whether clients train in a round with these parts.

    They train if a part has `report` or `local_names`.
    """
    return any(defines(part, "report") or defines(part, "local_names") for part in parts)


@functools.cache
def gives_memory(report: Callable[..., Any]) -> bool:
    """Say whether a part's `report` may return a memory.

    It cannot if it is annotated as `-> tuple[Tree, None]`.
    """
    return report is not Part.report and not _always_none(report, 1)


@functools.cache
def gives_summands(report: Callable[..., Any]) -> bool:
    """Say whether a part's `report` may return summands.

    It cannot if it is annotated as `-> tuple[None, Tree]`.
    """
    return report is not Part.report and not _always_none(report, 0)


def _always_none(report: Callable[..., Any], place: int) -> bool:
    """Say whether the value in this place of what `report` returns is annotated as None."""
    try:
        returned = get_args(get_type_hints(report).get("return"))
    except NameError:
        # The annotation has a name that is imported for type checkers only.
        return False
    return returned[place : place + 1] in ((None,), (type(None),))


def remembers(parts: Parts) -> bool:
    """Say whether clients may have a memory after a round with these parts.

    Entries that stay at the clients are a memory too.
    """
    return any(defines(part, "local_names") or gives_memory(type(part).report) for part in parts)


@dataclass(frozen=True, eq=False)
class Held:
    """A part that acts, the first round in which it acts without a break, and its state."""

    part: Part
    since: int
    state: Tree
