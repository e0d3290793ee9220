"""What a run with noise on its averages reveals of a client: epsilon, by `dp-accounting`."""

from functools import cache
from importlib.util import find_spec

from rayfed.base.errors import InputError

INSTALL = "pip install 'rayfed-distill[dp]'"


def require_accountant(part: object) -> None:
    """Raise `InputError` if the package that computes epsilon is not installed."""
    if find_spec("dp_accounting") is None:
        raise InputError(
            f"{part!r} needs dp-accounting, which computes epsilon and is not installed: {INSTALL}"
        )


@cache
def epsilon(
    noise: float,
    rounds: int,
    delta: float,
    clients_per_round: int,
    num_clients: int,
    hidden_cohorts: bool,
) -> float:
    """Return epsilon after some rounds, where two federations differ in the data of one client.

    `noise` is the deviation of the noise on the sum, over the clipping norm. A replaced client
    moves the sum by at most twice this norm, so the accountant gets half of `noise`. With
    `hidden_cohorts` each round draws its clients without replacement, and nobody learns which
    (Wang et al., AISTATS 2019). Without it, the client is taken to be in every round.

    >>> round(epsilon(4.0, 1, 1e-5, 10, 100, hidden_cohorts=False), 2)
    2.17
    """
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    event = GaussianDpEvent(noise / 2)
    if hidden_cohorts and clients_per_round < num_clients:
        event = SampledWithoutReplacementDpEvent(num_clients, clients_per_round, event)
    accountant.compose(event, rounds)
    return float(accountant.get_epsilon(delta))
