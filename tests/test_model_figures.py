"""The figures that need models: the models are those of the run, the numbers those of a case by
hand, and what is missing is refused.
"""

import copy
import sys
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from extras import needs
from matplotlib import style
from matplotlib.colors import to_rgba

import rayfed
from rayfed.base.errors import InputError
from rayfed.cli import main
from rayfed.papers import circle, embedding, loss_space, neurons
from rayfed.papers.models import GLOBAL, look, opened, shown
from rayfed.papers.panels import save
from rayfed.papers.style import STYLE
from rayfed.report.read import read_run


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a run of two rounds, of three out of six clients."""
    job = {
        "data": {"partition": {"name": "shards", "s": 2, "num_clients": 6}},
        "model": "lenet",
        "train": {"num_rounds": 2, "clients_per_round": 3, "local_steps": 2, "lr": 0.05},
        "ray": {"mode": "off"},
        "output": {"path": str(tmp_path_factory.mktemp("runs"))},
    }

    def run(name, **changes):
        return read_run(rayfed.run({**job, "name": name, "method": "fedavg", **changes}).path)

    return run


@pytest.fixture(scope="module")
def runs(start):
    return [start("fedavg"), start("fedntd", method="fedntd")]


def drawn(draw, *args, **kwargs):
    """The figure, laid out as it is saved."""
    with style.context(["default", STYLE]):
        figure = draw(*args, **kwargs)
        figure.draw_without_rendering()
    return figure


def figure(*arguments):
    return CliRunner().invoke(main, ["figure", *map(str, arguments)])


def test_what_is_shown_are_the_models_of_the_round_on_the_same_images(runs):
    run = runs[0]
    local = rayfed.local_models(run.folder, round=2)
    found = shown(run, 2, "", 30)
    assert (found.round, found.trained, [*found.seen]) == (2, 3, [GLOBAL, *local.clients])
    with opened(run) as again:
        model, test = again.setup.model.eval(), again.setup.federation.test
        rows = np.sort(np.random.default_rng(0).choice(len(test), 30, replace=False))
        images, labels = next(again.setup.federation.batches(test, rows, torch.device("cpu")))
        weights = {GLOBAL: local.start, **local.clients}
        for client, seen in found.seen.items():
            model.load_state_dict(weights[client])
            with torch.no_grad():
                features = model.features(images)
            np.testing.assert_allclose(seen.features, features.numpy(), atol=1e-5)
            assert seen.labels.tolist() == labels.tolist() == test.labels[rows].tolist()
            assert not seen.parameters
        after = again.global_model(2)
        model.load_state_dict(after)
        with torch.no_grad():
            features = model.features(images)
    alone = shown(run, None, "none", 30)
    assert (alone.round, alone.trained, [*alone.seen]) == (2, 0, [GLOBAL])
    np.testing.assert_allclose(alone.seen[GLOBAL].features, features.numpy(), atol=1e-5)


def test_the_first_clients_are_shown_unless_some_are_named(runs):
    clients = [*shown(runs[0], 1, "", 5).seen][1:]
    assert [*shown(runs[0], 1, "", 5, most=2).seen] == [GLOBAL, *clients[:2]]
    named = f"{clients[2]}, {clients[0]}"
    assert [*shown(runs[0], 1, named, 5).seen] == [GLOBAL, clients[2], clients[0]]
    with pytest.raises(
        InputError, match=r"^'.*fedavg': there is no client 6; the clients are 0 to 5"
    ):
        shown(runs[0], 1, "6", 5)
    with pytest.raises(InputError, match=r"round 4: the run has 2 finished rounds"):
        shown(runs[0], 4, "", 5)


@needs("sklearn")
def test_t_sne_places_all_models_together_and_colours_them_by_class_and_by_model(runs):
    run, images = runs[0], 12
    made = drawn(embedding.t_sne, [run], images=images)
    found = shown(run, None, "", images)
    assert made.get_label() == (
        "t-SNE of the features of 12 test images, of the global model that was sent in round 2, and "
        "3 of 3 local models of that round"
    )
    together = np.concatenate([seen.features for seen in found.seen.values()])
    points = embedding.embedded(together)
    assert np.array_equal(points, embedding.embedded(together)), "the seed is fixed"
    by_class, by_model = made.axes
    assert [len(panel.collections) for panel in made.axes] == [4, 4]
    for number, of_model in enumerate(by_class.collections):
        place = slice(number * images, (number + 1) * images)
        np.testing.assert_allclose(of_model.get_offsets(), points[place], rtol=1e-4)
    of_global = by_class.collections[0]
    labels = found.seen[GLOBAL].labels
    shades = [tuple(shade) for shade in of_global.get_edgecolors()]
    assert len(set(zip(labels, shades, strict=True))) == len(set(labels)) == len(set(shades))
    texts = [text.get_text() for text in by_class.get_legend().get_texts()]
    assert texts == list(run.classes)
    texts = [text.get_text() for text in by_model.get_legend().get_texts()]
    assert texts == ["global model", *[f"client {client}" for client in [*found.seen][1:]]]


@needs("sklearn")
def test_t_sne_of_several_runs_is_one_and_needs_features_of_one_size(runs, start):
    made = drawn(embedding.t_sne, runs, clients="none", images=10)
    texts = [text.get_text() for text in made.axes[1].get_legend().get_texts()]
    assert texts == ["fedavg", "fedntd"]
    assert made.get_label().endswith("of the global model after round 2")
    wide = start("wide", model="cnn")
    with pytest.raises(InputError, match=r"84 in 'fedavg' and 512 in 'wide': draw them apart"):
        embedding.t_sne([runs[0], wide], clients="none", images=10)
    with pytest.raises(InputError, match=r"^--images: t-SNE needs at least 5 points"):
        embedding.t_sne(runs[:1], clients="none", images=3)


def test_without_scikit_learn_the_message_has_the_command_that_installs_it(
    runs, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    done = figure("t-sne", runs[0].folder, "--images", 5, "-o", tmp_path / "a.svg")
    assert done.exit_code == 2 and "pip install 'rayfed-distill[figures]'" in done.stderr
    assert not (tmp_path / "a.svg").exists()


FLAT = """
from torch import nn


def test_runs_with_other_classes_are_drawn_apart(runs):
    other = replace(runs[0], classes=("a", "b"), job=runs[0].job | {"name": "other"})
    for draw in (embedding.t_sne, neurons.neurons, circle.circle):
        with pytest.raises(InputError, match="have other classes, and .*: draw them apart"):
            draw([runs[0], other])


def flat(*, image_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, num_classes))
"""


def test_a_model_without_features_is_refused(start, monkeypatch, tmp_path):
    (tmp_path / "flat_model.py").write_text(FLAT)
    monkeypatch.syspath_prepend(tmp_path)
    run = start("flat", model="flat_model:flat")
    done = figure("t-sne", run.folder, "-o", tmp_path / "a.svg")
    assert done.exit_code == 2
    assert "model 'flat_model:flat' has no methods `features` and `head`" in done.stderr


def test_each_neuron_has_the_colour_of_its_class_at_its_place_in_the_global_model(runs):
    run = runs[0]
    made = drawn(neurons.neurons, [run], images=40)
    found = shown(run, None, "", 40, most=neurons.ABREAST)
    assert len(made.axes) == 4
    preferences = {}
    for client, seen in found.seen.items():
        means = [seen.features[seen.labels == label].mean(axis=0) for label in range(10)]
        dead = ~seen.features.any(axis=0)
        preferences[client] = np.where(dead, -1, np.argmax(means, axis=0))
    order = np.argsort(preferences[GLOBAL], kind="stable")
    for panel, (client, preference) in zip(made.axes, preferences.items(), strict=True):
        cells = panel.images[0].get_array().ravel()
        assert len(cells) == 90 and cells[:84].tolist() == (preference[order] + 1).tolist()
        assert not cells[84:].any()
        title = panel.get_title(loc="left")
        if client != GLOBAL:
            alive = (preference >= 0) & (preferences[GLOBAL] >= 0)
            alike = 100 * (preference == preferences[GLOBAL])[alive].mean()
            assert title == f"alike: {alike:.0f} %\nclient {client}"
    colours = made.axes[0].images[0].cmap
    legend = made.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == list(run.classes)
    for number, entry in enumerate(legend.get_lines()):
        assert to_rgba(entry.get_color()) == colours(number + 1)


def test_the_layers_of_neurons_are_those_that_the_job_measures(start):
    run = start("layers", measure=["drift"], measure_layers=["features.8", "features.10"])
    made = drawn(neurons.neurons, [run], clients="none", images=20)
    assert [panel.get_title(loc="left") for panel in made.axes] == [
        "layers, features.8\nglobal model",
        "layers, features.10\nglobal model",
    ]


def quadratic(diagonal):
    """A loss with this Hessian in a basis that is turned, and its eigenvectors in columns."""
    size = len(diagonal)
    generator = torch.Generator().manual_seed(1)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    hessian = basis @ torch.diag(torch.tensor(diagonal, dtype=torch.float64)) @ basis.T
    return lambda point: 0.5 * point @ hessian @ point, basis


def test_leading_eigenvectors_are_those_of_a_quadratic():
    """The largest in size, with their signs."""
    loss, basis = quadratic([7.0, 0.5, -9.0, 1.0, 0.0])
    origin = torch.ones(5, dtype=torch.float64)
    values, vectors = loss_space.leading(loss, origin, 2)
    assert values == pytest.approx([-9, 7], rel=1e-2)
    for vector, place in zip(vectors, (2, 0), strict=True):
        assert abs(float(vector @ basis[:, place])) == pytest.approx(1, abs=1e-2)
        assert float(vector.norm()) == pytest.approx(1)
    assert float(vectors[0] @ vectors[1]) == pytest.approx(0, abs=1e-6)


def test_an_eigenvector_that_does_not_settle_is_told(caplog):
    loss, _ = quadratic([1.0, -1.0, 1.0])
    tilted, _ = quadratic([3.0, -3.001, 0.0])
    loss_space.leading(tilted, torch.zeros(3, dtype=torch.float64), 1)
    assert "has not settled in 100 steps" in caplog.text
    caplog.clear()
    values, _ = loss_space.leading(
        lambda point: loss(point) * 0, torch.ones(3, dtype=torch.float64), 2
    )
    assert values == [0, 0] and not caplog.text


def test_the_landscape_of_a_quadratic_is_its_loss(runs):
    loss, basis = quadratic([4.0, 2.0])
    space = loss_space.LossSpace(torch.zeros(2, dtype=torch.float64), [slice(0, 2)], loss)
    losses = loss_space.surface(space, [basis[:, 0], basis[:, 1]], 3)
    np.testing.assert_allclose(
        losses, 0.25 * np.array([[3, 2, 3], [1, 0, 1], [3, 2, 3]]), atol=1e-9
    )
    tilted = replace(space, loss=lambda point: loss(point) + point @ basis[:, 0])
    assert torch.equal(loss_space.uphill(tilted, basis[:, 0]), basis[:, 0])
    assert torch.equal(loss_space.uphill(tilted, -basis[:, 0]), basis[:, 0])


def test_the_loss_space_of_a_run_is_its_loss_around_the_weights(runs):
    run = runs[0]
    with opened(run) as again:
        space = loss_space.loss_space(again.setup, again.global_model(2), 10_000)
        setup = again.setup
    assert float(space.loss(space.origin)) == pytest.approx(run.rounds["test_loss"][2], rel=1e-5)
    assert len(space.slices) == 10 and space.slices[-1].stop == len(space.origin) == 44_426
    # By hand: the second derivative along a vector, by differences in float64.
    model = copy.deepcopy(setup.model).double().eval()
    rows = np.arange(20)
    images, labels = next(setup.federation.batches(setup.federation.test, rows, setup.device))

    def loss(vector):
        entries = dict(zip(names, vector.split(sizes), strict=True))
        shaped = {name: entries[name].view(shape) for name, shape in shapes.items()}
        logits = torch.func.functional_call(model, shaped, (images.double(),))
        return torch.nn.functional.cross_entropy(logits, labels)

    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    names, sizes = [*shapes], [shape.numel() for shape in shapes.values()]
    origin = space.origin.double()
    direction = torch.randn(origin.shape, generator=torch.Generator().manual_seed(0)).double()
    gradients = [torch.func.grad(loss)(origin + step * direction) for step in (1e-7, -1e-7)]
    expected = (gradients[0] - gradients[1]) / 2e-7
    found = loss_space.hessian_times(loss, origin, direction)
    assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_noise_changes_a_quadratic_by_the_square_of_its_level():
    """Its deviation is a share of each parameter's root mean square, here 5 and 0."""
    origin = torch.tensor([3.0, 4.0, 6.0, 4.0, 8.0, 0.0, 0.0], dtype=torch.float64)
    slices = [slice(0, 5), slice(5, 7)]
    space = loss_space.LossSpace(origin, slices, lambda point: (point - origin).square().sum())
    changes = loss_space.changes_under_noise(space)
    generator = torch.Generator().manual_seed(0)
    scale = origin[:5].square().mean()
    for draw in changes:
        direction = torch.randn(7, generator=generator)[:5].double()
        expected = [
            level**2 * float(scale * direction.square().sum()) for level in loss_space.LEVELS
        ]
        np.testing.assert_allclose(draw, expected, rtol=1e-5)


def test_noise_and_landscape_are_drawn_with_one_scale_for_all_runs(runs):
    made = drawn(loss_space.noise, runs, images=30)
    (axes,) = made.axes
    assert [entry.get_label() for entry in axes.lines] == ["fedavg", "fedntd"]
    for entry, run in zip(axes.lines, runs, strict=True):
        np.testing.assert_allclose(
            entry.get_ydata(), loss_space.changes_of(run, None, 30).mean(axis=0)
        )
        assert entry.get_ydata()[0] == 0
    made = drawn(loss_space.landscape, runs, images=10, grid=3)
    assert made.axes[0].get_zlim() == made.axes[1].get_zlim()


def test_a_circle_has_the_models_of_a_round_and_needs_features_on_one(runs, start):
    run = start("round", model="circle")
    made = drawn(circle.circle, [run], images=30)
    titles = [panel.get_title(loc="left") for panel in made.axes[:5]]
    clients = [*rayfed.local_models(run.folder).clients]
    assert titles == ["global", *[f"client {client}" for client in clients], "averaged"]
    columns = circle.columns_of(run, None, "", 30)
    with opened(run) as again:
        assert np.array_equal(
            columns[-1].points, look(again.setup, again.global_model(2), 30).features
        )
    with pytest.raises(InputError, match=r'the features have 84 numbers .* model = "circle"'):
        circle.circle(runs, images=5)


def test_the_density_of_points_is_highest_where_they_are_and_adds_up_to_one():
    points = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    density = circle.density_in_plane(points)
    cell = (2 * circle.SIDE / (circle.CELLS - 1)) ** 2
    assert density.sum() * cell == pytest.approx(1, abs=1e-3)
    row, column = np.unravel_index(density.argmax(), density.shape)
    places = np.linspace(-circle.SIDE, circle.SIDE, circle.CELLS)
    assert places[[row, column]] == pytest.approx([1, 0], abs=0.03), "y comes first"


@pytest.mark.parametrize("kind", ["neurons", "noise", "circle"])
def test_the_command_draws_and_refuses_what_is_no_run_of_it(kind, runs, tmp_path):
    if kind == "circle":
        done = figure(kind, runs[0].folder, "-o", tmp_path / "a.svg")
        assert done.exit_code == 2 and 'train with model = "circle"' in done.stderr
        return
    done = figure(kind, runs[0].folder, "--images", 20, "-o", tmp_path / "a.svg")
    assert done.exit_code == 0 and done.stdout.startswith("figure in "), done.stderr
    assert figure(kind, runs[0].folder, "--round", 9, "-o", tmp_path / "b.svg").exit_code == 2


@pytest.mark.slow
@needs("sklearn")
def test_names_are_text_in_every_figure_of_models(runs, start, tmp_path):
    """Of a class and a run, in SVG, and in PNG where the font has not every letter."""
    hostile = ("<script>alert(1)</script>", "$x_{", "\u72ac \U0001f415", "a" * 60)
    draws = [
        embedding.t_sne,
        neurons.neurons,
        loss_space.noise,
        loss_space.landscape,
        circle.circle,
    ]
    for draw in draws:
        run = start("text", model="circle") if draw is circle.circle else runs[0]
        run = replace(run, classes=(*hostile, *run.classes[4:]), label="<b>$y$")
        options = {"grid": 3} if draw is loss_space.landscape else {}
        for suffix in (".svg", ".png", ".pdf"):
            save(draw, tmp_path / f"a{suffix}", [run], images=20, **options)
        text = (tmp_path / "a.svg").read_text()
        words = [element.text for element in ElementTree.fromstring(text).iter() if element.text]
        assert "<script" not in text and "<b>" not in text
        assert any("<b>$y$" in word for word in words), draw.__name__
        if draw in (embedding.t_sne, neurons.neurons, circle.circle):
            assert hostile[1] in words and hostile[2] in words
        again = tmp_path / "again.svg"
        save(draw, again, [run], images=20, **options)
        assert again.read_text() == text, "the same numbers are the same bytes"
