"""Checks of a method: of its parts before a run, and of what the hooks return during the run."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from rayfed.base.errors import BrokenContract, InputError, RunFailed, told
from rayfed.methods.part import (
    Held,
    Method,
    Part,
    Parts,
    all_parts,
    defines,
    gives_memory,
    in_turn,
    name_of,
    stages,
    trains,
)
from rayfed.methods.personal import Local, LocalModel, local_names, shared
from rayfed.methods.views import Step
from rayfed.tensors.sums import checked
from rayfed.tensors.trees import Tree, copied, dotted, is_container, leaves
from rayfed.tensors.weights import Weights, state


def doubts(
    method: Method, model: nn.Module, num_rounds: int, measured: bool = False
) -> Iterator[str]:
    """Yield warnings about a method that the user may not mean.

    `measured` says whether the clients' models are measured. Raise `InputError` if the parts make
    no sense together, or if nothing would be trained.
    """
    refuse_misplaced(method, model)
    _refuse_vain(method)
    yield from of_rounds(method, num_rounds)
    yield from of_models(method, model, measured)


def _refuse_vain(method: Method) -> None:
    """Raise `InputError` if a part has nothing to act on.

    That is so if the part for `average` takes no reports of clients.
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
                    f'give each rounds of its own: method = [{{until = ROUND, method = "{other}"}}'
                    f', {{method = "{name}"}}]'
                )


def refuse_misplaced(method: Method, model: nn.Module) -> None:
    """Raise `InputError` if the method cannot work with the entries that stay at the clients."""
    stages_local = [local_names(parts, model) for parts in in_turn(method)]
    local = stages_local[0] if stages_local else {}
    if any(names != local for names in stages_local):
        raise InputError(
            "a method that changes in time must leave the same entries at the clients in all rounds"
        )
    _refuse_unknown(local, model)
    for parts in in_turn(method):
        _refuse_several_models(parts, local)
    if local and not any(isinstance(part, LocalModel) for part in all_parts(method)):
        _refuse_without_global_model(method, local, model)


def _refuse_unknown(local: Local, model: nn.Module) -> None:
    """Raise `InputError` for an entry that stays at the clients and is not in the model's state."""
    for slot, names in local.items():
        unknown = sorted(names - state(model).keys())
        if unknown:
            raise InputError(
                f"{slot}: local_names gives '{unknown[0]}', and the model's state has no such "
                "entry, or it is frozen"
            )


def _refuse_several_models(parts: Parts, local: Local) -> None:
    """Raise `InputError` if a client would have several models of its own."""
    keepers = [part.slot for part in parts if defines(part, "own_model")]
    owners = keepers + list(local)
    if keepers and len(owners) > 1:
        raise InputError(
            f"{' and '.join(owners)}: a client would have several models of its own; keep one "
            "of these parts"
        )


def _refuse_without_global_model(method: Method, local: Local, model: nn.Module) -> None:
    """Raise `InputError` if no parameter is averaged, or a part needs the complete global model."""
    slots = " and ".join(local)
    averaged = shared(local, dict(model.named_parameters()))
    if not any(p.requires_grad for p in averaged.values()):
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
    """Yield a warning if there are rounds in which no client trains.

    Raise `InputError` if no client would ever train.
    """
    idle = [stage for stage in _played(method, num_rounds) if not trains(stage[2])]
    count = sum(end - first_round for first_round, end, _ in idle)
    # One such round, after training, is what these methods are for.
    if count == 0 or (count == 1 and idle[0][0] > 1):
        return
    _, _, parts = idle[-1]
    names = " + ".join(name_of(type(part)) for part in parts if part.slot == "average")
    reason = (
        f"{names} changes a trained model, and no client trains in its rounds, which are {count} "
        f"of {num_rounds}"
    )
    advice = f'method = [{{until = {max(1, num_rounds - 1)}, method = "fedavg"}}, {{method = ...}}]'
    if count == num_rounds:
        raise InputError(
            f"{reason}: nothing would be trained. Train first, and give it the last round: {advice}"
        )
    yield f"{reason}. Give it the last round alone: {advice}"


def _played(method: Method, num_rounds: int) -> Iterator[tuple[int, int, Parts]]:
    """Yield each stage that a run reaches: its first round, the round after its last, its parts."""
    reached = [stage for stage in stages(method) if stage[0] <= num_rounds]
    ends = [first_round for first_round, _ in reached[1:]]
    ends.append(num_rounds + 1)
    for (first_round, parts), end in zip(reached, ends, strict=True):
        yield first_round, end, parts


def of_models(method: Method, model: nn.Module, measured: bool) -> Iterator[str]:
    """Yield a warning if the global model's accuracy says little about a method."""
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
    """Return a part with its state from the round before.

    A part that did not act in that round starts from `init`.
    """
    if before is not None and type(before.part) is type(part):
        return replace(before, part=part)
    state = part.init(copied(weights))
    refuse_unkept(f"{told(type(part))}.init", "state", state)
    return Held(part, round, state)


def a_term(part: Part, term: object) -> Tensor | None:
    """Return a part's term of the loss.

    Raise `BrokenContract` unless it is None, or a scalar with a gradient.
    """
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


def two_values(
    part: Part, hook: str, values: object, first_kind: str, second_kind: str
) -> tuple[Any, Any]:
    """Return the two values that a hook has returned.

    Raise `BrokenContract` unless there are two. A value of the kind "state" or "memory" must also
    fit into a checkpoint.
    """
    name = f"{told(type(part))}.{hook}"
    if not isinstance(values, tuple) or len(values) != 2:
        raise BrokenContract(
            f"{name} gave {told(values)}; it must give two values, the {first_kind} and the "
            f"{second_kind}"
        )
    if hook == "report" and values[1] is not None and not gives_memory(type(part).report):
        raise BrokenContract(
            f"{name} gave a memory, and is annotated to give None in its place; annotate it as it "
            "is"
        )
    for kind, value in zip((first_kind, second_kind), values, strict=True):
        if kind in ("state", "memory"):
            refuse_unkept(name, kind, value)
    return values


def refuse_unkept(name: str, kind: str, tree: Tree) -> None:
    """Raise `BrokenContract` if a checkpoint cannot hold a state or a memory as it is."""
    for path, leaf in leaves(tree):
        plain_keys = all(type(key) in (str, int) for step, key in path if step == "dict")
        plain_leaf = isinstance(leaf, Tensor | int | float | str | None) or is_container(leaf)
        if not plain_keys or not plain_leaf:
            # A tree may be a single leaf, which has no path.
            if path:
                returned = f"a {kind} with {told(leaf)} at {dotted(path)}"
            else:
                returned = f"{told(leaf)} as its {kind}"
            raise BrokenContract(
                f"{name} gave {returned}; a {kind} is made of tensors, numbers and text, in "
                "lists, tuples, and dicts whose keys are text or integers"
            )


def refuse_spoilt(where: str, step: object) -> None:
    """Raise `RunFailed` if the weights of a step have a NaN or an infinity.

    Raise `BrokenContract` if an `update` has not returned a step.
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
