"""Write the tables of papers.md, which list the tables and figures of the five papers.

$ python docs/make_papers.py
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from pages import put

from rayfed.papers.items import RAN, Declared, items

PAGE = Path(__file__).parent / "papers.md"
PAPERS = ("fedntd", "fedlmd", "fedcad", "fedssd", "fedcsd")
HEAD = ("what it shows", "command", "figure", "state", "reconstructed")


def page(declared: Mapping[str, Declared]) -> str:
    """Return the page's text with the tables of these items."""
    tables = {}
    for paper in PAPERS:
        of_paper = [item for name, item in declared.items() if name.startswith(f"{paper}/")]
        lines = [row(HEAD), row(["---"] * len(HEAD))]
        lines += [row(cells(item)) for item in of_paper]
        tables[paper] = "\n".join(lines)
    return put(PAGE.read_text(), tables)


def cells(declared: Declared) -> list[str]:
    """Return the cells of a table or figure."""
    item = declared.item
    kind = f"`{item.figure}`" if item.figure else "-"
    command = f"`rayfed reproduce {declared.name}`"
    return [item.shows, command, kind, RAN[item.ran], item.reconstructed or "-"]


def row(texts: Iterable[str]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(texts)} |"


if __name__ == "__main__":
    PAGE.write_text(page(items()))
    print(f"wrote {PAGE}")
