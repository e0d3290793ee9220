"""`--profile`: a table after the run."""

import re
import subprocess
import sys

import pytest


def table_of(output):
    """Rows of the table by section and step: a number per phase, then all, as they are printed."""
    section, rows = "", {}
    lines = output.splitlines()
    for line in lines[next(i for i, line in enumerate(lines) if line.startswith("seconds ")) + 1 :]:
        if found := re.fullmatch(r"  (\S.*?)(?:\s{2,}(.*))?", line):
            rows[section, found[1]] = found[2] or ""
        else:
            section = line.partition(",")[0]
    return rows


def test_a_profile_is_printed(folder, rayfed):
    result = rayfed("run", "job.toml", "--profile", "-s", "train.num_rounds=3")
    assert result.exit_code == 0, result.output
    head = next(line for line in result.stdout.splitlines() if line.startswith("seconds "))
    assert re.split(r"\s{2,}", head) == ["seconds", "start", "round 1", "2 to 3", "end", "all", "share"]
    rows = table_of(result.stdout)
    wanted = ("Python starts", "imports", "data, model", "train", "teacher", "evaluate", "wire", "fold", "server")
    assert {("the driver", step) for step in (*wanted, "tables", "checkpoint", "not accounted for", "sum")} <= set(rows)
    assert rows["the driver", "sum"].endswith("100.0%")
    assert re.search(r"until the first round had finished: [\d.]+ s, [\d.]+ s without training", result.stdout)


def test_the_profile_of_a_resumed_run_begins_with_its_checkpoint(folder, rayfed):
    rayfed("run", "job.toml")
    result = rayfed("resume", "runs/tiny", "-s", "train.num_rounds=4", "--profile")
    assert result.exit_code == 0, result.output
    assert re.search(r"seconds +start +round 3 +round 4 +end +all", result.stdout)


def test_a_run_that_fails_prints_the_profile_of_what_was_done(folder, rayfed):
    result = rayfed("run", "job.toml", "--profile", "-s", "train.lr=1e38", "-s", "train.local_epochs=5")
    assert result.exit_code == 1
    assert "the loss became" in result.stderr
    assert re.search(r"seconds +start +end +all", result.stdout)
    assert ("the driver", "train") in table_of(result.stdout)


def test_bad_input_prints_no_profile(folder, rayfed):
    result = rayfed("run", "job.toml", "--profile", "-s", "train.lr=-1")
    assert (result.exit_code, result.stdout) == (2, "")


def test_a_profile_is_of_a_single_run(folder, rayfed):
    job = (folder / "job.toml").read_text().replace('method = "fedntd"', "[grid]\nseeds = [0, 1]")
    (folder / "grid.toml").write_text(job)
    result = rayfed("run", "grid.toml", "--profile")
    assert result.exit_code == 2
    assert "--profile is of a single run: choose one of the 2 with --only" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells when a process was started")
def test_the_profile_begins_with_the_process(folder):
    script = "import time; time.sleep(0.5); from rayfed.cli.profile import BEGAN; print(time.monotonic() - BEGAN)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) >= 0.48, "to 10 ms"
