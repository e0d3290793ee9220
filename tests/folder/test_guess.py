"""The line that a run is no better than a guess: when it is there, what it proposes, and when it is
not.
"""

import numpy as np
import pytest

from rayfed.clients.settings import Training
from rayfed.folder.guess import guess, no_better_than_a_guess

TEN = Training(num_rounds=4, lr=0.01)


def rows(*accuracies):
    """A round's row for each, round 0 first; None: not evaluated."""
    return [{"round": n, "test_accuracy": accuracy} for n, accuracy in enumerate(accuracies)]


def test_a_guess_is_the_most_frequent_class_and_not_one_of_all_classes():
    assert guess(np.array([0, 1, 2, 3])) == 0.25
    assert guess(np.array([3, 3, 3, 0])) == 0.75


@pytest.mark.parametrize(
    ("accuracies", "by_guess", "num_examples", "says"),
    [
        ((0.1, 0.25, 0.25), 0.25, 100, "no round is better than a guess"),
        ((0.1, 0.2, None, 0.15), 0.25, 100, "no round is better than a guess"),
        # Nine of ten are one class.
        (
            (0.1, 0.9, 0.9),
            0.9,
            1000,
            "no round is better than a guess",
        ),
        ((0.1, 0.8, 0.1), 0.1, 1000, "the last round is no better than a guess"),
        ((0.1, 0.1, 0.11), 0.1, 1000, ""),
        # The initial model is chance.
        ((0.9, 0.5, 0.6), 0.5, 1000, ""),
        # A good model may have two of eight right.
        ((0.1, 0.25, 0.25), 0.25, 8, ""),
        # A single class has nothing to learn.
        ((0.5, 1.0, 1.0), 1.0, 1000, ""),
        # Nothing has been trained.
        ((0.1,), 0.1, 1000, ""),
    ],
    ids=str,
)
def test_when_there_is_a_line(accuracies, by_guess, num_examples, says):
    line = no_better_than_a_guess(rows(*accuracies), by_guess, num_examples, TEN)
    assert line.startswith(says) and bool(line) == bool(says)


def test_what_it_proposes_is_not_what_the_job_has_already():
    line = no_better_than_a_guess(rows(0.1, 0.1), 0.1, 1000, TEN)
    proposed = (
        "try a larger train.lr than 0.01, or more train.num_rounds than 4, or train.momentum = 0.9"
    )
    assert line.endswith(proposed) and "gives 10.0%" in line
    for other in (Training(momentum=0.9), Training(optimizer="adam")):
        assert "momentum" not in no_better_than_a_guess(rows(0.1, 0.1), 0.1, 1000, other)
    fallen = no_better_than_a_guess(rows(0.1, 0.8, 0.1), 0.1, 1000, TEN)
    assert "round 1 had 80.0%; try a smaller train.lr than 0.01" in fallen


@pytest.mark.parametrize(("notes", "says"), [([("diverged", 2.0)], "smaller"), ([], "larger")])
def test_where_clients_have_diverged_it_proposes_a_smaller_rate(notes, says):
    first, last = rows(0.1, 0.1)
    line = no_better_than_a_guess([first, {**last, "notes": notes}], 0.1, 1000, TEN)
    assert f"try a {says} train.lr than 0.01" in line
    assert ("clients have diverged" in line) == bool(notes)
