"""docs/notebook.ipynb runs, shows what its committed outputs show, and holds nothing of a machine."""

import importlib.util
import re
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools/run_notebook.py"


@pytest.fixture(scope="module")
def tool():
    pytest.importorskip("nbclient")
    spec = importlib.util.spec_from_file_location("run_notebook", TOOL)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def shown(notebook):
    """What the cells print, without decimals, whose last digits differ between processors, and how much they draw."""
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        text = "".join(output.text for output in outputs if output.output_type == "stream")
        yield re.sub(r"-?\d+\.\d+", "#", text), sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_and_prints_what_its_committed_outputs_say(tool, tmp_path, monkeypatch):
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(TOOL.parents[1]))
    (tmp_path / "work").mkdir()
    fresh = tool.executed(tmp_path / "work")
    committed = tool.nbformat.read(tool.NOTEBOOK, as_version=4)
    assert list(shown(fresh)) == list(shown(committed))
    assert sum(pictures for _, pictures in shown(fresh)) == 5
    assert (tmp_path / "work/runs/notebook/fedntd/report.html").is_file()


def test_the_committed_notebook_is_clean(tool):
    text = tool.NOTEBOOK.read_text()
    notebook = tool.nbformat.reads(text, as_version=4)
    tool.nbformat.validate(notebook)
    assert not re.search(r"(?<![\w.])/(home|root|work|Users|mnt|tmp)\b", re.sub(r'"image/png": "[^"]*"', "", text))
    assert all(cell.metadata == {} for cell in notebook.cells), "times of execution"
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in codes] == list(range(1, len(codes) + 1)), "in order, all of them"
    assert notebook.metadata.language_info == {"name": "python"}
    assert not any(output.output_type == "error" for cell in codes for output in cell.outputs)
    for target in re.findall(r"\]\(([\w/.]+)\)", "\n".join(cell.source for cell in notebook.cells)):
        assert (tool.NOTEBOOK.parent / target).exists()
