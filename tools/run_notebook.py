"""Run the notebooks in docs/notebooks, and keep their outputs in them, with nothing of this
machine.

python tools/run_notebook.py              all
python tools/run_notebook.py figure       docs/notebooks/figure.ipynb
"""

import argparse
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = {
    path.stem: path
    for path in sorted(Path(__file__).resolve().parents[1].glob("docs/notebooks/*.ipynb"))
}


def executed(path: Path, folder: Path | str) -> nbformat.NotebookNode:
    """Return a notebook after a run in a folder, where its results lie.

    Its outputs are without warnings, which name folders and processes of this machine. Raises the
    error of a cell.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, record_timing=False, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    # Without the version.
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of a notebook: {', '.join(NOTEBOOKS)}; none: all"
    )
    names = parser.parse_args().names or [*NOTEBOOKS]
    if unknown := [name for name in names if name not in NOTEBOOKS]:
        parser.error(f"no notebook {', '.join(unknown)}; there are {', '.join(NOTEBOOKS)}")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(NOTEBOOKS[name], folder), NOTEBOOKS[name])


if __name__ == "__main__":
    main()
