"""Modules import only from their own layer or lower ones, never in a circle; only the runtime knows
Ray.
"""

import ast
import functools
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import rayfed

PACKAGE = Path(rayfed.__file__).parent
LAYERS = [
    # learn: no Ray, writes nothing
    ["base", "tensors"],
    ["losses", "measures"],
    ["clients", "data", "models"],
    ["methods"],
    # run
    ["job"],
    ["rounds", "folder"],
    ["runtime"],
    ["experiment"],
    # use
    ["observers", "report"],
    ["api", "grid", "papers", "submit", "testing", "cli", "__main__"],
]
LAYER_OF = {f"rayfed.{entry}": number for number, layer in enumerate(LAYERS) for entry in layer}
FILES = {
    ".".join(("rayfed", *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for path in PACKAGE.rglob("*.py")
}
# jobs/
FILES = {
    name.removesuffix(".__init__"): FILES[name]
    for name in sorted(FILES)
    if ".examples." not in name
}


def layer_of(name):
    """The layer of the longest entry of `LAYERS` that the name begins with."""
    while name and name not in LAYER_OF:
        name = name.rpartition(".")[0]
    return LAYER_OF.get(name)


@functools.cache
def imports_of(name):
    """Every module that a module imports, also inside functions and for types only; `from rayfed
    import x` too.
    """
    found = []
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [module if module in FILES else node.module for module in inner]
    return found


def test_every_module_has_a_layer_and_imports_none_above_it():
    # Which exports names of all layers.
    for name in FILES.keys() - {"rayfed"}:
        own = layer_of(name)
        assert own is not None, f"{name} has no layer"
        assert {module for module in imports_of(name) if (layer_of(module) or 0) > own} == set(), (
            name
        )


def test_no_circle_of_imports():
    graph = {name: [module for module in imports_of(name) if module in FILES] for name in FILES}
    # Raises CycleError, which lists the modules of a circle.
    order = TopologicalSorter(graph).static_order()
    assert sorted(order) == sorted(FILES)


def test_every_room_is_a_layer_and_beside_them_are_few_files():
    rooms = {f"rayfed.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
    beside = {f"rayfed.{path.stem}" for path in PACKAGE.glob("*.py")} - {"rayfed.__init__"}
    assert rooms | beside == set(LAYER_OF)
    assert len(beside) <= 5


def test_the_package_lists_its_public_names_and_each_can_be_had():
    assert {*rayfed.__all__} <= {*dir(rayfed)} and "HOMES" not in dir(rayfed)
    for name in dir(rayfed):
        assert getattr(rayfed, name) is not None


def test_only_the_runtime_imports_ray():
    for name in FILES:
        rays = [module for module in imports_of(name) if module.split(".")[0] in ("ray", "grpc")]
        assert not rays or name.startswith("rayfed.runtime."), (name, rays)


def test_losses_import_only_torch_and_numpy():
    for name in (name for name in FILES if name.startswith("rayfed.losses")):
        foreign = {
            module
            for module in imports_of(name)
            if module.split(".")[0] not in sys.stdlib_module_names
        }
        assert {
            module
            for module in foreign
            if not module.startswith(("torch", "numpy", "rayfed.losses"))
        } == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "kept_out"),
    [
        ("rayfed", "torch numpy ray pydantic pyarrow"),
        ("rayfed.cli", "torch ray pyarrow"),
        ("rayfed.job", "torch ray pyarrow"),
        ("rayfed.report.read, rayfed.runtime.jobs", "ray torch"),
        ("rayfed.losses", "ray pydantic pyarrow PIL torchvision matplotlib rich click"),
        ("rayfed.experiment, rayfed.runtime.this_process", "ray torchvision matplotlib"),
        (
            "rayfed.runtime.actors",
            "pyarrow PIL torchvision matplotlib rayfed.report rayfed.experiment rayfed.folder",
        ),
    ],
)
def test_an_import_does_not_load_heavy_modules(modules, kept_out):
    """They would slow the start of a command, of a client's process, and of a program that uses
    only the losses.
    """
    script = f"import sys, {modules}; print(*(m for m in {kept_out.split()} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    "words",
    [
        "run quickstart -s train.num_round=2",
        "run quickstart -s train.lr=x",
        "run quickstart -s seed=-1",
        "run quickstart -s data.partition.alpa=1",
        "report nosuch",
        "table nosuch",
        "verify nosuch",
    ],
)
def test_a_mistake_is_told_before_torch_is_imported(words, tmp_path):
    """Importing torch takes seconds.

    Names of methods and models need it, other keys and folders do not.
    """
    script = f"""
import sys
from rayfed.cli import main
try:
    main({words.split()})
except SystemExit as ended:
    print(ended.code, *(name for name in ('torch', 'ray') if name in sys.modules))
"""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.stdout.split() == ["2"], done.stderr


def test_a_new_process_has_the_usual_settings_and_to_set_them_imports_no_compiler():
    """Nearly 900 modules, which `torch.use_deterministic_algorithms` imports even where nothing
    changes.
    """
    script = """
import sys, torch
from rayfed.base.isolation import KEPT, SETTINGS, isolated
unusual = [s.name for s in SETTINGS if s.usual is not KEPT and s.read() != s.usual]
assert not unusual, unusual
with isolated(0, torch.device('cpu')):
    pass
assert 'torch._dynamo' not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=PACKAGE.parent)
