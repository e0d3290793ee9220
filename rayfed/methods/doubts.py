"""What the user of a method may not mean: said before anything runs, or refused."""

import sys
from collections.abc import Iterator

from torch import nn

from rayfed.base.errors import InputError
from rayfed.clients.settings import Training
from rayfed.methods.part import Method, Parts, all_parts, defines, in_turn, name_of, stages, trains
from rayfed.methods.personal import local_names, refuse_misplaced


def doubts(method: Method, model: nn.Module, training: Training, measured: bool = False) -> Iterator[str]:
    """Warnings of what the user of a method may not mean; `measured` is whether the clients' models are measured.

    Raises `InputError` where the parts make no sense together, or nothing would be trained.
    """
    refuse_misplaced(method, model)
    _refuse_vain(method)
    yield from of_losses(all_parts(method))
    yield from of_rounds(method, training)
    yield from of_models(method, model, measured)


def _refuse_vain(method: Method) -> None:
    """Where the part for `average` takes no report of the clients, no other part has anything to act on."""
    for parts in in_turn(method):
        for part in (part for part in parts if part.slot == "average" and not defines(part, "report")):
            hooks = ("report", "local_names", "update")
            if acting := [p for p in parts if p is not part and any(defines(p, hook) for hook in hooks)]:
                name, other = name_of(type(part)), name_of(type(acting[0]))
                raise InputError(
                    f"{name} averages no clients, and {other} acts on clients that have trained; give each rounds of "
                    f'its own: method = [{{until = ROUND, method = "{other}"}}, {{method = "{name}"}}]'
                )


def of_losses(parts: Parts) -> Iterator[str]:
    """A warning for each part of the user's that may be meant to replace the cross-entropy, but trains beside it.

    Such a part is not of this package, its `loss` reads the labels, and its class leaves `slot` as it is.
    """
    supervisor = next((part for part in parts if part.slot == "supervise"), None)
    for cls in dict.fromkeys(type(part) for part in parts if part is not supervisor):
        code = getattr(cls.loss, "__code__", None)
        ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
        if supervisor and code and not ours and "labels" in code.co_names and cls.slot == name_of(cls):
            name, other = cls.__name__, type(supervisor).__name__
            yield (
                f"{name}.loss reads the labels, and {other} learns them too: both are trained. If {name} is meant to "
                f'replace it, give its class the line slot = "supervise"; if both are meant, a slot of another name, '
                f'such as slot = "my_{cls.slot}"'
            )


def of_rounds(method: Method, training: Training) -> Iterator[str]:
    """Warnings of a method that changes in time: of rounds without training, and of changes that never come.

    Raises `InputError` where no client would ever train.
    """
    yield from _of_idle_rounds(method, training.num_rounds)
    yield from _of_changes(method, training)


def _of_idle_rounds(method: Method, num_rounds: int) -> Iterator[str]:
    idle = [(first, last, parts) for first, last, parts in stages(method, 1, num_rounds) if not trains(parts)]
    count = sum(last - first + 1 for first, last, _ in idle)
    if count == 0 or (count == 1 and idle[0][0] > 1):  # a single round, after training, is what such a method is for
        return
    names = " + ".join(name_of(type(part)) for part in idle[-1][2] if part.slot == "average")
    why = f"{names} changes a trained model, and no client trains in its rounds, which are {count} of {num_rounds}"
    rather = f'method = [{{until = {max(1, num_rounds - 1)}, method = "fedavg"}}, {{method = ...}}]'
    if count == num_rounds:
        raise InputError(f"{why}: nothing would be trained. Train first, and give it the last round: {rather}")
    yield f"{why}. Give it the last round alone: {rather}"


def _of_changes(method: Method, training: Training) -> Iterator[str]:
    """A warning where a method that changes in time will, or may, end before it changes."""
    changes = [first for first, _, _ in stages(method, 1, sys.maxsize)][1:]
    if never := [first for first in changes if first > training.num_rounds]:
        yield (
            f"the method changes in round {never[0]}, and train.num_rounds = {training.num_rounds}: it never does; "
            "give `until` an earlier round, or the run more rounds"
        )
    elif changes and training.patience:
        yield (
            f"train.patience = {training.patience} may end the run before round {changes[-1]}, in which the method "
            "changes"
        )


def of_models(method: Method, model: nn.Module, measured: bool) -> Iterator[str]:
    """A warning that the global model's accuracy is not what such a method is for."""
    advice = "" if measured else "; measure = ['local'] records the accuracy of the clients' models"
    if slots := local_names(all_parts(method), model):
        yield (
            f"with {' and '.join(slots)} each client has a model of its own, and some entries of the global model are "
            f"never trained: test_accuracy says little{advice}"
        )
    if keepers := dict.fromkeys(part.slot for part in all_parts(method) if part.keeps_model):
        yield (
            f"with {' and '.join(keepers)} each client has a model of its own, and test_accuracy is that of the global "
            f"model{advice}"
        )
