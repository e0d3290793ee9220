"""What one look at a data set finds: each oddity is named with its number, and ordinary data have
none.
"""

import logging
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayfed.base.errors import InputError
from rayfed.data.examine import examine
from rayfed.data.samples import Dataset, Samples
from rayfed.data.settings import Data
from rayfed.data.sources import load
from rayfed.data.texts import Texts
from rayfed.data.words import words_of

REAL = Path(__file__).resolve().parents[3] / "shared/data"


def made(labels, test=None, classes=None, images=None, test_images=None):
    """A data set with these labels, and with distinct images unless others are given."""
    test = labels if test is None else test
    if classes is None:
        classes = tuple(map(str, range(max([*labels, *test]) + 1)))
    distinct = np.arange(4 * (len(labels) + len(test)), dtype=np.uint32).view(np.uint8)
    distinct = distinct.reshape(-1, 1, 4, 4)
    if images is None:
        images = distinct[: len(labels)]
    if test_images is None:
        test_images = distinct[len(labels) :]
    return Dataset(
        Samples(np.asarray(images), np.array(labels), tuple(classes)),
        Samples(np.asarray(test_images), np.array(test), tuple(classes)),
    )


def found(dataset, level=logging.WARNING):
    return [finding.message for finding in examine(dataset) if finding.level == level]


THREE = [0, 1, 2] * 4
NAMED = ("cat", "dog", "emu")


@pytest.mark.parametrize(
    ("labels", "test", "classes", "message"),
    [
        (THREE, None, None, None),
        (THREE, [0, 1, 2], NAMED, None),
        ([1, 2, 3], None, None, "labels begin with 1: class 0 has no image"),
        ([0, 5, 17], None, None, (
            "15 of 18 classes, '1', '2', '3', '4', '6', and 10 more, are without any image"
        )),
        ([2, 3, 4], None, None, "2 of 5 classes, '0', '1', are without any image"),
        ([0, 2], None, NAMED, (
            "1 of 3 classes, 'dog', is without any image, .* leave out their names"
        )),
        ([0, 2], [0, 1, 2], NAMED, (
            "1 of 3 classes, 'dog', is with test images and without training images"
        )),
        (THREE, [0, 2], NAMED, (
            "1 of 3 classes, 'dog', is without test images: .* are of the other 2"
        )),
        (THREE, [1, 1], NAMED, (
            "2 of 3 classes, 'cat', 'emu', are without test images: .* are of the other 1"
        )),
        (THREE, None, ("Cat", "cat ", "emu"), "classes 'Cat', 'cat ' differ in capitals, spaces"),
        (THREE, None, ("cat", "cat\u200b", "emu"), r"classes 'cat', 'cat\\u200b' differ"),
        (THREE, None, ((
            "caf\u00e9"
        ), "cafe\u0301", (
            "emu"
        )), r"classes 'caf\\xe9', 'cafe\\u0301' differ"),
        (THREE, None, ("ice cream", "icecream", "emu"), "classes 'ice cream', 'icecream' differ"),
        (THREE, None, ("01", "1", "emu"), "classes '01', '1' are one number, written in 2 ways"),
        (THREE, None, ("1.0", "1", "emu"), "classes '1.0', '1' are one number, written in 2 ways"),
        (THREE, None, ("00", "10", "100"), None),
        # Sections of a book.
        (THREE, None, ("1.1", "1.10", "1"), None),
        # Letters
        (THREE, None, ("a", "A", "emu"), None),
        (THREE, None, ("cat", "cats", "cat_1"), None),
        (THREE, None, ((
            "cat"
        ), "nan", (
            "emu"
        )), (
            "class 'nan' looks like a missing label, of 4 training images"
        )),
        (THREE, None, ("cat", "None", "emu"), "class 'None' looks like a missing label"),
        (THREE, None, ("cat", " ", "emu"), "class ' ' looks like a missing label"),
        # As EMNIST has its letters.
        ([1, 2], None, ("N/A", "a", "b"), None),
        (THREE, None, ("none", "nano", "NA"), None),
        ([*range(15), *range(15)], None, None, None),
        ([*range(15), *range(10)], [*range(15)], None, (
            "15 classes for 25 training images; is data.label"
        )),
    ],
)  # fmt: skip
def test_odd_classes_are_named_and_usual_ones_are_not(labels, test, classes, message):
    findings = found(made(labels, test, classes))
    assert len(findings) == (message is not None), findings
    if message:
        assert re.search(message, findings[0]), findings[0]


def test_a_label_for_each_example_is_an_id():
    with pytest.raises(
        InputError, match=r"each of the 20 training images has a label of its own \('0', '1'"
    ):
        examine(made([*range(20)]))
    # So few may be one of each class.
    assert found(made([*range(19)])) == []


def test_test_images_that_are_training_images_are_counted():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (400, 3, 2, 2), np.uint8)
    labels, test = [0, 1] * 100, [0, 1] * 100
    assert found(made(labels, test, None, images[:200], images[200:])) == []
    for copies, expected in ((1, 1), (7, 1), (200, 1), (0, 0)):
        others = images[200:].copy()
        others[:copies] = images[:copies]
        findings = found(made(labels, test, None, images[:200], others))
        assert len(findings) == expected
        assert not copies or findings[0].startswith(f"{copies} of 200 test images are training")


def test_few_copies_in_a_large_set_are_told_without_a_warning():
    images = np.arange(1000, dtype=np.uint32).view(np.uint8).reshape(-1, 1, 2, 2)
    others = np.arange(1000, 2000, dtype=np.uint32).view(np.uint8).reshape(-1, 1, 2, 2)
    others[:4] = images[:4]
    dataset = made([0, 1] * 500, [0, 1] * 500, None, images, others)
    assert found(dataset) == []
    assert found(dataset, logging.INFO) == ["4 of 1,000 test images are training images, too"]


def test_images_with_two_labels_and_copies_among_the_training_images_are_counted():
    images = np.arange(10, dtype=np.uint32).view(np.uint8).reshape(-1, 1, 2, 2).repeat(2, axis=0)
    others = images[:2] + np.array([100, 101], np.uint8).reshape(2, 1, 1, 1)
    alike = made([0, 0, 1, 1] * 5, [0, 1], None, images, others)
    assert found(alike) == []
    assert found(alike, logging.INFO) == [
        "10 of 20 training images are copies of another, and clients may share them"
    ]
    mixed = made([0, 1] * 10, [0, 1], None, images, others)
    assert found(mixed) == ["20 of 22 images are there with two labels or more"]
    between = made([0, 0, 1, 1] * 5, [1, 1], None, images, others * 0 + images[[0, 0]])
    assert "4 of 22 images are there with two labels or more" in found(between)


def test_a_test_set_that_is_split_off_a_set_of_copies_is_looked_at_after_the_split(
    tmp_path, caplog
):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 16), np.uint8).repeat(2, axis=0)
    table = pa.table({"image": list(pixels), "label": np.arange(60) // 2 % 3})
    pq.write_table(table, tmp_path / "a.parquet")
    data = load(Data(str(tmp_path / "a.parquet"), test_fraction=0.2))
    twins = {image.tobytes() for image in data.train.examples}
    leaked = sum(image.tobytes() in twins for image in data.test.examples)
    assert leaked > 1
    assert f"{leaked} of 12 test images are training images, too" in caplog.text


def rows(examples, lengths=None):
    labels = np.arange(len(examples)) % 2
    return Samples(np.asarray(examples), labels, ("no", "yes"), lengths=lengths)


def test_rows_of_a_table_coincide_by_chance_and_copies_of_it_do_not():
    rng = np.random.default_rng(0)
    few = rng.integers(0, 2, (300, 3)).astype(np.float32)
    assert found(Dataset(rows(few[:200]), rows(few[200:]))) == []
    many = rng.normal(size=(300, 3)).astype(np.float32)
    assert found(Dataset(rows(many[:200]), rows(many[200:]))) == []
    assert found(Dataset(rows(many[:200]), rows(many[150:250])))[0].startswith(
        "50 of 100 test rows are training rows, too"
    )


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([3, 4, 5, 1], [2], None),
        ([1, 1, 0, 5], [2], "3 of 4 training texts have one token or none"),
        ([5, 5, 0, 5], [2], "1 of 4 training texts have no token at all"),
        ([9, 9, 9, 5], [9], "3 of 4 training texts are longer than 5 tokens, and cut there"),
    ],
)
def test_texts_that_are_empty_of_one_word_or_cut_are_counted(train, test, message):
    tokens = np.arange(25).reshape(5, 5)
    samples = [
        rows(tokens[:4], np.array(train)),
        rows(tokens[4:], np.array(test)),
    ]
    findings = [each for each in found(Dataset(*samples)) if "classes" not in each]
    assert [each[: len(message or "")] for each in findings[:1]] == [message] * bool(message)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a good film", "nanny and None", "null and void"], None),
        (["a good film", "nan", " None "], (
            "2 of 3 texts of column 't' are 'nan', as programs write it"
        )),
        (["1.txt", "a/b.html", "see c.txt"], (
            "2 of 3 texts of column 't' are names of files, such as '1.txt'"
        )),
        (["1.txt", "good. Film", "3.50", "Great!", "e.g."], None),
    ],
)  # fmt: skip
def test_texts_that_stand_for_something_else_are_counted(texts, message, caplog):
    """Over all blocks of a column."""
    counted = Texts("a.parquet", "t")
    for text in texts:
        counted.count([text])
    counted.tell()
    assert len(caplog.messages) == (message is not None), caplog.messages
    if message:
        assert caplog.messages[0].startswith(f"a.parquet: {message}")


@pytest.mark.parametrize(("values", "number"), [([0, 1], 2), ([0, 255], 0), ([0, 1, 2], 0)])
def test_images_of_0_and_1_are_told_and_black_and_white_ones_are_not(values, number):
    images = np.resize(np.array(values, np.uint8), (12, 1, 4, 4))
    findings = found(made(THREE, images=images, test_images=images))
    assert sum("are 0 or 1 of 255, and look black" in message for message in findings) == number


def test_scripts_without_spaces_are_split_by_character_and_others_at_spaces():
    assert words_of("这部电影very好看") == [*"这部电影", "very", *"好看"]
    assert words_of("カタカナ、ひらがな。") == [*"カタカナひらがな"]
    assert words_of("สวัสดี ครับ") == [*"สวัสดีครับ"]
    assert words_of("Straße, naïve 1e5 a_b") == ["straße", "naïve", "1e5", "a_b"]
    assert words_of("한국어 문장 Привет мир") == ["한국어", "문장", "привет", "мир"]
    assert words_of("!? …") == []


def test_the_embedded_set_has_nothing_odd(caplog):
    load(Data())
    assert caplog.text == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_mnist_and_cifar_10_have_nothing_odd(name, caplog):
    train, test = (REAL / f"{name}-{split}.parquet" for split in ("train", "test"))
    if not (train.is_file() and test.is_file()):
        pytest.skip("the files are not here")
    load(Data(str(train), test=str(test)))
    assert caplog.text == ""
