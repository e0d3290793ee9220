"""The Hugging Face hub: huggingface_hub's own code against a small server that answers as the hub
does.
"""

import hashlib
import io
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rayfed.base.errors import InputError
from rayfed.data import hub, sources
from rayfed.data.federation import open_federation
from rayfed.data.partition import Natural
from rayfed.data.settings import MINI, SOURCES, Data
from rayfed.data.sources import load
from rayfed.job import Job

COMMIT = "1" * 40
REVISIONS = "main", COMMIT, "refs/convert/parquet"


def table(labels, names, label="label", **columns):
    """A file as `datasets` writes it: images as {bytes, path}, labels as numbers, class names in
    the metadata.
    """

    def encoded(value):
        file = io.BytesIO()
        Image.fromarray(np.full((4, 4, 3), value, dtype=np.uint8)).save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}

    features = {"image": {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}}
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    images = pa.array([encoded(value) for value in labels], kind)
    made = pa.table({"image": images, label: pa.array(labels, pa.int64()), **columns})
    file = io.BytesIO()
    pq.write_table(
        made.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})}),
        file,
    )
    return file.getvalue()


NAMES = ["cat", "dog"]
WRITERS = ["f1_05", "f0_14"] * 4
REPOSITORIES = {
    "flwrlabs/cinic10": {
        "README.md": b"---",
        "data/train-00000-of-00002.parquet": table([0, 1], NAMES),
        "data/train-00001-of-00002.parquet": table([1, 1], NAMES),
        "data/validation-00000-of-00001.parquet": table([0], NAMES),
        "data/test-00000-of-00001.parquet": table([1, 0, 1], NAMES),
    },
    "zh-plus/tiny-imagenet": {
        "data/train-00000-of-00001-13.parquet": table([0, 1, 0], NAMES),
        "data/valid-00000-of-00001-70.parquet": table([1], NAMES),
    },
    "flwrlabs/femnist": {
        "data/train-00000-of-00001.parquet": table(
            [0, 0, 0, 0, 1, 1, 1, 1], NAMES, "character", writer_id=WRITERS
        )
    },
    "me/two": {"a/train.parquet": table([0], NAMES), "b/train.parquet": table([0], NAMES)},
}


class Server(ThreadingHTTPServer):
    """Three questions of huggingface_hub: the commit of a revision, the files of a commit, one of
    these files.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        for name, files in REPOSITORIES.items():
            if path in (f"/api/datasets/{name}/revision/{known}" for known in REVISIONS):
                return self.answer(json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode())
            if path == f"/api/datasets/{name}/tree/{COMMIT}":
                entries = [
                    {
                        "type": "file",
                        "path": file,
                        "size": len(content),
                        "oid": hashlib.sha1(content).hexdigest(),
                    }
                    for file, content in files.items()
                ]
                return self.answer(json.dumps(entries).encode())
            start = f"/datasets/{name}/resolve/{COMMIT}/"
            if path.startswith(start) and path.removeprefix(start) in files:
                return self.answer(files[path.removeprefix(start)])
        return self.answer(b"{}", 404)

    do_HEAD = do_GET  # noqa: N815

    def answer(self, content, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    """A hub with `REPOSITORIES`; its paths that were asked for are in `asked`."""
    constants = pytest.importorskip("huggingface_hub.constants")
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    for key, value in {
        "ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(constants, key, value)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield server
    server.shutdown()
    server.server_close()


def test_a_named_set_is_downloaded_once_with_its_splits_and_class_names(server, tmp_path):
    root = str(tmp_path)
    data = load(Data("cinic10", root=root))
    assert data.train.labels.tolist() == [0, 1, 1, 1] and data.test.labels.tolist() == [1, 0, 1]
    assert data.train.classes == ("cat", "dog")
    assert data.train.examples[:, 0, 0, 0].tolist() == [0, 1, 1, 1] and data.train.shape == (
        3,
        4,
        4,
    )
    assert not any(path.endswith("README.md") for path in server.asked)
    asked = len(server.asked)
    again = load(Data("CINIC10", root=root))
    assert again.test.labels.tolist() == data.test.labels.tolist() and len(server.asked) == asked


def test_the_validation_set_stands_in_for_a_test_set(server, tmp_path):
    assert load(Data("tiny-imagenet", root=str(tmp_path))).test.labels.tolist() == [1]


def test_writers_are_the_clients_of_femnist_which_has_no_test_set(server, tmp_path):
    data = Data(
        "femnist", root=str(tmp_path), test_fraction=0.25, partition=Natural(column="writer_id")
    )
    federation = open_federation(data)
    assert federation.num_clients == 2 and federation.train.classes == ("cat", "dog")
    assert sorted(federation.train.labels) == [0] * 3 + [1] * 3
    with pytest.raises(
        InputError, match=r"data.source = 'femnist': it has no test set; .*data.test_fraction"
    ):
        load(Data("femnist", root=str(tmp_path)))
    with pytest.raises(InputError, match=r"no column 'letter'; it has image, character, writer_id"):
        load(Data("femnist", root=str(tmp_path), label="letter", test_fraction=0.5))


@pytest.mark.parametrize(
    "place", ["", "/", "/data", "@main/data/", "@" + COMMIT, "@refs/convert/parquet"]
)
def test_a_folder_at_the_hub_may_be_written_in_many_ways(server, tmp_path, place):
    data = load(Data("hf://datasets/flwrlabs/cinic10" + place, root=str(tmp_path)))
    assert (len(data.train), len(data.test)) == (4, 3)


FILES = [("train", 2), ("validation", 1)]


def test_single_files_of_the_hub_are_training_and_test_set_and_others_are_not_downloaded(
    server, tmp_path
):
    train, test = (
        f"hf://datasets/flwrlabs/cinic10/data/{name}-00000-of-0000{n}.parquet" for name, n in FILES
    )
    data = load(Data(train, test=test, root=str(tmp_path)))
    assert data.train.labels.tolist() == [0, 1] and data.test.labels.tolist() == [0]
    files = {path.rpartition("/")[2] for path in server.asked if "/resolve/" in path}
    assert files == {"train-00000-of-00002.parquet", "validation-00000-of-00001.parquet"}
    # The rest of a copy in part comes, too.
    both = load(Data("hf://datasets/flwrlabs/cinic10", root=str(tmp_path)))
    assert (len(both.train), len(both.test)) == (4, 3)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "hf://datasets/me/none",
            "the download failed .*Repository Not Found.* give the path of Parquet files that",
        ),
        ("hf://datasets/flwrlabs/cinic10/images", "there is no Parquet file at that place"),
        (
            "hf://datasets/me/two",
            r"its Parquet files lie in several folders \(a, b\); name one of them",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_place(server, tmp_path, place, message):
    with pytest.raises(InputError, match=f"^'{place}': .*{message}"):
        load(Data(place, root=str(tmp_path)))


def test_without_a_network_a_copy_is_read_and_a_missing_one_is_refused(server, tmp_path):
    first = load(Data("tiny-imagenet", root=str(tmp_path)))
    server.shutdown()
    server.server_close()
    again = load(Data("tiny-imagenet", root=str(tmp_path)))
    assert np.array_equal(first.train.examples, again.train.examples)
    refused = (
        f"'hf://datasets/flwrlabs/cinic10': {tmp_path}/hub has no copy, and the download failed "
        ".*run once where"
    )
    with pytest.raises(InputError, match=refused):
        load(Data("cinic10", root=str(tmp_path)))


def test_without_huggingface_hub_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        InputError,
        match=r"'hf://datasets/a/b' needs huggingface_hub.*pip install 'rayfed-distill\[hf\]'$",
    ):
        load(Data("hf://datasets/a/b", root=str(tmp_path)))


def test_every_set_of_the_hub_is_listed():
    assert set(SOURCES) == {MINI, *sources.TORCHVISION, *hub.HUB}
    assert all(hub.PLACE.fullmatch(place) for place, _ in hub.HUB.values())
    assert set(Job(name="a", data=Data("cinic10")).places()) == {"output.path", "data.root"}
