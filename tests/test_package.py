"""What a submitted job takes along, and what it leaves behind."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from rayfed import package, read_job
from rayfed.package import anchored, gather, places_of, size_of, write_zip
from rayfed.values import InputError

CODE = ["job.toml", "mine.py", "models/net.py", "jobs/table.csv"]
LEFT = [
    ".env",
    ".git/objects/1a",
    ".venv/lib/torch.py",
    "__pycache__/mine.pyc",
    "checkpoints.safetensors",
    "data/train.parquet",
    "environment-of-mine/lib/torch.py",
    "environment-of-mine/pyvenv.cfg",
    "old/results/environment.json",
    "old/results/job.toml",
    "old/results/log.txt",
    "models/__pycache__/net.pyc",
]


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "work"
    for place in CODE + LEFT:
        write(root / place)
    return root


def write(path, text="here\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def packed(root, *given, job="job.toml", **more):
    """The places of the packed files, without those of this package itself."""
    files, place = gather(root, root / job, *given, **more)
    return sorted(name for name in files if not name.startswith("rayfed/")), place


def test_code_goes_along_and_what_a_cluster_does_not_need_stays(folder):
    assert packed(folder) == (sorted(CODE), "job.toml")


def test_what_the_job_reads_and_writes_stays(folder):
    write(folder / "out/tiny/table.csv")
    write(folder / "images/cat/1.png")
    assert packed(folder, [folder / "out", folder / "images"]) == (sorted(CODE), "job.toml")


def test_patterns_leave_out_files_and_whole_folders(folder):
    write(folder / "notes/old/a.pdf")
    assert packed(folder, patterns=["notes", "*.csv"])[0] == ["job.toml", "mine.py", "models/net.py"]


@pytest.mark.parametrize("ignoring", ["jobs/\nsecret.py\n", "*.csv\nsecret.py\n"])
def test_what_git_ignores_stays(folder, ignoring):
    write(folder / "secret.py")
    write(folder / ".gitignore", ignoring)
    assert "secret.py" in packed(folder)[0], "there is no repository yet"
    subprocess.run(["git", "init", "-q", folder], check=True)
    assert packed(folder)[0] == ["job.toml", "mine.py", "models/net.py"]
    write(folder.parent / ".gitignore", "work\n")
    subprocess.run(["git", "init", "-q", folder.parent], check=True)
    (folder / ".git/HEAD").unlink()  # now it is a folder that the outer repository ignores as a whole
    assert "mine.py" in packed(folder)[0]


def test_a_job_file_goes_along_wherever_it_lies(folder):
    write(folder / "images/job.toml", "inside")
    assert packed(folder, [folder / "images"], job="images/job.toml")[1] == "images/job.toml"
    write(folder.parent / "elsewhere/job.toml", "outside")
    files, place = gather(folder, folder.parent / "elsewhere/job.toml")
    assert place == "submitted/job.toml"
    assert files[place].read_text() == "outside"
    assert files["job.toml"].read_text() == "here\n"


def test_the_package_that_runs_here_goes_along_with_its_data(folder):
    write(folder / "rayfed/__init__.py", "an older one")
    write(folder / "rayfed/gone.py")
    files, _ = gather(folder, folder / "job.toml")
    assert files["rayfed/__init__.py"] == package.PACKAGE / "__init__.py"
    assert "rayfed/data/fashion_mnist_mini/train.parquet" in files
    assert "rayfed/gone.py" not in files
    assert not [name for name in files if "__pycache__" in name]


def test_more_than_100_mib_is_refused_with_the_largest(folder):
    for name, mebibytes in (("models/large.bin", 70), ("larger.bin", 90)):
        with open(folder / name, "wb") as file:
            file.truncate(mebibytes * 2**20)  # a hole: it takes no room on the disk
    with pytest.raises(InputError, match=r"has 1\d\d.\d MiB in .* files, and 100.0 MiB can be sent") as caught:
        gather(folder, folder / "job.toml")
    assert "--exclude PATTERN, or name it in .gitignore" in str(caught.value)
    assert [line.split() for line in str(caught.value).splitlines()[1:4]] == [
        ["90.0", "MiB", "larger.bin"],
        ["70.0", "MiB", "models/"],
        ["70.0", "MiB", "models/large.bin"],
    ]
    files, _ = gather(folder, folder / "job.toml", patterns=["larger.bin"])
    assert 70 * 2**20 < size_of(files) < 100 * 2**20


def test_the_same_files_give_the_same_zip(folder, tmp_path):
    files, _ = gather(folder, folder / "job.toml")
    write_zip(files, tmp_path / "1.zip")
    (folder / "mine.py").touch()
    write_zip(gather(folder, folder / "job.toml")[0], tmp_path / "2.zip")
    assert (tmp_path / "1.zip").read_bytes() == (tmp_path / "2.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "1.zip") as archive:
        assert archive.namelist() == list(files)
        assert archive.read("models/net.py") == b"here\n"


# Paths in jobs -------------------------------------------------------------------------------------------------------


def job(**given):
    return read_job({"name": "tiny"}, {key.replace("__", "."): value for key, value in given.items()})


def test_paths_of_a_job_are_told_from_names():
    assert places_of(job()) == {"output.path": "runs", "data.root": "~/.cache/rayfed/data"}
    assert places_of(job(data__source="mine", output__path="/shared"))["data.source"] == "mine"


def test_relative_paths_are_taken_from_where_the_user_stands():
    given = job(data__source="mine.parquet", data__test="s3://bucket/test.parquet", output__checkpoints="~/kept")
    here = Path("/here")
    assert anchored([given], here, "x") == {"output.path": "/here/runs", "data.source": "/here/mine.parquet"}
    assert anchored([job(output__path="/shared/runs")], here, "x") == {}
    assert anchored([given, given], here, "x") == anchored([given], here, "x")


def test_relative_paths_are_refused_where_they_mean_nothing():
    with pytest.raises(InputError, match=r"output.path = 'runs': the head node of http://x:8265 is another machine"):
        anchored([job()], None, "http://x:8265")
    assert anchored([job(output__path="/shared/runs")], None, "http://x:8265") == {}
    with pytest.raises(InputError, match=r"data.source = 'a.parquet', 'b.parquet': these runs of a grid differ"):
        anchored([job(data__source="a.parquet"), job(data__source="b.parquet")], Path("/here"), "x")
