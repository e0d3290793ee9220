"""Write a record of a run: what `rayfed verify` needs of its folder, without this machine's places.

For docs/results.

    rayfed verify runs/mine && python docs/results/make_record.py runs/mine docs/results/mine

The newest two checkpoints are in it: with `-s output.every=1` those of the last two rounds, so that
the last round can be played again, up to its weights.
"""

import json
import shutil
import sys
from pathlib import Path

import tomli_w

from rayfed.base.storage import Folder
from rayfed.folder.checkpoint import BEST, memories_of
from rayfed.folder.places import checkpoints_of
from rayfed.folder.tables import RESULTS
from rayfed.job import read_job, read_toml


def make_record(run: Path, record: Path) -> int:
    """Write a record of a run to a new folder; gives its bytes.

    The best weights, of any round, are left out.
    """
    job = read_job(run / "job.toml")
    folder = checkpoints_of(job) if job.output.checkpoints else Folder(str(run / "checkpoints"))
    copied = Folder(str(record / "checkpoints"))
    for name in folder.names():
        if name != BEST:
            copied.write(name, folder.read(name))
    for name in memories_of(folder).names():
        memories_of(copied).write(name, memories_of(folder).read(name))
    for name in ("modules", *(f"{table}.parquet" for table in RESULTS)):
        if (run / name).exists():
            shutil.copytree(run / name, record / name)
    tables = read_toml(run / "job.toml")
    del tables["output"]
    (record / "job.toml").write_text(tomli_w.dumps(tables))
    summary, environment = (
        json.loads((run / f"{name}.json").read_text()) for name in ("summary", "environment")
    )
    summary["best"].pop("weights", None)
    environment["checkpoints"] = sorted(
        int(name[6:-5]) for name in folder.names() if name.endswith(".json")
    )
    for name, content in {"summary": summary, "environment": environment}.items():
        (record / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    return sum(file.stat().st_size for file in record.rglob("*") if file.is_file())


if __name__ == "__main__":
    run, record = map(Path, sys.argv[1:])
    print(f"a record of {make_record(run, record) / 1000:,.0f} kB is in {record}")
