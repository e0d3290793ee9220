"""`rayfed.testing.check_part`: parts of rayfed pass, and parts that break a law do not."""

from dataclasses import dataclass

import pytest

from rayfed.base.errors import BrokenContract
from rayfed.methods import RECIPES, Part
from rayfed.testing import check_part

SERVED = []


@dataclass(frozen=True)
class Weighs(Part):
    """Adds a term to the loss; what it does wrong is the name of a method of it."""

    wrong: str
    slot = "weighs"

    def begin(self, client):
        return getattr(self, self.wrong)(client)

    def loss(self, batch, factor):
        return batch.logits.square().mean() * factor

    def nothing(self, client):
        return 0.1

    def counts_clients(self, client):
        SERVED.append(client.id)
        return float(len(SERVED))

    def counts_rounds(self, client):
        """Count the rounds that this process has seen: the same for all clients of a round."""
        if client.round not in SERVED[-1:]:
            SERVED.append(client.round)
        return float(len(SERVED))

    def writes(self, client):
        client.label_counts.zero_()
        return 0.1


@pytest.fixture(autouse=True)
def _nobody_was_served():
    SERVED.clear()


def test_a_part_that_keeps_nothing_passes():
    check_part(Weighs("nothing"))


@pytest.mark.parametrize("name", ["fedavg", "fedntd", "scaffold", "fedcsd", "moon"])
def test_methods_of_rayfed_pass(name):
    check_part(RECIPES[name]())


def test_a_counter_is_refused_when_its_client_is_served_again():
    with pytest.raises(BrokenContract, match="served again after others"):
        check_part(Weighs("counts_clients"))


def test_what_depends_on_the_process_is_refused():
    with pytest.raises(AssertionError, match=r"Weighs: played again, .* round 1 has other weights"):
        check_part(Weighs("counts_rounds"))


def test_a_hook_that_writes_to_its_view_is_refused():
    with pytest.raises(BrokenContract, match="Weighs"):
        check_part(Weighs("writes"))
