"""Type questions into the search of the site that `make docs` has built, and check its answers.

The right page has to be among the first hits. The search is the site's own: its scripts and its
index run in node, which needs no package.

python tools/search_site.py build/site
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# The right page has to be one of so many first hits.
FIRST = 3
# What people type -> the pages that answer it.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "custom dataset": ("docs/data",),
    "custom model": ("docs/own",),
    "custom method": ("docs/own-method",),
    "sweep": ("docs/grids",),
    "hyperparameter search": ("docs/grids",),
    "early stopping": ("docs/training",),
    "learning rate": ("docs/training",),
    "multiple gpus": ("docs/gpu",),
    "out of memory": ("docs/troubleshooting",),
    "bit-identical": ("docs/gpu",),
    "accuracy": ("docs/results",),
    "troubleshooting": ("docs/troubleshooting",),
    "tutorial": ("docs/tutorial",),
    "which method": ("docs/which-method",),
    "federated averaging": ("docs/methods/fedavg",),
    "non-iid": ("docs/data", "docs/notebooks/non-iid"),
    "differential privacy": ("docs/privacy",),
    "export onnx": ("docs/bridges",),
    "kubernetes": ("docs/cluster",),
    "slurm": ("docs/cluster",),
    "resume": ("docs/failure",),
    "exit codes": ("docs/failure", "docs/cheat-sheet"),
    "tensorboard": ("docs/watching",),
    "install": ("docs/install",),
    "colab": ("docs/faq", "docs/teaching"),
    "flower": ("docs/coming-from",),
    "cheat sheet": ("docs/cheat-sheet",),
    "cite": ("README", "docs/faq"),
}
# In the order in which a page of the search loads them.
SCRIPTS = (
    "_static/doctools.js",
    "_static/sphinx_highlight.js",
    "_static/searchtools.js",
    "_static/language_data.js",
    "searchindex.js",
)
# Just so much of a browser that the search runs.
PROGRAM = """
const vm = require("vm");
const fs = require("fs");
const given = JSON.parse(fs.readFileSync(0, "utf8"));
const browser = vm.createContext({
  URLSearchParams,
  console,
  location: { search: "" },
  localStorage: { setItem() {} },
  document: { readyState: "loading", addEventListener() {}, getElementById: () => null },
});
browser.window = browser;
for (const path of given.scripts) vm.runInContext(fs.readFileSync(path, "utf8"), browser);
const search = vm.runInContext("Search", browser);
const found = given.questions.map((question) => {
  browser.location.search = `?${new URLSearchParams({ q: question })}`;
  const hits = search._performSearch(...search._parseQuery(question));
  return hits.reverse().slice(0, given.most);
});
console.log(JSON.stringify(found));
"""


class Hit(NamedTuple):
    """A line of what the search shows."""

    page: str
    # Of the page, and of its heading if that was found.
    title: str
    anchor: str
    score: float


def hits(site: Path, questions: Iterable[str], most: int = 10) -> dict[str, list[Hit]]:
    """Return what the site's search shows for each question, the first hit first."""
    asked = list(questions)
    scripts = [str(site / name) for name in SCRIPTS]
    done = subprocess.run(
        ["node", "-e", PROGRAM],
        input=json.dumps({"scripts": scripts, "questions": asked, "most": most}),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"the search of {site} does not run: {done.stderr.strip()[-2000:]}")
    found = {}
    for question, rows in zip(asked, json.loads(done.stdout), strict=True):
        found[question] = [Hit(row[0], row[1], row[2], row[4]) for row in rows]
    return found


def rank(found: Iterable[Hit], pages: Iterable[str]) -> int | None:
    """Return the place of the first hit on one of the pages, from 1; None if there is none."""
    right = set(pages)
    for place, hit in enumerate(found, 1):
        if hit.page in right:
            return place
    return None


def faults(site: Path, questions: dict[str, tuple[str, ...]]) -> list[str]:
    """Return a line for each question whose right page is not among the first hits.

    What each question finds is printed.
    """
    lines = []
    for question, found in hits(site, questions).items():
        place = rank(found, questions[question])
        print(f"{question}: {place or 'not found'}")
        for hit in found[:FIRST]:
            print(f"    {hit.page}{hit.anchor}  {hit.title}")
        if place is None or place > FIRST:
            wanted = " or ".join(questions[question])
            lines.append(f"'{question}' does not find {wanted} among the first {FIRST} hits")
    return lines


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(f"{(__doc__ or '').strip()}\n\ngive the folder of the site; `make docs` builds it")
    if shutil.which("node") is None:
        sys.exit("the search runs in node, which is not installed")
    wrong = faults(Path(sys.argv[1]), QUESTIONS)
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(QUESTIONS)} questions find their page among the first {FIRST} hits")


if __name__ == "__main__":
    main()
