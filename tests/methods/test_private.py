"""The private average: what a client can change, the noise, epsilon, and what is refused."""

import math
import operator
import tomllib
from dataclasses import dataclass
from enum import Enum, auto
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from click.testing import CliRunner
from extras import needs

import rayfed
from rayfed import methods as m
from rayfed.base.errors import Diverged, InputError
from rayfed.cli import main
from rayfed.clients.participation import Participation
from rayfed.methods import private
from rayfed.methods.accountant import epsilon
from rayfed.methods.leaks import refuse_leaks
from rayfed.methods.noise import SecretNoise, SimulatedNoise
from rayfed.methods.private import SECRET
from rayfed.rounds.client_work import refuse_infinite
from rayfed.rounds.engine import play, start
from rayfed.runtime.this_process import ThisProcess
from rayfed.tensors.trees import leaves
from rayfed.tensors.wire import unpack

pytestmark = needs("dp_accounting")
SECRET_VALUE = "0123456789abcdef" * 4


@pytest.fixture
def play_rounds(make_setup):
    """Play rounds of a method, and return the last."""

    def run(parts, count=1, **settings):
        setup = make_setup(parts, **settings)
        executor = ThisProcess(setup)
        current = start(setup, executor)
        for _ in range(count):
            current = play(setup, current, executor)
        return current

    return run


def client_with(weights, trained):
    """A client that has trained from some weights to others, as `report` sees it."""
    client = SimpleNamespace(weights=weights)
    fit = SimpleNamespace(parameters=trained, weights=trained)
    return client, fit


def total_of(part, starts, clip):
    """Return the sum of what clients report that have moved from zero to these weights."""
    total = {"clients": 0, "within": 0, "update": torch.zeros(3, dtype=torch.float64)}
    for trained in starts:
        client, fit = client_with({"w": torch.zeros(3)}, {"w": torch.tensor(trained)})
        summands, memory = part.report(client, clip, fit)
        assert memory is None
        total["clients"] += summands["clients"]
        total["within"] += summands["within"]
        total["update"] += summands["update"]["w"].double()
    return total


def test_a_short_update_is_sent_as_it_is_and_a_long_one_at_the_norm_of_the_clip():
    part = m.PrivateAverage(clip=1.0)
    short = total_of(part, [[0.3, 0.4, 0.0]], clip=1.0)
    torch.testing.assert_close(
        short["update"], torch.tensor([0.3, 0.4, 0.0], dtype=torch.float64), rtol=2e-5, atol=0
    )
    assert short["within"] == 1
    long = total_of(part, [[3.0, 4.0, 0.0]], clip=1.0)
    torch.testing.assert_close(
        long["update"], torch.tensor([0.6, 0.8, 0.0], dtype=torch.float64), rtol=2e-5, atol=0
    )
    assert long["within"] == 0


@pytest.mark.parametrize("replacement", [[0.0, 0.0, 0.0], [-900.0, 5.0, 1.0], [1e-3, 0.0, 0.0]])
def test_a_client_that_is_replaced_moves_the_sum_by_twice_the_clip_at_most(replacement):
    part = m.PrivateAverage(clip=0.5)
    others = [[0.1, 0.0, 2.0], [7.0, -7.0, 7.0]]
    before = total_of(part, [*others, [500.0, 0.0, 0.0]], clip=0.5)
    after = total_of(part, [*others, replacement], clip=0.5)
    assert float((after["update"] - before["update"]).norm()) <= 2 * 0.5
    assert before["clients"] == after["clients"]


def test_a_client_counts_the_same_however_many_samples_it_has(play_rounds, make_setup):
    """Without noise and with a wide bound it is the uniform mean, up to float32."""
    wide = play_rounds(m.compose(m.PrivateAverage(clip=1e6, noise=0.0)), count=2, norm=False)
    uniform = play_rounds(m.compose(m.Average(by="client")), count=2, norm=False)
    for name, weights in uniform.weights.items():
        torch.testing.assert_close(wide.weights[name], weights, rtol=1e-3, atol=1e-4)


def test_the_noise_on_the_sum_has_the_deviation_that_is_asked_for():
    for source in (SimulatedNoise(0), SecretNoise(SECRET_VALUE, "nonce", 1)):
        noisy = private.add_noise({"w": torch.zeros(100_000)}, 3.0, source)["w"]
        assert float(noisy.std()) == pytest.approx(3.0, rel=0.02)
        assert abs(float(noisy.mean())) < 0.05
        assert noisy.dtype == torch.float64


def test_the_noise_of_a_secret_is_normal_and_each_draw_is_another():
    """Shares below some numbers are those of the normal distribution, within five deviations."""
    source = SecretNoise(SECRET_VALUE, "nonce", 1)
    drawn = torch.stack([source.normal((501, 99)) for _ in range(4)]).reshape(4, -1)
    count = drawn.numel()
    for bound in (-3.0, -1.5, -0.5, 0.0, 1.0, 2.0, 3.5):
        share = float(torch.special.ndtr(torch.tensor(bound, dtype=torch.float64)))
        found = float((drawn < bound).double().mean())
        assert abs(found - share) < 5 * math.sqrt(share * (1 - share) / count), bound
    off_diagonal = torch.corrcoef(drawn) - torch.eye(4)
    assert float(off_diagonal.abs().max()) < 5 / math.sqrt(count / 4)
    assert source.normal(()).shape == () and source.normal((0,)).shape == (0,)


def test_the_noise_of_a_secret_depends_on_all_of_it_the_nonce_and_the_round():
    def numbers(*source):
        return SecretNoise(*source).normal((1000,))

    same = numbers(SECRET_VALUE, "nonce", 1)
    assert torch.equal(same, numbers(SECRET_VALUE, "nonce", 1))
    others = [("x" + SECRET_VALUE[1:], "nonce", 1), (SECRET_VALUE, "other", 1)]
    for other in (*others, (SECRET_VALUE, "nonce", 2), (SECRET_VALUE[:-1] + "x", "nonce", 1)):
        together = torch.stack([same, numbers(*other)])
        assert abs(float(torch.corrcoef(together)[0, 1])) < 0.2, other


def test_two_runs_with_one_secret_have_noise_of_their_own(play_rounds, monkeypatch):
    """Otherwise the difference of two models would have no noise."""
    method = m.compose(m.PrivateAverage())
    monkeypatch.setenv(SECRET, SECRET_VALUE)
    first, again = play_rounds(method, norm=False), play_rounds(method, norm=False)
    for name, weights in first.weights.items():
        assert not torch.equal(weights, again.weights[name])
    assert first.notes["privacy.simulation"] == 0


def test_a_run_that_continues_has_the_noise_of_one_that_never_stopped(make_setup, monkeypatch):
    setup = make_setup(m.compose(m.PrivateAverage()), norm=False)
    monkeypatch.setenv(SECRET, SECRET_VALUE)
    first = play(setup, start(setup, ThisProcess(setup)), ThisProcess(setup))
    through, continued = (play(setup, first, ThisProcess(setup)) for _ in range(2))
    for name, weights in through.weights.items():
        assert torch.equal(weights, continued.weights[name])


def test_the_secret_is_neither_in_the_state_nor_in_the_job(play_rounds, tmp_path):
    file = tmp_path / "secret"
    file.write_text(SECRET_VALUE)
    played = play_rounds(m.compose(m.PrivateAverage(secret_file=str(file))), norm=False)
    assert SECRET_VALUE not in repr(played.held)
    assert played.notes["privacy.simulation"] == 0


def test_a_run_without_a_secret_says_that_it_is_a_simulation(play_rounds, caplog):
    played = play_rounds(m.compose(m.PrivateAverage()), norm=False)
    assert played.notes["privacy.simulation"] == 1
    assert "a simulation, not private" in caplog.text
    assert "tables of clients" in caplog.text


def test_another_secret_than_at_the_beginning_is_refused(make_setup, monkeypatch):
    setup = make_setup(m.compose(m.PrivateAverage()), norm=False)
    executor = ThisProcess(setup)
    monkeypatch.setenv(SECRET, SECRET_VALUE)
    current = play(setup, start(setup, executor), executor)
    monkeypatch.delenv(SECRET)
    with pytest.raises(InputError, match="not the one with which the run began"):
        play(setup, current, executor)


def test_a_secret_that_can_be_guessed_is_refused(play_rounds, monkeypatch):
    monkeypatch.setenv(SECRET, "1234")
    with pytest.raises(InputError, match=r"has 4 characters, .* openssl rand -hex 32"):
        play_rounds(m.compose(m.PrivateAverage()), norm=False)


def test_an_empty_secret_is_refused_and_a_bad_one_before_the_run(make_setup, monkeypatch):
    """A simulation in place of an intended secret would be noticed too late."""
    setup = make_setup(m.compose(m.PrivateAverage()), norm=False)
    for value in ("", "1234"):
        monkeypatch.setenv(SECRET, value)
        with pytest.raises(InputError, match=rf"has {len(value)} characters"):
            m.PrivateAverage().check(setup.model, setup.job.train)
    with pytest.raises(InputError, match="cannot be read"):
        m.PrivateAverage(secret_file="nowhere").check(setup.model, setup.job.train)


def test_hidden_cohorts_are_refused_where_clients_remember(make_setup):
    for part, norm in ((m.moon()[-1], False), (m.LocalNorm(), True)):
        method = m.compose(m.PrivateAverage(hidden_cohorts=True), part)
        setup = make_setup(method, norm=norm)
        with pytest.raises(InputError, match="depends on earlier cohorts, for which hidden_coh"):
            refuse_leaks(method, setup.model, Participation())


def test_epsilon_grows_with_the_rounds_and_is_noted(play_rounds):
    part = m.PrivateAverage(noise=2.0, delta=1e-3)
    one = play_rounds(m.compose(part), count=1, norm=False)
    two = play_rounds(m.compose(part), count=2, norm=False)
    clients = len(one.clients)
    assert one.notes["privacy.epsilon"] == epsilon(2.0, 1, 1e-3, clients, 6, hidden_cohorts=False)
    assert two.notes["privacy.epsilon"] > one.notes["privacy.epsilon"]


def test_epsilon_of_one_gaussian_is_that_of_its_renyi_divergence():
    """Of all clients in a round, the Renyi divergence of order a is a / (2 sigma^2); the sum moves
    by twice the clip, so sigma is half of the noise. The conversion is that of Canonne et al. (2020),
    proposition 12, over a fine grid of orders.
    """
    noise, delta = 8.0, 1e-5
    sigma = noise / 2
    best = math.inf
    for order in [1 + step / 1000 for step in range(1, 60_000)]:
        divergence = order / (2 * sigma**2)
        bound = divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        best = min(best, bound)
    found = epsilon(noise, 1, delta, 5, 5, hidden_cohorts=True)
    assert found >= best - 1e-9
    assert found == pytest.approx(best, rel=0.01)


def test_hidden_cohorts_reveal_less_and_a_cohort_of_all_reveals_the_same():
    known = epsilon(8.0, 10, 1e-5, 10, 1000, hidden_cohorts=False)
    hidden = epsilon(8.0, 10, 1e-5, 10, 1000, hidden_cohorts=True)
    assert hidden < known
    assert epsilon(8.0, 10, 1e-5, 10, 10, hidden_cohorts=True) == epsilon(
        8.0, 10, 1e-5, 10, 10, hidden_cohorts=False
    )


def test_epsilon_is_that_of_the_package_s_own_example():
    """Its test of composition: ten Gaussians of deviation s are one of s / sqrt(10)."""
    ten = epsilon(6.0, 10, 1e-5, 5, 5, hidden_cohorts=False)
    one = epsilon(6.0 / math.sqrt(10), 1, 1e-5, 5, 5, hidden_cohorts=False)
    assert ten == pytest.approx(one, rel=1e-9)


def test_the_clip_grows_while_fewer_than_the_quantile_are_within_and_falls_otherwise():
    part = m.PrivateAverage(clip=1.0, noise=0.0, quantile=0.5, quantile_lr=0.2)
    noise = SimulatedNoise(0)
    assert part._next_clip(1.0, 0, 10, noise) == pytest.approx(math.exp(0.2 * 0.5))
    assert part._next_clip(1.0, 10, 10, noise) == pytest.approx(math.exp(-0.2 * 0.5))
    assert part._next_clip(1.0, 5, 10, noise) == 1.0


def test_the_noises_on_updates_and_count_reveal_together_what_noise_says():
    """Theorem 1 of Andrew et al.: z^-2 = z_updates^-2 + (2 sigma_count)^-2."""
    part = m.PrivateAverage(noise=1.5, quantile=0.5)
    updates, count = part._noise_on_updates(100), part._noise_on_count(100)
    assert updates**-2 + (2 * count) ** -2 == pytest.approx(1.5**-2)
    assert updates > 1.5


class Way(Enum):
    """What becomes of a client in training."""

    STILL = auto()
    # The loss is NaN from the first batch on.
    LOSS = auto()
    # The losses are finite, and the last step leads to an infinity.
    WEIGHTS = auto()


@dataclass(frozen=True)
class Goes(m.Part):
    """Replaces the loss; client 1 goes its way."""

    slot: ClassVar[str] = "supervise"
    way: Way

    def begin(self, client):
        return client

    def loss(self, batch, client):
        loss = batch.logits.square().mean()
        if client.id != 1:
            return loss
        if self.way is Way.WEIGHTS:
            # It is 0, and its gradient nearly the largest number that there is.
            return 3e38 * (batch.flat - batch.flat.detach()).sum()
        return loss * (0.0 if self.way is Way.STILL else math.nan)


# Every client takes part, and one that does not move does not decay either.
ALL = {"clients_per_round": 6, "local_steps": 2, "weight_decay": 0.0}


@pytest.mark.parametrize("way", [Way.LOSS, Way.WEIGHTS])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_a_client_that_diverges_counts_as_one_that_has_not_moved(play_rounds, caplog, way, noise):
    """Bit for bit, over two rounds: the sum, its divisor, the noise and the clipping norm."""
    average = m.PrivateAverage(noise=noise, quantile=0.5)
    still, wrong = (
        play_rounds(m.compose(average, Goes(how)), count=2, norm=False, **ALL)
        for how in (Way.STILL, way)
    )
    for name, weights in still.weights.items():
        assert weights.isfinite().all() and torch.equal(weights, wrong.weights[name])
    assert (still.notes["diverged"], wrong.notes["diverged"]) == (0, 1)
    assert still.notes["privacy.clip"] == wrong.notes["privacy.clip"]
    rows = {row.client: row for row in wrong.clients}
    assert {client: row.notes["diverged"] for client, row in rows.items()} == {
        client: float(client == 1) for client in range(6)
    }
    assert math.isnan(rows[1].train_loss) and math.isfinite(wrong.train_loss)
    assert (
        "round 2: 1 of 6 clients have diverged, and count as clients that have not moved: 1; a "
        "smaller train.lr may help"
    ) in caplog.text


def test_the_sum_with_a_client_that_diverges_is_that_of_the_others(make_setup):
    """The divisor is that of all."""
    method = m.compose(m.PrivateAverage(noise=0.0), Goes(Way.LOSS))
    setup = make_setup(method, norm=False, **ALL)
    executor = ThisProcess(setup)
    first = start(setup, executor)
    of_all = play(setup, first, executor)
    of_others = play(setup, first, executor, clients=[0, 2, 3, 4, 5])
    for name, before in first.weights.items():
        moved = 6 * (of_all.weights[name] - before).double()
        torch.testing.assert_close(
            moved, 5 * (of_others.weights[name] - before).double(), rtol=1e-4, atol=1e-5
        )
        assert moved.abs().sum() > 0


@pytest.mark.parametrize(
    ("part", "norm"), [(m.moon()[-1], False), (m.LocalNorm(), True)], ids=["moon", "fedbn"]
)
def test_what_a_client_keeps_is_as_it_was_before_it_diverged(make_setup, part, norm):
    """In the first round nobody diverges."""
    setup, other = (
        make_setup(m.compose(m.PrivateAverage(), part, Goes(way)), norm=norm, **ALL)
        for way in (Way.STILL, Way.LOSS)
    )
    executor = ThisProcess(setup)
    first = play(setup, start(setup, executor), executor)
    second = play(other, first, ThisProcess(other))
    assert second.notes["diverged"] == 1
    before, after = (executor.recall(played.memories[1]) for played in (first, second))
    before, after = (dict(leaves(unpack(memory)["slots"])) for memory in (before, after))
    assert before.keys() == after.keys()
    for place, leaf in before.items():
        same = torch.equal if isinstance(leaf, torch.Tensor) else operator.eq
        assert same(leaf, after[place]), place


def test_statistics_that_overflow_have_diverged_and_a_mask_has_not():
    """A batch normalised by an infinite variance is 0, so the loss stays finite."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    refuse_infinite(model, "here")
    model[1].running_var[0] = math.inf
    with pytest.raises(Diverged, match=r"^the model became NaN or infinite at here; try a smaller"):
        refuse_infinite(model, "here")


def test_an_own_model_that_diverges_does_not_end_a_private_run(play_rounds):
    method = m.compose(m.PrivateAverage(noise=0.0), m.ditto(lam=1e12)[-1])
    played = play_rounds(method, count=2, norm=False, local_steps=20)
    assert played.notes["diverged"] == len(played.clients) > 0
    assert played.train_loss is None, "of no client"


def test_a_private_run_in_which_all_diverge_ends_in_good_order(tmp_path, capsys):
    """It is verified and replayed like any other, although its losses are NaN."""
    method = [{"name": "private_average"}]
    overrides = {"method": method, "model": "lenet", "ray.mode": "off", "train.num_rounds": 2}
    overrides["measure"] = ["local", "train", "epochs", "drift", "gradients", "confusion"]
    overrides |= {"train.lr": 1e30, "output.path": str(tmp_path), "train.clients_per_round": 2}
    result = rayfed.run("quickstart", overrides)
    notes = [dict(row["notes"]) for row in result.rounds.to_pylist()[1:]]
    assert [note["diverged"] for note in notes] == [2, 2]
    assert result.rounds["train_loss"].to_pylist() == [None] * 3
    run = str(result.path)
    for command in (["verify", run], ["table", run], ["report", run]):
        ended = CliRunner().invoke(main, command)
        assert ended.exit_code == 0, ended.output
    client = result.clients["client"][0].as_py()
    ended = CliRunner().invoke(main, ["replay", run, "--round", "1", "--client", str(client)])
    assert "the run recorded the same loss" in ended.output


ALLOWED = {
    "fedntd": m.compose(m.PrivateAverage(), m.NotTrueDistill()),
    "fedlmd, momentum": m.compose(m.PrivateAverage(), m.LabelMaskedDistill(), m.ServerMomentum()),
    "moon, whose memory stays": m.compose(m.PrivateAverage(), m.moon()[-1]),
    "fedbn": m.compose(m.PrivateAverage(), m.LocalNorm()),
}
REFUSED = {
    "control variates": (
        m.compose(m.PrivateAverage(), m.ControlVariates()),
        "control_variates sends sums of its own",
    ),
    "prototypes": (
        m.compose(m.PrivateAverage(), m.PrototypeSimilarityDistill()),
        "before training",
    ),
    "samples": (
        m.compose(m.PrivateAverage(), m.SelectiveDistill()),
        "selective_distill gives the server samples",
    ),
    "another stage": (
        m.switch(m.fedavg(), m.compose(m.PrivateAverage()), at=2),
        "another stage of the method has average",
    ),
    "other values": (
        m.switch(m.compose(m.PrivateAverage()), m.compose(m.PrivateAverage(noise=2.0)), at=2),
        "its values change between the stages",
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_parts_that_send_nothing_else_go_with_it(name, make_setup, play_rounds):
    setup = make_setup(ALLOWED[name], norm=name == "fedbn")
    refuse_leaks(setup.job.method, setup.model, Participation())
    assert play_rounds(ALLOWED[name], norm=name == "fedbn").weights


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_noise_covers_is_refused(name, make_setup):
    method, words = REFUSED[name]
    setup = make_setup(method, norm=False)
    with pytest.raises(InputError, match=words):
        refuse_leaks(method, setup.model, Participation())


def test_buffers_and_other_cohorts_are_refused(make_setup):
    nothing = m.compose(m.PrivateAverage(), m.LocalModel())
    with pytest.raises(InputError, match="all parameters stay at the clients"):
        refuse_leaks(nothing, make_setup(nothing, norm=False).model, Participation())
    method = m.compose(m.PrivateAverage())
    with_norm = make_setup(method, norm=True)
    with pytest.raises(InputError, match=r"buffer .* keep BatchNorm at the clients"):
        refuse_leaks(method, with_norm.model, Participation())
    without = make_setup(method, norm=False)
    with pytest.raises(InputError, match=r"clients\.available = 0\.5: .* a fixed size"):
        refuse_leaks(method, without.model, Participation(available=0.5))


@dataclass(frozen=True)
class Quiet(m.Part):
    """Sends nothing, and says so."""

    def report(self, client, local, fit) -> tuple[None, None]:
        return None, None


@dataclass(frozen=True)
class Open(m.Part):
    """Sends its loss."""

    def report(self, client, local, fit):
        return {"loss": fit.loss}, None


def test_a_part_of_the_user_s_is_allowed_if_it_says_that_it_sends_nothing(make_setup):
    setup = make_setup(m.fedavg(), norm=False)
    refuse_leaks(m.compose(m.PrivateAverage(), Quiet()), setup.model, Participation())
    with pytest.raises(InputError, match="open sends sums of its own"):
        refuse_leaks(m.compose(m.PrivateAverage(), Open()), setup.model, Participation())


def test_a_job_file_composes_it():
    table = tomllib.loads("""
        [[method]]
        name = "private_average"
        clip = 0.5
        [[method]]
        name = "not_true_distill"
    """)
    parts = m.read_method(table["method"])
    assert m.PrivateAverage(clip=0.5) in parts
