"""What the documentation says is true: names, defaults, snippets, links, files, costs."""

import importlib
import json
import re
import shutil
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import rayfed
from rayfed import read_job
from rayfed.base.values import keys
from rayfed.clients.settings import Training
from rayfed.data.settings import Augment, Data
from rayfed.grid.cells import Grid, expand
from rayfed.job import Job
from rayfed.methods import (
    RECIPES,
    Average,
    Batch,
    DiscrepancyAverage,
    DynamicRegularizer,
    HeadCalibration,
    NormalizedAverage,
    fedntd,
    read_method,
)
from rayfed.methods.adaptive import ExtrapolatedAverage
from rayfed.methods.registry import describe, parameters
from rayfed.methods.views import ClientView, Fit, Outputs, ServerView, Step
from rayfed.models.classifier import Classifier, has_features
from rayfed.models.settings import MODELS as BUILT_IN
from rayfed.rounds import local
from rayfed.rounds.engine import rounds
from rayfed.rounds.local import Site
from rayfed.runtime.local_workers import LocalWorkers
from rayfed.tensors.trees import num_bytes

DOCS = Path(__file__).parents[1] / "docs"
METHODS = DOCS / "methods"
OVERVIEW = METHODS / "README.md"
PAGES = {path.stem: path for path in sorted(METHODS.glob("*.md")) if path != OVERVIEW}
OWN = DOCS / "own.md"
MODELS = DOCS / "models.md"
PARTICIPATION = DOCS / "participation.md"
RESULTS = DOCS / "results.md"
ROOT = DOCS.parent
README = ROOT / "README.md"
BESIDE = [README, ROOT / "CONTRIBUTING.md", ROOT / "jobs/papers/README.md", ROOT / "cluster/README.md"]
EVERY = [*BESIDE, *sorted(DOCS.glob("*.md")), OVERVIEW, *PAGES.values()]

every_page = pytest.mark.parametrize("name", PAGES)
every_file = pytest.mark.parametrize("path", EVERY, ids=lambda path: str(path.relative_to(ROOT)))


def snippets(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)


def prose(path):
    """A file's text without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def section(path, title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", path.read_text(), re.MULTILINE | re.DOTALL)[1]


def table(text):
    """The cells of the first table in a text, without its head and rule."""
    lines = re.search(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    rows = lines[0].splitlines()[2:] if lines else []
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Run in a folder that holds only the modules that the pages define."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = []
    for code in (code for page in (README, OVERVIEW, OWN) for code in snippets(page, "python")):
        if name := re.match(r"# (\w+)\.py\n", code):
            Path(f"{name[1]}.py").write_text(code)
            names.append(name[1])
            sys.modules.pop(name[1], None)
    importlib.invalidate_caches()
    yield
    for name in names:
        sys.modules.pop(name, None)


def test_every_recipe_has_a_page_and_every_page_a_recipe():
    assert set(PAGES) == set(RECIPES)


@every_page
def test_a_pages_job_and_parameters_are_of_its_method(name):
    (job,) = snippets(PAGES[name], "toml")
    method = tomllib.loads(job)["method"]
    last = method[-1]["method"] if isinstance(method, list) else method  # ccvr is for the last round
    assert name == (last if isinstance(last, str) else last["name"])
    line = re.search(r"^Parameters: `rayfed methods (\w+)`(.*?)\n\n", PAGES[name].read_text(), re.MULTILINE | re.DOTALL)
    assert bool(parameters(name)) == bool(line)
    if line:
        assert line[1] == name
        assert {*re.findall(r"`(\w+)`\s+\d", line[2])} <= {key for key, *_ in parameters(name)}


@every_file
@pytest.mark.usefixtures("modules")
def test_job_snippets_are_valid(path):
    for text in snippets(path, "toml"):
        given = tomllib.loads(text)
        if set(given) == {"method"}:
            read_method(given["method"])
        elif "grid" in given:
            assert len([cell.job() for cell in expand(given)]) == 8
        else:
            read_job(given)


@pytest.mark.usefixtures("modules")
def test_the_overviews_python_runs(capsys):
    for code in snippets(OVERVIEW, "python"):
        if not re.match(r"# \w+\.py\n", code):
            exec(code, {})
    before, after = json.loads(capsys.readouterr().out)  # round 0, round 1
    assert 0 < before < 1 and 0 < after < 1
    assert "my_method:FeatureDistill" in Path("runs/feature-distill/job.toml").read_text()


@pytest.mark.usefixtures("modules")
def test_the_examples_of_models_partitions_sampling_and_loggers_run(capsys):
    for code in snippets(OWN, "python"):
        if not re.match(r"# \w+\.py\n", code):
            exec(code, {})
    sampled, *played = capsys.readouterr().out.splitlines()
    assert [len(clients) for clients in json.loads(sampled)] == [8, 8, 8]
    assert [line.rpartition(" ")[0] for line in played] == ["1 [0, 1, 2]", "2 [3, 4, 5]"]
    lines = [json.loads(line) for line in Path("rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2]
    assert all(0 < line["accuracy"] < 1 for line in lines)


@pytest.mark.usefixtures("modules")
def test_the_examples_of_results_run(capsys):
    job = {
        "name": "quickstart",
        "method": "fedntd",
        "measure": ["confusion"],
        "model": "lenet",
        "train": {"num_rounds": 2, "clients_per_round": 2, "local_steps": 1},
        "ray": {"mode": "off"},
    }
    shutil.copytree(rayfed.run(job).path, "runs/measured")
    for code in snippets(RESULTS, "python"):
        exec(code.replace('"round") == 10', '"round") == 2').replace(' & (pc.field("client") == 3)', ""), {})
    forgetting, best, terms, cells = map(str.split, capsys.readouterr().out.splitlines())
    assert len(forgetting) == 3 and best[0] in ("1", "2") and int(best[1]) > 40_000
    assert len(terms) == 2 * 2 and all(float(term.strip("[],")) >= 0 for term in terms)
    assert "'predicted':" in cells


def test_the_part_of_the_readme_can_be_composed(modules):
    from mine import Pull

    assert read_method(["fedntd", {"name": "mine:Pull", "strength": 0.01}]) == rayfed.compose(fedntd(), Pull(0.01))


def test_the_files_that_the_architecture_names_exist():
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", (DOCS / "architecture.md").read_text()))
    assert len(named) > 30
    assert [name for name in sorted(named) if not any((at / name).is_file() for at in (ROOT / "rayfed", ROOT))] == []


@pytest.mark.usefixtures("modules")
def test_the_examples_of_participation_run(capsys):
    phones, day = map(tomllib.loads, snippets(PARTICIPATION, "toml"))
    by_time, make_trace = snippets(PARTICIPATION, "python")
    few = {"train.num_rounds": 2, "train.local_steps": 1, "train.clients_per_round": 2, "model": "lenet"}
    result = rayfed.run(phones, {**few, "ray.mode": "off"})
    exec(by_time, {})
    times = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert times == sorted(times) and len(times) == 3 and times[0] == 0 < times[-1]
    listed = {row[0].strip("`") for row in table(section(PARTICIPATION, "What is recorded"))}
    assert listed == dict(result.rounds.column("notes")[-1].as_py()).keys()
    exec(make_trace, {})
    trace = local.open_site(read_job(day)).trace
    assert [len(trace.clients[trace.rows(round)]) for round in (1, 24, 25)] == [36, 35, 36]


@pytest.mark.usefixtures("modules")
def test_the_example_of_frozen_layers_runs_and_the_page_names_every_model(capsys):
    (code,) = snippets(MODELS, "python")
    exec(code, {})
    assert capsys.readouterr().out.strip() == f"[0, {2 * 4 * (84 * 10 + 10)}] ['head.bias', 'head.weight']"
    (ours, *_), *_ = table(MODELS.read_text())
    assert re.findall(r"\w+", ours) == list(BUILT_IN)


@pytest.mark.usefixtures("modules")
def test_an_own_model_gets_the_keyword_arguments_that_the_page_lists():
    """The page's job files train with the page's model and partition, from the command line too."""
    listed = [row[0].strip("`") for row in table(section(OWN, "A model"))]
    assert listed[:2] == ["image_shape", "num_classes"]
    for text in snippets(OWN, "toml"):
        site = local.open_site(read_job(tomllib.loads(text)))
        assert site.federation.num_clients == 6 or site.model[1].out_features == 128
    site = local.open_site(read_job({"name": "line"}, {"model": "my_models:mlp"}))
    assert site.model[1].out_features == 64 and not has_features(site.model)


@pytest.mark.usefixtures("modules")
def test_the_pages_table_of_owners_deals_the_images_also_where_the_server_keeps_some():
    owners = np.arange(10_000) % 7
    np.savetxt("owners.txt", owners, fmt="%d")
    job = {"name": "owners", "data": {"partition": {"name": "my_owners:Owners"}}}
    federation = local.open_data(read_job(job))
    assert all(np.array_equal(federation.client(i), np.flatnonzero(owners == i)) for i in range(7))
    for more in ({"method": "fedssd"}, {"data.auxiliary_per_class": 64}):
        less = local.open_data(read_job(job, more))
        assert len(less.auxiliary) == 640
        assert all(set(less.client(i)) == set(federation.client(i)) - set(less.auxiliary) for i in range(7))


@pytest.mark.usefixtures("modules")
def test_the_overviews_loss_takes_the_place_of_the_cross_entropy():
    (text,) = (text for text in snippets(OVERVIEW, "toml") if "my_focal" in text)
    method = read_method(tomllib.loads(text)["method"])
    assert describe(method) in " ".join(section(OVERVIEW, "A method of your own").split())
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    p = logits.softmax(dim=1)[:, 0]
    found = method[-1].loss(SimpleNamespace(logits=logits, labels=torch.tensor([0, 0])), None)
    torch.testing.assert_close(found, (-((1 - p) ** 2) * p.log()).mean())
    training = {"num_rounds": 1, "clients_per_round": 2, "local_steps": 2}
    job = {"name": "focal", "method": "my_focal:Focal", "model": "lenet", "train": training, "ray": {"mode": "off"}}
    assert rayfed.run(job).rounds.num_rows == 2


def test_the_overview_lists_all_that_hooks_are_given():
    listed = {}
    for objects, fields, *_ in table(section(OVERVIEW, "A method of your own")):
        for name in objects.split(", "):
            listed.setdefault(name.strip("`"), []).extend(re.findall(r"(\w+)(?:\(\w+\))?`", fields))
    views = {"batch": Batch, "batch.teacher": Outputs, "client": ClientView, "server": ServerView}
    views |= {"fit": Fit, "step": Step}
    given = vars(Batch(None, None, None, None, None))
    for name, cls in views.items():
        there = {*dir(cls), *getattr(cls, "__dataclass_fields__", given)} - {"for_part"}
        assert sorted(listed[name]) == sorted(field for field in there if not field.startswith("_")), name


def test_both_forms_of_a_method_that_changes_agree():
    text = next(code for code in snippets(OVERVIEW, "toml") if "until" in code)
    code = next(code for code in snippets(OVERVIEW, "python") if "switch(" in code)
    namespace = {}
    exec(code, namespace)
    assert namespace["method"] == read_method(tomllib.loads(text)["method"])


def test_the_keys_that_others_names_are_translated_to_exist():
    found = [
        re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)`", ours) for ours, *_ in table((DOCS / "coming-from.md").read_text())
    ]
    named = {name for names in found for name in names if "." in name or name in Job.__dataclass_fields__}
    known = {key.name for table in (Job, Grid) for key in keys(table, "" if table is Job else "grid")}
    assert len(named) > 20 and named - {"rounds.parquet"} <= known


@every_file
def test_links_and_figures_exist(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = path.parent / file if file else path
        assert linked.exists(), f"{target}: there is no such file"
        assert linked.resolve().is_relative_to(DOCS.parent), f"{target} leaves the repository"
        headings = re.findall(r"^#+ (.*)$", prose(linked), re.MULTILINE) if anchor else []
        anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, f"{target}: the page has {sorted(anchors)}"


@every_file
def test_no_file_has_a_path_of_a_certain_machine(path):
    assert not re.search(r"(?<![\w.])/(home|root|work|Users|mnt)\b", path.read_text())


def test_the_overview_lists_every_method():
    assert [row[0] for row in table(OVERVIEW.read_text())] == [f"[`{name}`]({name}.md)" for name in RECIPES]


def test_the_overview_says_which_methods_average_uniformly():
    text = " ".join(section(OVERVIEW, "How the models are averaged").split())
    told = re.search(r"`(\w+)` and `(\w+)` take the uniform mean", text)
    averages = {name: next(part for part in recipe() if part.slot == "average") for name, recipe in RECIPES.items()}
    assert averages.pop(told[1]) == Average(by="client")
    assert isinstance(averages.pop(told[2]), DynamicRegularizer)
    for name in re.search(r"`(\w+)`, `(\w+)` and `(\w+)` have FedDyn's mean", text).groups():
        assert isinstance(averages.pop(name), DynamicRegularizer)
    assert isinstance(averages.pop(re.search(r"`(\w+)` weighs by samples and labels", text)[1]), DiscrepancyAverage)
    assert isinstance(averages.pop(re.search(r"`(\w+)` averages nothing", text)[1]), HeadCalibration)
    assert set(averages.values()) == {Average(by="samples"), NormalizedAverage(), ExtrapolatedAverage(by="samples")}


@every_page
def test_cost_is_as_measured(name, make_federation, monkeypatch):
    """In the seventh round with all clients. The model is so large that terms in C and D are small."""
    runs, passes, batches = [], [], []
    inside, view, outputs_of = Batch.__init__, local._view, Batch.outputs_of

    def counted_batch(self, *given):
        batches.append(self)
        inside(self, *given)

    def counted_outputs(self, model):
        runs.extend([model] if model not in self._frozen else [])
        return outputs_of(self, model)

    def counted_view(*given):
        made = view(*given)
        return replace(made, samples=lambda *size: passes.append(made.id) or made.samples(*size))

    monkeypatch.setattr(Batch, "__init__", counted_batch)
    monkeypatch.setattr(Batch, "outputs_of", counted_outputs)
    monkeypatch.setattr(local, "_view", counted_view)

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 2048), nn.ReLU(), nn.Linear(2048, 16), nn.ReLU())
    every_client_lacks_two = [[9, 3, 0, 0], [0, 8, 0, 2], [0, 0, 1, 0], [2, 0, 0, 2], [0, 0, 12, 1], [1, 0, 0, 6]]
    model, data = Classifier(layers, nn.Linear(16, 4)), make_federation(every_client_lacks_two)
    training = Training(num_rounds=7, clients_per_round=data.num_clients, local_steps=1, batch_size=5, lr=0.01)
    every_batch = Data(augment=Augment(flip=True))  # else a teacher runs once per round
    site = Site(model, data, Job("cost", method=RECIPES[name](), data=every_batch, train=training), torch.device("cpu"))
    history = [(round, len(batches), len(runs), len(passes)) for round in rounds(site, LocalWorkers(site))]
    (_, *before), (last, *now) = history[-2:]
    steps, in_batches, in_round = (after - earlier for earlier, after in zip(before, now, strict=True))

    unit = num_bytes(last.weights)
    kept = max((packed.num_bytes for packed in last.memories.values()), default=0)
    states = num_bytes([hold.state for hold in last.held.values()])
    measured = [
        in_batches / max(1, steps)  # ccvr trains no client
        + (name in ("fedalign", "fedsam", "fedsol", "fedspeed", "fedsmoo", "ditto")),  # a pass through a trained model
        in_round / data.num_clients,
        last.bytes_down / data.num_clients / unit,
        last.bytes_up / data.num_clients / unit,
        kept / unit,
        states / unit,
    ]
    cells = next(cells for link, _, *cells in table(OVERVIEW.read_text()) if link.startswith(f"[`{name}`]"))
    stated = [int(re.match(r"\d+", cell)[0]) for cell in cells]
    assert measured == pytest.approx(stated, abs=0.05)
    for cell, number in zip(cells[2:], measured[2:], strict=True):
        assert bool(re.search(r"\+|less", cell)) == (number != round(number)), "small terms are stated"
