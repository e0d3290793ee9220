"""What is checked of a method: before a run, that its parts make sense; in it, what the hooks give."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from rayfed.base.errors import BrokenContract, InputError, RunFailed, told
from rayfed.methods.part import (
    Held,
    Method,
    Part,
    all_parts,
    defines,
    gives_memory,
    in_turn,
    name_of,
    stages,
    trains,
)
from rayfed.methods.personal import LocalModel, local_names, shared
from rayfed.methods.views import Step
from rayfed.tensors.sums import checked
from rayfed.tensors.trees import Tree, copied, dotted, is_container, leaves
from rayfed.tensors.weights import Weights, state


def doubts(
    method: Method, model: nn.Module, num_rounds: int, measured: bool = False
) -> Iterator[str]:
    """Warnings of what the user of a method may not mean; `measured` is whether the clients' models
    are measured.

    Raises `InputError` where the parts make no sense together, or nothing would be trained.
    """
    refuse_misplaced(method, model)
    _refuse_vain(method)
    yield from of_rounds(method, num_rounds)
    yield from of_models(method, model, measured)


def _refuse_vain(method: Method) -> None:
    """Where the part for `average` takes no report of the clients, no other part has anything to
    act on.
    """
    for parts in in_turn(method):
        average = next(part for part in parts if part.slot == "average")
        if defines(average, "report"):
            continue
        for part in parts:
            acts = any(defines(part, hook) for hook in ("report", "local_names", "update"))
            if acts and part is not average:
                name, other = name_of(type(average)), name_of(type(part))
                raise InputError(
                    f"{name} averages no clients, and {other} acts on clients that have trained; "
                    "give each rounds of "
                    f'its own: method = [{{until = ROUND, method = "{other}"}}, {{method = '
                    f'"{name}"}}]'
                )


def refuse_misplaced(method: Method, model: nn.Module) -> None:
    """Raise `InputError` where the entries that stay at the clients make no sense with the rest of
    a method.
    """
    local, *later = [local_names(parts, model) for parts in in_turn(method)] or [{}]
    slots = " and ".join(local)
    if any(names != local for names in later):
        raise InputError(
            "a method that changes in time must leave the same entries at the clients in all rounds"
        )
    for slot, names in local.items():
        unknown = sorted(names - state(model).keys())
        if unknown:
            raise InputError(
                f"{slot}: local_names gives '{unknown[0]}', and the model's state has no such "
                "entry, or it is frozen"
            )
    for parts in in_turn(method):
        keepers = [part.slot for part in parts if defines(part, "own_model")]
        owners = [*keepers, *local]
        if keepers and len(owners) > 1:
            raise InputError(
                f"{' and '.join(owners)}: a client would have several models of its own; keep one "
                "of these parts"
            )
    if not local or any(isinstance(part, LocalModel) for part in all_parts(method)):
        return
    if not any(p.requires_grad for p in shared(local, dict(model.named_parameters())).values()):
        raise InputError(
            f"{slots}: all parameters would stay at the clients, and none would be averaged"
        )
    for part in all_parts(method):
        if defines(part, "survey") or part.auxiliary_per_class:
            raise InputError(
                f"{part!r} needs the whole global model, and with {slots} some entries of it are "
                "never trained; remove one of these parts"
            )


def of_rounds(method: Method, num_rounds: int) -> Iterator[str]:
    """A warning of rounds in which no client trains.

    Raises `InputError` where no client would ever train.
    """
    played = [(first, parts) for first, parts in stages(method) if first <= num_rounds]
    ends = [*(first for first, _ in played[1:]), num_rounds + 1]
    idle = [
        (first, end, parts)
        for (first, parts), end in zip(played, ends, strict=True)
        if not trains(parts)
    ]
    count = sum(end - first for first, end, _ in idle)
    # A single round, after training, is what such a method is for.
    if count == 0 or (count == 1 and idle[0][0] > 1):
        return
    _, _, parts = idle[-1]
    names = " + ".join(name_of(type(part)) for part in parts if part.slot == "average")
    why = (
        f"{names} changes a trained model, and no client trains in its rounds, which are {count} "
        f"of {num_rounds}"
    )
    rather = f'method = [{{until = {max(1, num_rounds - 1)}, method = "fedavg"}}, {{method = ...}}]'
    if count == num_rounds:
        raise InputError(
            f"{why}: nothing would be trained. Train first, and give it the last round: {rather}"
        )
    yield f"{why}. Give it the last round alone: {rather}"


def of_models(method: Method, model: nn.Module, measured: bool) -> Iterator[str]:
    """A warning that the global model's accuracy is not what such a method is for."""
    advice = "; `rayfed clients RUN` measures the clients' models after the run"
    advice += "" if measured else ", measure = ['local'] those of each round"
    slots = local_names(all_parts(method), model)
    if slots:
        yield (
            f"with {' and '.join(slots)} each client has a model of its own, and some entries of "
            f"the global model are never trained: test_accuracy says little{advice}"
        )
    keepers = dict.fromkeys(part.slot for part in all_parts(method) if defines(part, "own_model"))
    if keepers:
        yield (
            f"with {' and '.join(keepers)} each client has a model of its own, and test_accuracy "
            f"is that of the global model{advice}"
        )


def in_force(part: Part, before: Held | None, round: int, weights: Weights) -> Held:
    """A part with its state from the round before.

    A part that was not in force then starts from `init`.
    """
    if before is not None and type(before.part) is type(part):
        return replace(before, part=part)
    state = part.init(copied(weights))
    refuse_unkept(f"{told(type(part))}.init", "state", state)
    return Held(part, round, state)


def a_term(part: Part, term: object) -> Tensor | None:
    """A part's term of the loss, checked."""
    if term is None or (isinstance(term, Tensor) and term.ndim == 0 and term.requires_grad):
        return term
    if isinstance(term, Tensor) and term.ndim == 0:
        raise BrokenContract(
            f"{told(type(part))}.loss gave a number without a gradient, which trains nothing; "
            "compute it from what `batch` has, without detach() or item(), or give None for no "
            "term; where model.freeze stops the gradient, leave this part out"
        )
    kind = f"a tensor of shape {tuple(term.shape)}" if isinstance(term, Tensor) else told(term)
    raise BrokenContract(
        f"{told(type(part))}.loss gave {kind}; it must give a scalar tensor, or None for no term"
    )


def two_values(part: Part, hook: str, values: object, first: str, second: str) -> Any:
    """What a hook gave, checked: two values of these names.

    A state or a memory must fit into a checkpoint.
    """
    name = f"{told(type(part))}.{hook}"
    if not isinstance(values, tuple) or len(values) != 2:
        raise BrokenContract(
            f"{name} gave {told(values)}; it must give two values, the {first} and the {second}"
        )
    if hook == "report" and values[1] is not None and not gives_memory(type(part).report):
        raise BrokenContract(
            f"{name} gave a memory, and is annotated to give None in its place; annotate it as it "
            "is"
        )
    for kind, value in zip((first, second), values, strict=True):
        if kind in ("state", "memory"):
            refuse_unkept(name, kind, value)
    return values


def refuse_unkept(name: str, kind: str, tree: Tree) -> None:
    """Raise `BrokenContract` where a state or a memory holds what a checkpoint would change, or
    cannot hold.
    """
    for path, leaf in leaves(tree):
        plain_keys = all(type(key) in (str, int) for step, key in path if step == "dict")
        plain_leaf = isinstance(leaf, Tensor | int | float | str | None) or is_container(leaf)
        if not plain_keys or not plain_leaf:
            # A tree may be a single leaf, which has no place of its own.
            given = f"a {kind} with {told(leaf)} at {dotted(path)}" if path else told(leaf)
            role = "" if path else f" as its {kind}"
            raise BrokenContract(
                f"{name} gave {given}{role}; a {kind} is made of tensors, numbers and text, in "
                "lists, tuples, and dicts whose keys are text or integers"
            )


def refuse_spoilt(where: str, step: object) -> None:
    """Raise `RunFailed` where an `update` gave no step (`BrokenContract`), or weights that are no
    numbers.
    """
    if not isinstance(step, Step):
        raise BrokenContract(f"{where}: it gave {told(step)} in place of the step")
    try:
        checked(step.proposed)
        checked(step.shown)
    except ValueError as error:
        raise RunFailed(
            f"{where}: the new global model {error}; the round is not recorded"
        ) from None
