"""The code that a run records is the code that runs, whenever a module's file is edited."""

import importlib
import sys

import pytest

import rayfed
from rayfed.base import code
from rayfed.base.code import Source, edited, import_from
from rayfed.base.errors import InputError
from rayfed.folder import provenance
from rayfed.methods import compose

MINE = '''"""A module of the user's."""
from dataclasses import dataclass
import enum
import functools
from rayfed.methods import Part

SCALE = 0.5
COUNT = 0

class Kind(enum.IntEnum):
    HARD = 1

def helper(x, factor=2.0):
    global COUNT
    COUNT += 1
    return factor * x

@dataclass(frozen=True)
class Pull(Part):
    strength: float = 0.0

    @functools.cached_property
    def doubled(self):
        return 2 * self.strength

    def loss(self, batch, local):
        return SCALE * self.strength * batch.logits.square().mean()
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """An imported module, and a function that edits its file."""
    file = tmp_path / "mine_edited.py"
    file.write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    # Python takes the compiled file for the new one after an edit within a second, of one size.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = list(sys.meta_path)
    module = importlib.import_module("mine_edited")

    def edit(old, new):
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    yield module, edit
    sys.meta_path[:] = before
    sys.modules.pop("mine_edited", None)


EDITS = {
    ("square()", "abs()"): "Pull.loss is another function",
    ("return 2 * self", "return 3 * self"): "Pull.doubled is another function",
    ("return factor * x", "return x"): "helper is another function",
    ("SCALE = 0.5", "SCALE = 5.0"): "SCALE is 0.5 here, and 5.0 in the file",
    ("factor=2.0", "factor=4.0"): "a default of helper is 2.0 here, and 4.0 in the file",
    ("strength: float = 0.0", "strength: float = 1.0"): "Pull.strength is 0.0 here, and 1.0",
    ("return factor * x", "return factor *"): "Python cannot read it any more",
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_run_of_a_module_that_was_edited_after_its_import_is_refused(edit, mine, tables):
    module, change = mine
    change(*edit)
    with pytest.raises(
        InputError, match=r"the module 'mine_edited' has changed since it was"
    ) as no:
        rayfed.run(tables, method=compose(module.Pull()))
    assert EDITS[edit] in str(no.value)


def test_comments_and_counters_are_no_change_and_what_is_loaded_anew_runs(mine, tables):
    module, change = mine
    module.helper(1)
    change("SCALE = 0.5", "# a comment\n\nSCALE = 0.5")
    assert rayfed.run(tables, method=compose(module.Pull())).rounds.num_rows
    earlier = module.Pull()
    change("square()", "abs()")
    importlib.reload(module)
    with pytest.raises(
        InputError, match=r"mine_edited\.Pull was made before its module was loaded"
    ):
        rayfed.run(tables, method=compose(earlier), force=True)
    result = rayfed.run(tables, method=compose(module.Pull()), force=True)
    (recorded,) = (result.path / "modules").glob("mine_edited-*.py")
    assert "abs()" in recorded.read_text()


def test_a_run_keeps_the_code_that_it_began_with(mine, tables):
    _, change = mine
    job = rayfed.read_job(tables, {"method": "mine_edited:Pull"})
    provenance.refuse_edited(job)
    began = provenance.sources(job)
    change("SCALE = 0.5", "SCALE = 5.0")
    assert provenance.sources(job) == began and b"SCALE = 0.5" in began["mine_edited"]
    (sent,) = provenance.modules_to_send(job)
    del sys.modules["mine_edited"]
    import_from([sent])
    assert importlib.import_module("mine_edited").SCALE == 0.5
    del sys.modules["mine_edited"]
    import_from([])
    assert importlib.import_module("mine_edited").SCALE == 5.0


def test_packages_are_imported_from_given_code_with_their_relative_imports(tmp_path, monkeypatch):
    folder = tmp_path / "given_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inner.py").write_text("VALUE = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    import_from(
        [
            Source("given_package", str(folder / "__init__.py"), b"from .inner import VALUE"),
            Source("given_package.inner", str(folder / "inner.py"), b"VALUE = 2"),
        ]
    )
    assert importlib.import_module("given_package").VALUE == 2
    for name in ("given_package.inner", "given_package"):
        del sys.modules[name]


def test_a_file_from_before_this_process_is_not_looked_into(mine, monkeypatch):
    module, _ = mine
    assert edited(module, MINE.replace("0.5", "5.0").encode())
    monkeypatch.setattr(code, "_may_be_newer", lambda file: False)
    assert not edited(module, MINE.replace("0.5", "5.0").encode())
