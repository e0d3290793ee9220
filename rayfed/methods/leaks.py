"""What a method sends beside a private average: refused, since no noise covers it."""

from dataclasses import fields
from typing import Any

from torch import nn

from rayfed.base.errors import InputError
from rayfed.clients.participation import Participation
from rayfed.methods.part import (
    Method,
    Part,
    Parts,
    all_parts,
    defines,
    gives_summands,
    in_turn,
    name_of,
    remembers,
)
from rayfed.methods.personal import local_names, shared
from rayfed.methods.private import PrivateAverage
from rayfed.tensors.weights import parameters_of, state


def refuse_leaks(method: Method, model: nn.Module, participation: Participation) -> None:
    """Raise `InputError` if epsilon would not hold for all that a private average's clients send.

    A method without a private average sends what it likes.
    """
    private = [part for part in all_parts(method) if isinstance(part, PrivateAverage)]
    if not private:
        return
    for parts in in_turn(method):
        _refuse_other_average(parts)
        for part in parts:
            _refuse_other_summands(part)
        _refuse_no_average(parts, model)
        _refuse_buffers(parts, model)
        if private[0].hidden_cohorts:
            _refuse_memories(parts)
    if any(part != private[0] for part in private):
        raise InputError(
            "private_average: its values change between the stages of the method, and epsilon is "
            "of one noise for all rounds; give each stage the same"
        )
    _refuse_other_cohorts(participation)


def _refuse_other_average(parts: Parts) -> None:
    """Raise `InputError` if a stage averages without noise."""
    average = next(part for part in parts if part.slot == "average")
    if not isinstance(average, PrivateAverage):
        raise InputError(
            f"private_average: another stage of the method has {name_of(type(average))}, which "
            "sends updates without noise; give private_average to each stage"
        )


def _refuse_other_summands(part: Part) -> None:
    """Raise `InputError` if a part sends something that the noise does not cover."""
    name = name_of(type(part))
    if isinstance(part, PrivateAverage):
        return
    if part.auxiliary_per_class:
        raise InputError(
            f"private_average: {name} gives the server samples of the clients, which no noise "
            "covers; leave it out"
        )
    if defines(part, "survey"):
        raise InputError(
            f"private_average: {name} asks the clients for sums before training (survey), which no "
            "noise covers; leave it out"
        )
    if gives_summands(type(part).report):
        raise InputError(
            f"private_average: {name} sends sums of its own beside the average (report), which no "
            "noise covers; leave it out; a part of yours that sends none says so: "
            "report(...) -> tuple[None, Tree]"
        )


def _refuse_no_average(parts: Parts, model: nn.Module) -> None:
    """Raise `InputError` if all parameters stay at the clients."""
    if not shared(local_names(parts, model), parameters_of(model)):
        raise InputError(
            "private_average: all parameters stay at the clients, so there is no average to protect"
        )


def _refuse_buffers(parts: Parts, model: nn.Module) -> None:
    """Raise `InputError` if buffers would be averaged, as they have no bound."""
    sent = shared(local_names(parts, model), state(model))
    buffers = sorted(sent.keys() - parameters_of(model).keys())
    if buffers:
        raise InputError(
            f"private_average: the model's buffer '{buffers[0]}' would be averaged, and it has no "
            "bound; keep BatchNorm at the clients with the part local_norm, or take a model without"
        )


def _refuse_memories(parts: Parts) -> None:
    """Raise `InputError` if a client's update depends on the secret cohorts before.

    What hidden cohorts add to privacy is proven for rounds that depend on the data and on earlier
    models alone.
    """
    for part in parts:
        if remembers((part,)):
            raise InputError(
                f"private_average: clients have a memory with {name_of(type(part))}, so a round "
                "depends on earlier cohorts, for which hidden_cohorts is not proven; leave out "
                "hidden_cohorts"
            )


def _refuse_other_cohorts(participation: Participation) -> None:
    """Raise `InputError` if a round's clients are not a uniform sample of a fixed size."""
    uniform = Participation()
    for field in fields(participation):
        value: Any = getattr(participation, field.name)
        if value != getattr(uniform, field.name):
            raise InputError(
                f"clients.{field.name} = {value!r}: private_average counts on cohorts of a fixed "
                "size, drawn uniformly from all clients; leave out the [clients] table"
            )
