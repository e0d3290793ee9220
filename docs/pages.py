"""What the scripts share that make pages: texts at their places, figures, an error as one line."""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from rayfed.base.errors import InputError
from rayfed.folder.places import lineage_of
from rayfed.grid.cells import expand
from rayfed.job import differences, override, read_job, read_toml
from rayfed.papers.style import INK, METADATA


def put(page: str, texts: Mapping[str, str]) -> str:
    """The page with other texts at the places of these names."""
    for name, text in texts.items():
        between = rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)"
        before, *after = re.split(between, page, flags=re.DOTALL)
        if len(after) != 1:
            raise InputError(
                f"the page has {len(after)} places <!-- {name} --> with an end; it needs one"
            )
        page = f"\n{text}\n\n".join([before, *after])
    return page


def to_svg(figure: Figure, path: Path) -> None:
    """Write a figure: the same bytes for the same numbers, and its ink in a grey that is seen on
    dark pages too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, format="svg", metadata=METADATA)
    path.write_text(
        re.sub(r"[ \t]+$", "", path.read_text().replace(INK, "#333333"), flags=re.MULTILINE)
    )


def refuse_another_job(run: Path, *files: Path) -> None:
    """Raise `InputError` where a run is none of these job files', wherever its data lie and it was
    played.
    """
    tables = read_toml(run / "job.toml")
    cell = next(
        (cell for file in files for cell in expand(read_toml(file)) if cell.name == tables["name"]),
        None,
    )
    if cell is None:
        raise InputError(
            f"'{run}' is no run of {' or '.join(file.name for file in files)}: no run there has "
            "its name"
        )
    places = {
        "ray": tables["ray"],
        **{f"data.{key}": tables["data"][key] for key in ("source", "test", "root")},
    }
    other = differences(lineage_of(tables), read_job(override(cell.tables, places)).lineage())
    if other:
        raise InputError(f"'{run}' has another job than the file: {'; '.join(other)}")


def from_shell(main: Callable[..., None]) -> None:
    """Call a command with the shell's arguments; what is missing or wrong is one line."""
    try:
        main(*sys.argv[1:])
    except (InputError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
