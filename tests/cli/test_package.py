"""The files that `rayfed submit` sends, and the files that stay; compared with the archive that Ray makes."""

import io
import os
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest
from ray._private.ray_constants import get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import create_package

from rayfed import read_job
from rayfed.cli.package import PACKAGE, anchored, chosen, staged
from rayfed.errors import InputError

CODE = ["id_map.py", "job.toml", "jobs/table.csv", "mine.py", "models/net.py"]
WITHOUT_TABLE = [name for name in CODE if name != "jobs/table.csv"]
LEFT = [
    *(".env", ".netrc", ".aws/credentials", "models/.hidden"),
    *("server.pem", "models/tls.key", "id_rsa", "keys/id_ecdsa"),
    *("__pycache__/mine.pyc", "models/__pycache__/net.pyc", "mine.egg-info/PKG-INFO"),
    *("checkpoints.safetensors", "data/train.parquet", "models/net.pt", "images.tar.gz"),
    *("environment-of-mine/lib/torch.py", "environment-of-mine/pyvenv.cfg", "venv/lib/torch.py"),
    *("miniforge/conda-meta/history", "miniforge/lib/torch.py"),
    *("old/results/environment.json", "old/results/job.toml", "old/results/log.txt"),
]


@pytest.fixture
def root(tmp_path):
    for place in CODE + LEFT:
        write(tmp_path / "work" / place)
    return tmp_path / "work"


def write(path, text="here\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def git(folder, *words):
    subprocess.run(["git", *words], cwd=folder, check=True)


def sent(root, *without, patterns=()):
    """The names of the chosen files, as Ray packs them."""
    sizes, archive = chosen(root, without, patterns), root.parent / "sent.zip"
    archive.unlink(missing_ok=True)
    with staged(root, sizes) as code:
        rays_own = get_runtime_env_default_excludes()
        create_package(code["working_dir"], archive, include_gitignore=True, excludes=rays_own)
    with ZipFile(archive) as packed:
        there = {entry.filename: entry.file_size for entry in packed.infolist() if not entry.is_dir()}
    if ".rayignore" not in there:
        assert there == sizes
    return sorted(there)


def test_code_is_sent_and_secrets_data_caches_environments_and_runs_stay(root):
    assert sent(root) == CODE


def test_paths_of_the_job_stay(root, monkeypatch):
    write(root / "out/tiny/table.csv")
    write(root / "images/cat/1.png")
    write(root / "models/images/1.png")  # the same name elsewhere
    (root.parent / "link").symlink_to(root)
    monkeypatch.chdir(root)
    assert sent(root, Path("out"), root.parent / "link/images") == sorted([*CODE, "models/images/1.png"])


@pytest.mark.parametrize("patterns", [["notes", "*.csv"], ["notes/**", "jobs"], ["/notes/old/*.pdf", "table.csv"]])
def test_patterns_leave_out_files_and_whole_folders(root, patterns):
    write(root / "notes/old/a.pdf")
    assert sent(root, patterns=patterns) == WITHOUT_TABLE


@pytest.mark.parametrize(
    ("file", "pattern"),
    [(".gitignore", "jobs/"), (".gitignore", "*.csv"), (".git/info/exclude", "table.csv"), (".rayignore", "table.csv")],
)
def test_ignored_files_stay(root, file, pattern):
    write(root / "secret.py")
    git(root, "init", "-q")
    assert "secret.py" in sent(root)
    write(root / file, f"{pattern}\nsecret.*\n")
    assert [name for name in sent(root) if name != ".rayignore"] == WITHOUT_TABLE


@pytest.mark.parametrize("inner", [".", "models"])
def test_a_nested_gitignore_applies_to_its_folder_or_inner_repository(root, inner):
    git(root, "init", "-q")
    git(root, "init", "-q", inner)
    write(root / "models/.gitignore", "mine.py\nweights/\n")
    write(root / "models/mine.py")
    write(root / "models/weights/large.bin")
    assert sent(root) == CODE


def test_a_gitignore_of_all_hidden_files_does_not_leave_out_the_folder(root):
    """Ray's own reading of `.*` would leave out the folder itself, `.`."""
    git(root, "init", "-q")
    write(root / ".gitignore", ".*\n")
    assert sent(root) == CODE


def test_a_folder_that_an_outer_repository_ignores_is_sent(root):
    git(root.parent, "init", "-q")
    write(root.parent / ".gitignore", "work\n")
    assert sent(root) == CODE


@pytest.mark.parametrize("repository", ["work", "."])
def test_a_git_that_fails_inside_a_repository_is_refused(root, repository, monkeypatch):
    git(root.parent, "init", "-q", repository)
    break_git(root.parent, monkeypatch)
    with pytest.raises(InputError) as caught:
        chosen(root)
    assert str(caught.value) == (
        f"'{root}' is in a git repository, but git cannot list the files that it ignores (git is broken), so nothing "
        "is sent; repair that, or submit from a folder without git"
    )


def test_git_is_not_run_outside_a_repository(root, monkeypatch):
    break_git(root.parent, monkeypatch)
    assert sent(root) == CODE


def break_git(folder, monkeypatch):
    write(folder / "bin/git", "#!/bin/sh\necho git is broken >&2\nexit 2\n")
    (folder / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")


def test_links_to_files_in_the_folder_are_sent_and_other_links_stay(root):
    write(root.parent / "outside/secret.txt")
    (root / "inside.py").symlink_to("models/net.py")
    (root / "outside.txt").symlink_to("../outside/secret.txt")
    (root / "models/outside").symlink_to(root.parent / "outside")
    (root / "models/circle").symlink_to(root)
    (root / "nowhere").symlink_to("gone")
    (root / "key.txt").symlink_to("server.pem")
    assert sent(root) == sorted([*CODE, "inside.py"])


def test_any_name_can_be_left_out(root):
    """A name with special characters of patterns leaves out only the file of that name."""
    names = ["*", "[a]", "!mine.py", "#mine.py", "mine.??", "end ", " mine.py", "back\\slash", "jobs/**", "tab\t", "\n"]
    for name in names:
        write(root / name)
    assert sent(root, *(root / name for name in names)) == CODE


def test_more_than_100_mib_is_refused_with_the_largest_files(root):
    for name, mebibytes in (("models/large.bin", 70), ("larger.bin", 90)):
        with open(root / name, "wb") as file:
            file.truncate(mebibytes * 2**20)  # a hole: it takes no room on the disk
    with pytest.raises(InputError, match=r"has 167.8 MB in 7 files, and 104.9 MB can be sent") as caught:
        chosen(root)
    assert "--exclude PATTERN or .gitignore" in str(caught.value)
    assert [line.split() for line in str(caught.value).splitlines()[1:4]] == [
        ["94.4", "MB", "larger.bin"],
        ["73.4", "MB", "models/"],
        ["73.4", "MB", "models/large.bin"],
    ]
    assert 70 * 2**20 < sum(chosen(root, patterns=["larger.bin"]).values()) < 100 * 2**20


# A submission --------------------------------------------------------------------------------------------------------


def submit(cluster, rayfed, *words):
    """Submit a job; returns the names of the files of the working folder and of the package that the cluster got."""
    ended = rayfed("submit", "job.toml", "--address", cluster.url, *words)
    assert ended.exit_code == 0, ended.output
    environment = cluster.submissions[-1]["runtime_env"]
    uris = [environment["working_dir"], *environment["py_modules"]]
    archives = [cluster.packages[uri.removeprefix("gcs://")] for uri in uris]
    return [sorted(name for name in ZipFile(io.BytesIO(content)).namelist()) for content in archives]


def test_a_submission_has_the_folder_and_the_whole_installed_package(folder, rayfed, cluster):
    """The patterns that leave out parts of the folder, such as `data`, leave the package whole."""
    write(folder / "rayfed/__init__.py", "an older one")
    write(folder / "methods/readme.txt")
    own = [file for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    working, package = submit(cluster, rayfed, "--exclude", "methods", "--exclude", "*.json")
    assert working == ["job.toml", "tiny_models.py"]
    assert package == sorted(file.relative_to(PACKAGE.parent).as_posix() for file in own)
    assert "rayfed/data/fashion_mnist_mini/train.parquet" in package and "rayfed/cli/methods.json" in package


def test_a_job_file_that_would_not_be_sent_is_refused(folder, rayfed, cluster):
    ended = rayfed("submit", "job.toml", "--address", cluster.url, "--exclude", "*.toml")
    assert ended.exit_code == 2
    assert "'job.toml' would not be sent: git ignores it, or --exclude leaves it out" in ended.stderr
    assert not cluster.submissions


# Paths in jobs -------------------------------------------------------------------------------------------------------


def job(**given):
    return read_job({"name": "tiny"}, {key.replace("__", "."): value for key, value in given.items()})


def test_the_name_of_a_source_is_not_a_path():
    assert job().places() == {"output.path": "runs", "data.root": "~/.cache/rayfed/data"}
    assert job(data__source="mine", output__path="/shared").places()["data.source"] == "mine"


def test_relative_paths_begin_at_the_users_folder():
    given = job(data__source="mine.parquet", data__test="s3://bucket/test.parquet", output__checkpoints="~/kept")
    here = Path("/here")
    assert anchored([given], here, "x") == {"output.path": "/here/runs", "data.source": "/here/mine.parquet"}
    assert anchored([job(output__path="/shared/runs")], here, "x") == {}
    assert anchored([given, given], here, "x") == anchored([given], here, "x")


def test_relative_paths_are_refused_for_another_machine_and_where_runs_differ():
    with pytest.raises(InputError, match=r"output.path = 'runs': the head node of http://x:8265 is another machine"):
        anchored([job()], None, "http://x:8265")
    assert anchored([job(output__path="/shared/runs")], None, "http://x:8265") == {}
    with pytest.raises(InputError, match=r"data.source = 'a.parquet', 'b.parquet': these runs of a grid differ"):
        anchored([job(data__source="a.parquet"), job(data__source="b.parquet")], Path("/here"), "x")
