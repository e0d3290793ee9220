"""A file imports only from its own layer or those below, Ray stays in one place, and a file can be read in one go."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rayfed

PACKAGE = Path(rayfed.__file__).parent
LAYERS = [
    ["values", "weights", "wire", "seeds", "metrics", "losses", "data", "models", "storage"],
    ["methods.part"],
    ["methods", "local"],
    ["rounds", "job", "checkpoint", "record", "provenance", "package"],
    ["runtime"],
    ["report", "experiment", "replay", "display", "grid", "cost", "completion", "exits", "cli", "__main__"],
]
LONGEST = 350  # lines
PATHS = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in sorted(PACKAGE.rglob("*.py"))}
FILES = {".".join(parts).removesuffix(".__init__"): path for parts, path in PATHS.items()}
every_file = pytest.mark.parametrize("name", FILES)


def layer_of(name):
    """The layer of the longest entry that the name, without `rayfed.`, begins with."""
    entries = {entry: number for number, layer in enumerate(LAYERS) for entry in layer}
    fitting = [entry for entry in entries if name == entry or name.startswith(entry + ".")]
    return entries[max(fitting, key=len)] if fitting else None


def imports_of(path):
    """Every module that a file imports, anywhere in it; `from rayfed import x` is `rayfed.x`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            of_package = node.module in ("rayfed", "rayfed.methods")
            yield from (f"{node.module}.{alias.name}" for alias in node.names) if of_package else [node.module]


@pytest.mark.parametrize("name", [name for name in FILES if name != "__init__"])  # that one imports when it is asked
def test_every_file_has_a_layer_and_looks_down_only(name):
    own = layer_of(name)
    assert own is not None, f"{name} has no layer"
    looked_at = {module.removeprefix("rayfed.") for module in imports_of(FILES[name]) if module.startswith("rayfed.")}
    assert {module for module in looked_at if (layer_of(module) or 0) > own} == set()


@every_file
def test_only_the_runtime_imports_ray(name):
    rays = [module for module in imports_of(FILES[name]) if module.split(".")[0] == "ray"]
    assert not rays or name.startswith("runtime."), rays


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("losses.")])
def test_losses_need_torch_alone(name):
    foreign = {module for module in imports_of(FILES[name]) if module.split(".")[0] not in sys.stdlib_module_names}
    assert {m for m in foreign if not m.startswith(("torch", "rayfed.losses"))} == set()


@every_file
def test_a_file_can_be_read_in_one_go(name):
    assert len(FILES[name].read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize(
    ("modules", "kept_out"),
    [
        ("rayfed", "torch numpy ray pydantic pyarrow"),
        ("rayfed.losses", "ray pydantic pyarrow PIL torchvision matplotlib rich click"),
        ("rayfed.runtime.worker, rayfed.wire, rayfed.methods.registry", "ray torchvision matplotlib rich click"),
        ("rayfed.runtime.actors", "torchvision matplotlib rayfed.report rayfed.experiment rayfed.record"),
        ("rayfed.experiment, rayfed.runtime.here", "ray torchvision matplotlib"),
    ],
)
def test_what_an_import_brings(modules, kept_out):
    """What a client's process loads, and what one who only wants the losses does."""
    script = f"import sys, {modules}; print(*(m for m in {kept_out.split()} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert done.stdout.split() == []
