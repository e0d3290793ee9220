"""Skews of features: laws, cases by hand, and what is refused."""

from dataclasses import dataclass

import numpy as np
import pytest

from rayfed.base.errors import InputError
from rayfed.data.federation import federate, open_federation
from rayfed.data.partition import Iid
from rayfed.data.samples import Dataset, Samples
from rayfed.data.settings import Data
from rayfed.data.skews import Noise, NoSkew, Rotation, read_skew, skewed, write_skew
from rayfed.job import read_job


def grey(num, value=128, size=8):
    return np.full((num, 1, size, size), value, np.uint8)


def deal(skew, examples, num_clients=4, **options):
    labels = np.arange(len(examples)) % 2
    samples = Samples(examples, labels, ("a", "b"))
    return federate(Dataset(samples, samples), Iid(num_clients), skew=skew, **options)


def of_clients(federation):
    return [
        federation.train.examples[federation.client(client)]
        for client in range(federation.num_clients)
    ]


def test_the_variance_of_the_noise_grows_from_client_to_client():
    """Of 16,000 pixels each; the standard error of a variance is about one percent of it."""
    clients = of_clients(deal(Noise(variance=0.04), grey(1000)))
    for client, examples in enumerate(clients, start=1):
        variance = ((examples / 255 - 128 / 255) ** 2).mean()
        # 3.9 deviations fit between black and white.
        assert variance == pytest.approx(0.04 * client / 4, rel=0.05)
        assert (examples / 255).mean() == pytest.approx(128 / 255, abs=0.01)
    stronger = of_clients(deal(Noise(variance=0.08), grey(1000)))
    assert stronger[0].std() > 1.3 * clients[0].std()


def test_noise_is_cut_off_at_black_and_white_and_drawn_anew_for_each_image():
    (examples,) = of_clients(deal(Noise(variance=1.0), grey(2, value=255), num_clients=1))
    assert examples.max() == 255 and examples.min() < 200
    assert (examples == 255).mean() > 0.4, "it does not wrap around"
    assert not np.array_equal(examples[0], examples[1])


def test_noise_of_a_table_is_in_units_of_its_features():
    rng = np.random.default_rng(0)
    examples = rng.standard_normal((4000, 2)) * [1.0, 1000.0]
    (changed,) = of_clients(deal(Noise(variance=0.25), examples, num_clients=1))
    assert (changed - examples).std(axis=0) == pytest.approx([0.5, 500.0], rel=0.05)


def test_images_are_turned_by_the_clients_number():
    image = np.arange(16, dtype=np.uint8).reshape(1, 1, 4, 4)
    clients = of_clients(deal(Rotation(), np.repeat(image, 10, axis=0), num_clients=5))
    for client, examples in enumerate(clients):
        assert (examples == np.rot90(image, client, axes=(2, 3))).all()
    assert (clients[4] == image).all() and clients[1][0, 0, 0].tolist() == [3, 7, 11, 15]
    halves = of_clients(deal(Rotation(turns=2), np.repeat(image, 10, axis=0), num_clients=5))
    assert (halves[2] == image).all() and (halves[1] == clients[1]).all()


@pytest.mark.parametrize("skew", [Noise(), Rotation()], ids=repr)
def test_only_what_clients_train_on_is_changed_and_always_in_the_same_way(skew):
    rng = np.random.default_rng(0)
    examples = rng.integers(0, 256, (40, 1, 8, 8), dtype=np.uint8)
    original = examples.copy()
    plain, changed, again = (
        deal(kind, examples, auxiliary_per_class=2) for kind in (NoSkew(), skew, skew)
    )
    assert np.array_equal(examples, original), "what was read stays as it was"
    assert changed.hash() == again.hash() != plain.hash()
    assert plain.train.examples is examples or np.array_equal(plain.train.examples, examples)
    assert np.array_equal(changed.test.examples, plain.test.examples)
    server = changed.auxiliary
    assert np.array_equal(changed.train.examples[server], examples[server])
    assert (changed.mean, changed.std) == (plain.mean, plain.std)
    assert changed.partition.hash() == plain.partition.hash()


def test_the_noise_of_a_client_does_not_depend_on_the_others():
    rows = [np.arange(3), np.arange(3, 9), np.arange(9, 10)]
    one = skewed(Noise(), grey(10), rows, seed=0)
    rows[0], rows[2] = rows[2], rows[0]
    other = skewed(Noise(), grey(10), rows, seed=0)
    assert np.array_equal(one[3:9], other[3:9])
    assert not np.array_equal(one, skewed(Noise(), grey(10), rows, seed=1))


def test_a_job_names_a_skew_and_the_usual_one_does_not_change_its_hash():
    job = read_job({"name": "n"})
    assert job.data.skew == NoSkew() and "skew" not in job.lineage()["data"]
    noisy = read_job({"name": "n"}, {"data.skew": "noise", "data.skew.variance": 0.5})
    assert noisy.data.skew == Noise(0.5) and noisy.hash() != job.hash()
    assert read_job(noisy.table()) == noisy
    assert read_skew(write_skew(Rotation(2))) == Rotation(2)


# What is refused.


@dataclass(frozen=True)
class Own:
    """Gives what it is told."""

    what: str = "examples"

    def change(self, examples, client, num_clients, generator):
        return eval(self.what)


def test_a_skew_of_ones_own():
    own = f"{__name__}:Own"
    skew = read_skew({"name": own, "what": "255 - examples"})
    assert (of_clients(deal(skew, grey(8, value=5)))[1] == 250).all()
    for what, given in (("None", "None"), ("examples[1:]", "an array of uint8 (1, 1, 8, 8)")):
        with pytest.raises(InputError) as refused:
            deal(Own(what), grey(8))
        assert str(refused.value) == (
            f"data.skew: Own.change gives {given} for client 0; "
            "give an array of uint8 (2, 1, 8, 8), as it got"
        )


def test_a_skew_that_makes_no_sense_is_refused():
    tokens = np.ones((8, 5), dtype=np.int64)
    with pytest.raises(InputError, match=r"no noise can be added; give images or data\.features"):
        deal(Noise(), tokens)
    for examples, shape in ((tokens, "5"), (np.ones((8, 1, 2, 3), np.uint8), "1x2x3")):
        with pytest.raises(InputError, match=f"the examples have the shape {shape}; give data.si"):
            deal(Rotation(), examples)
    with pytest.raises(InputError, match=r"^skew 'rayfed.data.skews:skewed' is .*; it must be a"):
        read_skew("rayfed.data.skews:skewed")


def test_a_job_with_a_skew_opens():
    federation = open_federation(Data(partition=Iid(num_clients=4), skew=Rotation()))
    plain = open_federation(Data(partition=Iid(num_clients=4)))
    rows = federation.client(1)
    turned = np.rot90(plain.train.examples[rows], 1, axes=(2, 3))
    assert np.array_equal(federation.train.examples[rows], turned)
