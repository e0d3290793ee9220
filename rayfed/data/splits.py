"""Which files are to train on and which to test on, told by names at any depth.

A name of a folder or file tells a split if it has a word for the split, such as `Training`,
`test2017` or `val_images`, and otherwise only words such as `images`. A name of a file may also
begin with the word, as `train-00000-of-00002-5f3c.parquet`. Names that differ in such a word alone
are a pair, such as `cifar_train` and `cifar_test`. Pairs are looked for if no name tells a split by
itself.

A class may have such a name too, as CIFAR-100's `train`. So the topmost name counts. A folder that
holds images to train on tells a split only if another folder is left to tell their class.
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


def _splits_of_words() -> dict[str, str]:
    """Return the split of each word."""
    splits = {}
    for split, words in WORDS.items():
        for word in words:
            splits[word] = split
    splits["trainval"] = "train"
    return splits


SPLIT_OF = _splits_of_words()
# These words say nothing about which split it is.
FILLER = re.compile(
    r"of|parts?|shards?|chunks?|splits?|sets?|data|datasets?|images?|imgs?|pictures?|photos?"
    r"|files?|folder|dir|full|all|raw|final|orig|original|resized|cropped|small|large|big|tiny"
    r"|mini|clean|cleaned|labell?ed|sorted|x|default|parquet|pq|snappy"
)
# As names of classes these words have no meaning: there are valid and invalid parts, for example.
USUAL_CLASSES = ("valid", "dev", "devel", "development", "vld")
# In a longer name these words still tell a test set.
MENTIONED = ("test", "testing", "validation")
TOKENS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\W\d_A-Za-z]+")
BEGINNING = re.compile(rf"({'|'.join(SPLIT_OF)})(?=[-_. \d]|$)", re.IGNORECASE)
TRAINING = re.compile("|".join(WORDS["train"]), re.IGNORECASE)
# The names of the folders on the way from the root to a file.
Folders = tuple[str, ...]
# The folders of a file, and its own name; the name is '' if only folders are looked at.
Entry = tuple[Folders, str]
# A function that gets a name, and whether it is a file's. It returns the split that the name tells,
# or ''.
Mark = Callable[[str, bool], str]
# The split of each entry, and the level at which the name that tells it stands.
Found = dict[Entry, tuple[str, int]]


@dataclass(frozen=True)
class Layout:
    """What the names of the files at or below a root tell."""

    root: str
    # Files are listed by split; all are listed under "" if names tell no split.
    files: dict[str, list[str]]
    # The level of the folder that tells the split.
    levels: dict[Folders, int] = field(default_factory=dict)
    # These files have no split, while others have one.
    left_out: tuple[str, ...] = ()
    # These places look like a test set, but are not told from the rest.
    doubtful: tuple[str, ...] = ()
    # The doubtful places hold images themselves, as the folder of a class does.
    classlike: bool = False
    # This place looks like a training set, but is not told from the rest.
    training: str = ""
    # This place is an example of what looks like neither.
    rest: str = ""

    def folders(self, file: str) -> Folders:
        """Return the folders of a file, from the top of the file system.

        The folder that tells the split is left out.
        """
        place = below(self.root, posixpath.dirname(file))
        level = self.levels.get(place, len(place))
        return tuple(self.root.split("/")) + place[:level] + place[level + 1 :]


@lru_cache(maxsize=10_000)
def below(root: str, path: str) -> Folders:
    """Return the names on the way from a root to a path below it.

    >>> below("/data", "/data/train/cat"), below("/data", "/data")
    (('train', 'cat'), ())
    """
    relative = path[len(root) :].strip("/")
    return tuple(relative.split("/")) if relative else ()


@lru_cache(maxsize=10_000)
def split_of_folder(name: str) -> str:
    """Return the split that a folder's name tells, or '' if it tells none.

    >>> [split_of_folder(name) for name in ("Testing", "train2017", "valImages")]
    ['test', 'train', 'val']
    >>> split_of_folder("train_station"), split_of_folder("interval")
    ('', '')
    """
    splits = set()
    for token in TOKENS.findall(name.replace("t10k", "test")):
        word = token.lower()
        split = SPLIT_OF.get(word) or _joined(word)
        if split:
            splits.add(split)
        elif not FILLER.fullmatch(word):
            return ""
    if splits == {"train", "val"}:
        return "train"
    return splits.pop() if len(splits) == 1 else ""


def _joined(word: str) -> str:
    """Return the split of a word such as testset or traindata, or ''."""
    for start, split in SPLIT_OF.items():
        if word.startswith(start) and FILLER.fullmatch(word, len(start)):
            return split
    return ""


def split_of_file(name: str) -> str:
    """Return the split that a file's name tells, or '' if it tells none.

    >>> split_of_file("train-00000-of-00001-5f3c.parquet"), split_of_file("trainer.parquet")
    ('train', '')
    """
    start = BEGINNING.match(name)
    if start:
        return SPLIT_OF[start[1].lower()]
    return split_of_folder(posixpath.splitext(name)[0])


def read_layout(root: str, files: Sequence[str], *, images: bool) -> Layout:
    """Return what the names of files tell; the class of `images` is the folder that holds them."""
    by_folders: list[Entry] = [(below(root, posixpath.dirname(file)), "") for file in files]
    names = [posixpath.basename(file) for file in files]
    by_names = [(folders, name) for (folders, _), name in zip(by_folders, names, strict=True)]
    candidates = [by_folders, by_names] if images else [by_names]
    for entries in candidates:
        # There are many images: their names are looked at only if one of them may tell a split.
        if images and entries is by_names and not TRAINING.search("\n".join(names)):
            continue
        unique = set(entries)
        start = _common_depth(unique)
        for mark in (mark_of, Pairs(unique).mark):
            marked = _found(unique, mark, start)
            if _tells_splits(marked, start, images):
                return _layout(root, files, entries, marked)
    entries = by_folders if images else by_names
    marked = _found(set(entries), mark_of, 0)
    if marked.keys() == set(entries) and {split for split, _ in marked.values()} == {"train"}:
        return _layout(root, files, entries, marked)
    return _one_set(root, files, set(entries), images)


def mark_of(name: str, is_file: bool) -> str:
    """Return the split that a name tells by itself, or '' if it tells none."""
    return split_of_file(name) if is_file else split_of_folder(name)


class Pairs:
    """Names that differ only in a word for a split, such as cifar_train_0 and cifar_test_0."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        names: set[str] = set()
        for folders, file in entries:
            names.update(folders)
            names.add(file)
        bare = {_letters(name) for name in names}
        self._splits: dict[str, str] = {}
        for name in bare:
            for word in WORDS["train"]:
                if word in name:
                    self._pair(name, word, bare)

    def _pair(self, name: str, word: str, bare: set[str]) -> None:
        """Note the splits of a name and of its twin, if it has one.

        The name has the `word` for a training set. `bare` are the letters of all names.
        """
        for split in ("test", "val"):
            for split_word in WORDS[split]:
                twin = name.replace(word, split_word)
                if twin in bare:
                    self._splits.setdefault(name, "train")
                    self._splits.setdefault(twin, split)

    def mark(self, name: str, is_file: bool) -> str:
        """Return the split of a name that has such a twin, or '' of others."""
        return self._splits.get(_letters(name), "") if self._splits else ""


def _letters(name: str) -> str:
    """Return the letters of a name, in lower case, without the suffix of a file."""
    stem = re.sub(r"\.[A-Za-z]{2,7}$", "", name)
    return "".join(filter(str.isalpha, stem)).lower()


def _names(entry: Entry) -> Folders:
    """Return the names of an entry from the top, with the file's own name if there is one."""
    folders, file = entry
    return (*folders, file) if file else folders


def _common_depth(entries: Iterable[Entry]) -> int:
    """Return how many folders from the root on all files have in common."""
    depth = 0
    for level in zip(*map(_names, entries), strict=False):
        if len(set(level)) > 1:
            break
        depth += 1
    return depth


def _found(entries: Iterable[Entry], mark: Mark, start: int) -> Found:
    """Return the topmost name of each entry that tells a split, from the level `start` on.

    Entries without such a name are left out.
    """
    marked: Found = {}
    for entry in entries:
        names = _names(entry)
        for level in range(start, len(names)):
            split = mark(names[level], level == len(entry[0]))
            if split:
                marked[entry] = split, level
                break
    return marked


def _tells_splits(marked: Found, start: int, images: bool) -> bool:
    """Say whether there are a training and another set, and classes of the training set.

    Folders must be left that tell the classes of images.
    """
    splits = {split for split, _ in marked.values()}
    if "train" not in splits or len(splits) < 2:
        return False
    if not images:
        return True
    for (folders, _), (split, level) in marked.items():
        num_left = len(folders) - start - (level < len(folders))
        if split == "train" and num_left < 1:
            return False
    return True


def _layout(root: str, files: Sequence[str], entries: Sequence[Entry], marked: Found) -> Layout:
    """Return the layout of files whose names tell splits."""
    splits: dict[str, list[str]] = defaultdict(list)
    left_out = []
    for file, entry in zip(files, entries, strict=True):
        if entry in marked:
            splits[marked[entry][0]].append(file)
        else:
            left_out.append(file)
    levels = {}
    for (folders, _), (_, level) in marked.items():
        if level < len(folders):
            levels[folders] = level
    return Layout(root, dict(splits), levels, tuple(left_out))


def _one_set(root: str, files: Sequence[str], entries: set[Entry], images: bool) -> Layout:
    """Return the layout of all files as one set, with what looks like a test set in it."""
    # Each doubtful place, and whether it holds images itself.
    doubtful: dict[str, bool] = {}
    training = rest = ""
    pairs = Pairs(entries)
    for entry in sorted(entries):
        names = _names(entry)
        mark, level = _first_mark(entry, pairs, images)
        place = "/".join([root, *names[: level + 1]])
        if mark == "test":
            doubtful.setdefault(place, images and level == len(names) - 1)
        elif mark == "train":
            training = training or place
        else:
            rest = rest or place
    classlike = bool(doubtful) and all(doubtful.values())
    return Layout(root, {"": list(files)}, {}, (), tuple(doubtful), classlike, training, rest)


def _first_mark(entry: Entry, pairs: Pairs, images: bool) -> tuple[str, int]:
    """Return "test" or "train" for the topmost name that looks like such a set, and its level.

    Returns '' and the last level if no name looks like one.
    """
    names = _names(entry)
    for level, name in enumerate(names):
        split = mark_of(name, level == len(entry[0]))
        is_class = images and level == len(names) - 1
        is_mentioned = _mentions_a_test(name)
        if is_class:
            is_mentioned = is_mentioned and pairs.mark(name, False) != ""
        if split in ("test", "val") or is_mentioned:
            if not (is_class and name.lower() in USUAL_CLASSES):
                return "test", level
        elif split == "train" and not is_class:
            return "train", level
    return "", len(names) - 1


def _mentions_a_test(name: str) -> bool:
    """Say whether a word in a longer name is a word for a test set, such as my_test_2."""
    words = [token.lower() for token in TOKENS.findall(name)]
    return any(word in MENTIONED for word in words)
