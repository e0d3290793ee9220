"""The tools: each can be imported, and does its work once. Nothing here asserts on seconds."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import tomli_w

import rayfed
from rayfed.base.errors import InputError
from rayfed.grid.cells import expand
from rayfed.job import override, read_job, read_toml

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "jobs/quickstart.toml"
# As a tool has it that is run: some import others.
for folder in ("tools", "docs", "docs/comparison", "docs/reproduction"):
    sys.path.append(str(ROOT / folder))
# The scripts that make pages lie beside these.
FILES = [
    *(ROOT / "tools").glob("*.py"),
    *(ROOT / "docs").rglob("make_*.py"),
    ROOT / "docs/pages.py",
]
TOOLS = {path.stem: path for path in sorted(FILES)}


def tool(name):
    """A script as a module, which others can import."""
    spec = importlib.util.spec_from_file_location(name, TOOLS[name])
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_finds_all_that_it_needs_of_rayfed(name):
    assert tool(name).__doc__


# Here the tools' folders are on the path, so a tool that is started alone may miss what it finds here.
ALONE = """
import runpy, sys
for tool in sys.argv[1:]:
    sys.modules.pop("pages", None)
    sys.path[0] = tool.rpartition("/")[0]
    runpy.run_path(tool, run_name="tool")
    print(tool)
"""


def test_a_tool_that_is_started_alone_finds_its_modules():
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", ALONE, *map(str, TOOLS.values())]
    run = subprocess.run(words, capture_output=True, text=True, env=path)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_comparisons_tables_are_made_from_its_results():
    """No number was typed by hand.

    Values were chosen by runs with other seeds than those that are reported.
    """
    comparison, personal = tool("make_comparison"), tool("make_personal")
    page = comparison.PAGE.read_text()
    records, own = (
        comparison.read_records(comparison.RESULTS),
        comparison.read_records(personal.RESULTS, personal.Record),
    )
    assert personal.put_tables(comparison.put_tables(page, records), own) == page
    for rows in (records, own):
        cells = {(row.setting, row.method, row.seed) for row in rows}
        settings, methods, seeds = map(set, zip(*cells, strict=True))
        assert (
            len(rows) == len(cells) == len(settings) * len(methods) * len(seeds) and len(seeds) >= 3
        )
    for tuning, reported in (
        (comparison.TUNING, comparison.REPORTED.values()),
        (personal.TUNING, [personal.REPORTED]),
    ):
        tries, seeds = read_toml(tuning), [read_toml(file)["grid"]["seeds"] for file in reported]
        assert not {*tries["grid"]["seeds"]} & {seed for one in seeds for seed in one}
        assert f"{len(expand(tries))} runs" in tuning.read_text()


def test_a_page_takes_no_run_of_another_job(tmp_path):
    pages, full_size = tool("pages"), tool("make_full_size")
    cell = expand(read_toml(full_size.JOB))[0]
    elsewhere = override(
        cell.tables,
        {"data.source": "train.parquet", "data.test": "test.parquet", "ray.num_cpus": 3},
    )
    for changed, words in (
        ({}, None),
        ({"train.lr": 0.5}, "has another job than the file: train.lr is 0.5 there, 0.01 here"),
        ({"name": "mine"}, "is no run of full-size.toml"),
    ):
        (tmp_path / "job.toml").write_text(
            tomli_w.dumps(read_job(override(elsewhere, changed)).table())
        )
        with pytest.raises(InputError, match=words) if words else nullcontext():
            pages.refuse_another_job(tmp_path, full_size.JOB)


def test_the_forest_plot_is_drawn_from_the_records():
    """`python docs/comparison/forest.py` draws it again."""
    path = ROOT / "docs/comparison/forest.py"
    spec = importlib.util.spec_from_file_location("forest", path)
    forest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(forest)
    assert forest.FIGURE.read_text() == forest.figure()
    of_shards = forest.effects()["shards-2"]
    assert len(of_shards) == 17
    assert [round(number, 1) for number in of_shards["fedspeed"]] == [5.1, 4.2, 6.0]


def test_the_pages_have_searched_words_and_commands_that_can_be_copied(tmp_path):
    check = tool("check_site")
    assert check.faults_of_pages(ROOT) == []
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("a tutorial")
    page = f"```console\n$ rayfed status\n```\n```bash\n{'x' * 101}\n```\n"
    (tmp_path / "docs/page.md").write_text(page + "```console\n$ ls\nmine.py\n```\n")
    wrong = check.faults_of_pages(tmp_path)
    assert "no page has the words 'custom model'" in wrong
    assert "no page has the words 'tutorial'" not in wrong
    assert [line for line in wrong if line.startswith("docs/page.md")] == [
        "docs/page.md: no output follows '$ rayfed status': make it a block of bash",
        f"docs/page.md: a line of code with 101 characters: {'x' * 60}",
    ]


@pytest.mark.slow
def test_the_table_of_methods_under_noise_is_made_from_its_records():
    noise = tool("make_noise")
    page, records = noise.PAGE.read_text(), noise.read_records(noise.RECORDS)
    assert noise.put(page, {"noise": noise.table(records)}) == page
    runs = {f"privacy-noise/{one.method}-noise-{one.noise:g}/seed-{one.seed}" for one in records}
    assert runs == {cell.name for cell in expand(read_toml(noise.HERE / "noise.toml"))}


def test_a_method_that_diverged_at_a_noise_is_told_and_in_no_mean():
    noise = tool("make_noise")

    def of(seed, status, accuracy):
        return noise.Record("fedavg", 1.0, seed, status, 30, accuracy, 9.0)

    done = [of(0, "done", 60.0), of(1, "done", 62.0)]
    assert noise.cell(done) == "61.0 ± 1.4"
    assert noise.cell([*done, of(2, "failed", 10.0)]) == "61.0 ± 1.4; 1 of 3 diverged"
    assert noise.cell([of(2, "failed", 10.0)]) == "-; 1 of 1 diverged"


def test_twenty_methods_are_chosen_and_tested_as_their_design_says(tmp_path, monkeypatch):
    twenty = tool("make_twenty")
    committed = twenty.PAGE.read_text()
    monkeypatch.setattr(twenty, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(twenty, "FIGURE", tmp_path / "figure.svg")
    twenty.PAGE.write_text(committed)
    twenty.write_page()
    assert twenty.PAGE.read_text() == committed, "no number was typed by hand"
    row = re.compile(r"^\| \[(\w+)\]\(.*?\) \| (.*) \|$", re.MULTILINE)
    theirs = dict(
        row.findall(committed.partition("<!-- twenty, shards-2 -->")[2].partition("<!-- end")[0])
    )
    ours = dict(row.findall((ROOT / "README.md").read_text()))
    assert len(ours) >= 5 and ours.items() <= theirs.items(), "README's table"
    for setting, file in twenty.TUNING.items():
        methods = {}
        for entry in read_toml(file)["grid"]["method"]:
            methods.setdefault(entry["name"].partition("+")[0], []).append(entry)
        assert len(methods) == 20 and {len(tries) for tries in methods.values()} == {5}, setting
    halved = {"a": {100: 9.0, 101: 1.0}, "b": {100: 8.0, 101: 8.0}, "c": {100: 7.0}}
    assert twenty.left(halved, ["a", "b", "c"], 2) == ["b", "c"]
    done = {
        name: dict.fromkeys(range(100, 104), mean)
        for name, mean in {"m": 3.0, "m+lr-1": 4.0}.items()
    }
    assert twenty.chosen({"m": {**done, "m+lr-2": {100: 99.0}}}) == {"m": ["m+lr-1", "m"]}, (
        "who left early is not chosen"
    )
    assert twenty.sign_flip([1.0] * 10) == 2 / 1024
    assert twenty.sign_flip([3.0, -1.0]) == 1.0
    assert twenty.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {"a": 0.03, "c": 0.06, "b": 0.06}
    assert twenty.critical_difference(10, 30) == pytest.approx(3.164 * (110 / 180) ** 0.5, rel=1e-3)
    file = tmp_path / "records.csv"
    for number in (1.0, 2.0):
        twenty.add(
            file,
            ("setting", "method", "seed", "primary"),
            [("s", "m", 0, number), ("s", "m", number, 5.0)],
        )
    assert [row[2:] for row in twenty.read(file)] == [
        ["0", "2.0000"],
        ["1.0", "5.0000"],
        ["2.0", "5.0000"],
    ]
    numbers = {"fedavg": {0: 1.0, 1: 2.0}, "fedntd": {0: 2.0, 1: 3.5}, "fedvls": {0: 1.5, 1: 2.0}}
    bounds = {"local": {0: 4.0, 1: 4.0}, twenty.OWN: {0: 9.0, 1: 9.5}}
    lines = twenty.table(
        {**numbers, **bounds}, {method: {0: 40} for method in numbers}
    ).splitlines()
    assert lines[2].startswith("| fedavg, the clients' own models | 9.2 ± 0.4 |  |  |  |")
    assert lines[3].startswith(
        "| [local](methods/local.md), the clients' own models | 4.0 ± 0.0 | -5.2 ["
    )
    assert lines[4].startswith("| [fedntd](methods/fedntd.md) | 2.8 ± 1.1 | +1.2 [")
    assert lines[4].endswith("| 1.000 | 40 |"), "corrected for two methods"
    assert twenty.mean_ranks({**numbers, **bounds}) == (
        {"fedavg": 2.75, "fedntd": 1.0, "fedvls": 2.25},
        2,
    )
    said = twenty.claims({key: {**numbers, **bounds} for key in twenty.SETTINGS})
    assert (
        "| [fedvls](methods/fedvls.md) over [fedntd](methods/fedntd.md) | FedVLS, Table 13 | -1.0 ["
        in said
    )
    certain = {"fedavg": dict.fromkeys(range(10), 1.0), "fedntd": dict.fromkeys(range(10), 2.0)}
    assert "p = 0.002: **holds**" in twenty.claims(dict.fromkeys(twenty.SETTINGS, certain))
    assert "| 3.0 | lr-2 | 1.0 ± 0.0 |" in twenty.finalists(
        {"shards-2": {"m": {"m": done["m"], "m+lr-2": dict.fromkeys(range(100, 104), 2.0)}}}
    )
    twenty.draw(dict.fromkeys(twenty.SETTINGS, numbers), tmp_path / "ranks.svg")
    assert "critical difference" in (tmp_path / "ranks.svg").read_text()


# Operations of a step of `cnn`, as in docs/gpu.md.
AT_MOST = {"fedavg": 34, "fedprox": 49, "scaffold": 47, "fedntd": 68, "fedlmd": 76}


def test_a_step_takes_no_more_operations_than_it_did_and_waits_do_not_grow_with_the_model():
    counting = tool("count_operations")

    def counts(method, model="cnn"):
        changed = {**counting.WORKLOAD, "model.name": model, "method": method}
        step, waits, _, of_client = counting.per_step(
            counting.open_setup(rayfed.read_job(QUICKSTART, changed))
        )
        return step.total(), waits.total(), of_client

    for method, most in AT_MOST.items():
        step, waits, of_client = counts(method)
        assert 20 < step <= most and waits == 0 < of_client, method
    assert counts("fedavg")[2] == counts("fedavg", "resnet8")[2]
    # A choice by a mask is counted.
    assert counts("feduv")[1] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_contenders_of_the_benchmark_do_the_same_work(tmp_path):
    """FedNTD, on the embedded images."""
    contenders = ["ray", "tuned", "here", "plain"]
    options = [
        "--quick",
        "--workloads",
        "W3",
        "--contenders",
        *contenders,
        "--json",
        tmp_path / "out.json",
    ]
    run = subprocess.run(
        [sys.executable, TOOLS["bench"], *options], capture_output=True, text=True, timeout=880
    )
    assert run.returncode == 0, run.stderr
    lines = json.loads((tmp_path / "out.json").read_text())["workloads"]["W3"]["contenders"]
    assert [line["contender"] for line in lines] == contenders
    for laps in zip(*(line["laps"] for line in lines), strict=True):
        assert len({(lap["number"], lap["clients"]) for lap in laps}) == 1
        assert max(lap["accuracy"] for lap in laps) - min(lap["accuracy"] for lap in laps) <= 0.05


def test_the_sites_check_finds_a_file_an_anchor_and_what_is_loaded_from_elsewhere(tmp_path):
    check = tool("check_site")
    assert check.faults(tmp_path) == [f"{tmp_path}: there are no pages"]
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/other.html").write_text(
        '<p id="here"></p><a href="../index.html">up</a><img src="data:image/png,">'
    )
    (tmp_path / "index.html").write_text(
        '<a href="deep/other.html#here"></a><a href="https://example.org"></a><a href="#"></a>'
    )
    assert check.faults(tmp_path) == []
    page = (
        '<a href="deep/other.html#there"></a><a href="none.html"></a><script '
        'src="https://example.org/x.js"></script>'
    )
    (tmp_path / "index.html").write_text(page)
    assert check.faults(tmp_path) == [
        "index.html: loads https://example.org/x.js",
        "index.html: deep/other.html#there: the page has no such anchor",
        "index.html: none.html: there is no such file",
    ]


def test_a_picture_of_another_report_is_found(tmp_path, monkeypatch):
    check = tool("check_site")
    assert len(check.look_of_report(ROOT)) == 64
    monkeypatch.setattr(check, "look_of_report", lambda root: "today")
    folder = tmp_path / "docs/report"
    folder.mkdir(parents=True)
    for name in ("new-1280-light", "new-390-dark", "old-one-1280-light"):
        (folder / f"{name}.png").write_bytes(b"")
    (folder / check.TAKEN).write_text('{"new": "today", "old-one": "yesterday"}')
    (line,) = check.faults_of_pictures(tmp_path)
    assert line.startswith("docs/report/old-one-1280-light.png: the report looks different today")


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
def test_the_sites_search_is_asked_and_the_right_page_has_to_come_first(tmp_path):
    pytest.importorskip("sphinx")
    search = tool("search_site")
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    scorer = str(ROOT / "docs/_static/scorer.js")
    (source / "conf.py").write_text(f"html_theme = 'basic'\nhtml_search_scorer = {scorer!r}\n")
    pages = {
        "index": "Home\n====\n\n.. toctree::\n\n   adam\n   train\n",
        "adam": "Early models\n============\n\nStopping is told elsewhere, as is early stopping.\n",
        "train": "Training\n========\n\nText.\n\nStopping early\n--------------\n\nText.\n",
    }
    for name, text in pages.items():
        (source / f"{name}.rst").write_text(text)
    build = [sys.executable, "-m", "sphinx", "-q", "-d", tmp_path / "trees", source, site]
    subprocess.run(build, check=True)
    found = search.hits(site, ["early stopping", "zebra"])
    assert [hit.page for hit in found["early stopping"]][:2] == ["train", "adam"]
    assert found["zebra"] == [] and search.rank([], ["train"]) is None
    assert search.rank(found["early stopping"], ["adam"]) == 2
    questions = {"early stopping": ("train",), "zebra": ("adam", "train")}
    assert search.faults(site, questions) == [
        "'zebra' does not find adam or train among the first 3 hits"
    ]


def shown(notebook):
    """What the cells print, without decimals, whose last digits differ between processors, and how
    much they draw.
    """
    for cell in notebook.cells:
        outputs = cell.get("outputs", [])
        text = "".join(output.text for output in outputs if output.output_type == "stream")
        # So do the numbers that are set in bold, and those that are remarked on.
        text = re.sub(r"\\textbf\{([^{}]*)\}", r"\1", text)
        text = re.sub(r"^% .*\n?", "", text, flags=re.MULTILINE)
        yield (
            re.sub(r"-?\d+\.\d+", "#", text),
            sum("image/png" in output.get("data", {}) for output in outputs),
        )


NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_its_committed_outputs_say(path, tmp_path, monkeypatch):
    pytest.importorskip("nbclient")
    notebooks = tool("run_notebook")
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "work").mkdir()
    fresh = notebooks.executed(path, tmp_path / "work")
    assert list(shown(fresh)) == list(shown(notebooks.nbformat.read(path, as_version=4)))


def test_the_notebooks_have_their_outputs_and_nothing_of_a_machine():
    assert len(NOTEBOOKS) == 6 and sum(path.stat().st_size for path in NOTEBOOKS) < 1_500_000
    for path in NOTEBOOKS:
        text = re.sub(r'"image/png": "[^"]*"', "", path.read_text())
        assert not re.search(r"(?<![\w.])/(home|root|work|Users|mnt|tmp)\b", text), path.name
        cells = json.loads(path.read_text())["cells"]
        assert all(cell["execution_count"] for cell in cells if cell["cell_type"] == "code"), (
            path.name
        )
        assert any(
            "image/png" in output.get("data", {})
            for cell in cells
            for output in cell.get("outputs", [])
        )


def test_the_tool_for_notebooks_has_help_and_refuses_a_name_that_is_none():
    before = {path: path.read_bytes() for path in NOTEBOOKS}
    for options, status, words in (
        (["--help"], 0, "usage"),
        (["forgeting"], 2, "no notebook forgeting; there are"),
    ):
        run = subprocess.run(
            [sys.executable, TOOLS["run_notebook"], *options], capture_output=True, text=True
        )
        assert run.returncode == status and words in run.stdout + run.stderr
    assert before == {path: path.read_bytes() for path in NOTEBOOKS}
