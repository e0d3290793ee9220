"""Methods by name: what a job file may say, and what is answered where it says something else."""

import inspect
import re
import sys

import pytest

from rayfed.methods import (
    PARTS,
    RECIPES,
    Average,
    CrossEntropy,
    LabelMaskedDistill,
    NotTrueDistill,
    Proximal,
    ServerMomentum,
    compose,
    fedavg,
    fedlmd,
    fedlmd_tf,
    fedntd,
    fedprox,
    read_method,
    switch,
    write_method,
)
from rayfed.methods.registry import parameters
from rayfed.values import InputError

OWN = """
from dataclasses import dataclass
from rayfed.methods import Part, Proximal, compose

@dataclass(frozen=True)
class Own(Part):
    strength: float = 1.0
    def loss(self, batch, local):
        return None

def recipe(strength: float = 2.0):
    return compose(Own(strength), Proximal())

number = 3
class NoPart: ...
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """An importable module with a part and a recipe."""
    (tmp_path / "own_methods.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_methods"
    sys.modules.pop("own_methods", None)


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ("fedavg", fedavg()),
        ("fedlmd_tf", fedlmd_tf()),
        ("proximal", compose(Proximal())),
        ({"name": "fedprox", "mu": 1}, fedprox(mu=1.0)),
        ([{"name": "fedntd", "beta": 0.5}, {"name": "proximal"}], compose(fedntd(beta=0.5), Proximal())),
        (["fedntd", {"name": "server_momentum", "beta": 0.1}], compose(fedntd(), ServerMomentum(0.1))),
        ([{"name": "average", "by": "client"}, "cross_entropy"], (Average(by="client"), CrossEntropy())),
        ([{"until": 50, "method": "fedlmd_tf"}, {"method": "fedlmd"}], switch(fedlmd_tf(), fedlmd(), at=51)),
        (
            [{"until": 1, "method": "fedavg"}, {"until": 3, "method": ["fedntd", "proximal"]}, {"method": "fedlmd"}],
            switch(fedavg(), switch(compose(NotTrueDistill(), Proximal()), fedlmd(), at=4), at=2),
        ),
        ([{"method": "fedntd"}], fedntd()),
    ],
    ids=str,
)
def test_reads(given, method):
    assert read_method(given) == method
    assert read_method(write_method(method)) == method


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("fednt", r"unknown method 'fednt'; did you mean 'fedntd'\? \(valid: average, "),
        ("fed avg!", "unknown method 'fed avg!'"),
        ({"name": "fedntd", "betta": 1}, r"method fedntd: unknown key 'betta'; did you mean 'beta'\?"),
        ({"name": "fedavg", "mu": 1}, r"method fedavg: unknown key 'mu' \(it takes: nothing\)"),
        ({"name": "fedprox", "mu": -1}, r"mu = -1(\.0)?: input should be greater than or equal to 0"),
        ({"name": "fedprox", "mu": "much"}, r"method fedprox\.mu = 'much': input should be a valid number"),
        ({"name": "fedntd", "teacher": 1}, r"method fedntd\.teacher = 1: input should be a valid boolean"),
        ({"name": "fedntd", "form": "l1"}, r"method fedntd\.form = 'l1': input should be 'kl' or 'mse'"),
        ({"beta": 1.0}, r"\{'beta': 1.0\} has no name \(such as"),
        (["fedntd", "fedlmd"], "whole recipe"),
        ([], r"method = \[\]: give a name, a table with a name, or a list of tables"),
        (5, "method = 5: give a name"),
        ([5], "method"),
        ([{"until": 5, "method": "fedavg"}], "the last one only {method = ...}"),
        ([{"method": "fedavg"}, {"method": "fedntd"}], "each entry is {until = ROUND, method = ...}"),
        ([{"until": 5, "method": "fedavg"}, "fedntd"], "'fedntd' in a list that changes in time"),
        ([{"until": 0, "method": "fedavg"}, {"method": "fedntd"}], r"method.until = 0: give the last round"),
        ([{"until": "x", "method": "fedavg"}, {"method": "fedntd"}], r"method.until = 'x': give the last round"),
        (
            [{"until": 5, "method": "fedavg"}, {"until": 5, "method": "fedntd"}, {"method": "fedlmd"}],
            "method.until = 5 follows 5: rounds must grow",
        ),
        ("no_such_module:Part", "method 'no_such_module:Part' cannot be imported"),
    ],
    ids=str,
)
def test_refuses_in_words(given, message):
    with pytest.raises(InputError, match=message):
        read_method(given)


def test_a_part_and_a_recipe_of_ones_own(own):
    method = read_method({"name": f"{own}:Own", "strength": 3.0})
    assert repr(method[-1]) == "Own(strength=3.0)"
    assert write_method(method)[-1] == {"name": f"{own}:Own", "strength": 3.0}
    assert read_method(write_method(method)) == method
    assert read_method(f"{own}:recipe") == compose(read_method({"name": f"{own}:Own", "strength": 2.0}), Proximal())
    for name, message in [
        ("Nothing", "cannot be imported"),
        ("number", "is 3; it must be a Part"),
        ("NoPart", "NoPart"),
    ]:
        with pytest.raises(InputError, match=message):
            read_method(f"{own}:{name}")


def test_a_function_of_the_round_cannot_be_written():
    with pytest.raises(InputError, match="a job can hold parts, or a `switch` between them"):
        write_method(lambda round: fedavg())


def test_recipes_and_parts_are_the_librarys_own():
    assert {"fedavg", "fedprox", "fedavgm", "fedntd", "fedlmd", "fedlmd_tf"} <= set(RECIPES)
    assert "compose" not in RECIPES
    assert PARTS["label_masked_distill"] is LabelMaskedDistill
    assert not set(RECIPES) & set(PARTS)


@pytest.mark.parametrize("name", [*RECIPES, *PARTS])
def test_every_method_explains_itself(name):
    """A sentence for each number, its default, and where the method is from."""
    maker = RECIPES.get(name) or PARTS[name]
    shown = parameters(name)
    assert [(parameter, default) for parameter, default, _ in shown] == [
        (p.name, p.default) for p in inspect.signature(maker).parameters.values()
    ]
    assert all(len(sentence) > 3 for _, _, sentence in shown if name in PARTS), shown
    if name in RECIPES:
        assert re.search(r"\b(20[12]\d\)|eq\. \d)", maker.__doc__), "a recipe cites its paper"
