"""Methods by name: what a job file can say, and the messages for everything else."""

import inspect
import pickle
import re
import sys

import pytest

from rayfed import methods as m
from rayfed.base.errors import InputError
from rayfed.methods.registry import describe, parameters

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
    """The name of an importable module with a part and a recipe."""
    (tmp_path / "own_methods.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_methods"
    sys.modules.pop("own_methods", None)


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ("fedavg", m.fedavg()),
        ("fedlmd_tf", m.fedlmd_tf()),
        ("proximal", m.compose(m.Proximal())),
        ({"name": "fedprox", "mu": 1}, m.fedprox(mu=1.0)),
        (
            [{"name": "fedntd", "beta": 0.5}, {"name": "proximal"}],
            m.compose(m.fedntd(beta=0.5), m.Proximal()),
        ),
        (
            ["fedntd", {"name": "server_momentum", "beta": 0.1}],
            m.compose(m.fedntd(), m.ServerMomentum(0.1)),
        ),
        (
            [{"name": "average", "by": "client"}, "cross_entropy"],
            (m.Average(by="client"), m.CrossEntropy()),
        ),
        (
            [{"until": 50, "method": "fedlmd_tf"}, {"method": "fedlmd"}],
            m.switch(m.fedlmd_tf(), m.fedlmd(), at=51),
        ),
        (
            [
                {"until": 1, "method": "fedavg"},
                {"until": 3, "method": ["fedntd", "proximal"]},
                {"method": "fedlmd"},
            ],
            m.switch(
                m.fedavg(),
                m.switch(m.compose(m.NotTrueDistill(), m.Proximal()), m.fedlmd(), at=4),
                at=2,
            ),
        ),
        ([{"method": "fedntd"}], m.fedntd()),
    ],
    ids=str,
)
def test_an_entry_of_a_job_file_becomes_a_method(given, method):
    assert m.read_method(given) == method
    assert m.read_method(m.write_method(method)) == method


def test_parts_and_recipes_can_come_from_the_users_module(own):
    method = m.read_method({"name": f"{own}:Own", "strength": 3.0})
    assert repr(method[-1]) == "Own(strength=3.0)"
    assert m.write_method(method)[-1] == {"name": f"{own}:Own", "strength": 3.0}
    assert m.read_method(m.write_method(method)) == method
    with_default = m.read_method({"name": f"{own}:Own", "strength": 2.0})
    assert m.read_method(f"{own}:recipe") == m.compose(with_default, m.Proximal())
    for name, message in [
        (
            "Nothing",
            "method 'own_methods:Nothing': module 'own_methods' has no attribute 'Nothing'",
        ),
        ("number", "is 3; it must be a Part"),
        ("NoPart", "NoPart"),
    ]:
        with pytest.raises(InputError, match=message):
            m.read_method(f"{own}:{name}")


@pytest.mark.parametrize("name", m.RECIPES)
def test_a_recipe_is_described_by_its_name(name):
    method = m.RECIPES[name]()
    assert describe(method) == describe(m.read_method(m.write_method(method))) == name


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"name": "fedntd", "beta": 0.5, "form": "mse"}, "fedntd beta = 0.5, form = 'mse'"),
        ({"name": "fedlsd", "beta": 0.25}, "fedlsd beta = 0.25"),
        (
            ["kd", {"name": "proximal", "mu": 0.1}],
            "kd + proximal mu = 0.1",
        ),
        (
            ["normalized_average", "restricted_cross_entropy"],
            "normalized_average + restricted_cross_entropy",
        ),
        ([{"until": 5, "method": "fedavg"}, {"method": "kd"}], "fedavg; from round 6 on: kd"),
        ({"name": "average", "by": "client"}, "average by = 'client', with cross_entropy"),
        ("control_variates", "scaffold by = 'samples'"),
    ],
    ids=str,
)
def test_a_method_is_described_as_it_was_written(given, text):
    assert describe(m.read_method(given)) == text


@pytest.mark.parametrize(
    "given",
    [["fedavg", "proximal"], ["proximal", "fedntd"], ["fedprox", "not_true_distill"]],
    ids=str,
)
def test_a_composed_method_keeps_its_typed_names_through_a_pickle_and_is_equal_to_its_parts(given):
    typed = m.read_method(given)
    assert describe(pickle.loads(pickle.dumps(typed))) == " + ".join(given)
    # From the job.toml of a run, which has the parts.
    again = m.read_method(m.write_method(typed))
    assert again == typed == tuple(typed)
    assert describe(tuple(typed)) in ("fedprox", "fedntd + proximal")


@pytest.mark.parametrize("name", [*m.RECIPES, *m.PARTS])
def test_every_method_explains_itself(name):
    """A sentence for each number, its default, and the method's paper."""
    maker = m.RECIPES.get(name) or m.PARTS[name]
    shown = parameters(name)
    assert [(parameter, default) for parameter, default, _ in shown] == [
        (p.name, p.default) for p in inspect.signature(maker).parameters.values()
    ]
    assert all(len(sentence) > 3 for _, _, sentence in shown if name in m.PARTS), shown
    if name in m.RECIPES:
        assert re.search(r"\b(20[12]\d\)|eq\. \d)", maker.__doc__), "a recipe cites its paper"


def test_the_name_of_a_paper_in_place_of_its_function_is_refused_with_that_function():
    says = "^no name 'FedNTD' in rayfed.methods; methods are functions in small letters: fedntd$"
    with pytest.raises(ImportError, match=says):
        from rayfed.methods import FedNTD  # noqa: F401
    assert not hasattr(m, "FedNothing")
