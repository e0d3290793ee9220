"""The README's tree has every file, and no other."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_tree_lists_every_source_file():
    tree = re.search(r"## Where things are\n+```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    listed, folders = set(), []
    for line in tree.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        folders = [*folders[: len(indent) // 2], name.rstrip("/")]
        if name.endswith(".py"):
            listed.add("/".join(folders))
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rayfed").rglob("*.py")}
    assert listed == {path for path in there if Path(path).name not in ("__init__.py", "__main__.py")}
