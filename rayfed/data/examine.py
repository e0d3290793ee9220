"""One look at a data set after it was read, whatever its source, and before it is dealt.

What cannot be meant is refused. What is probably not meant is a warning, with the names or the
numbers concerned. Ordinary data give no warning: a test checks it with the embedded set, MNIST and
CIFAR-10.

Shapes: `N` examples, `K` classes.
"""

import logging
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rayfed.base.errors import InputError
from rayfed.data.labels import number_in
from rayfed.data.samples import Dataset, Samples
from rayfed.data.texts import is_missing, plain

# A message has at most that many names.
NAMED = 5
# A whole number as text, as programs write it: 1, 01 and 1.0.
WHOLE = re.compile(r"0*(?P<digits>[0-9]+?)(?:\.0+)?")
# In a set with fewer examples, each example may have a class of its own.
FEW = 20
# From this share of images on that are in both sets, or have two labels, a warning says so.
ODD_SHARE = 0.005
# From this share of training images on that are copies, a line of the log says so.
COPIED_SHARE = 0.01
# From this share of texts on that have no word, a warning says so.
EMPTY_SHARE = 0.01
# A set of rows may have copies by chance. The share of test rows that are training rows is no
# chance above so many times the share of training rows with copies.
CHANCE = 2.0
# From this share of test rows on that are training rows, a warning says so.
LEAST_IN_BOTH = 0.1


class Finding(NamedTuple):
    """Something to say about a data set."""

    # The levels are those of `logging`.
    level: int
    message: str


def examine(dataset: Dataset) -> list[Finding]:
    """Return what is odd about a data set.

    Raises `InputError` if labels cannot be labels.
    """
    _refuse_ids(dataset.train)
    findings = [Finding(logging.WARNING, message) for message in _warnings(dataset)]
    findings += _findings_of_copies(dataset)
    return findings


def _warnings(dataset: Dataset) -> Iterator[str]:
    """Yield the warnings about classes, names, images and texts."""
    yield from _of_counts(dataset)
    yield from _of_names(dataset)
    yield from _of_order(dataset)
    for split, samples in (("training", dataset.train), ("test", dataset.test)):
        yield from _of_one_colour(split, samples)
        yield from _of_ones(split, samples)
        yield from _of_lengths(split, samples)


# The next functions look at the classes.


def _refuse_ids(train: Samples) -> None:
    """Raise `InputError` if each example has a label of its own."""
    if len(train) < FEW or len(np.unique(train.labels)) < len(train):
        return
    names = _quoted([train.classes[label] for label in train.labels[:NAMED]])
    raise InputError(
        f"each of the {len(train):,} training {_things(train)} has a label of its own ({names}), "
        "as an id has; name the column of the classes with data.label"
    )


def _of_counts(dataset: Dataset) -> Iterator[str]:
    """Yield warnings of classes without training or test examples, and of too many classes."""
    train, test = dataset.train, dataset.test
    classes, things = train.classes, _things(train)
    in_train = np.bincount(train.labels, minlength=len(classes)) > 0
    in_test = np.bincount(test.labels, minlength=len(classes)) > 0
    used = int(in_train.sum())
    if len(train) >= FEW and used > len(train) / 2:
        yield (
            f"{used:,} classes for {len(train):,} training {things}; is data.label the column of "
            "the classes?"
        )
    # A class that is named as missing may have no examples: EMNIST's letters have a class 0, 'N/A'.
    is_gap = np.array([is_missing(name) for name in classes])
    nowhere = np.flatnonzero(~in_train & ~in_test & ~is_gap)
    numbers_alone = classes == tuple(map(str, range(len(classes))))
    if numbers_alone and nowhere.tolist() == [0]:
        yield (
            f"labels begin with 1: class 0 has no {things[:-1]}, and the model has an output for "
            "it; if it is not meant, subtract 1 from the labels"
        )
    elif len(nowhere):
        remedy = "leave out their names"
        if numbers_alone:
            remedy = "number the labels from 0 without gaps, or write names"
        yield (
            f"{_some(classes, nowhere)} without any {things[:-1]}, and the model has an output for "
            f"each; if it is not meant, {remedy}"
        )
    untrained = np.flatnonzero(~in_train & in_test)
    if len(untrained):
        yield (
            f"{_some(classes, untrained)} with test {things} and without training {things}: no "
            "model can learn it"
        )
    untested = np.flatnonzero(in_train & ~in_test)
    if len(untested):
        yield (
            f"{_some(classes, untested)} without test {things}: accuracy and forgetting are of the "
            f"other {int(in_test.sum()):,}"
        )


def _of_names(dataset: Dataset) -> Iterator[str]:
    """Yield warnings of names that look like missing labels, and of names that are one name."""
    classes, things = dataset.train.classes, _things(dataset.train)
    counts = np.bincount(dataset.train.labels, minlength=len(classes))
    for label, name in enumerate(classes):
        if counts[label] and is_missing(name):
            yield (
                f"class {_quoted([name])} looks like a missing label, of {counts[label]:,} "
                f"training {things}; leave them out, or give them a label"
            )
    alike = defaultdict(list)
    for name in classes:
        alike[plain(name)].append(name)
    for names in alike.values():
        # Letters are classes of their own, such as A and a.
        are_letters = all(len(name) == 1 for name in names)
        if len(names) > 1 and not are_letters:
            yield (
                f"classes {_told_apart(names)} differ in capitals, spaces, invisible characters or "
                "forms of Unicode alone; if they are one class, give it one name"
            )
    by_digits = defaultdict(list)
    for name in classes:
        number = WHOLE.fullmatch(name)
        if number:
            by_digits[number["digits"]].append(name)
    for names in by_digits.values():
        if len(names) > 1:
            yield (
                f"classes {_quoted(names)} are one number, written in {len(names)} ways; if they "
                "are one class, give it one name"
            )


def _of_order(dataset: Dataset) -> Iterator[str]:
    """Yield a warning of test numbers that were looked up among names in another order."""
    train, test = dataset.train, dataset.test
    if train.numbered or not test.numbered:
        return
    numbers = []
    for name in train.classes:
        number = number_in(name)
        if number is not None:
            numbers.append(number)
    if len(numbers) == len(train.classes) and numbers != sorted(numbers):
        yield (
            "labels are text in the training set and numbers in the test set; a number is taken "
            "for the class of that name, and classes are in the order of text: "
            f"{', '.join(train.classes[:NAMED])}, ..."
        )


# The next functions look at images.


def _of_one_colour(split: str, samples: Samples) -> Iterator[str]:
    """Yield a warning of images (N, C, H, W) that have one colour alone.

    Nothing can be learned of them.
    """
    images = samples.examples
    if images.ndim != 4:
        return
    colour = images[0, :, :1, :1]
    # The first image is looked at first, as it is enough for nearly every set.
    if (images[0] == colour).all() and (images == colour).all():
        yield (
            f"all images of the {split} set have one single colour, "
            f"{', '.join(map(str, colour.ravel()))}, and show nothing; is what they show in "
            "another channel, or were they saved wrongly?"
        )


def _of_ones(split: str, samples: Samples) -> Iterator[str]:
    """Yield a warning of images whose pixels are 0 and 1, which a viewer shows as black."""
    images = samples.examples
    # The first image is looked at first, as it is enough for nearly every set.
    if images.ndim != 4 or images[0].max() > 1 or images.max() != 1:
        return
    yield (
        f"all pixels of the {split} set are 0 or 1 of 255, and look black; if they were from 0 to "
        "1 before they became whole numbers, all between is lost: multiply by 255 first"
    )


# The next function looks at texts.


def _of_lengths(split: str, samples: Samples) -> Iterator[str]:
    """Yield warnings of texts, or lists of tokens, that are empty, of one word, or cut."""
    if samples.lengths is None:
        return
    count, length = len(samples), samples.shape[0]
    num_empty = int((samples.lengths == 0).sum())
    num_short = int((samples.lengths <= 1).sum())
    num_cut = int((samples.lengths > length).sum())
    texts = f"of {count:,} {split} texts"
    if num_short > count / 2:
        yield (
            f"{num_short:,} {texts} have one token or none, so that few texts share any; is it the "
            "column of the texts? Words end at spaces: split other texts with a tokenizer, and "
            "give its numbers with data.tokens"
        )
    elif num_empty >= EMPTY_SHARE * count and num_empty:
        yield f"{num_empty:,} {texts} have no token at all; leave them out"
    if num_cut > count / 2:
        yield (
            f"{num_cut:,} {texts} are longer than {length} tokens, and cut there; data.length is "
            "the limit"
        )


# The next functions look for copies.


def _findings_of_copies(dataset: Dataset) -> Iterator[Finding]:
    """Yield findings about test examples that are training examples, and about other copies.

    Two photographs are never the same by chance. Two rows of a table may be, for example rows of
    yes and no, or short texts. So rows count only if the test set has clearly more of the training
    set's rows than the training set has copies.
    """
    train, test = dataset.train, dataset.test
    in_train, in_test = _hashes(train), _hashes(test)
    distinct = len(np.unique(np.concatenate([in_train, in_test])))
    if distinct == len(train) + len(test):
        return
    things = _things(train)
    leaked = int(np.isin(in_test, in_train).sum())
    _, counts = np.unique(in_train, return_counts=True)
    copied = len(in_train) - len(counts)
    with_twin = int(counts[counts > 1].sum())
    share, own_share = leaked / len(test), with_twin / len(train)
    are_images = train.examples.dtype == np.uint8
    if are_images:
        is_leak = share >= ODD_SHARE
    else:
        is_leak = share >= LEAST_IN_BOTH and share > CHANCE * own_share
    if is_leak:
        yield Finding(
            logging.WARNING,
            f"{leaked:,} of {len(test):,} test {things} are training {things}, too: the accuracy "
            "is partly of what the model was trained on",
        )
    elif leaked and are_images:
        yield Finding(
            logging.INFO, f"{leaked:,} of {len(test):,} test {things} are training {things}, too"
        )
    if not are_images:
        return
    hashes = np.concatenate([in_train, in_test])
    doubtful = _with_two_labels(hashes, np.concatenate([train.labels, test.labels]))
    if doubtful >= ODD_SHARE * len(hashes):
        yield Finding(
            logging.WARNING,
            f"{doubtful:,} of {len(hashes):,} {things} are there with two labels or more",
        )
    if copied >= COPIED_SHARE * len(train):
        yield Finding(
            logging.INFO,
            f"{copied:,} of {len(train):,} training {things} are copies of another, and clients "
            "may share them",
        )


def _with_two_labels(hashes: np.ndarray, labels: np.ndarray) -> int:
    """Return how many examples have a copy with another label."""
    order = np.lexsort((labels, hashes))
    hashes, labels = hashes[order], labels[order]
    _, start, counts = np.unique(hashes, return_index=True, return_counts=True)
    lowest, highest = labels[start], labels[start + counts - 1]
    return int(counts[lowest != highest].sum())


def _hashes(samples: Samples) -> np.ndarray:
    """Return a hash of each example, int64 (N,), equal for equal examples in this process."""
    rows = samples.examples.reshape(len(samples), -1)
    return np.fromiter((hash(row.tobytes()) for row in rows), np.int64, len(rows))


# The next functions make words of messages.


def _things(samples: Samples) -> str:
    """Return the word for the examples of a set."""
    if samples.examples.dtype == np.uint8:
        return "images"
    if samples.lengths is not None:
        return "texts"
    return "rows"


def _some(classes: Sequence[str], labels: np.ndarray) -> str:
    """Return a number of classes in words, with the names of the first classes."""
    names = _quoted([classes[label] for label in labels])
    if len(labels) == 1:
        return f"1 of {len(classes):,} classes, {names}, is"
    return f"{len(labels):,} of {len(classes):,} classes, {names}, are"


def _quoted(names: Sequence[str]) -> str:
    """Return names in quotes, with spaces and invisible characters spelled out.

    If there are many names, only the first ones are returned.
    """
    shown = [f"'{_spelled_out(name)}'" for name in names[:NAMED]]
    if len(names) > NAMED:
        shown.append(f"and {len(names) - NAMED:,} more")
    return ", ".join(shown)


def _told_apart(names: Sequence[str]) -> str:
    """Return names in quotes, in ASCII if two names look the same."""
    visible_names = {unicodedata.normalize("NFKC", _spelled_out(name)) for name in names}
    if len(visible_names) == len(names):
        return _quoted(names)
    return ", ".join(map(ascii, names[:NAMED]))


def _spelled_out(name: str) -> str:
    """Return a name with characters that cannot be printed as escapes."""
    return "".join(mark if mark == " " or mark.isprintable() else repr(mark)[1:-1] for mark in name)
