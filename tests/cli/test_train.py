"""The command `rayfed run`: its output and exit codes; bad input changes nothing."""

import io
import itertools
import json
import logging
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, pstdev
from traceback import walk_tb

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rayfed import Observer, experiment, read_job, resume, run
from rayfed.cli.clients import numbers
from rayfed.folder.summary import read_summary
from rayfed.folder.tables import read_table
from rayfed.measures import forgetting
from rayfed.observers.display import Bar, bar_on, ray_text, result_text
from rayfed.rounds import engine
from rayfed.rounds.round import ClientRow

ROOT = Path(__file__).resolve().parents[2]


# A run
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "says"),
    [(0, ""), (2.5, ", and 2.5 GB of memory"), ("auto", ", and the memory that is measured")],
)
def test_the_header_says_what_an_actor_has(memory, says):
    job = read_job("quickstart", {"ray.actors": 3, "ray.num_gpus": 0.25, "ray.memory": memory})
    expected = "started here; actors: 3, each with 1 CPU and 0.25 GPU" + says
    assert ray_text(job) == expected


def test_a_run_prints_a_header_a_line_per_round_and_where_the_results_are(folder, rayfed):
    result = rayfed("run", "job.toml", "-s", "train.num_rounds=4", "-s", "train.eval_every=3")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[:2] == ["name     tiny", "method   fedntd"]
    assert "data     data: 40 + 20 of 1x4x4; iid, num_clients = 4" in lines
    assert (
        "clients  4 with 10 images each; 2 per round" in lines
        and "ray      off: in this process" in lines
    )
    rounds = [line.split("  ") for line in lines if line.startswith("round ")]
    assert [words[0] for words in rounds] == [f"round {number}/4" for number in range(5)]
    assert [words[1].split()[0] for words in rounds] == [
        "accuracy",
        "not",
        "not",
        "accuracy",
        "accuracy",
    ]
    assert "round 1/4  not evaluated  loss " in (folder / "runs/tiny/log.txt").read_text()
    assert [line.split()[0] for line in lines[-5:]] == ["best", "last", "note", "results", "next"]
    assert lines[-2].endswith("runs/tiny") and lines[-4].endswith("in round 4")
    assert "no round is better than a guess" in lines[-3], "its images are noise"
    assert "\r" not in result.output and result.stderr == ""


def test_warnings_of_the_package_go_to_standard_error(folder, rayfed, monkeypatch):
    open_round = engine.open_round

    def warn(*arguments):
        logging.getLogger("rayfed.somewhere").warning("a thing")
        return open_round(*arguments)

    monkeypatch.setattr(engine, "open_round", warn)
    result = rayfed("run", "job.toml")
    assert result.stderr == "warning: a thing\n" * 2
    assert "a thing" not in result.stdout
    assert (folder / "runs/tiny/log.txt").read_text().count("WARNING a thing") == 2
    assert not logging.getLogger("rayfed").handlers


def test_force_replaces_the_results_of_a_run(folder, rayfed):
    assert rayfed("run", "job.toml").exit_code == 0
    assert rayfed("run", "job.toml", "-s", "seed=1", "--force").exit_code == 0
    assert "seed = 1" in (folder / "runs/tiny/job.toml").read_text()


BROKEN = """
from dataclasses import dataclass
from rayfed.methods import Part
@dataclass(frozen=True)
class Broken(Part):
    def begin(self, client):
        if client.round == 2:
            raise {error}
"""


def test_run_with_resume_continues_a_run_that_was_begun_and_else_begins_it(folder, rayfed):
    words = ["run", "job.toml", "--resume"]
    resumed = lambda: json.loads((folder / "runs/tiny/environment.json").read_text())  # noqa: E731
    assert rayfed(*words).exit_code == 0 and "resumed" not in resumed()
    ended = rayfed(*words, "-s", "train.num_rounds=3")
    assert ended.exit_code == 0, ended.output
    assert [time["after_round"] for time in resumed()["resumed"]] == [2]
    rounds = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("round ")]
    assert rounds == ["3/3"]


def test_a_failing_client_ends_the_run_with_its_traceback_and_code_1(folder, rayfed):
    (folder / "my_broken.py").write_text(BROKEN.format(error="ZeroDivisionError('my own mistake')"))
    result = rayfed("run", "job.toml", "-s", "method=my_broken:Broken")
    assert result.exit_code == 1
    assert "error: " in result.stderr
    assert "in begin" in result.stderr
    assert "ZeroDivisionError: my own mistake" in result.stderr
    log = (folder / "runs/tiny/log.txt").read_text()
    assert "rounds/client_work.py" in log and "rounds/client_work.py" not in result.stderr, (
        "the screen has the user's frames"
    )
    *_, again, onwards, _ = result.stderr.splitlines()
    assert again.startswith("once the code is mended, begin again: rayfed run ") and again.endswith(
        " --force"
    )
    assert onwards.startswith("or, to continue after round 1: rayfed resume ") and onwards.endswith(
        " --other-bits"
    )
    assert "rounds up to 1 are recorded in runs/tiny" in result.stderr
    summary = json.loads((folder / "runs/tiny/summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("failed", 1)


def test_a_part_that_breaks_the_contract_is_named_without_frames_and_with_the_same_advice(
    folder, rayfed
):
    (folder / "my_odd.py").write_text(
        BROKEN.partition("    def")[0] + "    def loss(self, batch, local):\n        return 1.0\n"
    )
    result = rayfed("run", "job.toml", "-s", "method=my_odd:Broken")
    assert result.exit_code == 1
    said, _, again, onwards, replay = result.stderr.splitlines()
    assert (
        said
        == "error: my_odd.Broken.loss gave 1.0; it must give a scalar tensor, or None for no term"
    )
    assert again.startswith("once the code is mended, begin again: rayfed run ") and again.endswith(
        " --force"
    )
    assert onwards.endswith(" --other-bits") and " --round 1 --client " in replay


def test_an_exception_of_50_mb_is_cut_in_the_middle(folder, rayfed):
    (folder / "my_long.py").write_text(
        BROKEN.format(error="ValueError('x' * 50_000_000 + ' the end')")
    )
    result = rayfed("run", "job.toml", "-s", "method=my_long:Broken")
    assert result.exit_code == 1
    assert "ValueError: xxx" in result.stderr and "characters are left out here" in result.stderr
    assert "x the end\n" in result.stderr and "recorded in" in result.stderr
    log, summary = (folder / "runs/tiny" / name for name in ("log.txt", "summary.json"))
    assert len(result.stderr) < 11_000 < 900_000 < log.stat().st_size < 1_100_000
    assert " ERROR ClientFailed: client " in log.read_text() and summary.stat().st_size < 12_000


def test_ctrl_c_ends_the_run_with_code_130_and_says_what_is_recorded(folder, rayfed):
    (folder / "my_stop.py").write_text(BROKEN.format(error="KeyboardInterrupt"))
    result = rayfed("run", "job.toml", "-s", "method=my_stop:Broken")
    assert result.exit_code == 130
    assert result.stderr == (
        "stopped; rounds up to 1 are recorded in runs/tiny; to continue after round 1: rayfed "
        "resume runs/tiny\n"
    )
    assert json.loads((folder / "runs/tiny/summary.json").read_text())["status"] == "stopped"


def test_an_infinite_loss_ends_the_run_with_one_message(folder, rayfed):
    result = rayfed("run", "job.toml", "-s", "train.lr=3e38")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "the loss became inf at client" in result.stderr
    assert "Traceback" not in result.stderr
    assert " in cross_entropy and not_true_distill of the method fedntd" in result.stderr
    assert "-s train.lr=3e+37 --force" in result.stderr and "rayfed resume" not in result.stderr


@contextmanager
def drawn(folder, width=100):
    """A bar, and what is written to its terminal."""
    sys.path.insert(0, str(folder))
    with bar_on(
        Console(file=(screen := io.StringIO()), force_terminal=True, width=width)
    ) as progress:
        yield progress, screen


def test_on_a_terminal_a_bar_moves_with_each_client_and_says_which_rounds_are_not_evaluated(folder):
    with drawn(folder) as (progress, screen):
        run("job.toml", {"train.num_rounds": 4, "train.eval_every": 3}, observers=[Bar(progress)])
        task = progress.tasks[0]
        assert (task.completed, task.total, task.finished) == (4, 4, True)
    assert "round 5/4" not in screen.getvalue()
    steps = ("starting the workers", "evaluating the initial model")
    for words in (
        *steps,
        "round 0/4",
        "round 1/4",
        "clients 1/2",
        "accuracy ",
        "round 4/4",
        "0:00:0",
    ):
        assert words in screen.getvalue(), words
    shown = re.findall(
        r"(accuracy +[\d.]+%  forgetting|accuracy [\d.]+% in round \d)", screen.getvalue()
    )
    assert [end for end, _ in itertools.groupby(text.split()[-1] for text in shown)] == [
        "0",
        "forgetting",
    ]


def test_of_a_round_the_bar_leaves_a_part_to_the_server(folder):
    """So it stands at a whole number only where a round is finished."""
    steps = []

    class Watched(Bar):
        def client(self, done, total):
            super().client(done, total)
            steps.append((done, progress.tasks[0].completed))

    with drawn(folder) as (progress, _):
        run("job.toml", observers=[Watched(progress)])
    assert [(done, round(3 * completed)) for done, completed in steps] == [
        (number, 3 * finished + number) for finished in (0, 1) for number in (1, 2)
    ]


def test_the_bar_of_a_resumed_run_goes_on_at_its_round_and_stands_still_where_the_run_ends_early(
    folder,
):
    with drawn(folder) as (progress, screen):
        run("job.toml", {"train.num_rounds": 3})
        more = {"train.num_rounds": 9, "train.lr": 1e-9, "train.patience": 2}
        run("job.toml", {**more, "name": "early"}, observers=[(display := Bar(progress))])
        task = progress.tasks[0]
        assert task.finished and task.fields["round"] == display._round < 9
        resume("runs/tiny", {"train.num_rounds": 5}, observers=[Bar(progress)])
        first, *_, last = (sample.completed for sample in progress.tasks[1]._progress)
        assert first == 3 and last < 1, (
            "the time left is counted from the rounds that were played here"
        )
    written = screen.getvalue().partition("reading the checkpoint")[2]
    assert re.findall(r"round (\d)/5", written.partition("clients 1/2")[0])[-1] == "4"
    assert "round 9/9" not in screen.getvalue()


def test_in_python_progress_shows_what_the_command_shows_and_else_nothing_is_printed(
    folder, capsys
):
    sys.path.insert(0, str(folder))
    run("job.toml", {"name": "quiet"})
    assert capsys.readouterr().out == ""
    run("job.toml", progress=True)
    header, rounds = capsys.readouterr().out.split("ray      off: in this process\n")
    assert header.startswith("name     tiny\n")
    assert re.findall(r"^round (\d)/2  ", rounds, re.MULTILINE) == ["0", "1", "2"]
    resume("runs/tiny", {"train.num_rounds": 3}, progress=True)
    assert re.findall(r"^round (\d)/3  ", capsys.readouterr().out, re.MULTILINE) == ["3"]


def test_progress_and_observers_of_ones_own_go_together(folder, capsys):
    class Numbers(Observer):
        def __init__(self):
            self.heard = []

        def round(self, round):
            self.heard.append(round.round)

    sys.path.insert(0, str(folder))
    numbers = Numbers()
    run("job.toml", progress=True, observers=[numbers])
    assert numbers.heard == [0, 1, 2]
    assert "\nround 2/2  " in capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_bar_is_one_line_of_the_terminal_and_80_columns_show_all_of_it(width, folder):
    figures = "accuracy 12.3%  forgetting -12.3%"
    with drawn(folder, width) as (progress, screen):
        progress.add_task(
            "", total=200, round=100, rounds=200, clients="clients 10/10", figures=figures
        )
        progress.refresh()
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()))
    assert {len(line) for line in lines} == {0, width}
    assert screen.getvalue().count("\n") == 1
    shown = all(
        words in lines[-2] for words in ("round 100/200", "clients 10/10", figures, "-:--:--")
    )
    assert shown or width < 80


def test_a_negative_forgetting_is_explained_once_where_it_is_shown(folder, rayfed, monkeypatch):
    monkeypatch.setattr(forgetting, "peak", lambda peak, now: -0.25)
    result = rayfed("run", "job.toml")
    assert result.stdout.count("forgetting -25.0%") == 2, "of round 2, and of the last round"
    explained = (
        "(a negative forgetting: on average, a class is better now than in any evaluated round "
        "before)"
    )
    assert result.stdout.count(explained) == 1


@pytest.mark.slow
def test_a_killed_run_leaves_readable_tables(folder):
    """Here jobs/train.py starts the run, as it does in `ray job submit`."""
    script = [
        sys.executable,
        str(ROOT / "jobs/train.py"),
        "job.toml",
        "-s",
        "train.num_rounds=100000",
    ]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as process:
        next(line for line in process.stdout if line.startswith("round      3/"))
        process.send_signal(signal.SIGKILL)
    path = folder / "runs/tiny"
    rounds = read_table(path, "rounds").column("round").to_pylist()
    assert rounds == list(range(len(rounds)))
    assert len(rounds) > 3
    assert len(read_table(path, "classes")) >= 4 * (len(rounds) - 1)
    assert read_summary(path)["status"] == "running"


@contextmanager
def started(setting, **options):
    """`rayfed run` as a script, on its way: it has printed its first line. Killed in the end."""
    script = [sys.executable, str(ROOT / "jobs/train.py"), "job.toml", "-s", setting]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(script, **pipes, **options) as run:
        try:
            assert run.stdout.readline().startswith("name")
            yield run
        finally:
            run.kill()


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_any_more_goes_on_and_its_log_has_every_line(folder):
    # As with `| head -1`.
    with started("train.num_rounds=3") as run:
        run.stdout.close()
        assert run.wait(timeout=240) == 0, run.stderr.read()
    assert read_summary(folder / "runs/tiny")["status"] == "done"
    log = (folder / "runs/tiny/log.txt").read_text()
    assert "name     tiny" in log
    assert [f"round {number}/3" in log for number in range(4)] == [True] * 4


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_a_run_which_says_so_at_once(folder, number):
    plain = lambda: [signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGHUP)]  # noqa: E731
    with started("train.num_rounds=100000", preexec_fn=plain) as run:
        next(line for line in run.stdout if line.startswith("round      1/"))
        run.send_signal(number)
        _, said = run.communicate(timeout=240)
    assert run.returncode == 130
    # The first says that the job is read.
    _, stopping, stopped = said.splitlines()
    assert stopping == (
        "stopping, with a checkpoint of the last finished round; Ctrl-C again ends at once, "
        "without it"
    )
    assert stopped.startswith("stopped; rounds up to ")
    summary = read_summary(folder / "runs/tiny")
    newest = max(path.name for path in (folder / "runs/tiny/checkpoints").glob("*.json"))
    assert (summary["status"], newest) == ("stopped", f"round-{summary['rounds']:05d}.json")


@pytest.mark.slow
def test_nohup_lets_a_run_go_on_after_sighup(folder):
    with started(
        "train.num_rounds=50", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ) as run:
        next(line for line in run.stdout if line.startswith("round  1/"))
        run.send_signal(signal.SIGHUP)
        run.communicate(timeout=240)
    assert run.returncode == 0


def test_clients_measures_each_clients_own_model_after_a_run(folder, rayfed):
    rayfed("run", "job.toml", "-s", "clients.held_out=1", "-s", "train.clients_per_round=3")
    shown = rayfed("clients", "runs/tiny", "--tune", "all", "--epochs", "0.5")
    rows = read_table(folder / "runs/tiny", "own").to_pylist()
    assert [row["client"] for row in rows] == [0, 1, 2, 3] and sum(
        row["held_out"] for row in rows
    ) == 1
    _, *lines = shown.stdout.splitlines()
    of_lines = [
        ("trained", False, "in_local"),
        ("trained, tuned", False, "tuned_in_local"),
        ("held out", True, "in_local"),
        ("held out, tuned", True, "tuned_in_local"),
    ]
    for line, (group, held_out, column) in zip(lines, of_lines, strict=True):
        assert line.split("  ")[1].strip() == group
        values = [row[column] for row in rows if row["held_out"] == held_out]
        # A tenth of three is one.
        expected = (
            len(values),
            mean(values),
            pstdev(values),
            min(values),
        )
        assert [float(word) for word in line.split()[-5:-1]] == pytest.approx(
            [expected[0], *(100 * value for value in expected[1:])], abs=0.06
        )
    rayfed(
        "run",
        "job.toml",
        "-s",
        "train.num_rounds=1",
        "-s",
        "train.clients_per_round=1",
        "-s",
        "name=once",
    )
    groups = [
        line.split("  ")[1].strip()
        for line in rayfed("clients", "runs/once").stdout.splitlines()[1:]
    ]
    assert groups == ["trained", "never trained"], (
        "one client has trained, and three have the global model"
    )
    assert (
        "the model has no module `head` that trains"
        in rayfed("clients", "runs/tiny", "--tune", "head").stderr
    )


def test_natural_clients_keep_their_names_in_the_run(folder, rayfed, pages):
    rows = {
        "x": [0.0, 1.0, 2.0, 3.0] * 6,
        "label": [0, 1] * 12,
        "device": ["phone-7", "tablet", "phone-11"] * 8,
    }
    pq.write_table(pa.table(rows), "phones.parquet")
    phones = (
        "source='phones.parquet', features=['x'], test_fraction=0.2, partition={name='natural', "
        "column='device'}"
    )
    job = ["-s", f"data={{{phones}}}", "-s", "model=mlp", "-s", "train.clients_per_round=3"]
    done = rayfed("run", "job.toml", *job)
    assert done.exit_code == 0, done.output
    partition = read_table(folder / "runs/tiny", "partition").to_pylist()
    names = {0: "phone-11", 1: "phone-7", 2: "tablet"}
    assert {row["client"]: row["name"] for row in partition} == names
    page = (folder / "runs/tiny/report.html").read_text()
    shown = rayfed("partition", "job.toml", *job).stdout
    assert all(
        f"{number} {name}" in text for number, name in names.items() for text in (page, shown)
    )
    of_clients = rayfed("clients", "runs/tiny").stdout
    for row in read_table(folder / "runs/tiny", "own").to_pylist():
        assert re.search(
            rf"{row['name']} +{100 * row['in_local']:.1f} +{100 * row['accuracy']:.1f}", of_clients
        )


@pytest.mark.parametrize(("best", "last"), [(-0.1, 0.1), (0.1, -0.1), (-0.1, -0.1), (0.0, 0.0)])
def test_a_negative_forgetting_of_the_best_or_the_last_round_is_explained(best, last):
    numbers = {"test_accuracy": 0.5, "round": 1}
    summary = {
        which: {**numbers, "forgetting": of} for which, of in (("best", best), ("last", last))
    }
    said = result_text(Path("runs/tiny"), summary)
    assert ("a negative forgetting" in said) == (min(best, last) < 0)


def test_the_end_of_the_first_run_says_how_to_compare_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = {"test_accuracy": 0.5, "round": 1, "forgetting": None}
    said = []
    for name in ("first", "second"):
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        (path / "job.toml").touch()
        said.append(result_text(path, {"best": row, "last": row}).splitlines()[-1])
    first = "next     compare it with another run: rayfed table runs/first runs/OTHER"
    assert said == [first, "results  runs/second"]


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        (1.5, "the run recorded the same loss"),
        (1.25, "the run recorded 1.2500, which is 0.2 apart"),
        (None, None),
    ],
)
def test_a_replay_says_how_far_its_loss_is_from_the_recorded_one(
    rayfed, monkeypatch, recorded, said
):
    row = ClientRow(3, 10, 1.5, 0.1, "here")
    monkeypatch.setattr(experiment, "replay", lambda *given: (row, recorded))
    lines = rayfed("replay", "runs/tiny", "--round", "2", "--client", "3").stdout.splitlines()
    assert lines[0] == "client 3, round 2: 10 images, loss 1.5000, 0.1 s"
    assert lines[1:] == ([said] if said else [])


@pytest.mark.parametrize(("clients", "lowest"), [(1, 1), (10, 1), (11, 2), (20, 2)])
def test_the_worst_tenth_of_the_clients_is_at_least_a_tenth(clients, lowest):
    in_local = [number / 100 for number in reversed(range(clients))]
    shown = numbers(in_local, [0.5] * clients)
    mean_of_all, deviation = 100 * mean(in_local), 100 * pstdev(in_local)
    mean_of_lowest = mean(range(lowest))
    assert shown == [f"{value:.1f}" for value in (mean_of_all, deviation, mean_of_lowest, 50)]


def test_a_replay_opens_the_debugger_only_if_asked_and_only_where_the_client_fails(
    folder, rayfed, monkeypatch
):
    (folder / "my_broken.py").write_text(BROKEN.format(error="ValueError('my own mistake')"))
    ended = rayfed("run", "job.toml", "-s", "method=my_broken:Broken")
    _, _, words = ended.stderr.splitlines()[-1].partition(": rayfed ")
    replay = words.split()
    assert replay[:4] == ["replay", "runs/tiny", "--round", "2"]
    opened = []
    monkeypatch.setattr("pdb.post_mortem", opened.append)
    assert rayfed(*replay).exit_code == 1
    not_there = rayfed("replay", "runs/tiny", "--round", "9", "--client", "0", "--debug")
    assert not_there.exit_code == 2
    assert opened == []
    assert rayfed(*replay, "--debug").exit_code == 1
    (shown,) = opened
    assert [*walk_tb(shown)][-1][0].f_code.co_name == "begin", "the frame that raised it"


def test_a_run_is_found_by_its_name_in_runs_and_by_its_path(folder, rayfed):
    assert rayfed("run", "job.toml").exit_code == 0
    for command in ("table", "report", "verify", "clients"):
        by_name, by_path = rayfed(command, "tiny"), rayfed(command, "runs/tiny")
        assert by_name.exit_code == 0, by_name.output
        assert by_name.stdout == by_path.stdout
    resumed = rayfed("resume", "tiny", "-s", "train.num_rounds=3")
    assert resumed.stdout.splitlines()[-2].split() == ["report", "runs/tiny/report.html"]
    figure = rayfed("figure", "curves", "tiny", "-o", "curves.svg")
    assert figure.exit_code == 0, figure.output
    (folder / "tiny").mkdir()
    refused = rayfed("table", "tiny")
    assert refused.exit_code == 2, "what exists as it is typed comes first"
    assert "'tiny' is not the folder of a run" in refused.stderr
