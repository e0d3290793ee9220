"""The reference in docs/api has every public name, and docstrings say what readers need: shapes,
errors, examples.
"""

import ast
import builtins
import importlib
import inspect
import json
import re
import textwrap
from pathlib import Path

import rayfed
from rayfed import losses, methods
from rayfed.data.partition import PARTITIONS
from rayfed.methods import PARTS, RECIPES
from rayfed.models.registry import MODELS

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/api").glob("*.md"))
HOMES = {"methods": methods, "losses": losses}


def documented():
    """Every name in the reference, with its object: those of a module that a page lists, or all
    that it defines.
    """
    things = {}
    for page in (path.read_text() for path in PAGES):
        for name in re.findall(r"^\.\. auto(?:function|class):: rayfed\.(\S+)", page, re.MULTILINE):
            module, _, own = f"rayfed.{name}".rpartition(".")
            things[name] = getattr(importlib.import_module(module), own)
        listed = (
            r"^\.\. automodule:: rayfed\.(\S+)\n   :members:(.*)\n(?:   :exclude-members:(.*)\n)?"
        )
        for module, members, excluded in re.findall(listed, page, re.MULTILINE):
            home = importlib.import_module(f"rayfed.{module}")
            mine = (
                name
                for name, value in vars(home).items()
                if getattr(value, "__module__", "") == home.__name__
            )
            names = members.replace(",", " ").split() or [
                name for name in mine if not name.startswith("_")
            ]
            left_out = excluded.replace(",", " ").split()
            assert {*left_out} <= {*vars(home)}, "a name that is left out is no longer there"
            things |= {
                f"{module}.{name}": getattr(home, name) for name in names if name not in left_out
            }
    return {
        name: thing
        for name, thing in things.items()
        if inspect.isclass(thing) or inspect.isfunction(thing)
    }


REFERENCE = documented()


def own_doc(thing):
    """The docstring that is written at a thing: not inherited, and not made by `dataclass`."""
    doc = thing.__doc__ or ""
    return "" if doc.startswith(f"{thing.__name__}(") else inspect.cleandoc(doc)


def taught():
    """What the documentation's Python, the notebooks and a new project import from rayfed: (module,
    name).
    """
    python_block = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    sources = ["\n".join(python_block.findall(page.read_text())) for page in pages]
    for path in (ROOT / "docs/notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        sources.append(
            "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        )
    sources += [path.read_text() for path in (ROOT / "rayfed/cli/project").glob("*.py.txt")]
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.partition(".")[0] == "rayfed"
        ):
            yield from ((node.module, each.name) for each in node.names)


def test_every_public_name_is_in_the_reference():
    public = {getattr(rayfed, name): name for name in rayfed.__all__}
    public |= {getattr(losses, name): name for name in losses.__all__}
    public |= {
        thing: name for named in (PARTS, RECIPES, PARTITIONS) for name, thing in named.items()
    }
    public |= {thing: name for name, thing in MODELS.items()}
    for module, name in taught():
        thing = getattr(importlib.import_module(module), name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            public[thing] = f"{module}.{name}"
    there = {*REFERENCE.values()}
    assert not [
        name
        for thing, name in public.items()
        if thing not in there and thing.__module__[:6] == "rayfed"
    ]


def test_a_public_name_has_a_docstring_that_begins_with_a_sentence():
    summaries = {
        name: own_doc(thing).partition("\n\n")[0].rstrip() for name, thing in REFERENCE.items()
    }
    assert [name for name, summary in summaries.items() if not summary.endswith((".", ":"))] == []


def raised(thing):
    """The names of what a function raises itself, or a class in its methods that are public."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(thing)))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield node.exc.func.id


def unnamed(thing):
    """The errors that a thing raises, and that neither it nor, of a class, its bases and their
    methods name.
    """
    if inspect.isclass(thing):
        members = [member for base in thing.__mro__ for member in vars(base).values()]
        docs = [
            *(base.__doc__ for base in thing.__mro__),
            *(getattr(member, "__doc__", "") for member in members),
        ]
    else:
        docs = [thing.__doc__]
    words = " ".join(doc for doc in docs if isinstance(doc, str))
    names = {**vars(builtins), **vars(inspect.getmodule(thing))}
    for error in {*raised(thing)} - {"NotImplementedError"}:
        if not any(base.__name__ in re.findall(r"\w+", words) for base in names[error].__mro__):
            yield error


def test_a_docstring_names_the_errors_that_are_raised():
    assert {
        name: errors for name, thing in REFERENCE.items() if (errors := [*unnamed(thing)])
    } == {}


SHAPE = re.compile(r"\([A-Z0-9][A-Za-z0-9, +*-]*,[A-Za-z0-9 ]*\)|\([A-Z]+,\)")
# Arguments whose shapes the package's docstring says once.
LEGEND = re.compile(r"(logits|features|labels)$")


def test_a_loss_says_the_shape_of_each_tensor_and_a_measure_that_of_its_arrays():
    functions = {name: thing for name, thing in REFERENCE.items() if name.startswith("losses.")}
    for name, function in functions.items():
        if inspect.isfunction(function):
            kinds = {
                key: str(each.annotation)
                for key, each in inspect.signature(function).parameters.items()
            }
            shapes = SHAPE.findall(own_doc(function))
            tensors = [
                key for key, kind in kinds.items() if "Tensor" in kind and not LEGEND.search(key)
            ]
            assert len(shapes) >= len(tensors), (name, tensors)
            assert shapes or not any(
                "ndarray" in kind and "Sequence" not in kind for kind in kinds.values()
            ), name


def test_each_name_of_the_package_itself_has_an_example():
    names = [name for name in rayfed.__all__ if not name.endswith("Error")]
    assert [name for name in names if ">>>" not in own_doc(getattr(rayfed, name))] == []
