"""The command `init`."""

from pathlib import Path

import click

from rayfed.base.errors import InputError

PROJECT = Path(__file__).parent / "project"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def init(folder: Path) -> None:
    """Create a starter project (job file, own method, test) in FOLDER.

    The project has a job file, your own method with its test, and a README with three commands.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"'{folder}' is not an empty folder, and nothing in it is replaced: give a new "
            "folder's name"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(PROJECT.iterdir()):
        # The files end in .txt, as in README.md.txt, so that no tool takes them for rayfed's files.
        (folder / file.stem).write_text(file.read_text())
    print((folder / "README.md").read_text())
    hint = "" if folder.samefile(".") else f"; go there first: cd '{folder}'"
    print(f"Written to '{folder}'{hint}")
