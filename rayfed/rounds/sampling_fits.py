"""What is checked of `clients.sampling` before a run starts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import nn

from rayfed.base.errors import BrokenContract, InputError
from rayfed.clients.cohort import Circumstances, choice_at, held_out
from rayfed.clients.sampling import (
    SAMPLINGS,
    Choice,
    Rule,
    Seen,
    label_of,
    refuse_choice,
    refuse_state,
    start,
)
from rayfed.methods.part import Method, in_turn
from rayfed.methods.personal import local_names


def refuse_unfit_sampling(of: Circumstances, method: Method, model: nn.Module) -> None:
    """Raise `InputError` where the rule does not fit the job, or a rule of the user's is wrong.

    `of` are the circumstances of round 1.
    """
    rule = of.settings.sampling
    num_clients = len(of.sizes) - len(held_out(of.settings, of.seed, len(of.sizes)))
    columns = () if of.trace is None else of.trace.columns
    number = of.settings.chosen(of.training.clients_per_round)
    rule.check(number, num_clients, of.settings.has_clock(columns))
    refuse_no_losses(rule, method, model)
    if type(rule) not in SAMPLINGS.values():
        refuse_own_sampling(of)


def refuse_no_losses(rule: Rule, method: Method, model: nn.Module) -> None:
    """Raise `InputError` if the rule asks for losses of the global model, and there is no such.

    That clients train, and so have losses, is checked with the method.
    """
    if not rule.asks:
        return
    for parts in in_turn(method):
        names: set[str] = set()
        names.update(*local_names(parts, model).values())
        if names:
            raise InputError(
                f"{label_of(rule)}: it asks for losses of the global model, and with this method "
                f"'{min(names)}' stays at the clients; give clients.sampling = 'power_of_choice' "
                "with estimate = 'last', which takes the losses of training"
            )


def refuse_own_sampling(of: Circumstances) -> None:
    """Try a rule of the user's in round 1, twice. Raise `InputError` if its choice is not allowed.

    The clients that it asks have the losses 1, 2, ... in this trial.
    """
    rule = of.settings.sampling
    try:
        first, second = trial(of), trial(of)
    except BrokenContract as error:
        raise InputError(str(error)) from None
    except Exception as error:
        # The user's code may raise anything.
        raise InputError(
            f"{label_of(rule)} fails when it is tried: {type(error).__name__}: {error}"
        ) from error
    if first != second:
        raise InputError(
            f"{label_of(rule)}: choose gives other clients when it is asked again; draw from "
            "choice.generator alone, and keep nothing but the state"
        )


def trial(of: Circumstances) -> list[int]:
    """Return the clients that the rule chooses, after it was started; let it learn, too."""
    rule = of.settings.sampling
    choice = choice_at(of, start(rule, len(of.sizes)))
    asked = refuse_choice(rule, choice, rule.ask(choice), "ask")
    choice = replace(choice, asked=asked, losses=np.arange(1.0, len(asked) + 1))
    clients = refuse_choice(rule, choice, rule.choose(choice), "choose")
    refuse_state(rule, rule.learn(choice.state, seen_in_trial(choice, clients)), "learn")
    return clients.tolist()


def seen_in_trial(choice: Choice, clients: np.ndarray) -> Seen:
    """Return what these clients (K,) might report: a loss of 1."""
    ones = np.ones(len(clients))
    seconds = None if choice.seconds is None else ones
    return Seen(choice.round, clients, choice.sizes[clients], ones, ones, seconds)
