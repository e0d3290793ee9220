"""The tables and figures of the papers: each declaration makes valid jobs, and a mistake is named."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from rayfed.base.errors import InputError
from rayfed.cli import main
from rayfed.papers.items import item_of, items, told_changes
from rayfed.papers.kinds import KINDS

PAPERS = Path(__file__).resolve().parents[1] / "jobs/papers"
DOCS = PAPERS.parents[1] / "docs"
FIVE = ("fedntd", "fedlmd", "fedcad", "fedssd", "fedcsd")
DECLARED = items()
OF_FIVE = [name for name in DECLARED if name.startswith(FIVE)]
JOB = """
name = "p-t"
method = "fedavg"
[data]
source = "fashion-mnist-mini"
test_fraction = 0.99
[data.partition]
name = "iid"
num_clients = 4
[model]
name = "lenet"
[train]
num_rounds = 3
clients_per_round = 2
[ray]
mode = "off"
[grid]
seeds = [0]
[[grid.setting]]
name = "one"
[[grid.setting]]
name = "two"
"train.clients_per_round" = 3
[[grid.method]]
name = "fedavg"
method = "fedavg"
"""
ITEMS = """
paper = "P"
[small]
"train.num_rounds" = 2
[runs.other]
job = "t"
set = { seed = 3 }
[runs.local]
job = "t"
set = { measure = ["local"] }
[items.table]
shows = "a table"
runs = "t"
[items.local]
shows = "in-out"
runs = "local"
figure = "in-out"
[items.curve]
shows = "a curve"
runs = "other"
rows = ["one/*"]
figure = "curves"
options = { of = "test_loss" }
"""


@pytest.fixture
def paper(tmp_path, monkeypatch):
    """A paper with a job file, and with the declarations of a table and a figure."""
    folder = tmp_path / "jobs/papers/p"
    folder.mkdir(parents=True)
    (folder / "t.toml").write_text(JOB.replace("seeds = [0]\n", ""))
    (folder / "items.toml").write_text(ITEMS)
    (folder / "results.csv").write_text("table,grid,setting,method,metric,value,spread,stat,note\n")
    monkeypatch.chdir(tmp_path)
    return folder


def rayfed(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


@pytest.mark.parametrize("name", OF_FIVE)
def test_every_item_makes_valid_jobs_at_full_size_and_small(name):
    declared = item_of(name)
    full, small = ([cell.job() for cell in declared.cells(small=of)] for of in (False, True))
    assert not {job.name for job in full} & {job.name for job in small}
    assert max(job.train.num_rounds for job in small) <= 20
    assert all(job.ray.mode == "off" for job in small)


def test_each_job_file_of_the_five_papers_has_an_item():
    used = {str(declared.file.resolve()) for declared in DECLARED.values()}
    files = {str(file) for paper in FIVE for file in PAPERS.glob(f"{paper}/*.toml")}
    assert {file for file in files if Path(file).name != "items.toml"} <= used


def test_items_that_share_runs_share_their_names():
    """Runs are reused: a name stands for one job, whatever the item."""
    hashes = {}
    for name in OF_FIVE:
        for cell in DECLARED[name].cells(small=True):
            tables = {key: value for key, value in cell.tables.items() if key != "grid"}
            assert hashes.setdefault(cell.name, tables) == tables, (name, cell.name)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('runs = "other"', 'runs = "othr"', "items.curve: runs = 'othr' is neither a job file"),
        ('figure = "curves"', 'figure = "curve"', "no kind of figure 'curve'; did you mean 'cu"),
        ('of = "test_loss"', 'x = "test_loss"', "'curves' has no option 'x'; it has by_setting, "),
        ('figure = "curves"\n', "", "options are for a figure, and this is a table"),
        ('shows = "a table"', 'show = "a table"', "items.table: unknown key 'show'; did you mean"),
        ('shows = "a table"\n', "", "shows"),
        ('job = "t"', 'job = "u"', "runs.other: the paper has no job file 'u'"),
        ("[runs.other]", "[runs.t]", "runs.t: 't' is a job file as well"),
        ('job = "t"\nset', 'job = ""\nset', "runs.other: the paper has no job file 'other'"),
        ("{ seed = 3 }", '{ name = "x" }', "leave 'name' out"),
        ('runs = "other"', 'runs = "t"', "runs.other: no item has these runs"),
        ("[small]", "[smal]", "unknown key 'smal'"),
    ],
)
def test_a_mistake_in_the_declarations_is_named(paper, old, new, message):
    assert old in ITEMS
    (paper / "items.toml").write_text(ITEMS.replace(old, new, 1))
    with pytest.raises(InputError) as error:
        items()
    assert message in str(error.value)
    assert "jobs/papers/p/items.toml" in str(error.value)


def test_rows_that_match_nothing_are_refused(paper):
    (paper / "items.toml").write_text(ITEMS.replace("one/*", "three/*"))
    with pytest.raises(InputError, match=r"p/curve: rows 'three/\*': none of 2 runs matches"):
        item_of("p/curve").cells()


def test_changed_runs_have_a_name_of_their_own_and_small_ones_another(paper):
    named = [cell.name for cell in item_of("p/table").cells()]
    assert named == ["p-t/one/fedavg/seed-0", "p-t/two/fedavg/seed-0"]
    (cell,) = item_of("p/curve").cells()
    assert (cell.name, cell.tables["train"]["num_rounds"]) == ("p-other/one/fedavg/seed-3", 3)
    (cell,) = item_of("p/curve").cells(small=True)
    assert (cell.name, cell.tables["train"]["num_rounds"]) == ("p-other-small/one/fedavg/seed-3", 2)
    (cell,) = item_of("p/curve").cells({"name": "mine", "train.lr": 0.5}, small=True)
    assert (cell.name, cell.tables["train"]["lr"]) == ("mine/one/fedavg/seed-3", 0.5)


def test_a_figure_is_drawn_from_runs_that_exist_and_says_what_it_is(paper, tmp_path):
    first = rayfed("reproduce", "p/curve", "--small", "-s", "train.lr=0.02")
    assert first.exit_code == 0, first.output
    assert "figure in p-curve-small.svg\nTest loss by round\n" in first.stdout
    text = words_of(tmp_path / "p-curve-small.svg")
    small = "small variant (fashion-mnist-mini, lenet, 2 rounds)"
    assert f"p/curve, not as in the paper: {small}; changed: train.lr = 0.02" in text
    again = rayfed("reproduce", "p/curve", "--small", "-s", "train.lr=0.02", "-o", "mine.png")
    assert again.stdout.startswith("1 of 1 runs done already\n")
    assert (tmp_path / "mine.png").is_file()
    listed = rayfed("reproduce", "p/curve", "--small", "--list")
    assert listed.stdout == "p-other-small/one/fedavg/seed-3\n"
    # At full size nothing stands above the figure.
    rayfed("reproduce", "p/curve", "-o", "full.svg")
    assert "not as in the paper" not in (tmp_path / "full.svg").read_text()


def words_of(picture: Path) -> str:
    """Return the words of an SVG, whose lines may be broken."""
    return " ".join(re.sub(r"<[^>]+>", " ", picture.read_text()).split())


def test_a_figure_without_some_of_its_runs_says_so(paper, tmp_path):
    (paper / "items.toml").write_text(ITEMS.replace("one/*", "*"))
    done = rayfed("reproduce", "p/curve", "--rows", "*two*")
    assert done.exit_code == 0, done.output
    assert "p/curve, not as in the paper: 1 of 2 runs" in words_of(tmp_path / "p-curve.svg")


def test_runs_with_which_others_begin_are_not_in_a_figure(paper, tmp_path):
    job = paper / "t.toml"
    job.write_text(job.read_text().replace("[grid]", "[grid]\nfirst = {measure = []}"))
    done = rayfed("reproduce", "p/local", "-o", "a.svg")
    assert done.exit_code == 0, done.output
    assert "not as in the paper" not in (tmp_path / "a.svg").read_text()
    # The folder of all of them can be drawn, too.
    (folder,) = tmp_path.glob("runs/p-local")
    assert rayfed("figure", "in-out", str(folder)).exit_code == 0
    done = rayfed("reproduce", "p/local", "--rows", "*first*")
    assert done.exit_code == 2 and "shows the runs that begin with these" in done.stderr


def test_a_table_has_no_picture_and_a_name_must_be_known(paper, tmp_path):
    (tmp_path / "folder.svg").mkdir()
    for arguments, message in (
        (("p/table", "-o", "a.svg"), "--output: p/table is a table, which is printed"),
        (("p/curve", "-o", "a.txt"), "--output 'a.txt': pictures end in .png, .svg, .pdf"),
        (("p/curv",), "'p/curv': there is no such table or figure in jobs/papers; did you mean"),
        (("p/curv",), "`rayfed reproduce p` lists them"),
        (("q",), "jobs/papers (valid: p); `rayfed reproduce` lists them"),
        (("p/local", "-s", "measure=[]"), "p/local shows numbers of the measure 'local', and"),
        (("p/curve", "-o", "/proc/x.svg"), "'/proc/x.svg' cannot be written to"),
        (("p/curve", "-o", "folder.svg"), "'folder.svg' is a folder"),
    ):
        done = rayfed("reproduce", *arguments)
        assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    (paper / "items.toml").unlink()
    done = rayfed("reproduce", "p/t", "--small")
    assert done.exit_code == 2
    assert "--small: p/t has no small variant; make it small with -s" in done.stderr


def test_the_list_has_what_each_item_shows_and_costs(paper):
    listed = rayfed("reproduce", "p").stdout
    assert "\np/table\n    a table\n    1 method x 2 settings, 2 runs of 3 rounds; " in listed
    assert "\np/curve\n    a curve\n    1 method x 1 setting, 1 run of 3 rounds; " in listed


def test_changes_that_change_no_number_are_not_told():
    assert told_changes({"output.path": "x", "data.root": "y"}) == ""


def test_every_kind_of_figure_has_an_item():
    """But those that show in another way what others show."""
    used = {DECLARED[name].item.figure for name in OF_FIVE} - {""}
    assert used == KINDS.keys() - {"forgetting", "local", "unevenness"}


def test_the_page_of_the_papers_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    make_papers = importlib.import_module("make_papers")
    written = make_papers.PAGE.read_text()
    assert written == make_papers.page(DECLARED), "python docs/make_papers.py writes it"
    assert all(f"`rayfed reproduce {name}`" in written for name in OF_FIVE)


def test_a_paper_is_read_as_it_stands():
    for paper in FIVE:
        text = (PAPERS / paper / "items.toml").read_text()
        names = [f"{paper}/{name}" for name in tomllib.loads(text)["items"]]
        assert names == [name for name in OF_FIVE if name.startswith(f"{paper}/")]


def figures_in(text):
    """The figures that a text names, in small letters: "A 1, 2b, B 3 to 4" are a1, a2b, b3, b4."""
    figures, paper = set(), ""
    for words in text.lower().split(", "):
        match = re.fullmatch(r"(?:([a-z]+) )?(\d+[a-d]?)(?: to (\d+))?", words)
        paper = match[1] or paper
        numbers = range(int(match[2]), int(match[3]) + 1) if match[3] else [match[2]]
        figures |= {f"{paper}{number}" for number in numbers}
    return figures


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.papers])
def test_a_kind_names_the_figures_that_are_declared_with_it(kind):
    declared = set()
    for name, item in DECLARED.items():
        if item.item.figure == kind:
            paper, figures = name.split("/")[0], item.item.shows.split(":")[0]
            declared |= figures_in(re.sub(", (left|right)", "", figures.replace("Fig.", paper)))
    named = figures_in(KINDS[kind].papers)
    # A figure may be named without the panels that are items of their own.
    whole = {figure.rstrip("abcd") for figure in declared}
    assert named <= declared | whole
    assert {figure for figure in declared if figure.rstrip("abcd") not in named} <= named
