"""Hostile input ends in one message: no crash, no endless wait, no full memory, and no code of it
is run.
"""

import functools
import io
import logging
import os
import re
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image

import rayfed
from rayfed.base.errors import InputError
from rayfed.cli import main
from rayfed.clients.trace import read_trace
from rayfed.data import decode
from rayfed.data.partition import Natural
from rayfed.data.settings import Data
from rayfed.data.sources import load
from rayfed.folder.log import logging_to_file
from rayfed.job import read_job
from rayfed.methods import compose
from rayfed.models.registry import build_model
from rayfed.rounds.setup import open_setup

PACKAGE = Path(rayfed.__file__).parent
# Bytes of address space for a process that reads a bomb.
LITTLE = 6 * 2**30


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


SMALL = encoded(Image.new("L", (4, 4)))


def write(path: Path, image, label=(0, 1), metadata=None) -> str:
    table = pa.table(
        {"image": image, "label": label if isinstance(label, pa.Array) else list(label)}
    )
    pq.write_table(table.replace_schema_metadata(metadata), path)
    return str(path)


def refuses(source: Data, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load(source)
    assert "\n" not in str(caught.value)


def refused_with_little_memory(source: str) -> str:
    """The message with which a process with little memory and time refuses a source; '' if it
    accepts the source.
    """
    script = (
        "import sys\n"
        "from rayfed.data.settings import Data\n"
        "from rayfed.data.sources import load\n"
        "from rayfed.base.errors import InputError\n"
        "try:\n"
        "    load(Data(sys.argv[1], test_fraction=0.5))\n"
        "except InputError as error:\n"
        "    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, source],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=PACKAGE.parent,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LITTLE, LITTLE)),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- Parquet


def test_an_object_with_code_in_a_parquet_file_is_not_run(tmp_path):
    """Arrow's old extension type for Python objects has a pickle in the schema."""
    ran = tmp_path / "ran"
    code = f"cposix\nsystem\n(S'touch {ran}'\ntR.".encode()
    extension = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": code,
    }
    field = pa.field("image", pa.binary(), metadata=extension)
    table = pa.table(
        [pa.array([code, code]), pa.array([0, 1])],
        pa.schema([field, pa.field("label", pa.int64())]),
    )
    pq.write_table(table, tmp_path / "a.parquet")
    refuses(Data(str(tmp_path / "a.parquet")), "row 0: cannot be decoded as an image")
    assert not ran.exists()


def of_images(image, label=(0, 1), **more) -> pa.Table:
    return pa.table({"image": image, "label": list(label), **more})


def nested(depth: int) -> pa.Array:
    lists = pa.array([1, 1], pa.uint8())
    for _ in range(depth):
        lists = pa.ListArray.from_arrays(pa.array(range(len(lists) + 1), pa.int32()), lists)
    return lists


NO_TEXT = pa.Array.from_buffers(pa.string(), 4, pa.array([b"\xff", b"a"] * 2).buffers())
TWICE = pa.array([0, 1] * 2)
FOUR = pa.array([SMALL] * 4)
# A table as a user may have it, the settings with which it is read, and the words that refuse it.
ODD_TABLES = {
    "no columns": (pa.table({}), {}, "no column 'image'"),
    "deep lists": (
        of_images(nested(60)),
        {},
        "cannot be read as a Parquet file .*nested|cannot be images",
    ),
    "times": (of_images(pa.array([1, 2], pa.timestamp("s"))), {}, "images are encoded bytes"),
    "list as client": (
        of_images([SMALL] * 2, who=[[1], [2]]),
        {"partition": Natural("who")},
        "is of type list<item: int64>",
    ),
    "label twice": (
        [("label", TWICE), ("label", TWICE)],
        {},
        "2 columns have the name 'label'; give each a name of",
    ),
    "image twice": ([("image", FOUR), ("label", TWICE)], {}, "2 columns have the name 'image'"),
    "label no text": (
        [("label", NO_TEXT)],
        {},
        "column 'label' has text that is not UTF-8; write it as UTF-8",
    ),
    "domain no text": (
        [("label", TWICE), ("who", NO_TEXT)],
        {"domain": "who"},
        "'who' has text that is not UTF-8",
    ),
    "client NaN": (
        [("label", TWICE), ("who", pa.array([1.0, np.nan] * 2))],
        {"partition": Natural("who")},
        "row 1: NaN in column 'who'; give",
    ),
    "client without a name": (
        [("label", TWICE), ("who", pa.array(["a", "b", " ", ""]))],
        {"partition": Natural("who")},
        "row 3: '' in column 'who'; a client, or a domain, has 1 to 100 printable letters",
    ),
    "client of a name that nobody sees": (
        [("label", TWICE), ("who", pa.array(["a", "b", "\u200b \u200b", "\u06f1"]))],
        {"partition": Natural("who")},
        "row 2: '.*u200b .*u200b' in column 'who'; a client, or a domain, has",
    ),
    "domain of a control character": (
        [("label", TWICE), ("who", pa.array(["a", "b", "c", "\x07"]))],
        {"domain": "who"},
        "row 3: '.*x07' in column 'who'; a client, or a domain, has",
    ),
    "a domain's long name": (
        [("label", TWICE), ("who", pa.array(["a", "b" * 101, "c" * 100, "d"]))],
        {"domain": "who"},
        "row 1: 'bbb",
    ),
}


@pytest.mark.parametrize("name", ODD_TABLES)
def test_an_odd_table_is_refused_in_one_line(tmp_path, name):
    table, settings, message = ODD_TABLES[name]
    if isinstance(table, list):
        names, arrays = zip(("image", FOUR), *table, strict=True)
        table = pa.table(list(arrays), names=list(names))
    pq.write_table(table, tmp_path / "a.parquet")
    if name == "deep lists" and pa.__version__.startswith("18."):
        # They are lists of one pixel each, and so images of one pixel.
        pytest.skip("PyArrow 18 reads lists that are nested 60 times")
    refuses(
        Data(str(tmp_path / "a.parquet"), test_fraction=0.5, **settings), f"a.parquet.*({message})"
    )


@pytest.mark.parametrize("content", ["cut", "empty", "large footer"])
def test_a_file_that_is_no_parquet_is_refused(tmp_path, content):
    path = tmp_path / "a.parquet"
    whole = Path(write(path, [SMALL] * 2)).read_bytes()
    footer = b"PAR1" + b"x" * 100 + struct.pack("<I", 2**31 - 1) + b"PAR1"
    path.write_bytes({"cut": whole[:-20], "empty": b"", "large footer": footer}[content])
    refuses(Data(str(path)), "a.parquet: cannot be read as a Parquet file")


@pytest.mark.parametrize(
    "metadata",
    [
        {b"classes": b"\xff\xfe,b"},
        {"huggingface": "[" * 100_000},
        {"huggingface": '{"info": {"features": 3}}'},
    ],
    ids=["no UTF-8", "deep", "no names"],
)
def test_class_names_of_odd_types_do_no_harm(tmp_path, metadata):
    path = write(tmp_path / "a.parquet", [SMALL] * 2, metadata=metadata)
    assert [type(name) for name in load(Data(path, test=path)).train.classes] == [str, str]


def test_numbers_in_one_file_and_lists_in_another_are_one_message(tmp_path):
    for name, x in (("a", [[1.0, 2.0]] * 2), ("b", [1.0] * 2)):
        pq.write_table(pa.table({"x": x, "label": [0, 1]}), tmp_path / f"{name}.parquet")
    refuses(
        Data(str(tmp_path), features=["x"], test_fraction=0.5),
        "column 'x' is of type list.* in .*a.parquet, and of type double in .*b.parquet",
    )


def test_a_trace_with_a_column_twice_is_one_message(tmp_path):
    pq.write_table(
        pa.table([TWICE, TWICE, TWICE], names=["round", "client", "client"]), tmp_path / "t.parquet"
    )
    with pytest.raises(
        InputError, match=r"give a Parquet file with the columns round and client, each once"
    ) as caught:
        read_trace(str(tmp_path / "t.parquet"), 5)
    assert "\n" not in str(caught.value)


# --- images


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@functools.cache
def bombs() -> dict[str, bytes]:
    """Small files that claim to be large, or end early."""
    jpeg = bytearray(encoded(Image.effect_noise((64, 64), 50), "JPEG"))
    frame, large = jpeg.find(b"\xff\xc0"), bytearray(jpeg)
    large[frame + 5 : frame + 9] = struct.pack(">HH", 65500, 65500)
    zeros = zlib.compress(b"\0" * 2**26, 9)
    tags = [
        struct.pack("<HHII", *tag) for tag in ((256, 4, 1, 10), (257, 4, 1, 10), (273, 4, 2**30, 8))
    ]
    return {
        "png of 50,000 x 50,000": SMALL[:8]
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000)),
        "png with much text": SMALL[:33] + chunk(b"zTXt", b"k\0\0" + zeros) * 3 + SMALL[33:],
        "png with a large profile": SMALL[:33] + chunk(b"iCCP", b"k\0\0" + zeros) + SMALL[33:],
        "jpeg of 65,500 x 65,500": bytes(large),
        "jpeg, cut": bytes(jpeg[: len(jpeg) // 2]),
        "tiff, cut": encoded(Image.new("RGB", (64, 64)), "TIFF", compression="tiff_deflate")[:90],
        "tiff, in circles": b"II*\0\x08\0\0\0"
        + struct.pack("<H", 3)
        + b"".join(tags)
        + struct.pack("<I", 8),
        "bmp": b"BM"
        + struct.pack("<IHHIIiiHHI", 100, 0, 0, 54, 40, 2**31 - 1, -(2**31), 1, 24, 0)
        + b"\0" * 60,
        "ppm": b"P6 1000000000 1000000000 255 ",
        "webp": b"RIFF\xff\xff\xff\xffWEBPVP8 \xff\xff\xff\xff" + b"\0" * 100,
        "eps, which is a program": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    }


@pytest.mark.parametrize("name", bombs())
def test_image_bombs_are_refused(tmp_path, name):
    refuses(
        Data(write(tmp_path / "a.parquet", [bombs()[name]] * 2)),
        "row 0: (cannot be decoded as an image|far more than the 89,478,485 pixels allowed)",
    )


def test_the_first_of_many_frames_is_read(tmp_path):
    frames = [Image.new("P", (8, 8), i) for i in range(200)]
    path = write(
        tmp_path / "a.parquet",
        [encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])] * 2,
    )
    assert load(Data(path, test=path)).train.examples.shape[2:] == (8, 8)


# --- folders


def tree(root: Path) -> Path:
    for kind in ("cat", "dog"):
        (root / kind).mkdir(parents=True)
        for i in range(2):
            (root / kind / f"{i}.png").write_bytes(SMALL)
    return root


def test_pipes_and_devices_are_ignored(tmp_path):
    root = tree(tmp_path / "tree")
    (root / "cat" / "zero.png").symlink_to("/dev/zero")
    os.mkfifo(root / "cat" / "pipe.png")
    assert refused_with_little_memory(str(root)) == ""
    assert len(load(Data(str(root), test=str(root))).train) == 4


def test_links_to_other_folders_are_followed_and_circles_are_refused(tmp_path):
    root = tree(tmp_path / "tree")
    (tmp_path / "emu").symlink_to(root / "dog")
    (root / "emu").symlink_to(tmp_path / "emu")
    assert load(Data(str(root), test_fraction=0.5)).train.classes == ("cat", "dog", "emu")
    (root / "cat" / "loop").symlink_to(root)
    (root / "dog" / "loop").symlink_to(root / "cat")
    assert (
        "loop': this link leads to a folder above it; remove the link"
        in refused_with_little_memory(str(root))
    )


@pytest.mark.parametrize(
    "path",
    ["/dev/zero", "pipe", "a\0b", "x" * 5000, "~nobody-of-this-name/x.parquet", "file://a b"],
)
def test_paths_that_are_not_data_files_are_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(InputError):
        load(Data(path, test_fraction=0.5))


def test_a_file_that_was_deleted_after_it_was_listed_is_refused(tmp_path, monkeypatch):
    root = tree(tmp_path / "tree")
    whole = decode._batched

    def late(items, size):
        (root / "cat" / "1.png").unlink(missing_ok=True)
        return whole(items, size)

    monkeypatch.setattr(decode, "_batched", late)
    refuses(Data(str(root)), "cat/1.png: cannot be read")


# --- jobs


@pytest.mark.parametrize("path", ["/", "a\0b", "x" * 5000, "binary.toml"])
def test_paths_that_are_not_job_files_are_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("binary.toml").write_bytes(b"\x80\x81\xff\0")
    with pytest.raises(InputError, match="job file"):
        read_job(path)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "a/../b",
        "/etc",
        "a//b",
        ".hidden",
        "a\x00b",
        "a b",
        "-rf",
        "x" * 201,
        "/".join("x" * 11),
        None,
    ],
)
def test_names_that_leave_the_folder_or_are_no_folder_name_are_refused(name):
    message = "use letters, digits and . _ + -" if isinstance(name, str) else "give text"
    with pytest.raises(InputError, match=re.escape(f"name = {name!r}: {message}")):
        read_job({"name": name})
    fine = "x" * 200 + "/A.b_c+d-1"
    assert read_job({"name": fine}).name == fine


def test_a_job_with_large_but_valid_numbers_is_opened():
    many = {
        "train.num_rounds": 10**18,
        "train.batch_size": 10**18,
        "train.local_epochs": 10**18,
        "seed": 10**100,
    }
    training = open_setup(read_job({"name": "n"}, many)).job.train
    assert training.num_rounds == 10**18
    assert np.isfinite(training.lr_at(10**18))


def test_an_address_that_means_any_ray_here_is_refused_where_there_is_none():
    """In a process of its own: this one may have joined a Ray for another test."""
    script = """
import functools
from ray._private import services
from rayfed.base.errors import InputError
from rayfed.runtime import session
services.find_gcs_addresses, services.find_bootstrap_address = functools.cache(lambda: []), lambda folder: None
try:
    with session._joined("auto", "ray.address = 'auto'"):
        print("joined")
except InputError as error:
    print(error)
"""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    begin = r"ray.address = 'auto': no Ray answers there \(Could not find [^.]*\)\n"
    says = begin + "to run without it, leave the address out: .*\n(.*\n)*  ray start --head"
    assert re.match(says, done.stdout), done.stdout + done.stderr


# --- the terminal


def test_names_reach_the_terminal_in_one_line_without_control_characters(tmp_path, monkeypatch):
    labels = ["\x1b[31mred\x1b[0m", "a\nb\tc\x1b]0;title\x07"] * 4
    pq.write_table(
        pa.table({"x": [1.0, 2.0] * 4, "label": labels, "d": ["x\ny", "z"] * 4}),
        tmp_path / "a.parquet",
    )
    data = 'source = "a.parquet"\nfeatures = ["x"]\ndomain = "d"\ntest_fraction = 0.5\n'
    partition = '[data.partition]\nname = "iid"\nnum_clients = 1\n'
    (tmp_path / "job.toml").write_text(f'name = "n"\nmodel = "mlp"\n[data]\n{data}{partition}')
    monkeypatch.chdir(tmp_path)
    for words in (
        ["data", "job.toml"],
        ["partition", "job.toml"],
        ["data", "job.toml", "-s", "data.client=\x1b[31mx"],
    ):
        said = CliRunner().invoke(main, words).output
        assert said and "\x1b" not in said and "Traceback" not in said
    said = CliRunner().invoke(main, ["partition", "job.toml"]).stdout.splitlines()
    assert len(said[0].split()) == 4 and r"a\nb\tc" in said[0]
    said = CliRunner().invoke(main, ["data", "job.toml"]).stdout.splitlines()
    assert all(re.match(r"\w+  +\S", line) for line in said) and said[-1].endswith(r": x\ny, z")


@pytest.mark.parametrize("words", ["status", "report runs/x", "keys", "methods"])
def test_a_module_of_the_current_folder_is_not_run_in_place_of_pythons_own(tmp_path, words):
    for name in ("html", "json", "tomllib", "fcntl", "click"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run(
        [sys.executable, "-m", "rayfed", *words.split()],
        capture_output=True,
        cwd=tmp_path,
        env=environment,
    )
    assert not (tmp_path / "ran").exists()


HIDDEN = "cat\u202etac\u2069", "dog\x1b[31m\x1b]0;x\x07"


@pytest.mark.parametrize("form", ["column", "metadata", "folders"])
def test_hidden_characters_of_class_and_domain_names_are_spelled_out_wherever_they_are_shown(
    tmp_path, form
):
    path = str(tmp_path / "a.parquet")
    table = pa.table(
        {"image": [SMALL] * 4, "label": [0, 1] * 2 if form == "metadata" else [*HIDDEN] * 2}
    )
    table = table.append_column("where", pa.array([*HIDDEN] * 2))
    pq.write_table(
        table.replace_schema_metadata(
            {"classes": ",".join(HIDDEN)} if form == "metadata" else None
        ),
        path,
    )
    if form == "folders":
        path = str(tree(tmp_path / "tree"))
        for name, old in zip(HIDDEN, ("cat", "dog"), strict=True):
            os.rename(f"{path}/{old}", f"{path}/{name}")
    read = load(Data(path, domain="where", test=path))
    shown = [r"cat\u202etac\u2069", r"dog\x1b]0;x\x07"]
    assert [*read.train.classes] == [*read.test.classes] == shown
    assert form == "folders" or [*read.test.domain_names] == shown


def test_hidden_characters_do_not_reach_the_log(tmp_path):
    with logging_to_file() as begin:
        begin(tmp_path)
        logging.getLogger("rayfed").info("%s", HIDDEN[0] + HIDDEN[1])
    assert r"cat\u202etac\u2069dog\x1b]0;x\x07" in (tmp_path / "log.txt").read_text()


STRANGE = """
import os
from shutil import rmtree
from os import system
from torch import zeros
def fine(): return __import__("rayfed").methods.compose()
"""


@pytest.mark.parametrize("key", ["method", "model", "data.partition"])
@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "shutil:rmtree",
        "antigravity:fly",
        "strange:system",
        "strange:rmtree",
        "strange:zeros",
    ],
)
def test_what_is_named_is_looked_at_before_it_is_called(tmp_path, monkeypatch, key, name):
    (tmp_path / "strange.py").write_text(STRANGE)
    monkeypatch.syspath_prepend(tmp_path)

    def build():
        job = read_job({"name": "n"}, {key: name, f"{key}.{option}": f"touch {tmp_path}/ran"})
        build_model(job.model.name, job.model.options, image_shape=(1, 8, 8), num_classes=2, seed=0)

    message = (
        "is a module of Python itself; name a module of yours|Python's own or built in; name a "
        "function or a class"
    )
    option = "command" if name.endswith("system") else "path"
    with pytest.raises(InputError, match=f"'{name}'.*({message})"):
        build()
    assert (
        sorted(path.name for path in tmp_path.glob("[!_]*")) == ["strange.py"]
        and "antigravity" not in sys.modules
    )
    assert read_job({"name": "n", "method": "strange:fine"}).method == compose()
