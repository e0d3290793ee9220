"""Data sets in files: which files a path has, and images in folders.

Names tell the split (`rayfed.data.splits`): `train/...` and `test/...`, or `train-00000.parquet`
and `test.parquet`. A validation set stands in for a test set. Without such names, everything in the
folder is one set.

An image's class is the folder that holds it. Its client or domain is the folder above that.
Examples are `train/cat/1.png` (CINIC-10) and `amazon/backpack/1.jpg` (Office-Caltech-10, whose
clients are its domains).
"""

import logging
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from pyarrow import fs as pafs

from rayfed.base.errors import InputError
from rayfed.base.storage import exists, locate, reach, read_file
from rayfed.data.columns import read_parquet
from rayfed.data.contents import FIRST, is_image
from rayfed.data.decode import SUFFIXES, decode_all
from rayfed.data.masks import masks_among, masks_beside
from rayfed.data.parquet import CONVERT, PARQUET
from rayfed.data.samples import Samples, refuse_many_classes, shortened
from rayfed.data.settings import Data
from rayfed.data.splits import Layout, below, read_layout

# Systems, not people, make these folders and files, and all whose names begin with a dot.
SYSTEM = re.compile(
    r"__macosx|@eadir|@__thumb|@recycle|#recycle|#snapshot|\$recycle\.bin"
    r"|system volume information|lost\+found|__pycache__|(?:eh)?thumbs\.db|desktop\.ini|icon\r",
    re.IGNORECASE,
)
# Documents with these suffixes often lie next to images, and need no warning.
DOCUMENT = re.compile(
    r"\.(?:txt|md|rst|html?|pdf|docx?|jsonl?|csv|tsv|xml|ya?ml|toml|ini|cfg|py|ipynb|sh|log|xlsx?"
    r"|bib|tex|md5|sha256|names|lst|index)",
    re.IGNORECASE,
)
# Files with these names need no word at all.
ABOUT = re.compile(
    r"readme|licen[sc]e|copying|notice|citation|changelog|makefile|checksums", re.IGNORECASE
)
# The header of a README.md names the data sets of a repository of a hub in this form.
CONFIGURATION = re.compile(r"^[\s-]*config_name:\s*['\"]?([^'\"\s]+)", re.MULTILINE)
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".zst")
# Folders that hold the images of a class, and do not name it.
CONTAINER = re.compile(
    r"images?|imgs?|pictures|pics|photos|jpegimages|jpe?gs?|png|data|raw|originals?", re.IGNORECASE
)
# From this share of image files on that are probably masks, a warning says so.
MASKS_SHARE = 0.05
log = logging.getLogger(__name__)


def read_files(data: Data) -> tuple[Samples, Samples | None]:
    """Return the training set and, if there is one, the test set.

    They are read from `data.source` and `data.test`. Raises InputError for anything wrong with
    them.
    """
    source = _listed(data.source)
    test = None
    if data.test:
        if not exists(data.test):
            raise InputError(f"data.test = '{data.test}': no such file or folder")
        test = _listed(data.test)
        source = source.without(test)
    layout = source.layout()
    _refuse_doubts(layout, data)
    files = layout.files.get("train") or layout.files[""]
    test_files, test_layout = _test_files(layout, test)
    if not test_files:
        return _read(source.fs, files, layout, data, None), None
    _tell_unused(layout, test_layout, test_files)
    # Only test images have domains.
    train = _read(source.fs, files, layout, replace(data, domain=""), None)
    test_fs = test.fs if test else source.fs
    return train, _read(test_fs, test_files, test_layout, data, train)


def _test_files(layout: Layout, test: "Listed | None") -> tuple[list[str], Layout]:
    """Return the files to test on, of `data.test` if it is given, and what their names tell."""
    if test is None:
        chosen = layout.files.get("test") or layout.files.get("val") or []
        return _labelled(layout, chosen), layout
    layout = test.layout()
    chosen = layout.files.get("test") or layout.files.get("val") or []
    if not chosen:
        # Everything in data.test is to test on, whatever the names in it are.
        chosen = list(chain.from_iterable(layout.files.values()))
    return chosen, layout


def _labelled(layout: Layout, chosen: list[str]) -> list[str]:
    """Return the test set, or the validation set if it alone lies in folders of classes.

    In ImageNet the validation set alone lies in such folders.
    """
    validation = layout.files.get("val")
    if not validation or chosen is validation or not chosen[0].lower().endswith(SUFFIXES):
        return chosen
    classes = _class_names(layout, layout.files["train"])
    if classes & _class_names(layout, chosen) or not classes & _class_names(layout, validation):
        return chosen
    log.warning(
        "the test set, such as '%s', does not lie in folders of classes: the validation set, such "
        "as '%s', is tested on",
        chosen[0],
        validation[0],
    )
    return validation


def _class_names(layout: Layout, files: Sequence[str]) -> set[str]:
    """Return the names of the classes of these files."""
    classes = _classes_and_above(_folders_of(layout, files))
    return {name for name, _ in classes.values()}


@dataclass(frozen=True)
class Listed:
    """The files at or below a path."""

    # The path is as the user gave it.
    path: str
    fs: pafs.FileSystem
    root: str
    # The files are Parquet files, or images if there are no Parquet files; sorted.
    files: tuple[str, ...]

    @property
    def has_images(self) -> bool:
        """Say whether the files are images."""
        return self.files[0].lower().endswith(SUFFIXES)

    def without(self, test: "Listed") -> "Listed":
        """Return the files that are not files of a test set, if the test set is a part of them."""
        if not test.root.startswith(f"{self.root}/"):
            return self
        test_files = set(test.files)
        rest = tuple(file for file in self.files if file not in test_files)
        return replace(self, files=rest) if rest else self

    def layout(self) -> Layout:
        """Return what the names of the files tell."""
        return read_layout(self.root, self.files, images=self.has_images)


def _listed(path: str) -> Listed:
    """Return the files at or below a path, and warn of files that are not read as one may think."""
    fs, root = locate(path)
    root = root.rstrip("/") or "/"
    files, other_files = reach(path, lambda: _list(fs, root))
    _tell_configurations(path, fs, root, files, other_files)
    _tell_others(path, root, files, other_files)
    return Listed(path, fs, root, tuple(files))


def _refuse_doubts(layout: Layout, data: Data) -> None:
    """Raise InputError if a part looks like a test set, but would be trained on.

    Warns of files that are left out.
    """
    source = f"data.source = '{data.source}'"
    fraction = f", data.test_fraction = {data.test_fraction}" if data.test_fraction else ""
    if layout.doubtful:
        _refuse_doubtful(layout, layout.doubtful[0], f"{source}{fraction}", bool(data.test))
    if layout.training and layout.rest:
        raise InputError(
            f"{source}{fraction}: '{layout.training}' looks like a training set, but "
            f"'{layout.rest}' does not look like a test set; name both (data.source = "
            f"'{layout.training}', data.test = the test set), or rename '{layout.training}' if all "
            "is to be trained on"
        )
    if layout.left_out:
        log.warning(
            "%s: %d files are left out, as their names tell neither training nor test set, such as "
            "'%s'",
            source,
            len(layout.left_out),
            layout.left_out[0],
        )


def _refuse_doubtful(layout: Layout, place: str, source: str, has_test: bool) -> None:
    """Raise InputError for a `place` that looks like a test set.

    It may be a class if the test set is given apart (`has_test`) and it holds images itself.
    """
    if layout.classlike:
        if has_test:
            return
        name = posixpath.basename(place)
        folder = posixpath.dirname(place)
        raise InputError(
            f"{source}: '{place}' looks like a test set, and holds images itself, as a class "
            "does; if it is the test set, put its images into folders of classes "
            f"({folder}/{name}/cat/1.png), and the others below a folder train "
            f"({folder}/train/cat/1.png); if '{name}' is a class, put all classes into a folder "
            "train"
        )
    sibling = layout.training or layout.rest
    if not sibling and not has_test:
        raise InputError(
            f"{source}: all in it looks like a test set ('{place}'); to train on it, name it: "
            f"data.source = '{place}'"
        )
    raise InputError(
        f"{source}: '{place}' looks like a test set, but '{sibling}' does not look like a training "
        f"set; name both (data.source = the training set, data.test = '{place}'), or rename "
        f"'{place}' if it is to be trained on"
    )


def _tell_unused(layout: Layout, test_layout: Layout, test_files: Sequence[str]) -> None:
    """Log that a validation set is not used if there is a test set."""
    layouts = [layout] if test_layout is layout else [layout, test_layout]
    for used_layout in layouts:
        unused = used_layout.files.get("val", [])
        if unused and unused[0] not in test_files[:1]:
            log.info("the validation set, such as '%s', is not used", unused[0])


def is_hidden(name: str) -> bool:
    """Say whether a file or folder is hidden, or made by the system.

    >>> [is_hidden(name) for name in (".git", "Thumbs.db", "cat.png")]
    [True, True, False]
    """
    return name.startswith(".") or SYSTEM.fullmatch(name) is not None


def _list(fs: pafs.FileSystem, root: str) -> tuple[list[str], list[str]]:
    """Return the Parquet files at or below `root`, or else the images, sorted.

    Also returns the other files that are not hidden. Raises InputError if there are neither Parquet
    files nor images.
    """
    if fs.get_file_info(root).type == pafs.FileType.File:
        return [root], []
    if isinstance(fs, pafs.LocalFileSystem):
        visible = sorted(_walk(root))
    else:
        visible = sorted(
            info.path
            for info in fs.get_file_info(pafs.FileSelector(root, recursive=True))
            if info.is_file and not any(map(is_hidden, below(root, info.path)))
        )
    files = [path for path in visible if _is_parquet_data(root, path)]
    if not files:
        files = [path for path in visible if path.lower().endswith(SUFFIXES)]
    if not files:
        contents = f"; it has {_counted(visible)}{_way_on(fs, visible)}" if visible else ""
        raise InputError(
            f"'{root}': neither Parquet files ({', '.join(PARQUET)}) nor images "
            f"({', '.join(SUFFIXES)}) in it{contents}"
        )
    chosen = set(files)
    return files, [path for path in visible if path not in chosen]


def _is_parquet_data(root: str, path: str) -> bool:
    """Say whether a file is a Parquet file with data.

    Spark and others mark what is no data with an underscore at the beginning of a name.
    """
    if not path.lower().endswith(PARQUET):
        return False
    return not any(name.startswith("_") for name in below(root, path))


def _way_on(fs: pafs.FileSystem, files: Sequence[str]) -> str:
    """Say what to do with files of which none is read."""
    if any(map(_is_archive, files)):
        return "; unpack the archives"
    without_suffix = [file for file in files if not posixpath.splitext(file)[1]]
    if without_suffix and is_image(read_file(fs, without_suffix[0], FIRST)):
        name = posixpath.basename(without_suffix[0])
        return f"; those without a suffix are images: name them with one, such as '{name}.png'"
    return f"; {CONVERT}"


def _is_archive(path: str) -> bool:
    """Say whether a file has the suffix of an archive."""
    return path.lower().endswith(ARCHIVES)


def _counted(files: Sequence[str]) -> str:
    """Return the numbers of files by suffix, such as '6 .heic, 2 without a suffix'.

    >>> _counted(["a.heic", "b.HEIC", "c"])
    '2 .heic, 1 without a suffix'
    """
    counts = Counter(posixpath.splitext(file)[1].lower() for file in files)
    words = [f"{count} {suffix or 'without a suffix'}" for suffix, count in counts.most_common()]
    return shortened(words)


def _tell_configurations(
    path: str, fs: pafs.FileSystem, root: str, files: Sequence[str], other_files: Sequence[str]
) -> None:
    """Warn of a repository of a hub if several data sets would be read as one.

    Its README.md names them as configurations, and each has a folder of its name.
    """
    page = posixpath.join(root, "README.md")
    if page not in other_files:
        return
    text = reach(path, lambda: read_file(fs, page)).decode(errors="replace")
    header = text.split("\n---", 1)[0] if text.startswith("---") else ""
    folders: set[str] = set()
    for file in files:
        folders.update(below(root, file)[:-1])
    configurations = sorted(folders & set(CONFIGURATION.findall(header)))
    if len(configurations) > 1:
        log.warning(
            "'%s' holds %d data sets (%s), as its README.md says, and they are read as one; to "
            "read one alone, name its folder",
            path,
            len(configurations),
            shortened(configurations),
        )


def _tell_others(path: str, root: str, files: Sequence[str], other_files: Sequence[str]) -> None:
    """Warn of files that may hold data and are not read, by suffix and number.

    Also warns of folders of which nothing is read.
    """
    documents: list[str] = []
    unread: list[str] = []
    has_images = files[0].lower().endswith(SUFFIXES)
    for file in other_files:
        stem, suffix = posixpath.splitext(posixpath.basename(file))
        if ABOUT.fullmatch(stem):
            continue
        if not has_images or DOCUMENT.fullmatch(suffix):
            documents.append(file)
        else:
            unread.append(file)
    if documents:
        kind = "image" if has_images else "Parquet"
        log.info("'%s': beside the %s files lie %s", path, kind, _counted(documents))
    if not unread:
        return
    # A folder is read if a file in it or below it is read.
    read_folders: set[str] = set()
    for file in files:
        folder = posixpath.dirname(file)
        while folder not in read_folders:
            read_folders.add(folder)
            folder = posixpath.dirname(folder)
    unread_folders = {posixpath.dirname(file) for file in unread} - read_folders
    names = [f"'{posixpath.relpath(folder, root)}'" for folder in sorted(unread_folders)]
    log.warning(
        "'%s': files left out, of kinds that are not read: %s; convert images to PNG or JPEG%s",
        path,
        _counted(unread),
        f"; nothing is read of the folder {shortened(names)}" if names else "",
    )


def _walk(folder: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the files below a local folder that are not hidden, also through links.

    Arrow's own walk follows links in circles, for hours. Raises InputError for a link that leads to
    a folder `above`.
    """
    real = os.path.realpath(folder)
    if real in above:
        raise InputError(f"'{folder}': this link leads to a folder above it; remove the link")
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_hidden(entry.name):
                continue
            if entry.is_dir():
                yield from _walk(entry.path, (*above, real))
            # Pipes and devices are left out. A link to nothing is found out when it is read.
            elif entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path)):
                yield entry.path


def _read(
    fs: pafs.FileSystem, files: list[str], layout: Layout, data: Data, train: Samples | None
) -> Samples:
    """Return the samples of one split.

    A test set is read with the classes of its training set `train`. Raises InputError for anything
    wrong with the files.
    """
    if files[0].lower().endswith(SUFFIXES):
        key = data.in_place_of_images
        if key:
            raise InputError(
                f"data.{key} names columns of Parquet files, and '{files[0]}' is an image"
            )
        return read_tree(fs, files, layout, data, train)
    return read_parquet(fs, files, data, train)


def read_tree(
    fs: pafs.FileSystem, files: list[str], layout: Layout, data: Data, train: Samples | None
) -> Samples:
    """Return image files as samples, with clients and domains if asked for.

    A test set's classes must be among `train`'s.
    """
    folders = _folders_of(layout, files)
    _tell_masks(files, folders)
    classes_and_above = _classes_and_above(folders)
    names, names_above = [], []
    for file in files:
        name, name_above = classes_and_above[posixpath.dirname(file)]
        names.append(name)
        names_above.append(name_above)
    classes = train.classes if train else tuple(sorted(set(names)))
    refuse_many_classes(len(classes), f"folders such as '{posixpath.dirname(files[0])}'")
    code = {name: label for label, name in enumerate(classes)}
    for file, name in zip(files, names, strict=True):
        if name not in code:
            _refuse_class(file, name, classes)
    groups, codes = np.unique(names_above, return_inverse=True)
    readers = (Whole(fs, file).read for file in files)
    images = decode_all(readers, len(files), files.__getitem__, data.size)
    if len(classes) == 1 and not train:
        _refuse_one_class(list(folders), classes[0])
    labels = np.array([code[name] for name in names], dtype=np.int64)
    group_names = tuple(map(str, groups))
    samples = Samples(images, labels, classes)
    if data.client and not train:
        samples = replace(samples, groups=codes, group_names=group_names)
    if data.domain:
        samples = replace(samples, domains=codes, domain_names=group_names)
    return samples


def _folders_of(layout: Layout, files: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return each folder of the files, and the names on the way to it that tell no split."""
    examples = {posixpath.dirname(file): file for file in files}
    return {folder: layout.folders(file) for folder, file in examples.items()}


def _classes_and_above(folders: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, str]]:
    """Return the class of each folder's images, and the name of the folder above it.

    In Tiny-ImageNet, all images lie in train/CLASS/images. If all folders have such a name, it is
    no class.
    """
    own_names = {names[-1].lower() for names in folders.values()}
    parents = {names[:-1] for names in folders.values()}
    if len(own_names) == 1 and CONTAINER.fullmatch(min(own_names)) and len(parents) > 1:
        folders = {folder: names[:-1] for folder, names in folders.items()}
    return {folder: (names[-1], names[-2]) for folder, names in folders.items()}


def _tell_masks(files: Sequence[str], folders: dict[str, tuple[str, ...]]) -> None:
    """Warn of masks next to their images.

    Raises InputError if masks would be a class of their own.
    """
    folder = masks_beside(folders.values(), CONTAINER)
    if folder:
        raise InputError(
            f"'{folder}' lies beside a folder of images, and seems to hold their masks, which are "
            "no images of a class; move the folders of masks to another place; if it is a class, "
            "rename the folder"
        )
    masks = masks_among(files)
    if masks and len(masks) >= MASKS_SHARE * len(files):
        mask, image = masks[0]
        log.warning(
            "%d of %d image files seem to be masks of others, such as '%s' of '%s', and are read "
            "as images of the class; move them to another place",
            len(masks),
            len(files),
            mask,
            posixpath.basename(image),
        )


def _refuse_class(file: str, name: str, classes: Sequence[str]) -> None:
    """Raise InputError for a test image whose folder `name` is not a class of the training set."""
    folder = posixpath.dirname(file)
    advice = "if another split is the labelled one, name its folder with data.test"
    if posixpath.basename(folder) != name:
        raise InputError(
            f"{file}: it lies in no folder of a class; put each test image into one, such as "
            f"{folder}/{classes[0]}/{posixpath.basename(file)}; {advice}"
        )
    raise InputError(
        f"{file}: its folder '{name}' is not one of the training set's classes "
        f"({shortened(classes)}); {advice}"
    )


def _refuse_one_class(folders: Sequence[str], name: str) -> None:
    """Raise InputError for images that all have one class."""
    advice = (
        "put the images of each class in a folder of its own, such as train/cat/1.png and "
        "train/dog/1.png"
    )
    if len(folders) == 1:
        raise InputError(
            f"'{folders[0]}': all images lie in one folder, and so have one class, '{name}'; "
            f"{advice}"
        )
    raise InputError(
        f"'{folders[0]}': the folders that hold images, {len(folders)} in all, give one class, "
        f"'{name}'; {advice}"
    )


@dataclass(frozen=True)
class Whole:
    """A file that holds one image."""

    fs: pafs.FileSystem
    path: str

    def read(self) -> bytes:
        """Return the bytes of the file."""
        return read_file(self.fs, self.path)
