"""Sources: each form of data becomes samples, or is refused with the place of the error."""

import copy
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import ExifTags, Image
from pyarrow import fs as pafs

import rayfed
from rayfed.base import storage
from rayfed.base.errors import InputError
from rayfed.data import decode as decode_module
from rayfed.data import files, sources
from rayfed.data.decode import MAX_PIXELS, decode
from rayfed.data.partition import Natural
from rayfed.data.seen import TURNS
from rayfed.data.settings import Data
from rayfed.data.sources import load
from rayfed.data.splits import read_layout

FASHION = Path("/usr/share/datasets/fashion-mnist")


def pixels(n: int, channels: int = 1, height: int = 4, width: int = 4, seed: int = 0) -> np.ndarray:
    """Images uint8 (n, C, H, W)."""
    return np.random.default_rng(seed).integers(
        0, 256, (n, channels, height, width), dtype=np.uint8
    )


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def encode(image: np.ndarray) -> bytes:
    planes = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    return png(Image.fromarray(np.ascontiguousarray(planes)))


def write(path: Path, image, label, metadata: dict[str, str] | None = None, **columns) -> str:
    table = pa.table({"image": image, "label": label, **columns})
    try:
        pq.write_table(table.replace_schema_metadata(metadata), path)
    except pa.ArrowNotImplementedError as error:
        if "_view" not in str(error):
            raise
        pytest.skip(f"this PyArrow writes no views into Parquet files: {error}")
    return str(path)


def png_file(
    path: Path, n: int = 6, classes: int = 2, channels: int = 1, size: int = 4, seed: int = 0
) -> str:
    images = [encode(image) for image in pixels(n, channels, size, size, seed)]
    return write(path, images, [i % classes for i in range(n)])


def refuses(source: Data, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load(source)
    assert "\n" not in str(caught.value)


# --- known sources


def test_the_embedded_set_is_balanced():
    data = load(Data())
    assert data.train.examples.shape == (10_000, 1, 28, 28)
    assert data.test.examples.shape == (2_000, 1, 28, 28)
    assert data.train.examples.dtype == np.uint8
    assert data.train.examples.flags.c_contiguous
    assert data.train.labels.dtype == np.int64
    assert data.train.classes[9] == "Ankle boot"
    assert set(np.bincount(data.train.labels)) == {1000}
    assert set(np.bincount(data.test.labels)) == {200}


@pytest.mark.slow
@pytest.mark.skipif(not FASHION.is_dir(), reason="Fashion-MNIST is not installed")
def test_the_tool_makes_the_embedded_set_again(tmp_path):
    tool = Path(__file__).parents[2] / "tools" / "make_fashion_mnist_mini.py"
    subprocess.run([sys.executable, tool, FASHION, tmp_path], check=True, capture_output=True)
    embedded = load(Data())
    remade = load(Data(str(tmp_path)))
    assert np.array_equal(embedded.train.examples, remade.train.examples)
    assert np.array_equal(embedded.test.labels, remade.test.labels)


def idx_files(folder: Path, images: bytes, labels: bytes = b"\0\0\x08\x01\0\0\0\x02\0\1") -> str:
    """Two images of 2 x 2 pixels per split, where torchvision puts MNIST."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(
            b"\0\0\x08\3\0\0\0\2\0\0\0\2\0\0\0\2" + images
        )
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    return str(folder)


def test_a_set_that_torchvision_has_downloaded_is_read(tmp_path):
    root = idx_files(tmp_path, bytes(range(8)))
    train = load(Data("mnist", root=root)).train
    assert train.examples.tolist() == [[[[0, 1], [2, 3]]], [[[4, 5], [6, 7]]]]
    assert train.labels.tolist() == [0, 1]
    assert train.classes == tuple("0123456789")


def test_a_damaged_set_is_refused(tmp_path):
    root = idx_files(tmp_path, bytes(8), b"no labels")
    refuses(
        Data("mnist", root=root),
        f"^data.source = 'mnist': {tmp_path}.*or set data.root to a folder that has",
    )


class Offline:
    """Stands in for a torchvision data set: not in its folder, and no network."""

    def __init__(self, root, train, download, **options):
        raise OSError("no route to host") if download else RuntimeError("Dataset not found")


class Stored:
    """Stands in for a torchvision data set that is in its folder."""

    classes = ("0 - zero", "cat")
    targets = (0, 1)

    def __init__(self, root, train, download, **options):
        assert not download
        shape = (2, 3, 2) if options else (2, 2, 2, 3)
        self.data = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)


@pytest.mark.parametrize("name", sorted(sources.TORCHVISION))
def test_a_failed_download_is_refused_with_the_folder_and_what_to_do(name, tmp_path, monkeypatch):
    from torchvision import datasets

    monkeypatch.setattr(datasets, sources.TORCHVISION[name], Offline)
    message = (
        f"'{name}': {tmp_path} has no intact copy, and the download failed .no route.*network.*or "
        "set data.root"
    )
    refuses(Data(name, root=str(tmp_path)), message)


def test_torchvisions_arrays_become_samples(monkeypatch):
    from torchvision import datasets

    monkeypatch.setattr(datasets, "CIFAR10", Stored)
    train = load(Data("cifar10", root="nowhere")).train
    assert train.examples[0].tolist() == [[[0, 3], [6, 9]], [[1, 4], [7, 10]], [[2, 5], [8, 11]]]
    assert train.classes == ("0", "cat")
    assert train.labels.tolist() == [0, 1]
    monkeypatch.setattr(datasets, "EMNIST", type("EMNIST", (Stored,), {}))
    # Upright
    assert load(Data("emnist", root="nowhere")).train.examples[0].tolist() == [
        [[0, 2, 4], [1, 3, 5]]
    ]


def test_importing_and_reading_data_does_not_import_torchvision():
    code = "import sys; from rayfed.data.sources import Data, load; load(Data()); "
    code += "assert not {'torch', 'torchvision', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# --- Parquet


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [4, 90])
def test_encoded_images_are_read(tmp_path, channels, size):
    train, test = (
        png_file(tmp_path / f"{part}.pq", 9, 3, channels, size, seed)
        for part, seed in (("a", 1), ("b", 2))
    )
    data = load(Data(train, test=test))
    assert np.array_equal(data.train.examples, pixels(9, channels, size, size, 1))
    assert np.array_equal(data.test.examples, pixels(9, channels, size, size, 2))
    assert data.train.examples.flags.c_contiguous
    assert data.train.labels.tolist() == [0, 1, 2] * 3
    assert data.train.classes == ("0", "1", "2")


def test_hugging_face_files_are_read(tmp_path):
    images = pixels(4)
    structs = [{"bytes": encode(image), "path": "x.png"} for image in images]
    features = {
        "info": {"features": {"label": {"names": ["cat", "dog", "emu"], "_type": "ClassLabel"}}}
    }
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write(
            tmp_path / f"{name}.parquet",
            structs,
            [0, 1, 0, 1],
            {"huggingface": json.dumps(features)},
        )
    data = load(Data(str(tmp_path)))
    assert np.array_equal(data.train.examples, np.concatenate([images, images]))
    assert len(data.test) == 4
    assert data.train.classes == ("cat", "dog", "emu")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_lists_of_pixels_are_read(tmp_path, channels, nested, last):
    images = pixels(5, channels, 2, 5)
    stored = images.transpose(0, 2, 3, 1) if last else images
    lists = stored.tolist() if nested else stored.reshape(5, -1).tolist()
    path = write(tmp_path / "a.parquet", lists, [0, 1, 0, 1, 0])
    read = load(Data(path, test=path, shape=list(stored.shape[1:]))).train.examples
    assert np.array_equal(read, images) and read.flags.c_contiguous
    for shape in ([], [3, 3, 3], [channels, -2, -5]):
        refuses(
            Data(path, shape=shape),
            f"of {10 * channels} pixels cannot be images of shape .*; data.shape must be",
        )


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (
            [[0.5] * 4] * 2,
            "of type double, from 0.5 to 0.5; they must be whole numbers in 0..255; multiply by "
            "255",
        ),
        (
            [[-1.0, 0.0, 0.5, 1.0]] * 2,
            "they must be whole numbers in 0..255; add 1, multiply by 127.5",
        ),
        (
            [[0.0, 99.5, 255.0, 1.0]] * 2,
            "from 0 to 255; they must be whole numbers in 0..255; round them",
        ),
        (
            [[-128, 0, 5, 127]] * 2,
            "from -128 to 127; .* in 0..255; if they are signed bytes, add 128",
        ),
        (
            [[0, 1, 2, 256]] * 2,
            r"of type int64, from 0 to 256; they must be whole numbers in 0..255$",
        ),
        ([[1, 2, 3, 4], [1, 2, 3]], "lists of 3.5 pixels cannot be images"),
        (["text", "text"], "column 'image' is of type string; images are encoded bytes"),
        ([b"", b"x"], "a.parquet, row 0: no image bytes"),
        (
            [encode(pixels(1)[0]), encode(pixels(1)[0])[:60]],
            "a.parquet, row 1: cannot be decoded as an image",
        ),
    ],
)
def test_images_that_cannot_be_read_are_refused(tmp_path, image, message):
    refuses(Data(write(tmp_path / "a.parquet", image, [0, 1])), message)


def test_a_damaged_image_is_named_by_file_and_row(tmp_path):
    images = [encode(image) for image in pixels(600)]
    for damaged in (images, [*images[:567], b"\x89PNG\r\n\x1a\n..", *images[568:]]):
        write(tmp_path / f"train-{damaged is images}.parquet", damaged, [0, 1] * 300)
    refuses(
        Data(str(tmp_path), test_fraction=0.1),
        "train-False.parquet, row 567: cannot be decoded as an image",
    )


def test_labels_are_numbers_or_names_of_classes(tmp_path):
    images = [encode(image) for image in pixels(4)]
    named = {"classes": "cat,dog"}
    numbers = write(tmp_path / "a.parquet", images, pa.array([1, 0, 1, 1], pa.int8()), named)
    words = write(
        tmp_path / "b.parquet", images, pa.array(["dog", "cat", "dog", "dog"]).dictionary_encode()
    )
    for path in (numbers, words):
        train = load(Data(path, test=numbers)).train
        assert train.classes == ("cat", "dog")
        assert train.labels.tolist() == [1, 0, 1, 1]
    other = write(tmp_path / "c.parquet", images, ["dog", "emu", "dog", "dog"])
    refuses(
        Data(numbers, test=other),
        "c.parquet, row 1: label 'emu' is not one of the classes .cat, dog",
    )
    out = write(tmp_path / "d.parquet", images, [0, 1, 2, -1], named)
    refuses(Data(out), r"d.parquet, row 2: label 2 is outside 0..1 \(cat, dog\)")
    refuses(
        Data(write(tmp_path / "e.parquet", images, [0, 1, -1, 0])),
        "row 2: label -1 is outside 0..1",
    )
    refuses(
        Data(write(tmp_path / "f.parquet", images, [0, None, 1, 0])),
        "row 1: no value in column 'label'",
    )
    refuses(
        Data(write(tmp_path / "g.parquet", images, [0.5, 1, 1, 0])),
        "row 0: 0.5 in column 'label', which is of type double; labels are whole numbers or text; "
        "divide",
    )
    renamed = write(tmp_path / "h.parquet", images, [0, 1, 0, 1], {"classes": "dog, emu"})
    refuses(
        Data(numbers, test=renamed),
        r"its classes \(dog, emu\) are not the training set's \(cat, dog\); write the same names",
    )


PETS = {"classes": "cat,dog,emu"}
TENS = [str(number) for number in range(12)]
# Labels and names to train on and to test on; the classes; what the test labels are.
MAPPED = [
    (TENS, {}, [2, 10, 11], {}, sorted(TENS), ["2", "10", "11"]),
    (TENS, {}, [2.0, 10.0], {}, sorted(TENS), ["2", "10"]),
    (["01", "02", "10"], {}, [10, 1], {}, ["01", "02", "10"], ["10", "01"]),
    (["1.0", "2.0", "2.0"], {}, [2, 1], {}, ["1.0", "2.0"], ["2.0", "1.0"]),
    ([0, 1, 2], {}, ["2", "0"], {}, ["0", "1", "2"], ["2", "0"]),
    ([0, 1, 2], {}, ["2.0", "00"], {}, ["0", "1", "2"], ["2", "0"]),
    ([0, 1, 2], PETS, ["emu", "cat"], {}, ["cat", "dog", "emu"], ["emu", "cat"]),
    ([0, 1, 2], PETS, ["2", "0"], {}, ["cat", "dog", "emu"], ["emu", "cat"]),
    ([0, 1, 2], PETS, [2, 0], {}, ["cat", "dog", "emu"], ["emu", "cat"]),
    (
        ["emu", "dog", "cat"],
        {},
        [0, 1],
        {"classes": "emu,dog"},
        ["cat", "dog", "emu"],
        ["emu", "dog"],
    ),
    (
        [0, 1, 1],
        {"classes": "cat,dog"},
        [0, 1],
        {"classes": "dog,cat"},
        ["cat", "dog"],
        ["dog", "cat"],
    ),
    ([0.0, 1.0, 2.0], {}, [2, 1], {}, ["0", "1", "2"], ["2", "1"]),
    ([True, False, True], {}, [0, 1], {}, ["False", "True"], ["False", "True"]),
    ([True, False, True], {}, ["True"], {}, ["False", "True"], ["True"]),
]


@pytest.mark.parametrize(("train", "names", "test", "test_names", "classes", "meant"), MAPPED)
def test_labels_of_a_test_set_mean_the_classes_of_the_training_set(
    tmp_path, train, names, test, test_names, classes, meant
):
    images = [encode(image) for image in pixels(20)]
    first = write(tmp_path / "a.parquet", images[: len(train)], train, names)
    second = write(tmp_path / "b.parquet", images[-len(test) :], test, test_names)
    data = load(Data(first, test=second))
    assert list(data.train.classes) == classes
    assert [classes[label] for label in data.test.labels] == meant


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (["cat", "dog"], [0, 1], (
            "row 0: column 'label' has numbers, and the training set's classes are names .cat"
        )),
        (["1", "2"], [1, 3], r"row 1: label 3 is not one of the classes \(1, 2\)"),
        (["1", "01"], [1, 1], "has numbers, and the training set's classes are names"),
        (["cat", "dog"], ["Cat ", "dog"], (
            "row 0: label 'Cat ' is not one of .*; did you mean 'cat'"
        )),
        (["0", "1"], [-1, -1], (
            "row 0: label -1 is not one of the classes .*; -1 often marks rows without"
        )),
        ([-1, 1], [-1, 1], "row 0: label -1 is outside 0..1 .*; of labels -1 and 1, write 0 and 1"),
        ([0, 1], [-1, -1], (
            "row 0: label -1 is outside 0..1 .*; -1 often marks rows without a label"
        )),
        (["cat", " "], ["cat", "cat"], "row 1: the text in column 'label' is empty"),
        ([0.0, float(
            "nan"
        )], [0, 1], (
            "row 1: nan in column 'label'.*leave out rows without a label"
        )),
        ([[1, 0], [0, 1]], [0, 1], r"of type list<.*of lists of 0 and 1, .* numpy.argmax.labels, axis=1."),
        ([b"cat", b"dog"], [0, 1], "of type binary; write it as text: column.cast"),
    ],
)  # fmt: skip
def test_labels_that_cannot_be_meant_are_refused(tmp_path, train, test, message):
    images = [encode(image) for image in pixels(4)]
    first = write(tmp_path / "a.parquet", images[:2], train)
    refuses(Data(first, test=write(tmp_path / "b.parquet", images[2:], test)), message)


# Of a type, as other tools write it: the form, and the usual type.
FORMS = [
    (pa.string_view(), pa.string()),
    (pa.large_string(), pa.string()),
    (pa.dictionary(pa.int8(), pa.string()), pa.string()),
    (pa.int8(), pa.int64()),
    (pa.uint32(), pa.int64()),
]


@pytest.mark.parametrize(("form", "usual"), FORMS, ids=str)
def test_labels_have_any_form_of_their_type_and_shards_may_differ_in_it(tmp_path, form, usual):
    images = [encode(image) for image in pixels(4)]
    labels = [0, 1, 1, 0] if usual == pa.int64() else ["cat", "dog", "dog", "cat"]
    for name, kind in (("train-0", usual), ("train-1", form), ("test", form)):
        write(tmp_path / f"{name}.parquet", images, pa.array(labels, usual).cast(kind))
    data = load(Data(str(tmp_path)))
    assert data.train.labels.tolist() == [0, 1, 1, 0] * 2
    assert data.test.labels.tolist() == [0, 1, 1, 0]


STRUCT = pa.struct([("bytes", pa.binary_view()), ("path", pa.string_view())])


BYTES = [
    pa.large_binary(),
    pa.binary_view(),
    pa.dictionary(pa.int32(), pa.binary()),
    pa.struct([("bytes", pa.large_binary())]),
    STRUCT,
]


@pytest.mark.parametrize("kind", BYTES, ids=str)
def test_images_have_any_form_of_bytes(tmp_path, kind):
    images = [encode(image) for image in pixels(3)]
    stored = [{"bytes": image} for image in images] if pa.types.is_struct(kind) else images
    column = pa.array(stored, kind)
    path = write(tmp_path / "a.parquet", column, [0, 1, 0])
    assert np.array_equal(load(Data(path, test=path)).train.examples, pixels(3))


@pytest.mark.parametrize(
    "kind",
    [pa.list_view(pa.uint8()), pa.large_list(pa.int16()), pa.list_(pa.uint8(), 16)],
    ids=str,
)
def test_pixels_have_any_form_of_a_list(tmp_path, kind):
    lists = pa.array(pixels(3).reshape(3, -1).tolist(), kind)
    path = write(tmp_path / "a.parquet", lists, [0, 1, 0])
    assert np.array_equal(load(Data(path, test=path)).train.examples, pixels(3))


def test_types_that_have_no_common_type_are_both_named(tmp_path):
    images = [encode(image) for image in pixels(2)]
    write(tmp_path / "train-0.parquet", images, [0, 1])
    write(tmp_path / "train-1.parquet", images, ["0", "1"])
    refuses(
        Data(str(tmp_path), test_fraction=0.5),
        "column 'label' is of type int64 in .*train-0.parquet, and of type string in "
        ".*train-1.parquet",
    )


def test_an_image_that_is_a_path_alone_is_read_from_beside_its_file(tmp_path):
    images = pixels(4)
    (tmp_path / "pictures").mkdir()
    for i, image in enumerate(images):
        (tmp_path / "pictures" / f"{i}.png").write_bytes(encode(image))
    rows = [{"bytes": None, "path": f"pictures/{i}.png"} for i in range(4)]
    rows[1] = {"bytes": encode(images[1]), "path": "nowhere.png"}
    rows[2]["path"] = str(tmp_path / "pictures/2.png")
    rows[3]["bytes"] = b""
    path = write(tmp_path / "a.parquet", rows, [0, 1, 0, 1])
    assert np.array_equal(load(Data(path, test=path)).train.examples, images)
    (tmp_path / "pictures/3.png").unlink()
    refuses(
        Data(path, test=path),
        "row 3: no image bytes, only the path 'pictures/3.png', which cannot be read .*; copy the",
    )


# Of a file with another name than it should have, and words that say so.
CONTENTS = [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d", "git lfs pull"),
    (b"\n<!DOCTYPE html>\n<html>404</html>", "web page"),
    (b"", "empty file"),
    (bytes(400), "a file of zeros"),
    (b"PK\x03\x04", "ZIP archive; unpack it"),
    (b"\0\0\0\x20ftypheic", "HEIC"),
]


@pytest.mark.parametrize(("content", "words"), CONTENTS, ids=[words for _, words in CONTENTS])
def test_a_file_that_is_something_else_is_told_by_its_first_bytes(tmp_path, content, words):
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    refuses(Data(str(path)), f"a.parquet: cannot be read as a Parquet file; it is .*{words}")


def test_a_client_column_becomes_groups(tmp_path):
    images = [encode(image) for image in pixels(5)]
    columns = {"writer": ["b", "a", "c", "a", "b"], "year": [9, 10, 9, 10, 8]}
    path = write(tmp_path / "a.parquet", images, [0, 1, 0, 1, 0], **columns)
    data = load(Data(path, test=path, partition=Natural("writer")))
    assert data.train.groups.tolist() == [1, 0, 2, 0, 1]
    assert data.test.groups is None
    train = load(Data(path, test=path, partition=Natural("year"))).train
    assert train.groups.tolist() == [1, 2, 1, 2, 0]


def test_a_domain_column_names_the_domains_of_the_test_images(tmp_path):
    images = [encode(image) for image in pixels(6)]
    labels, columns = (
        [0, 1] * 3,
        {"site": ["b", "a", "c", "a", "b", "b"], "year": [9, 10, 9, 10, 8, 9]},
    )
    marked = write(tmp_path / "marked.parquet", images, labels, **columns)
    plain = write(tmp_path / "plain.parquet", images, labels)
    data = load(Data(plain, test=marked, domain="site"))
    assert (data.test.domains.tolist(), data.test.domain_names) == (
        [1, 0, 2, 0, 1, 1],
        ("a", "b", "c"),
    )
    assert data.train.domains is data.train.groups is None, "the column is read where it is needed"
    assert data.test.by_domain(np.array([1, 3, 5])).tolist() == [2, 1, 0]
    assert load(Data(plain, test=marked, domain="year")).test.domain_names == ("8", "9", "10")
    without = load(Data(plain, test=marked)).test
    assert without.domains is None and without.by_domain(np.arange(6)).shape == (0,)

    held = load(Data(marked, domain="site", partition=Natural("year"), test_fraction=0.4))
    rows = [
        next(i for i in range(6) if np.array_equal(pixels(6)[i], image))
        for image in held.test.examples
    ]
    assert [held.test.domain_names[code] for code in held.test.domains] == [
        columns["site"][row] for row in rows
    ]
    assert held.train.groups is not None and len(held.test) == 2

    refuses(
        Data(marked, test=plain, domain="site"),
        "plain.parquet: no column 'site'; it has image, label .*data.domain",
    )


def test_columns_can_have_other_names(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"img": [encode(i) for i in pixels(2)], "fine.label": [0, 1]}), path)
    assert len(load(Data(str(path), test=str(path), image="img", label="fine.label")).train) == 2
    refuses(Data(str(path)), "no column 'image'; it has img, fine.label .data.image, data.label")


def test_a_test_set_can_be_taken_from_the_training_set(tmp_path):
    path = png_file(tmp_path / "a.parquet", 60, 3)
    refuses(
        Data(path), 'it has no test set; name a test set .data.test = "path"., or hold out a part'
    )
    data = load(Data(path, test_fraction=0.25))
    assert np.bincount(data.test.labels).tolist() == [5, 5, 5]
    assert len(data.train) == 45
    refuses(
        Data(png_file(tmp_path / "b.parquet", 3, 3), test_fraction=0.5), "no class has two images"
    )
    together = {image.tobytes() for part in (data.train, data.test) for image in part.examples}
    assert together == {image.tobytes() for image in pixels(60)}
    same, other = (
        load(Data(path, test_fraction=0.25)),
        load(Data(path, test_fraction=0.25, test_seed=1)),
    )
    assert np.array_equal(same.test.examples, data.test.examples)
    assert not np.array_equal(other.test.examples, data.test.examples)
    tuning = load(Data(path, test=png_file(tmp_path / "c.parquet", 30, 3), test_fraction=0.25))
    assert np.array_equal(tuning.test.examples, data.test.examples), "a test set is left alone"


def test_missing_and_damaged_files_are_refused(tmp_path):
    refuses(Data(str(tmp_path)), "neither Parquet files .* nor images .* in it")
    path = png_file(tmp_path / "a.parquet")
    refuses(Data(path, test="b.parquet"), "data.test = 'b.parquet': no such file or folder")
    (tmp_path / "c.parquet").write_text("no")
    refuses(Data(str(tmp_path / "c.parquet")), "c.parquet: cannot be read as a Parquet file")
    whole = Path(path).read_bytes()
    (tmp_path / "e.parquet").write_bytes(whole[:20] + b"\xff" * 40 + whole[60:])
    refuses(Data(str(tmp_path / "e.parquet")), "e.parquet: cannot be read as a Parquet file")
    refuses(
        Data(write(tmp_path / "d.parquet", pa.array([], pa.binary()), pa.array([], pa.int8()))),
        "it has no rows",
    )


def test_training_and_test_set_must_agree(tmp_path):
    small, large = (png_file(tmp_path / f"{side}.parquet", size=side) for side in (4, 5))
    refuses(Data(small, test=large), r"disagree in image shape \(C, H, W\): 1, 4, 4 and 1, 5, 5$")


def test_uris_and_other_file_systems_are_read(tmp_path, monkeypatch):
    (tmp_path / "b").mkdir()
    path = png_file(tmp_path / "train.parquet")
    png_file(tmp_path / "b" / "test.parquet")
    assert np.array_equal(
        load(Data(f"file://{path}", test=f"file://{tmp_path}/b")).train.examples, pixels(6)
    )
    subtree = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    for module in (files, storage):
        monkeypatch.setattr(module, "locate", lambda uri: (subtree, uri))
    assert np.array_equal(
        load(Data("train.parquet", test="train.parquet")).train.examples, pixels(6)
    )


# --- image folders


def save(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(image))


@pytest.mark.parametrize("held", ["test", "val", "valid", "validation"])
def test_image_folders_are_read(tmp_path, held):
    images = pixels(6, 3)
    for i, place in enumerate(
        ["train/dog/0", "train/cat/1", "train/cat/2", f"{held}/cat/3", f"{held}/dog/4"]
    ):
        save(tmp_path / f"{place}.png", images[i])
    (tmp_path / "README.txt").write_text("not an image")
    data = load(Data(str(tmp_path)))
    assert data.train.classes == ("cat", "dog")
    assert data.train.labels.tolist() == [0, 0, 1]
    assert np.array_equal(data.train.examples, images[[1, 2, 0]])
    assert np.array_equal(data.test.examples, images[[3, 4]])
    save(tmp_path / held / "emu" / "5.png", images[5])
    refuses(
        Data(str(tmp_path)), "its folder 'emu' is not one of the training set's classes .cat, dog"
    )
    refuses(
        Data(str(tmp_path / "train/dog")),
        "'.*/dog': all images lie in one folder, and so have one class, 'dog'",
    )


# What is in a folder; the classes, or the number of files, by split.
LAYOUTS = [
    ("{train,test}/{cat,dog}/1.png", {"train": "cat dog", "test": "cat dog"}),
    ("{Training,Testing}/{cat,dog}/1.png", {"train": "cat dog", "test": "cat dog"}),
    ("{trn,tst,dev}/{cat,dog}/1.png", {"train": "cat dog", "test": "cat dog", "val": "cat dog"}),
    ("a/b/{train2017,val2017}/{cat,dog}/1.png", {"train": "cat dog", "val": "cat dog"}),
    ("{train_images,testSet}/{cat,dog}/1.png", {"train": "cat dog", "test": "cat dog"}),
    ("seg_{train,test}/seg_{train,test}/{cat,dog}/1.png", {"train": "cat dog", "test": "cat dog"}),
    ("{mytrain,mytest}/{cat,dog}/1.png", {"train": "cat dog", "test": "cat dog"}),
    ("{cat,dog}/{train,test}/1.png", {"train": "cat dog", "test": "cat dog"}),
    ("{cat,dog}/{train_1,train_2,test_1}.png", {"train": "cat dog", "test": "cat dog"}),
    ("{train,val}/{n1,n2}/images/1.JPEG", {"train": "n1 n2", "val": "n1 n2"}),
    ("{train,test}/{cat,dog}/1.png notes/1.png", {"train": "cat dog", "test": "cat dog"}),
    # Classes whose names are those of splits.
    ("{train,test}/{bus,train,test}/1.png", {"train": "bus test train", "test": "bus test train"}),
    ("train/{control,test}/1.png", {"train": "control test"}),
    ("{bus,train}/1.png", {"": "bus train"}),
    ("{valid,invalid}/1.png", {"": "invalid valid"}),
    ("{train_station,test_tube}/1.png", {"": "test_tube train_station"}),
    ("{interval,latest,strain}/1.png", {"": "interval latest strain"}),
    ("{cat,dog}/{1,my_test}.png", {"": "cat dog"}),
    ("data/{train,test}-0000{0,1}-of-00002.parquet", {"train": 2, "test": 2}),
    ("{train-0-5f3c,test-0-aa}.parquet", {"train": 1, "test": 1}),
    ("cifar{train,test}.parquet", {"train": 1, "test": 1}),
    ("data-{train,dev}-0001.parquet", {"train": 1, "val": 1}),
    ("plain/{train,test,unsupervised}-0.parquet", {"train": 1, "test": 1}),
    ("{contest,latest}.parquet", {"": 2}),
]


def spread(pattern: str) -> list[str]:
    """The paths that a pattern with {a,b} stands for."""
    found = re.search(r"\{(.*?)\}", pattern)
    if not found:
        return pattern.split()
    one_each = [pattern.replace(found[0], word, 1) for word in found[1].split(",")]
    return [path for each in one_each for path in spread(each)]


@pytest.mark.parametrize(("pattern", "expected"), LAYOUTS, ids=[pattern for pattern, _ in LAYOUTS])
def test_names_tell_the_split_at_any_depth(pattern, expected):
    paths = sorted({f"/root/{path}" for part in pattern.split() for path in spread(part)})
    layout = read_layout("/root", paths, images=not paths[0].endswith(".parquet"))
    read = {}
    for split, of_split in layout.files.items():
        names = files._class_names(layout, of_split)
        read[split] = len(of_split) if "parquet" in pattern else " ".join(sorted(names))
    assert read == expected
    assert not layout.doubtful


# What is in a folder, and words of the refusal.
DOUBTFUL = [
    ("{cat,dog,test}/1.png", "test' looks like a test set, and holds images itself, as a class"),
    ("{train,test}/1.png", "test' looks like a test set, and holds images itself, as a class"),
    ("{cat,dog}_{train,test}/1.png", "cat_test' looks like a test set, and holds images itself"),
    ("{a,test}/{cat,dog}/1.png", "test' looks like a test set, but '.*a/cat' does not look like a"),
    ("validation/{cat,dog}/1.png", "all in it looks like a test set .'.*/validation'.; to train"),
    ("train/{cat,dog}/1.png more/{cat,dog}/1.png", "train' looks like a training set, but '.*more"),
]


@pytest.mark.parametrize(("pattern", "words"), DOUBTFUL)
@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_what_looks_like_a_test_set_is_not_trained_on(tmp_path, pattern, words, fraction):
    for part in pattern.split():
        for path in spread(part):
            save(tmp_path / path, pixels(1)[0])
    refuses(Data(str(tmp_path), test_fraction=fraction), words)


def test_a_test_set_within_the_source_is_not_trained_on(tmp_path):
    for i, path in enumerate(spread("{site,check}/{cat,dog}/{1,2}.png")):
        save(tmp_path / path, pixels(8)[i])
    data = load(Data(str(tmp_path), test=str(tmp_path / "check")))
    assert np.array_equal(data.train.examples, pixels(8)[:4])
    assert np.array_equal(data.test.examples, pixels(8)[4:])


def test_a_test_set_without_classes_leaves_the_test_to_the_validation_set(tmp_path, caplog):
    """As in ImageNet."""
    places = ["train/cat/1", "train/dog/1", "val/cat/1", "val/dog/1", "test/1", "test/2"]
    for i, place in enumerate(places):
        save(tmp_path / f"{place}.png", pixels(6)[i])
    data = load(Data(str(tmp_path)))
    assert np.array_equal(data.test.examples, pixels(6)[2:4])
    assert "does not lie in folders of classes: the validation set" in caplog.text
    shutil.rmtree(tmp_path / "val")
    refuses(Data(str(tmp_path)), "1.png: it lies in no folder of a class; put each test image into")


SYSTEMS = [
    ".ipynb_checkpoints/1-checkpoint.png",
    "train/.ipynb_checkpoints/1.png",
    "train/cat/.ipynb_checkpoints/2.png",
    "__MACOSX/train/cat/._1.png",
    "train/@eaDir/1.png/SYNOPHOTO_THUMB_M.jpg",
    "train/cat/Thumbs.db",
    ".git/x/1.png",
    "train/cat/._1.png",
    "README.md",
]


def test_what_is_the_systems_is_not_read_and_not_told(tmp_path, caplog):
    for i, place in enumerate(spread("{train,test}/{cat,dog}/1.png")):
        save(tmp_path / place, pixels(4)[i])
    for place in SYSTEMS:
        save(tmp_path / place, pixels(1)[0])
    caplog.set_level("INFO")
    data = load(Data(str(tmp_path)))
    assert (data.train.classes, len(data.train), len(data.test)) == (("cat", "dog"), 2, 2)
    assert not caplog.records


def test_files_that_are_not_read_are_told_by_suffix_and_number(tmp_path, caplog):
    for i, place in enumerate(spread("{train,test}/{cat,dog}/_1.png")):
        save(tmp_path / place, pixels(4)[i])
    for place in ("train/fox/1.heic", "train/fox/2.heic", "train/cat/3.npy", "train/list.txt"):
        save(tmp_path / place, pixels(1)[0])
    caplog.set_level("INFO")
    assert len(load(Data(str(tmp_path))).train) == 2
    levels = {record.levelname: record.getMessage() for record in caplog.records}
    assert levels["INFO"].endswith("beside the image files lie 1 .txt")
    assert "files left out, of kinds that are not read: 2 .heic, 1 .npy;" in levels["WARNING"]
    assert levels["WARNING"].endswith("nothing is read of the folder 'train/fox'")


@pytest.mark.parametrize(
    ("pattern", "folder"),
    [
        ("{train,test}/{flu,well}/{images,masks}/1.png", "flu/masks"),
        ("{train,test}/{flu,well}/{Images,Lung-Masks}/1.png", "flu/Lung-Masks"),
        ("{images,ground_truth}/{1,2}.png", "ground_truth"),
    ],
)
def test_folders_of_masks_are_no_classes(tmp_path, pattern, folder):
    places = list(spread(pattern))
    for place in places:
        save(tmp_path / place, pixels(1)[0])
    fraction = 0.0 if places[0].startswith("train") else 0.5
    message = f"{folder}' lies beside a folder of images, and seems to hold their masks"
    refuses(Data(str(tmp_path), test_fraction=fraction), message)


def test_files_of_masks_are_told_and_usual_names_are_not(tmp_path, caplog):
    for i, place in enumerate(spread("{train,test}/{mask,no_mask}/{1,2}.png")):
        save(tmp_path / place, pixels(8)[i])
    assert load(Data(str(tmp_path))).train.classes == ("mask", "no_mask")
    for place in ("train/mask/3_mask.png", "train/no_mask/1 mask.png", "train/mask/hat_4.png"):
        save(tmp_path / place, pixels(1, seed=int(place[-5] == "4"))[0])
    caplog.clear()
    load(Data(str(tmp_path)))
    masks = [line for line in caplog.messages if "masks of others" in line]
    assert len(masks) == 1
    assert masks[0].startswith("1 of 7 image files seem to be masks of others, such as '")
    assert "no_mask/1 mask.png' of '1.png', and are read as images of the class" in masks[0]


def test_images_without_a_suffix_are_refused_with_the_way_on(tmp_path):
    for place in spread("{cat,dog}/1"):
        save(tmp_path / place, pixels(1)[0])
    message = (
        "2 without a suffix; those without a suffix are images: name them with one, such as '1.png'"
    )
    refuses(Data(str(tmp_path), test_fraction=0.5), message)
    for place in spread("{cat,dog}/1"):
        (tmp_path / place).write_bytes(b"pickled")
    refuses(Data(str(tmp_path)), "2 without a suffix; rayfed reads Parquet and folders of images")


def test_names_that_are_not_utf8_are_read(tmp_path):
    for i, place in enumerate(spread("{train,test}/{cat,dog}/1.png")):
        save(tmp_path / place, pixels(4)[i])
    for split in ("train", "test"):
        os.rename(tmp_path / split / "cat", os.fsencode(tmp_path / split) + b"/caf\xe9")
    data = load(Data(str(tmp_path)))
    assert data.train.classes == (r"caf\udce9", "dog")
    assert np.array_equal(data.train.examples, pixels(4)[:2])
    folder = tmp_path / "tables"
    folder.mkdir()
    png_file(folder / "train.parquet")
    os.rename(folder / "train.parquet", os.fsencode(folder) + b"/train-\xe9.parquet")
    assert len(load(Data(str(folder), test_fraction=0.5)).train) == 2


def test_a_link_that_leads_nowhere_is_refused(tmp_path):
    for i, place in enumerate(spread("{cat,dog}/{1,2}.png")):
        save(tmp_path / place, pixels(4)[i])
    (tmp_path / "cat/3.png").symlink_to("absent.png")
    refuses(Data(str(tmp_path), test_fraction=0.5), "3.png: cannot be read .*No such file")


def test_folders_above_the_classes_can_be_clients(tmp_path):
    for i, place in enumerate(["amazon/bag/0", "amazon/mug/1", "webcam/bag/2", "webcam/mug/3"] * 2):
        save(tmp_path / f"{place}{i}.png", pixels(8)[i])
    data = load(Data(str(tmp_path), partition=Natural("domain"), test_fraction=0.5))
    assert data.train.classes == ("bag", "mug")
    assert len(data.train) == 4 and set(data.train.groups.tolist()) == {0, 1}
    assert data.test.domains is None and data.train.group_names == ("amazon", "webcam")
    data = load(Data(str(tmp_path), domain="any name", test_fraction=0.5))
    assert data.train.groups is None and data.test.domain_names == ("amazon", "webcam")
    of_amazon = [i for i in range(8) if i % 4 < 2]
    for image, code in zip(data.test.examples, data.test.domains, strict=True):
        assert (code == 0) == any(np.array_equal(image, pixels(8)[i]) for i in of_amazon)


# --- sizes and modes


def test_images_of_different_sizes_need_a_size(tmp_path):
    for i, side in enumerate([4, 4, 6, 8]):
        save(tmp_path / "aabb"[i] / f"{i}.png", pixels(1, 3, side, side)[0])
    message = (
        r"2.png: 6 x 6 pixels, where earlier images have 4 x 4; set data.size \(say, size = 32\)"
    )
    refuses(Data(str(tmp_path)), message)
    assert load(Data(str(tmp_path), size=5, test_fraction=0.5)).train.shape == (3, 5, 5)


def test_sizes_are_compared_across_blocks(tmp_path):
    images = [encode(image) for image in pixels(300)] + [encode(pixels(1, 1, 6, 6)[0])]
    path = write(tmp_path / "a.parquet", images, [0, 1] * 150 + [0])
    refuses(Data(path), "6 x 6 pixels, where earlier images have 4 x 4")


def test_every_source_can_be_resized(tmp_path):
    images = pixels(2, 3, 8, 8)
    encoded = write(tmp_path / "a.parquet", [encode(image) for image in images], [0, 1])
    listed = write(tmp_path / "b.parquet", images.tolist(), [0, 1])
    small = [
        load(Data(path, test=path, size=4, shape=[3, 8, 8])).train.examples
        for path in (encoded, listed)
    ]
    assert small[0].shape == (2, 3, 4, 4)
    assert np.array_equal(*small)
    assert small[1].flags.c_contiguous


def test_resizing_is_antialiased_and_crops_the_centre():
    # 16 x 32: every second column is bright.
    stripes = np.tile(np.array([0, 255] * 16, dtype=np.uint8), (16, 1))[None]
    small = decode(encode(stripes), size=4).astype(int)
    assert small.shape == (1, 4, 4)
    assert np.abs(small - 127).max() < 20
    wide = np.zeros((1, 4, 12), dtype=np.uint8)
    wide[:, :, 4:8] = 200
    assert np.array_equal(decode(encode(wide), size=4), np.full((1, 4, 4), 200))


def test_grey_images_among_coloured_ones_become_rgb(tmp_path):
    grey, rgb = pixels(300), pixels(1, 3)
    path = write(
        tmp_path / "a.parquet", [*map(encode, grey), encode(rgb[0]), encode(grey[0])], [0, 1] * 151
    )
    train = load(Data(path, test=path)).train
    assert train.shape == (3, 4, 4)
    assert np.array_equal(train.examples[300], rgb[0])
    assert np.array_equal(train.examples[:300], np.repeat(grey, 3, axis=1))
    assert train.examples.flags.c_contiguous


@pytest.mark.parametrize(
    ("mode", "channels"), [("1", 1), ("L", 1), ("LA", 1), ("P", 3), ("RGB", 3), ("RGBA", 3)]
)
def test_the_mode_of_an_image_gives_its_channels(mode, channels):
    assert decode(png(Image.new(mode, (5, 4)))).shape == (channels, 4, 5)


def saved(image: Image.Image, form: str, **options) -> bytes:
    file = io.BytesIO()
    try:
        image.save(file, form, **options)
    except OSError as error:
        if "cannot write mode" not in str(error):
            raise
        pytest.skip(f"this Pillow cannot write the image: {error}")
    return file.getvalue()


def planes(image: Image.Image) -> np.ndarray:
    """The image's values (C, H, W)."""
    values = np.asarray(image)
    return values[None] if values.ndim == 2 else values.transpose(2, 0, 1)


@pytest.mark.parametrize("form", ["PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_camera_was_held(orientation, form):
    """Law: turned the other way and marked so, it is read as it was."""
    image = Image.fromarray(pixels(1, 3, 4, 6)[0].transpose(1, 2, 0))
    turn = TURNS.get({6: 8, 8: 6}.get(orientation, orientation))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    options = {"lossless": True, "exact": True} if form == "WEBP" else {}
    stored = image if turn is None else image.transpose(turn)
    assert np.array_equal(decode(saved(stored, form, exif=exif, **options)), planes(image))


def test_damaged_notes_do_not_keep_an_image_from_being_read():
    image = Image.fromarray(pixels(1, 3)[0].transpose(1, 2, 0))
    for note in (b"Exif\0\0", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"none"):
        assert np.array_equal(decode(saved(image, "PNG", exif=note)), planes(image))


def test_transparent_images_lie_on_white():
    clear, half, solid = 0, 102, 255
    colours = np.array([[[10, 20, 30, clear], [10, 20, 30, half], [10, 20, 30, solid]]], np.uint8)
    # 0.4 of the colour, 0.6 of white.
    as_shown = [[255, 157, 10], [255, 161, 20], [255, 165, 30]]
    assert decode(png(Image.fromarray(colours)))[:, 0].tolist() == as_shown
    greys = np.array([[[10, clear], [10, half], [10, solid]]], np.uint8)
    assert decode(png(Image.fromarray(greys, "LA")))[:, 0].tolist() == as_shown[:1]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    for form in ("PNG", "GIF"):
        shown = decode(saved(palette, form, transparency=0))[:, 0]
        assert shown.tolist() == [[255, 40], [255, 50], [255, 60]]
    keyed = Image.new("RGB", (2, 1), (1, 2, 3))
    keyed.putpixel((1, 0), (4, 5, 6))
    shown = decode(saved(keyed, "PNG", transparency=(1, 2, 3)))[:, 0]
    assert shown.tolist() == [[255, 4], [255, 5], [255, 6]]


def test_an_opaque_image_is_the_same_with_and_without_alpha():
    image = Image.fromarray(pixels(1, 3, 16, 16)[0].transpose(1, 2, 0))
    assert np.array_equal(decode(png(image.convert("RGBA"))), planes(image))


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_16_bits_become_8(form):
    values = np.array([[0, 128, 129, 257, 1000 * 257 // 10, 65535]], np.uint16)
    assert decode(saved(Image.fromarray(values), form))[0].tolist() == [[0, 0, 1, 1, 100, 255]]


def told_by(caplog, path: Path | str) -> list[str]:
    """What is said about a set that is its own test set, each message once."""
    caplog.clear()
    load(Data(str(path), test=str(path)))
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_little_that_remains_of_16_bits_is_told(tmp_path, caplog):
    for highest, told in ((4095, True), (65535, False)):
        image = Image.fromarray(np.linspace(0, highest, 16, dtype=np.uint16).reshape(4, 4))
        said = told_by(caplog, write(tmp_path / "a.parquet", [png(image)] * 2, [0, 1]))
        assert (
            any(
                "the highest value is 4095: of the 256 values of 8 bits, 16" in line
                for line in said
            )
            == told
        )


@pytest.mark.parametrize("mode", ["I", "F"])
def test_values_without_a_known_range_are_refused(tmp_path, mode):
    image = saved(Image.new(mode, (4, 4)), "TIFF")
    message = f"row 0: mode {mode}: values of 32 bits have no known range; scale them to 0..255"
    refuses(Data(write(tmp_path / "a.parquet", [image], [0])), message)


MANY = {
    "save_all": True,
    "append_images": [Image.new("RGB", (4, 4), "red"), Image.new("RGB", (4, 4), "blue")],
}


PAGES = [(form, MANY, 3) for form in ("TIFF", "GIF", "PNG", "WEBP")]
PAGES += [(form, {}, 1) for form in ("TIFF", "GIF", "PNG", "WEBP", "JPEG", "BMP", "PPM")]
# A phone's photograph with a smaller one in it.
PAGES += [("MPO", MANY, 1)]


README_OF_TWO = """---
configs:
- config_name: en
  data_files: en/*
- config_name: "fr"
  data_files: fr/*
---
config_name: text
"""


@pytest.mark.parametrize(
    ("page", "folders", "named"),
    [
        (README_OF_TWO, ["en", "fr"], "2 data sets (en, fr)"),
        (README_OF_TWO, ["en", "other"], ""),
        (README_OF_TWO, ["en", "text"], ""),
        ("# en and fr\n\nconfig_name: en\nconfig_name: fr\n", ["en", "fr"], ""),
        ("", ["en", "fr"], ""),
    ],
)
def test_a_repository_of_several_data_sets_that_are_read_as_one_is_told(
    tmp_path, caplog, page, folders, named
):
    for number, folder in enumerate(folders):
        (tmp_path / "hub" / folder).mkdir(parents=True)
        image = encode(np.full((1, 8, 8), 40 * number + 9, dtype=np.uint8))
        other = encode(np.full((1, 8, 8), 40 * number + 19, dtype=np.uint8))
        write(tmp_path / "hub" / folder / "train.parquet", [image, other], [0, 1])
    if page:
        (tmp_path / "hub/README.md").write_text(page)
    # The folder is the training set and the test set, and each is told.
    said = {line for line in told_by(caplog, tmp_path / "hub") if "as its README.md" in line}
    assert len(said) == bool(named)
    assert all(named in line for line in said)


@pytest.mark.parametrize(("form", "options", "pages"), PAGES)
def test_pages_and_frames_that_are_left_out_are_told(tmp_path, caplog, form, options, pages):
    # Copies, as Pillow notes in an image how it was saved, and would save it so in another form.
    image = saved(Image.fromarray(pixels_of_colour()), form, **copy.deepcopy(options))
    if form == "MPO" and not is_read_as(form, image):
        pytest.skip("this Pillow writes MPO files that it cannot read")
    said = told_by(caplog, write(tmp_path / "a.parquet", [image] * 2, [0, 1]))
    about = [line for line in said if "2 of 2 images have several pages or frames" in line]
    assert bool(about) == (pages > 1)
    assert all(f"row 0 with {pages}: only the first is read" in line for line in about)


def is_read_as(form: str, image: bytes) -> bool:
    """Whether Pillow takes a file for one of this form, and says nothing about it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        return Image.open(io.BytesIO(image)).format == form and not said


def pixels_of_colour() -> np.ndarray:
    return pixels(1, 3)[0].transpose(1, 2, 0)


def test_a_set_of_one_single_colour_is_told(tmp_path, caplog):
    black, other = png(Image.new("RGB", (4, 4))), png(Image.new("RGB", (4, 4), (0, 0, 1)))
    said = told_by(caplog, write(tmp_path / "a.parquet", [black, black], [0, 1]))
    assert any(
        "the training set have one single colour, 0, 0, 0, and show nothing" in line
        for line in said
    )
    said = told_by(caplog, write(tmp_path / "b.parquet", [black, other], [0, 1]))
    assert not any("single colour" in line for line in said)


def test_bombs_are_refused(tmp_path):
    bomb = png(Image.new("1", (MAX_PIXELS // 1000, 1001)))
    assert len(bomb) < 10_000
    path = write(tmp_path / "a.parquet", [bomb], [0])
    refuses(Data(path), "row 0: .* pixels, more than the 16,777,216 allowed without data.size; set")


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_large_photographs_are_read_where_they_are_scaled_down(tmp_path, monkeypatch, form):
    monkeypatch.setattr(decode_module, "MAX_PIXELS", 1000)
    monkeypatch.setattr(decode_module, "LARGEST", 10_000)
    half = np.zeros((60, 120, 3), np.uint8)
    half[:30] = 200
    large = saved(Image.fromarray(half), form)
    path = write(tmp_path / "a.parquet", [large, large], [0, 1])
    train = load(Data(path, test=path, size=4)).train
    assert np.abs(train.examples[0][:, [0, 3]].astype(int) - [[200] * 4, [0] * 4]).max() < 12
    refuses(
        Data(path), "row 0: 120 x 60 pixels, more than the 1,000 allowed without data.size; set"
    )
    monkeypatch.setattr(decode_module, "LARGEST", 5000)
    refuses(
        Data(path, size=4), "row 0: 120 x 60 pixels, more than the 5,000 allowed; scale it down"
    )


def test_grey_and_coloured_sets_go_together(tmp_path):
    grey, rgb = (png_file(tmp_path / f"{c}.parquet", channels=c) for c in (1, 3))
    for train, test in ((grey, rgb), (rgb, grey)):
        data = load(Data(train, test=test))
        sets = {grey: np.repeat(pixels(6), 3, axis=1), rgb: pixels(6, 3)}
        assert np.array_equal(data.train.examples, sets[train])
        assert np.array_equal(data.test.examples, sets[test])


@pytest.mark.parametrize(("content", "words"), CONTENTS[:2], ids=["lfs", "page"])
def test_an_image_that_is_something_else_is_told_by_its_first_bytes(tmp_path, content, words):
    refuses(
        Data(write(tmp_path / "a.parquet", [content], [0])),
        f"row 0: cannot be decoded as an image; it is .*{words}",
    )


def test_an_image_that_is_cut_off_or_unknown_is_refused_with_the_way_on(tmp_path):
    whole = saved(Image.fromarray(pixels(1, 3, 40, 40)[0].transpose(1, 2, 0)), "JPEG")
    cut = write(tmp_path / "a.parquet", [whole[:-200]], [0])
    refuses(Data(cut), r"row 0: .*image .*image file is truncated.*; it may be cut off: copy")
    unknown = write(tmp_path / "b.parquet", [b"abc"], [0])
    refuses(Data(unknown), "row 0: .*; it is none of PNG, JPEG, .*: convert it to PNG")


# --- functions of the user's

OWN_DATA = """
import numpy as np
from PIL import Image
from torch.utils.data import Dataset

rng = np.random.default_rng(0)
pixels, labels = rng.integers(0, 256, (9, 4, 5, 3), dtype=np.uint8), [0, 1, 2] * 3

class Pictures(Dataset):
    classes = ["cat", "dog", "emu"]
    def __len__(self):
        return 9
    def __getitem__(self, i):
        return Image.fromarray(pixels[i]), labels[i]

class Modes(Pictures):
    # Images in a mode of Pillow; of two modes, the first image has the first.
    def __init__(self, *modes):
        self.modes = modes
    def __getitem__(self, i):
        return Image.fromarray(pixels[i]).convert(self.modes[min(i, len(self.modes) - 1)]), labels[i]

def palettes(): return Modes("P"), None
def mixed(): return Modes("L", "RGB"), None
def greys(): return Modes("RGB"), Modes("L")
def clear(): return Modes("RGBA", "LA"), None
def bits(): return Modes("1"), None
def floating(): return Modes("F"), None
def sixteen(): return ((pixels[..., 0].astype(np.uint16) * 257), labels), None
def arrays(): return (pixels[..., 0], labels), None
def sets(): return Pictures(), (pixels.transpose(0, 3, 1, 2)[:2], [2, 0])
def smaller(): return (pixels, labels), (pixels[:2, :3, :3], [2, 0])
def floats(): return (pixels / 255, labels), None
def normalised(): return (((pixels - 200.0) / 60).astype("float32"), labels), None
def around(): return (np.linspace(-1, 1, 9 * 20).reshape(9, 4, 5), labels), None
def wide(): return (pixels.astype(float), labels), None
def below(): return (pixels, [-1, 0, 1] * 3), None
def holes(): return (np.full((9, 4, 5), np.nan), labels), None
def short(): return (pixels, labels[:8]), None
def deep(): return (pixels, np.array(labels)[:, None]), None
def flat(): return (pixels.reshape(9, 60), labels), None
def four(): return (np.zeros((9, 4, 5, 4), np.uint8), labels), None
def fourth(): return (np.zeros((9, 4, 5, 6), np.uint8), labels), None
def last(): return (np.moveaxis(pixels, 0, -1), labels), None
def sizes(): return ([pixels[i, : 4 - i % 2] for i in range(9)], labels), None
def none(): return (pixels[:0], labels[:0]), None
def halves(): return (pixels, [0, 0.5, 1] * 3), None
def beyond(): return (pixels, labels), (pixels[:1], [3])
def single(): return pixels, labels, labels
def broken(): raise OSError("no disk")
def leaves(): raise SystemExit(0)
def many(): return (pixels, [0, 1, 40000] * 3), None
class Swapped(Pictures):
    classes = ["dog", "cat", "emu"]
class Twice(Pictures):
    classes = ["cat", "cat", "emu"]
def swapped(): return Pictures(), Swapped()
def twice(): return Twice(), None
"""


@pytest.fixture
def own_data(tmp_path, monkeypatch):
    (tmp_path / "own_data.py").write_text(OWN_DATA)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("own_data")
    del sys.modules["own_data"]


def test_a_function_gives_arrays_or_torch_datasets(own_data):
    data = load(Data("own_data:sets"))
    assert np.array_equal(data.train.examples, own_data.pixels.transpose(0, 3, 1, 2))
    assert np.array_equal(data.test.examples, data.train.examples[:2])
    assert data.train.labels.tolist() == own_data.labels and data.test.labels.tolist() == [2, 0]
    assert data.train.classes == data.test.classes == ("cat", "dog", "emu")
    data = load(Data("own_data:smaller", size=4))
    assert data.train.shape == data.test.shape == (3, 4, 4), (
        "sets of two sizes are made alike before they are compared"
    )
    refuses(Data("own_data:smaller"), "training and test set disagree in image shape")
    data = load(Data("own_data:arrays", test_fraction=0.3))
    assert (data.train.examples.shape, data.test.examples.shape) == ((6, 1, 4, 5), (3, 1, 4, 5))


def test_pillow_images_of_a_function_are_read_as_one_sees_them(own_data):
    def read(name):
        data = load(Data(f"own_data:{name}", test_fraction=0.4))
        return np.concatenate([data.train.examples, data.test.examples])

    palettes = read("palettes").astype(int)
    assert palettes.shape == (9, 3, 4, 5)
    # A palette has 216 colours, and is set as near as that.
    assert abs(palettes.mean() - own_data.pixels.mean()) < 20
    assert read("mixed").shape == read("clear").shape == (9, 3, 4, 5)
    assert set(read("bits").ravel().tolist()) == {0, 255}
    data = load(Data("own_data:greys"))
    assert data.train.shape == data.test.shape == (3, 4, 5)
    assert (data.test.examples == data.test.examples[:, :1]).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("floating", "mode F: values of 32 bits have no known range; scale them to 0..255"),
        (
            "sixteen",
            r"uint16 from \d+ to \d+, .*as .images / 257..round...astype.'uint8'. makes of",
        ),
        (
            "floats",
            r"': images are float64 from 0\.\d+ to 1\.0, .*, as .255 . "
            r"images.\.round...astype.'uint8'. makes of",
        ),
        (
            "around",
            r"from -1\.0 to 1\.0, .*, as ..images \+ 1. \* 127\.5.\.round...astype.'uint8'. makes "
            r"of",
        ),
        ("wide", r"from \d+\.0 to 255\.0, .*, as images\.round...astype.'uint8'. makes of"),
        (
            "normalised",
            r"images are float32 from -3\.\d+ to 0\.\d+, .* before they were normalised; it gives "
            r".train, test., ",
        ),
        ("holes", "images are float64 from nan to nan, and must be uint8"),
        (
            "short",
            r"': labels are int64 of shape .8,.: each of 9 images needs one, a whole number from "
            r"0; it gives .train",
        ),
        (
            "deep",
            r"labels are int64 of shape .9, 1.: each of 9 images .*; give labels.ravel\(\); it "
            r"gives",
        ),
        (
            "flat",
            r"images have the shape .60,., and must be .H, W., .H, W, C. or .C, H, W., C 1 or 3",
        ),
        (
            "four",
            r"images have the shape .4, 5, 4., and must be .H, W.* give images\[..., :3\]; it "
            r"gives",
        ),
        (
            "fourth",
            r"images have the shape .4, 5, 6., and must be .H, W.* give images\[:, :3\]; it gives",
        ),
        (
            "last",
            r"images have the shape .5, 3, 9., .*, give numpy.moveaxis\(images, -1, 0\); it gives",
        ),
        ("sizes", "9 images of 2 shapes: give one image or more, all of one shape"),
        ("none", "0 images of 0 shapes: give one"),
        (
            "halves",
            "labels are float64 of shape .9,.: each of 9 images needs one, a whole number from 0",
        ),
        (
            "beyond",
            "labels of the test set are 3 to 3, and must be whole numbers from 0, below the number "
            "of classes, 3",
        ),
        (
            "below",
            "labels of the training set are -1 to 1, and must be whole numbers from 0, below .*, 2",
        ),
        (
            "single",
            "': ValueError: too many values to unpack .*; it gives .train, test., test may be None",
        ),
        ("broken", r"fails, line \d+ of '.*own_data.py': OSError: no disk"),
        ("leaves", r"fails, line \d+ of '.*own_data.py': SystemExit: 0"),
        ("many", "': it: 40,001 classes, more than the"),
        ("swapped", "classes are dog, cat, emu; the test set's must be the training set's"),
        ("twice", "classes are cat, cat, emu; .* each named once"),
        ("absent", "has no attribute 'absent'"),
    ],
)
def test_a_function_that_gives_something_else_is_refused(own_data, name, message):
    refuses(Data(f"own_data:{name}", test_fraction=0.3), message)
    refuses(
        Data("own_data:sets", test="x.parquet"),
        "the source 'own_data:sets' has a test set of its own",
    )


def test_a_run_with_a_function_is_resumed_on_the_same_data_alone(own_data, tmp_path):
    """Also where the module itself has not changed, only what it gives."""
    job = {
        "name": "own",
        "data": {"source": "own_data:sets", "partition": {"name": "iid", "num_clients": 3}},
    }
    job |= {"model": "cnn", "ray": {"mode": "off"}, "output": {"path": str(tmp_path / "runs")}}
    result = rayfed.run(job, {"train.num_rounds": 1, "train.clients_per_round": 2})
    assert [file.name[:9] for file in (result.path / "modules").iterdir()] == ["own_data-"]
    assert rayfed.read_job(result.path / "job.toml").places().keys() == {"data.root", "output.path"}
    assert rayfed.resume(result.path, {"train.num_rounds": 2}).rounds.num_rows == 3
    own_data.pixels[0] += 1
    with pytest.raises(
        InputError, match="belongs to another job: the images or labels have changed since"
    ):
        rayfed.resume(result.path, {"train.num_rounds": 3})
