"""Data sets in files: which files a path has, and images in folders.

Names tell the split (`rayfed.data.splits`): `train/...` and `test/...`, or `train-00000.parquet`
and `test.parquet`. A validation set stands in for a test set. Without such names, everything in the
folder is one set.

An image's class is the folder that holds it, its client or domain the folder above that. Examples:
`train/cat/1.png` (CINIC-10) and `amazon/backpack/1.jpg` (Office-Caltech-10, whose clients are its
domains).
"""

import logging
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from pyarrow import fs as pafs

from rayfed.base.errors import InputError
from rayfed.base.storage import exists, locate, reach, read_file
from rayfed.data.columns import read_parquet
from rayfed.data.contents import FIRST, is_image
from rayfed.data.decode import SUFFIXES, decode_all
from rayfed.data.masks import masks_among, masks_beside
from rayfed.data.parquet import CONVERT, PARQUET
from rayfed.data.samples import Samples, few_classes, shortened
from rayfed.data.settings import Data
from rayfed.data.splits import Layout, below, read_layout

# Folders and files that systems, not people, put beside others; so are all whose names begin with a
# dot.
SYSTEM = re.compile(
    r"__macosx|@eadir|@__thumb|@recycle|#recycle|#snapshot|\$recycle\.bin|system volume "
    r"information|lost\+found"
    r"|__pycache__|(?:eh)?thumbs\.db|desktop\.ini|icon\r",
    re.IGNORECASE,
)
# What lies beside images in good order, and what needs no word at all.
DOCUMENT = re.compile(
    r"\.(?:txt|md|rst|html?|pdf|docx?|jsonl?|csv|tsv|xml|ya?ml|toml|ini|cfg|py|ipynb|sh|log|xlsx?|bib|tex|md5|sha256"
    r"|names|lst|index)",
    re.IGNORECASE,
)
ABOUT = re.compile(
    r"readme|licen[sc]e|copying|notice|citation|changelog|makefile|checksums", re.IGNORECASE
)
# A data set of a repository of a hub, in the header of its README.md.
CONFIGURATION = re.compile(r"^[\s-]*config_name:\s*['\"]?([^'\"\s]+)", re.MULTILINE)
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".zst")
# Folders that hold the images of a class, and do not name it.
CONTAINER = re.compile(
    r"images?|imgs?|pictures|pics|photos|jpegimages|jpe?gs?|png|data|raw|originals?", re.IGNORECASE
)
# Of image files that are probably masks, that is warned of.
MASKS_SHARE = 0.05
log = logging.getLogger(__name__)


def read_files(data: Data) -> tuple[Samples, Samples | None]:
    """The training set and, if there is one, the test set, from `data.source` and `data.test`."""
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
    # Domains are of test images.
    train = _read(source.fs, files, layout, replace(data, domain=""), None)
    test_fs = test.fs if test else source.fs
    return train, _read(test_fs, test_files, test_layout, data, train)


def _test_files(layout: Layout, test: "Listed | None") -> tuple[list[str], Layout]:
    """The files to test on, of `data.test` if it is given, and what their names tell."""
    if test is None:
        chosen = layout.files.get("test") or layout.files.get("val") or []
        return _labelled(layout, chosen), layout
    layout = test.layout()
    chosen = layout.files.get("test") or layout.files.get("val") or []
    if not chosen:
        # What data.test names is to test on, whatever the names in it are.
        chosen = [file for split in layout.files.values() for file in split]
    return chosen, layout


def _labelled(layout: Layout, chosen: list[str]) -> list[str]:
    """The test set; or the validation set, if it alone lies in folders of classes, as ImageNet's
    does.
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
    named = _classes_and_above(_folders_of(layout, files))
    return {name for name, _ in named.values()}


@dataclass(frozen=True)
class Listed:
    """The files at or below a path."""

    # As the user gave it.
    path: str
    fs: pafs.FileSystem
    root: str
    # Parquet files, or else images; sorted.
    files: tuple[str, ...]

    @property
    def has_images(self) -> bool:
        return self.files[0].lower().endswith(SUFFIXES)

    def without(self, test: "Listed") -> "Listed":
        """The files that are not those of a test set, where that is a part of it."""
        if not test.root.startswith(f"{self.root}/"):
            return self
        tested = set(test.files)
        rest = tuple(file for file in self.files if file not in tested)
        return replace(self, files=rest) if rest else self

    def layout(self) -> Layout:
        return read_layout(self.root, self.files, images=self.has_images)


def _listed(path: str) -> Listed:
    fs, root = locate(path)
    root = root.rstrip("/") or "/"
    files, others = reach(path, lambda: _list(fs, root))
    _tell_configurations(path, fs, root, files, others)
    _tell_others(path, root, files, others)
    return Listed(path, fs, root, tuple(files))


def _refuse_doubts(layout: Layout, data: Data) -> None:
    """Raises InputError where a part looks like a test set, but would be trained on."""
    source = f"data.source = '{data.source}'"
    fraction = f", data.test_fraction = {data.test_fraction}" if data.test_fraction else ""
    if layout.doubtful and layout.classlike and not data.test:
        place = layout.doubtful[0]
        name = posixpath.basename(place)
        folder = posixpath.dirname(place)
        raise InputError(
            f"{source}{fraction}: '{place}' looks like a test set, and holds images itself, as a "
            "class does; if it is the test set, put its images into folders of classes "
            f"({folder}/{name}/cat/1.png), and the others below a folder train "
            f"({folder}/train/cat/1.png); if '{name}' is a class, put all classes into a folder "
            "train"
        )
    if (
        layout.doubtful
        and not layout.classlike
        and not layout.rest
        and not layout.training
        and not data.test
    ):
        place = layout.doubtful[0]
        raise InputError(
            f"{source}{fraction}: all in it looks like a test set ('{place}'); to train on it, "
            f"name it: data.source = '{place}'"
        )
    if layout.doubtful and not layout.classlike:
        place = layout.doubtful[0]
        other = layout.training or layout.rest
        raise InputError(
            f"{source}{fraction}: '{place}' looks like a test set, but '{other}' does not look "
            "like a training set; name both (data.source = the training set, data.test = "
            f"'{place}'), or rename '{place}' if it is to be trained on"
        )
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


def _tell_unused(layout: Layout, test_layout: Layout, test_files: Sequence[str]) -> None:
    """Say that a validation set is not used, where a test set is there."""
    for each in {id(each): each for each in (layout, test_layout)}.values():
        unused = each.files.get("val", [])
        if unused and unused[0] not in test_files[:1]:
            log.info("the validation set, such as '%s', is not used", unused[0])


def is_hidden(name: str) -> bool:
    """Whether a file or folder is the system's, or hidden."""
    return name.startswith(".") or SYSTEM.fullmatch(name) is not None


def _list(fs: pafs.FileSystem, root: str) -> tuple[list[str], list[str]]:
    """The Parquet files at or below `root`, or else the images, sorted; and the other files that
    are not hidden.
    """
    if fs.get_file_info(root).type == pafs.FileType.File:
        return [root], []
    if isinstance(fs, pafs.LocalFileSystem):
        paths: Iterable[str] = _walk(root)
    else:
        paths = (
            info.path
            for info in fs.get_file_info(pafs.FileSelector(root, recursive=True))
            if info.is_file and not any(map(is_hidden, below(root, info.path)))
        )
    visible = sorted(paths)
    parquet = [path for path in visible if path.lower().endswith(PARQUET)]
    # Spark and others mark what is no data with a first underscore.
    files = [path for path in parquet if not any(name[0] == "_" for name in below(root, path))]
    if not files:
        files = [path for path in visible if path.lower().endswith(SUFFIXES)]
    if not files:
        there = f"; it has {_counted(visible)}" if visible else ""
        ways = _way_on(fs, visible)
        raise InputError(
            f"'{root}': neither Parquet files ({', '.join(PARQUET)}) nor images "
            f"({', '.join(SUFFIXES)}) in it{there}{ways if visible else ''}"
        )
    chosen = set(files)
    return files, [path for path in visible if path not in chosen]


def _way_on(fs: pafs.FileSystem, files: Sequence[str]) -> str:
    """What to do with files of which none is read."""
    if any(map(_is_archive, files)):
        return "; unpack the archives"
    plain = [file for file in files if not posixpath.splitext(file)[1]]
    if plain and is_image(read_file(fs, plain[0], FIRST)):
        name = posixpath.basename(plain[0])
        return f"; those without a suffix are images: name them with one, such as '{name}.png'"
    return f"; {CONVERT}"


def _is_archive(path: str) -> bool:
    return path.lower().endswith(ARCHIVES)


def _counted(files: Sequence[str]) -> str:
    """Files by suffix, such as '6 .heic, 2 without a suffix'."""
    counts = Counter(posixpath.splitext(file)[1].lower() for file in files)
    words = [f"{count} {suffix or 'without a suffix'}" for suffix, count in counts.most_common()]
    return shortened(words)


def _tell_configurations(
    path: str, fs: pafs.FileSystem, root: str, files: Sequence[str], others: Sequence[str]
) -> None:
    """Warn of a repository of a hub of which several data sets would be read as one.

    Its README.md names them as configurations, and each has a folder of its name.
    """
    page = posixpath.join(root, "README.md")
    if page not in others:
        return
    text = reach(path, lambda: read_file(fs, page)).decode(errors="replace")
    header = text.split("\n---", 1)[0] if text.startswith("---") else ""
    named = set(CONFIGURATION.findall(header))
    found = sorted({name for file in files for name in below(root, file)[:-1] if name in named})
    if len(found) > 1:
        log.warning(
            "'%s' holds %d data sets (%s), as its README.md says, and they are read as one; to "
            "read one alone, name its folder",
            path,
            len(found),
            shortened(found),
        )


def _tell_others(path: str, root: str, files: Sequence[str], others: Sequence[str]) -> None:
    """Warn of files that may hold data and are not read, by suffix and number, and of folders of
    which nothing is.
    """
    documents: list[str] = []
    unread: list[str] = []
    has_images = files[0].lower().endswith(SUFFIXES)
    for file in others:
        stem, suffix = posixpath.splitext(posixpath.basename(file))
        if ABOUT.fullmatch(stem):
            continue
        is_document = not has_images or DOCUMENT.fullmatch(suffix)
        (documents if is_document else unread).append(file)
    if documents:
        kind = "image" if has_images else "Parquet"
        log.info("'%s': beside the %s files lie %s", path, kind, _counted(documents))
    if not unread:
        return
    read = {posixpath.dirname(file) for file in files}
    lost = {posixpath.dirname(file) for file in unread} - read
    lost = {folder for folder in lost if not any(each.startswith(f"{folder}/") for each in read)}
    names = [f"'{posixpath.relpath(folder, root)}'" for folder in sorted(lost)]
    log.warning(
        "'%s': files left out, of kinds that are not read: %s; convert images to PNG or JPEG%s",
        path,
        _counted(unread),
        f"; nothing is read of the folder {shortened(names)}" if names else "",
    )


def _walk(folder: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """The files below a local folder that are not hidden, also through links.

    (Arrow's own walk follows links in circles, for hours.)
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
            # No pipes, no devices. A link to nothing is found out when it is read.
            elif entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path)):
                yield entry.path


def _read(
    fs: pafs.FileSystem, files: list[str], layout: Layout, data: Data, train: Samples | None
) -> Samples:
    """One split. A test set is read with the classes of its training set."""
    if files[0].lower().endswith(SUFFIXES):
        if key := data.in_place_of_images:
            raise InputError(
                f"data.{key} names columns of Parquet files, and '{files[0]}' is an image"
            )
        return read_tree(fs, files, layout, data, train)
    return read_parquet(fs, files, data, train)


def read_tree(
    fs: pafs.FileSystem, files: list[str], layout: Layout, data: Data, train: Samples | None
) -> Samples:
    """Image files as samples, with clients and domains if asked for.

    A test set's classes must be among `train`'s.
    """
    folders = _folders_of(layout, files)
    _tell_masks(files, folders)
    named = _classes_and_above(folders)
    names, above = [], []
    for file in files:
        name, group = named[posixpath.dirname(file)]
        names.append(name)
        above.append(group)
    classes = train.classes if train else tuple(sorted(set(names)))
    few_classes(len(classes), f"folders such as '{posixpath.dirname(files[0])}'")
    code = {name: label for label, name in enumerate(classes)}
    for file, name in zip(files, names, strict=True):
        if name not in code:
            _refuse_class(file, name, classes)
    groups, codes = np.unique(above, return_inverse=True)
    images = decode_all(
        (Whole(fs, file).read for file in files), len(files), files.__getitem__, data.size
    )
    if len(classes) == 1 and not train:
        _refuse_one_class(list(folders), classes[0])
    labels = np.array([code[name] for name in names], dtype=np.int64)
    sorted_above = tuple(map(str, groups))
    samples = Samples(images, labels, classes)
    if data.client and not train:
        samples = replace(samples, groups=codes, group_names=sorted_above)
    return replace(samples, domains=codes, domain_names=sorted_above) if data.domain else samples


def _folders_of(layout: Layout, files: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Each folder of the files, and the names on the way to it that are of no split."""
    examples = {posixpath.dirname(file): file for file in files}
    return {folder: layout.folders(file) for folder, file in examples.items()}


def _classes_and_above(folders: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, str]]:
    """The class of each folder's images, and the name of the folder above it.

    In Tiny-ImageNet, all images lie in train/CLASS/images: such a folder, if all have its name, is
    no class.
    """
    last = {names[-1].lower() for names in folders.values()}
    parents = {names[:-1] for names in folders.values()}
    if len(last) == 1 and CONTAINER.fullmatch(min(last)) and len(parents) > 1:
        folders = {folder: names[:-1] for folder, names in folders.items()}
    return {folder: (names[-1], names[-2]) for folder, names in folders.items()}


def _tell_masks(files: Sequence[str], folders: dict[str, tuple[str, ...]]) -> None:
    """Warn of masks beside their images.

    Raises InputError where masks would be a class of their own.
    """
    if folder := masks_beside(folders.values(), CONTAINER):
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
    folder = posixpath.dirname(file)
    elsewhere = "if another split is the labelled one, name its folder with data.test"
    if posixpath.basename(folder) != name:
        raise InputError(
            f"{file}: it lies in no folder of a class; put each test image into one, such as "
            f"{folder}/{classes[0]}/{posixpath.basename(file)}; {elsewhere}"
        )
    raise InputError(
        f"{file}: its folder '{name}' is not one of the training set's classes "
        f"({shortened(classes)}); {elsewhere}"
    )


def _refuse_one_class(folders: Sequence[str], name: str) -> None:
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
        return read_file(self.fs, self.path)
