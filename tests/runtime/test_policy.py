"""What becomes of work that was lost: the table of docs/failure.md, row by row."""

from pathlib import Path

import pytest

from rayfed.runtime.policy import (
    WORKER_FATES,
    Decision,
    ItemFate,
    Tries,
    Trouble,
    WorkerFate,
    decide,
)

PAGE = Path(__file__).parents[2] / "docs/failure.md"
# What a row of the table says of the place, beside the trouble.
PLACES = {
    "a second GPU": Tries(gpu_failed=True),
    "on a node that drains": Tries(draining=True),
    "memory was full": Tries(draining=True, out_of_memory=True),
}


def rows():
    """Return the rows of the table as (trouble, tries, decision)."""
    text = PAGE.read_text().split("### What is decided")[1].split("## Ray, the driver")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    found = []
    for line in lines:
        trouble, event, worker, item, counts = (cell.strip(" `") for cell in line.split("|")[1:-1])
        tries = Tries()
        for words, place in PLACES.items():
            if words in event:
                tries = place
        decision = Decision(WorkerFate[worker], ItemFate[item], counts == "yes")
        found.append((Trouble[trouble], tries, decision))
    return found


def test_the_table_has_each_trouble_and_each_place():
    troubles = {trouble for trouble, _, _ in rows()}
    assert troubles == set(Trouble)
    assert sum(tries != Tries() for _, tries, _ in rows()) == len(PLACES)


@pytest.mark.parametrize(("trouble", "tries", "decision"), rows())
def test_a_decision_is_that_of_the_table(trouble, tries, decision):
    assert decide(trouble, tries) == decision


@pytest.mark.parametrize(("trouble", "tries", "decision"), rows())
def test_an_item_that_counts_is_given_up_after_so_many_retries(trouble, tries, decision):
    last = Tries(
        times_lost=3,
        max_retries=3,
        gpu_failed=tries.gpu_failed,
        draining=tries.draining,
        out_of_memory=tries.out_of_memory,
    )
    fate = ItemFate.GIVE_UP if decision.counts else decision.items
    assert decide(trouble, last) == Decision(decision.worker, fate, decision.counts)


@pytest.mark.parametrize("trouble", WORKER_FATES)
def test_a_message_of_several_items_never_counts(trouble):
    decision = decide(trouble, Tries(together=4, times_lost=3, max_retries=3))
    assert decision.items is ItemFate.RETRY
    assert not decision.counts
