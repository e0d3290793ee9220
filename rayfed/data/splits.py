"""Which files are to train on, which to test on: told by the names of folders and files, at any
depth.

A name tells a split if it has a word for it, such as `Training`, `test2017` or `val_images`, and
else only words such as `images`. A name of a file may also begin with the word, as
`train-00000-of-00002-5f3c.parquet`. Else names that differ in such a word alone are a pair, such as
`cifar_train` and `cifar_test`.

A class may have such a name, too, as CIFAR-100's `train`. So the topmost name counts, and a folder
that holds images to train on tells a split only where another folder is left to tell their class.
"""

import posixpath
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

WORDS = {
    "train": ("training", "train", "trn"),
    "test": ("testing", "tests", "test", "tst", "evaluation", "eval", "holdout", "heldout"),
    "val": ("validation", "valid", "val", "vld", "development", "devel", "dev"),
}
"""Words for each split, a longer one before its beginning."""

SPLIT_OF = {word: split for split, words in WORDS.items() for word in words}
SPLIT_OF["trainval"] = "train"
# Words that say nothing about which split it is.
FILLER = re.compile(
    r"of|parts?|shards?|chunks?|splits?|sets?|data|datasets?|images?|imgs?|pictures?|photos?|files?|folder|dir|full"
    r"|all|raw|final|orig|original|resized|cropped|small|large|big|tiny|mini|clean|cleaned|labell?ed|sorted|x|default"
    r"|parquet|pq|snappy"
)
# As the name of a class, these are words like any other: valid and invalid parts, for example.
USUAL_CLASSES = ("valid", "dev", "devel", "development", "vld")
# Words that in a longer name still tell a test set.
MENTIONED = ("test", "testing", "validation")
TOKENS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\W\d_A-Za-z]+")
BEGINNING = re.compile(rf"({'|'.join(SPLIT_OF)})(?=[-_. \d]|$)", re.IGNORECASE)
TRAINING = re.compile("|".join(WORDS["train"]), re.IGNORECASE)
# The names of the folders on the way from the root to a file.
Folders = tuple[str, ...]
# The folders of a file, and its own name; '' where it is not looked at.
Entry = tuple[Folders, str]
# The split that a name tells, '' if none; whether it is a file's.
Mark = Callable[[str, bool], str]
# The split, and at which level of the entry its name stands.
Found = dict[Entry, tuple[str, int]]


@dataclass(frozen=True)
class Layout:
    """What the names of the files at or below a root tell."""

    root: str
    # By split; all under "", if names tell none.
    files: dict[str, list[str]]
    # Of the folder that tells the split.
    levels: dict[Folders, int] = field(default_factory=dict)
    # Files of no split, where others have one.
    left_out: tuple[str, ...] = ()
    # What looks like a test set, but is not told from the rest.
    doubtful: tuple[str, ...] = ()
    # It holds images itself, as the folder of a class does.
    classlike: bool = False
    # What looks like a training set, but is not told from the rest.
    training: str = ""
    # An example of what looks like neither.
    rest: str = ""

    def folders(self, file: str) -> Folders:
        """The folders of a file, from the top of the file system, without the one that tells the
        split.
        """
        place = below(self.root, posixpath.dirname(file))
        level = self.levels.get(place, len(place))
        return (*self.root.split("/"), *place[:level], *place[level + 1 :])


@lru_cache(maxsize=10_000)
def below(root: str, path: str) -> Folders:
    """The names on the way from a root to a path below it.

    >>> below("/data", "/data/train/cat"), below("/data", "/data")
    (('train', 'cat'), ())
    """
    relative = path[len(root) :].strip("/")
    return tuple(relative.split("/")) if relative else ()


@lru_cache(maxsize=10_000)
def split_of_folder(name: str) -> str:
    """The split that a folder's name tells; '' if none.

    >>> [split_of_folder(name) for name in ("Testing", "train2017", "valImages", "train_station", "interval")]
    ['test', 'train', 'val', '', '']
    """
    found = set()
    for token in TOKENS.findall(name.replace("t10k", "test")):
        word = token.lower()
        split = SPLIT_OF.get(word) or _joined(word)
        if split:
            found.add(split)
        elif not FILLER.fullmatch(word):
            return ""
    if found == {"train", "val"}:
        return "train"
    return found.pop() if len(found) == 1 else ""


def _joined(word: str) -> str:
    """The split of a word such as testset or traindata."""
    for start, split in SPLIT_OF.items():
        if word.startswith(start) and FILLER.fullmatch(word, len(start)):
            return split
    return ""


def split_of_file(name: str) -> str:
    """The split that a file's name tells; '' if none.

    >>> split_of_file("train-00000-of-00001-5f3c.parquet"), split_of_file("trainer.parquet")
    ('train', '')
    """
    start = BEGINNING.match(name)
    if start:
        return SPLIT_OF[start[1].lower()]
    return split_of_folder(posixpath.splitext(name)[0])


def read_layout(root: str, files: Sequence[str], *, images: bool) -> Layout:
    """What the names of files tell; the class of `images` is the folder that holds them."""
    by_folders: list[Entry] = [(below(root, posixpath.dirname(file)), "") for file in files]
    names = [posixpath.basename(file) for file in files]
    by_names = [(folders, name) for (folders, _), name in zip(by_folders, names, strict=True)]
    ways = [by_folders, by_names] if images else [by_names]
    for entries in ways:
        # Images are many: their names are looked at only where one of them may tell a split.
        if images and entries is by_names and not TRAINING.search("\n".join(names)):
            continue
        unique = set(entries)
        start = _common_depth(unique)
        for mark in (mark_of, Pairs(unique).mark):
            found = _found(unique, mark, start)
            if _tells_splits(found, start, images):
                return _layout(root, files, entries, found)
    entries = by_folders if images else by_names
    found = _found(set(entries), mark_of, 0)
    if found.keys() == set(entries) and {split for split, _ in found.values()} == {"train"}:
        return _layout(root, files, entries, found)
    return _one_set(root, files, set(entries), images)


def mark_of(name: str, is_file: bool) -> str:
    """The split that a name tells by itself; '' if none."""
    return split_of_file(name) if is_file else split_of_folder(name)


class Pairs:
    """Names that differ only in a word for a split, such as cifar_train_0 and cifar_test_0."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        names = {name for folders, file in entries for name in (*folders, file)}
        bare = {_letters(name) for name in names}
        self._splits: dict[str, str] = {}
        for name in bare:
            for word in WORDS["train"]:
                if word in name:
                    self._pair(name, word, bare)

    def _pair(self, name: str, word: str, bare: set[str]) -> None:
        for split in ("test", "val"):
            for other in WORDS[split]:
                twin = name.replace(word, other)
                if twin in bare:
                    self._splits.setdefault(name, "train")
                    self._splits.setdefault(twin, split)

    def mark(self, name: str, is_file: bool) -> str:
        """The split of a name that has such a twin; '' of others."""
        return self._splits.get(_letters(name), "") if self._splits else ""


def _letters(name: str) -> str:
    """The letters of a name, in lower case, without the suffix of a file."""
    stem = re.sub(r"\.[A-Za-z]{2,7}$", "", name)
    return "".join(filter(str.isalpha, stem)).lower()


def _names(entry: Entry) -> Folders:
    folders, file = entry
    return (*folders, file) if file else folders


def _common_depth(entries: Iterable[Entry]) -> int:
    """How many folders from the root on all files have in common."""
    depth = 0
    for level in zip(*map(_names, entries), strict=False):
        if len(set(level)) > 1:
            break
        depth += 1
    return depth


def _found(entries: Iterable[Entry], mark: Mark, start: int) -> Found:
    """The topmost name of each entry, from the level `start` on, that tells a split; entries
    without are left out.
    """
    found: Found = {}
    for entry in entries:
        names = _names(entry)
        for level in range(start, len(names)):
            split = mark(names[level], level == len(entry[0]))
            if split:
                found[entry] = split, level
                break
    return found


def _tells_splits(found: Found, start: int, images: bool) -> bool:
    """Whether there are a training and another set, and folders are left that tell the classes of
    the training set.
    """
    splits = {split for split, _ in found.values()}
    if "train" not in splits or len(splits) < 2:
        return False
    if not images:
        return True
    for (folders, _), (split, level) in found.items():
        left = len(folders) - start - (level < len(folders))
        if split == "train" and left < 1:
            return False
    return True


def _layout(root: str, files: Sequence[str], entries: Sequence[Entry], found: Found) -> Layout:
    splits: dict[str, list[str]] = defaultdict(list)
    left_out = []
    for file, entry in zip(files, entries, strict=True):
        if entry in found:
            splits[found[entry][0]].append(file)
        else:
            left_out.append(file)
    levels = {}
    for (folders, _), (_, level) in found.items():
        if level < len(folders):
            levels[folders] = level
    return Layout(root, dict(splits), levels, tuple(left_out))


def _one_set(root: str, files: Sequence[str], entries: set[Entry], images: bool) -> Layout:
    """All files as one set, with what looks like a test set in it."""
    # And whether it holds images itself.
    doubtful: dict[str, bool] = {}
    training = rest = ""
    pairs = Pairs(entries)
    for entry in sorted(entries):
        names = _names(entry)
        marks = [mark_of(name, level == len(entry[0])) for level, name in enumerate(names)]
        is_told = False
        for level, name in enumerate(names):
            place = "/".join([root, *names[: level + 1]])
            is_class = images and level == len(names) - 1
            is_mentioned = _mentions_a_test(name)
            if is_class:
                is_mentioned = is_mentioned and pairs.mark(name, False) != ""
            if marks[level] in ("test", "val") or is_mentioned:
                if not (is_class and name.lower() in USUAL_CLASSES):
                    doubtful.setdefault(place, is_class)
                    is_told = True
                    break
            elif marks[level] == "train" and not is_class:
                training = training or place
                is_told = True
                break
        if not is_told:
            rest = rest or "/".join([root, *names])
    classlike = bool(doubtful) and all(doubtful.values())
    return Layout(root, {"": list(files)}, {}, (), tuple(doubtful), classlike, training, rest)


def _mentions_a_test(name: str) -> bool:
    """Whether a word in a longer name is one for a test set, such as my_test_2."""
    words = [token.lower() for token in TOKENS.findall(name)]
    return any(word in MENTIONED for word in words)
