"""The README lists exactly the rooms that exist, its numbers are the comparison's, and its examples can be run."""

import re
from pathlib import Path

from rayfed.base.seeds import cohort
from rayfed.job import read_job

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = [ROOT / "README.md", ROOT / "rayfed/cli/train.py"]
REPLAY = re.compile(r"rayfed replay runs/\S+ --round (\d+) --client (\d+)")


def test_the_tree_has_a_line_for_each_room_and_each_file_beside_them():
    tree = re.search(r"## Where things are\n.*?```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    listed = re.findall(r"^  (\S+)", tree, re.MULTILINE)
    rooms = {f"{path.parent.name}/" for path in (ROOT / "rayfed").glob("*/__init__.py")}
    beside = {path.name for path in (ROOT / "rayfed").glob("*.py") if not path.name.startswith("__")}
    assert sorted(listed) == sorted(rooms | beside)


def test_the_table_has_the_numbers_of_the_comparison():
    row = re.compile(r"^\| \[(\w+)\]\(.*?\) \| (.*) \|$", re.MULTILINE)
    page = (ROOT / "docs/comparison.md").read_text().partition("## The tables")[2].partition("\n## ")[0]
    theirs, ours = dict(row.findall(page)), dict(row.findall((ROOT / "README.md").read_text()))
    assert len(ours) >= 5
    assert ours == {name: theirs[name] for name in ours}


def test_the_clients_of_replay_examples_were_in_those_rounds():
    """`rayfed replay` refuses other clients, so an example must name a client that the quickstart's seed draws."""
    job = read_job(ROOT / "jobs/quickstart.toml")
    clients = {path: REPLAY.findall(path.read_text()) for path in EXAMPLES}
    assert all(clients.values())
    for number, client in (pair for pairs in clients.values() for pair in pairs):
        drawn = cohort(job.seed, int(number), job.data.partition.num_clients, job.train.clients_per_round)
        assert int(client) in drawn
