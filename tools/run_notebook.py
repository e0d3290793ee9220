"""Run docs/notebook.ipynb, and keep its outputs in it, with nothing of this machine: this command has no options."""

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs/notebook.ipynb"


def executed(folder: Path | str) -> nbformat.NotebookNode:
    """The notebook after a run in a folder, where its results lie. Raises the error of a cell."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=600, record_timing=False, resources={"metadata": {"path": str(folder)}})
    client.execute()
    notebook.metadata.language_info = {"name": "python"}  # without the version
    return notebook


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(executed(folder), NOTEBOOK)
