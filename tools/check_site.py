"""Check the site that `make docs` has built, and the pages that it is made of.

Every link and anchor leads somewhere, on disk, without a network. The pages have the words that
people search for. Commands can be copied as they are, and no line of code is too long. Pictures of
the report show today's.

python tools/check_site.py build/site
"""

import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
# Words that people type into a search.
SEARCHED = (
    *("custom model", "custom dataset", "custom method", "federated averaging", "tutorial"),
    *("sweep", "hyperparameter search", "early stopping", "multiple gpus", "bit-identical"),
    *("troubleshooting", "differential privacy", "non-iid", "faq", "reproducible"),
)
# Characters of a line of code, which a page shows without scrolling.
LONGEST = 100
# The file beside the pictures of reports: what the report looked like when they were taken.
TAKEN = "taken.json"
# MB of the whole site.
LARGEST = 30
# What a page brings, and its attribute.
LOADED = {
    "script": "src",
    "img": "src",
    "link": "href",
    "iframe": "src",
}


class Page(HTMLParser):
    """The ids of a page, its links, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values:
            self.loaded.append(values[LOADED[tag]])


def faults(site: Path) -> list[str]:
    """A line for each link that leads nowhere, and for each thing that is loaded from elsewhere."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    lines = [] if pages else [f"{site}: there are no pages"]
    for path, page in pages.items():
        here = path.relative_to(site.resolve())
        lines += [f"{here}: loads {url}" for url in page.loaded if urlsplit(url).netloc]
        for url in [*page.links, *page.loaded]:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not to.is_file():
                lines.append(f"{here}: {url}: there is no such file")
            elif parts.fragment and to in pages and unquote(parts.fragment) not in pages[to].ids:
                lines.append(f"{here}: {url}: the page has no such anchor")
    return list(dict.fromkeys(lines))


def faults_of_words(pages: dict[Path, str]) -> list[str]:
    """A line for each searched word that no page has."""
    everything = re.sub(r"\s+", " ", " ".join(pages.values())).lower()
    return [f"no page has the words '{words}'" for words in SEARCHED if words not in everything]


def faults_of_code(path: Path, text: str) -> list[str]:
    """A line for each block of commands that cannot be copied, and for each line that is too long.

    A prompt `$ ` is for commands whose output follows.
    """
    lines = []
    for language, code in re.findall(r"^```(\S*)\n(.*?)^```$", text, re.M | re.S):
        # What is in braces is for Sphinx.
        rows = [] if language.startswith("{") else code.splitlines()
        if language == "console" and all(row.startswith("$ ") for row in rows):
            lines.append(f"{path}: no output follows '{rows[0]}': make it a block of bash")
        for row in rows:
            if len(row) > LONGEST:
                lines.append(f"{path}: a line of code with {len(row)} characters: {row[:60]}")
    return lines


def look_of_report(root: Path) -> str:
    """Return a hash of what a run's report looks like: its templates, and what a recorded one says.

    `tools/picture_report.py` writes it beside the pictures that it takes.
    """
    folder = root / "rayfed/report/templates"
    look = hashlib.sha256()
    for name in ("base.html", "run.html", "page.css", "page.js"):
        look.update((folder / name).read_bytes())
    said = json.loads((root / "tests/records/pages.json").read_text())["one"]
    look.update(json.dumps(said, sort_keys=True).encode())
    return look.hexdigest()


def faults_of_pictures(root: Path) -> list[str]:
    """Return a line for each picture of a report that looks different today."""
    folder = root / "docs/report"
    record = folder / TAKEN
    taken = json.loads(record.read_text()) if record.exists() else {}
    lines = []
    for path in sorted(folder.glob("*.png")):
        name = re.sub(r"-\d+-(light|dark)$", "", path.stem)
        if taken.get(name) != look_of_report(root):
            lines.append(
                f"docs/report/{path.name}: the report looks different today; take the picture "
                "again with tools/picture_report.py"
            )
    return lines


def faults_of_pages(root: Path) -> list[str]:
    """A line for each fault of the pages, as Markdown has them."""
    paths = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    pages = {path.relative_to(root): path.read_text() for path in paths}
    lines = faults_of_words(pages)
    for path, text in pages.items():
        lines += faults_of_code(path, text)
    return lines


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(f"{(__doc__ or '').strip()}\n\ngive the folder of the site; `make docs` builds it")
    site = Path(sys.argv[1])
    wrong = faults(site) + faults_of_pages(ROOT) + faults_of_pictures(ROOT)
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) / 1e6
    if size > LARGEST:
        wrong.append(f"the site has {size:.1f} MB; at most {LARGEST} are right")
    if wrong:
        sys.exit("\n".join(wrong))
    print(
        f"{site}: {len(list(site.rglob('*.html')))} pages, {size:.1f} MB, all links lead somewhere"
    )


if __name__ == "__main__":
    main()
