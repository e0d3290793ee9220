"""The files that `rayfed submit` sends, and the files that stay; compared with the archive that Ray
makes.
"""

import io
import os
import shlex
import subprocess
from inspect import signature
from pathlib import Path
from zipfile import ZipFile

import pytest
import ray
from ray._private import ray_constants
from ray._private.runtime_env.packaging import create_package

from rayfed import read_job
from rayfed.base.errors import InputError
from rayfed.job import EXAMPLES
from rayfed.runtime.versions import DRIVER_LABELS, minor
from rayfed.submit.driver import places
from rayfed.submit.package import PACKAGE, anchored, chosen, staged

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
    sizes, archive = chosen(root, without, patterns).sent, root.parent / "sent.zip"
    archive.unlink(missing_ok=True)
    with staged(root, sizes) as code:
        # Ray before 2.54 leaves nothing out of its own accord.
        find_excludes = getattr(ray_constants, "get_runtime_env_default_excludes", list)
        options = {"excludes": find_excludes(), "include_gitignore": True}
        if "include_gitignore" not in signature(create_package).parameters:
            # Ray before 2.53 always does what .gitignore says.
            del options["include_gitignore"]
        create_package(code["working_dir"], archive, **options)
    with ZipFile(archive) as packed:
        there = {
            entry.filename: entry.file_size for entry in packed.infolist() if not entry.is_dir()
        }
    if ".rayignore" not in there:
        assert there == sizes
    return sorted(there.keys() - {".rayignore", ".gitignore"})


SPECIAL = [
    "*",
    "[a]",
    "!mine.py",
    "#mine.py",
    "mine.??",
    "end ",
    " mine.py",
    "back\\slash",
    "jobs/**",
    "tab\t",
    "\n",
]
IGNORING = {
    "secret.py": "",
    "models/mine.py": "",
    "models/large/a.bin": "",
    "models/.gitignore": "mine.py\nlarge/\n",
}
# Other files, folders with git, paths that are left out, patterns; and what is sent.
WORLDS = {
    "as it is": ({}, [], [], [], CODE),
    "paths of the job": (
        {"out/tiny/table.csv": "", "images/cat/1.png": "", "models/images/1.png": ""},
        *([], ["out", "images"], [], sorted([*CODE, "models/images/1.png"])),
    ),
    **{
        " ".join(patterns): ({"notes/old/a.pdf": ""}, [], [], patterns, WITHOUT_TABLE)
        for patterns in (
            ["notes", "*.csv"],
            ["notes/**", "jobs"],
            ["/notes/old/*.pdf", "table.csv"],
        )
    },
    **{
        f"{file}: {pattern}": (
            {**IGNORING, file: f"{pattern}\nsecret.*\n"},
            git,
            [],
            [],
            WITHOUT_TABLE,
        )
        for file, pattern in (
            (".gitignore", "jobs/"),
            (".git/info/exclude", "table.csv"),
            (".rayignore", "*.csv"),
        )
        for git in (["."], [".", "models"])
    },
    # Each leaves out the file of its name alone.
    "special names": (
        dict.fromkeys(SPECIAL, ""),
        [],
        SPECIAL,
        [],
        CODE,
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_code_is_sent_and_secrets_data_caches_environments_runs_and_what_is_ignored_stay(
    root, name
):
    files, repositories, without, patterns, expected = WORLDS[name]
    for repository in repositories:
        git(root, "init", "-q", repository)
    for place, text in files.items():
        write(root / place, text)
    (root.parent / "link").symlink_to(root)
    places = [root.parent / "link" / place for place in without]
    assert sent(root, *places, patterns=patterns) == expected


@pytest.mark.parametrize("repository", ["work", "."])
def test_a_git_that_fails_inside_a_repository_is_refused(root, repository, monkeypatch):
    git(root.parent, "init", "-q", repository)
    write(root.parent / "bin/git", "#!/bin/sh\necho git is broken >&2\nexit 2\n")
    (root.parent / "bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{root.parent / 'bin'}{os.pathsep}{os.environ['PATH']}")
    words = (
        "but git cannot list the files that it ignores \\(git is broken\\), so nothing is sent; "
        "repair that, or"
    )
    with pytest.raises(InputError, match=words):
        chosen(root)


def test_links_to_files_in_the_folder_are_sent_and_other_links_stay(root):
    write(root.parent / "outside/secret.txt")
    (root / "inside.py").symlink_to("models/net.py")
    (root / "outside.txt").symlink_to("../outside/secret.txt")
    (root / "models/outside").symlink_to(root.parent / "outside")
    (root / "models/circle").symlink_to(root)
    (root / "nowhere").symlink_to("gone")
    (root / "key.txt").symlink_to("server.pem")
    assert sent(root) == sorted([*CODE, "inside.py"])


@pytest.mark.parametrize(
    "hiding", ["torch.py", "json.py", "torch/__init__.py", "asyncio/__init__.py"]
)
def test_a_file_that_would_hide_a_module_from_ray_is_refused(root, hiding):
    for harmless in ("models/json.py", "json.txt", "torch/mine.txt", "torches.py"):
        write(root / harmless)
    assert len(chosen(root).sent) == len(CODE) + 4
    write(root / hiding)
    place = hiding.partition("/")[0]
    says = (
        rf"^'{hiding}' would hide the module '{place.removesuffix('.py')}' from Ray, .* --exclude "
        rf"{place}$"
    )
    with pytest.raises(InputError, match=says):
        chosen(root)
    assert hiding not in chosen(root, patterns=[place]).sent


@pytest.mark.parametrize(
    ("include", "sent"),
    [
        ("secrets", ["secrets/a.yaml", "secrets/in/b.yaml"]),
        ("secrets/**", ["secrets/a.yaml", "secrets/in/b.yaml"]),
        ("secrets/in", ["secrets/in/b.yaml"]),
        ("a.yaml", ["secrets/a.yaml"]),
        ("*.txt", ["my_key.txt"]),
    ],
)
def test_what_is_included_is_sent_with_all_that_lies_in_it_and_no_other_secret(root, include, sent):
    for name in ("secrets/a.yaml", "secrets/in/b.yaml", "my_key.txt"):
        write(root / name)
    assert sorted(chosen(root, include=[include]).sent) == sorted([*CODE, *sent])


def test_a_folder_with_one_of_the_files_of_a_run_is_no_run(root):
    own = ["mine/environment.json", "theirs/job.toml"]
    for name in own:
        write(root / name)
    assert sorted(chosen(root).sent) == sorted([*CODE, *own])


SECRET_FILES = {
    ".env": "",
    "my.key": "",
    ".ssh/id_rsa": "",
    ".hidden/notes.txt": "",
    "a/.b/c.txt": "",
}


@pytest.mark.parametrize("secret", SECRET_FILES)
@pytest.mark.parametrize("tracked", [False, True])
def test_a_link_to_a_file_that_stays_stays_whatever_its_name(root, secret, tracked):
    """Also a link to such a link, one with the whole path, and one to a folder above it."""
    write(root / secret)
    (root / "plain.txt").symlink_to(secret)
    (root / "again.txt").symlink_to("plain.txt")
    (root / "whole.txt").symlink_to(root / secret)
    (root / "folder").symlink_to((root / secret).parent)
    if tracked:
        git(root, "init", "-q")
        git(root, "add", "-A", "-f")
    found = chosen(root)
    assert sorted(found.sent) == CODE
    for name in ("plain.txt", "again.txt", "whole.txt"):
        assert found.stays[name] == "is a link to what is not sent"


def test_more_than_100_mib_is_refused_with_the_largest_files(root):
    for name, mebibytes in (("models/large.bin", 70), ("larger.bin", 90)):
        with open(root / name, "wb") as file:
            # A hole: it takes no room on the disk.
            file.truncate(mebibytes * 2**20)
    with pytest.raises(
        InputError, match=r"has 167.8 MB in 7 files, and 104.9 MB can be sent"
    ) as caught:
        chosen(root)
    assert "--exclude PATTERN or .gitignore" in str(caught.value)
    assert [line.split() for line in str(caught.value).splitlines()[1:4]] == [
        ["94.4", "MB", "larger.bin"],
        ["73.4", "MB", "models/"],
        ["73.4", "MB", "models/large.bin"],
    ]
    assert 70 * 2**20 < sum(chosen(root, patterns=["larger.bin"]).sent.values()) < 100 * 2**20


# Secrets
# ------------------------------------------------------------------------------------------

NAMES = """
ID_RSA id_rsa id_dsa id_ecdsa id_ed25519.old id_rsa.bak my_id_rsa.txt deploy_rsa ssh_host_rsa_key server.pem
Server.PEM server.pem.bak server.pem~ server.key SERVER.KEY tls.key.1 key.ppk a.p8 a.p12 a.P12 a.pfx a.kdbx a.jks
a.keystore a.keytab a.gpg a.ovpn a.tfvars terraform.tfstate terraform.tfstate.backup prod.env env env.production
credentials.json credentials Credentials.JSON aws-credentials.csv application_default_credentials.json
client_secret_123.json clientSecret.json secrets.toml secrets.yaml Secrets.yml secret.txt secrets/prod.yaml auth.json
token token.txt token.json Token auth_token hf_token access-token.txt github_token accessToken.json api_key.txt
apiKey.json keys.json gcp_key.json private-key.txt accessKeys.csv service-account.json service_account_prod.json
kubeconfig kube-config.yaml passwords.txt password passwd .netrc _netrc .htpasswd htpasswd db.sqlite users.db
vault.yml wallet.dat cookies.txt kaggle.json signing-key.json .env .npmrc .aws/config envrc identity pw.txt key1.txt
api_key2.json APIKey2.json passwords2024.txt 1password.json apikey rootkey.csv passphrase.txt oauth2.json pgpass.conf
npmrc private.asc cert.der my.cnf x.kdb id_github
"""
BY_NAME = NAMES.split()
HARMLESS = """
tokens.py KEYS.PY secret.rs configs/db/local.toml secrets_model.py keyboard.py secret.py credentials.py key.py
passwords.ipynb id_rsa.py keyboard.json tokenizer.json added_tokens.json special_tokens_map.json vocab.txt monkey.csv
secretary.txt keypoints.json kernel.cu environment.yml authors.txt compass.json models/token/embed.py hotkey.json
README.md id_map.json job.toml
"""
INNOCENT = HARMLESS.split()


@pytest.mark.parametrize("tracked", [False, True])
def test_files_that_are_named_like_secrets_stay_and_innocent_files_go(tmp_path, tracked):
    for name in BY_NAME + INNOCENT:
        write(tmp_path / name)
    if tracked:
        git(tmp_path, "init", "-q")
        git(tmp_path, "add", "-A", "-f")
    found = chosen(tmp_path)
    assert sorted(found.sent) == sorted(INNOCENT)
    hidden = {name for name in BY_NAME if name.startswith(".")}
    assert {
        name for name, why in found.stays.items() if why.startswith("looks like a secret: ")
    } == {*BY_NAME} - hidden


def test_what_is_sent_is_shown_and_a_dry_run_sends_nothing(folder, rayfed, cluster):
    write(folder / "my_key.txt")
    write(folder / "mine.py", "x = 1\n")
    # Asks no cluster.
    dry = rayfed("submit", "job.toml", "--dry-run", "--address", "http://127.0.0.1:1")
    assert dry.exit_code == 0, dry.output
    lines = {" ".join(line.split()) for line in dry.stdout.splitlines()}
    assert "not sent my_key.txt looks like a secret: named 'key'" in lines
    assert {"6 bytes mine.py", "not sent data/ is the job's own place, or rayfed"} <= lines
    ended = rayfed("submit", "job.toml", "--address", cluster.url)
    assert "not sent     my_key.txt (named 'key'): like secrets; rename them" in ended.stdout
    assert "largest      job.toml 235 bytes, " in ended.stdout
    ended = rayfed(
        "submit",
        "job.toml",
        "--address",
        cluster.url,
        "--include",
        "my_key.txt",
        "-s",
        "name=other",
    )
    assert ended.exit_code == 0 and "not sent" not in ended.stdout


# A submission
# ------------------------------------------------------------------------------------------


def submit(cluster, rayfed, *words):
    """Submit a job; returns the names of the files of the working folder and of the package that
    the cluster got.
    """
    ended = rayfed("submit", "job.toml", "--address", cluster.url, *words)
    assert ended.exit_code == 0, ended.output
    environment = cluster.submissions[-1]["runtime_env"]
    uris = [environment["working_dir"], *environment["py_modules"]]
    archives = [cluster.packages[uri.removeprefix("gcs://")] for uri in uris]
    return [
        sorted(name for name in ZipFile(io.BytesIO(content)).namelist()) for content in archives
    ]


def test_a_cluster_here_of_another_ray_gets_no_job(folder, rayfed, cluster, monkeypatch):
    # The cluster still tells the right one.
    monkeypatch.setattr("ray.__version__", "2.99.0")
    ended = rayfed("submit", "job.toml", "--address", cluster.url)
    assert ended.exit_code == 2
    assert f"{cluster.url}: that cluster has Ray " in ended.output
    assert "but this environment has Ray 2.99.0; " in ended.output
    assert not cluster.packages and not cluster.submissions


def test_a_label_of_the_driver_is_refused_by_a_ray_that_knows_none(
    folder, rayfed, cluster, monkeypatch
):
    monkeypatch.setattr("ray.__version__", "2.53.0")
    ended = rayfed("submit", "job.toml", "--address", cluster.url, "--entrypoint-label", "a=b")
    assert ended.exit_code == 2
    assert "--entrypoint-label needs Ray 2.54 or later" in ended.output
    assert not cluster.submissions


def test_a_driver_gets_its_variables_packages_and_place_and_nothing_else_without_them(
    folder, rayfed, cluster
):
    submit(cluster, rayfed)
    plain = cluster.submissions[-1]
    assert set(plain["runtime_env"]["env_vars"]) == {
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV",
        "RAY_JOB_STOP_WAIT_TIME_S",
        "RAYFED_COMMIT",
    }
    assert "pip" not in plain["runtime_env"] and not [
        key for key in plain if key.startswith("entrypoint_")
    ]

    asks = shlex.split(
        "--env A=1 --env B=x=y --env C= --with timm==1.0.31 --with 'tiny @ git+https://host/tiny' "
        "--entrypoint-num-cpus 0.5 --entrypoint-memory 1610612736"
    )
    knows_labels = minor(ray.__version__) >= DRIVER_LABELS
    if knows_labels:
        asks += ["--entrypoint-label", "disk=!in(slow,old)"]
    submit(cluster, rayfed, *asks, "-s", "name=other")
    asked = cluster.submissions[-1]
    variables = asked["runtime_env"]["env_vars"]
    assert variables == {**plain["runtime_env"]["env_vars"], "A": "1", "B": "x=y", "C": ""}
    assert asked["runtime_env"]["pip"]["packages"] == [
        "timm==1.0.31",
        "tiny @ git+https://host/tiny",
    ]
    assert asked["entrypoint"].startswith("python -m rayfed run "), (
        "the Python that has the packages"
    )
    place = {key: value for key, value in asked.items() if key.startswith("entrypoint_")}
    labels = {"entrypoint_label_selector": {"disk": "!in(slow,old)"}} if knows_labels else {}
    assert place == {"entrypoint_num_cpus": 0.5, "entrypoint_memory": 1610612736, **labels}


@pytest.mark.parametrize("address", ["", "auto", "10.0.0.1:6379"])
def test_a_job_runs_on_the_cluster_that_gets_it_whatever_address_it_names(
    folder, rayfed, cluster, address
):
    words = ["-s", f"ray.address={address}", "-s", "ray.mode=on"] if address else []
    submit(cluster, rayfed, *words)
    command = shlex.split(cluster.submissions[-1]["entrypoint"])
    given = [word for word in command if word.startswith("ray.address=")]
    assert given == ([f"ray.address={address}", "ray.address="] if address else [])


def test_a_driver_runs_on_the_head_or_where_there_is_what_it_asks_for():
    head = {
        "isHeadNode": True,
        "resourcesTotal": {"CPU": 2.0, "memory": 8.0},
        "labels": {"disk": "slow"},
    }
    other = {"resourcesTotal": {"CPU": 8.0, "memory": 4.0}, "labels": {}}

    def where(**asked):
        return places([other, head], {f"entrypoint_{name}": value for name, value in asked.items()})

    assert where() == [head]
    assert where(num_cpus=1) == [other, head]
    assert where(num_cpus=4) == [other]
    assert where(memory=6) == [head]
    assert where(label_selector={"disk": "!slow"}) == [other]
    assert where(num_cpus=4, memory=6) == []


def test_a_relative_path_is_refused_with_the_reason_where_no_node_has_what_the_driver_asks_for(
    folder, rayfed, cluster, monkeypatch
):
    head = {"isHeadNode": True, "resourcesTotal": {"CPU": 2.0}, "labels": {}}
    monkeypatch.setattr("rayfed.cli.submit.nodes_of", lambda jobs: [head])
    monkeypatch.setattr("rayfed.cli.submit.are_here", lambda jobs, nodes: bool(nodes))
    ended = rayfed("submit", "job.toml", "--address", cluster.url, "--entrypoint-num-cpus", "64")
    assert (
        ended.exit_code == 2
        and "runs on a node with what it asks for, and none has it, (of http" in ended.output
    )


def test_a_submission_has_the_folder_and_the_whole_installed_package(folder, rayfed, cluster):
    """The patterns that leave out parts of the folder, such as `data`, leave the package whole."""
    write(folder / "rayfed/__init__.py", "an older one")
    write(folder / "methods/readme.txt")
    own = [
        file for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    ]
    names = {file.relative_to(PACKAGE.parent).as_posix() for file in own}
    names |= {
        f"rayfed/examples/{file.relative_to(EXAMPLES)}"
        for file in EXAMPLES.rglob("*")
        if file.is_file()
    }
    working, package = submit(cluster, rayfed, "--exclude", "methods", "--exclude", "*.json")
    assert working == ["job.toml", "tiny_models.py"]
    assert package == sorted(names)
    assert "rayfed/data/fashion_mnist_mini/train.parquet" in package


def test_an_example_is_submitted_by_its_name_as_it_is_sent_with_the_package(
    folder, rayfed, cluster
):
    ended = rayfed("submit", "quickstart", "--address", cluster.url, "-s", "name=example")
    assert ended.exit_code == 0, ended.output
    sent = cluster.submissions[-1]
    assert " rayfed run quickstart " in sent["entrypoint"]
    (package,) = (
        cluster.packages[uri.removeprefix("gcs://")] for uri in sent["runtime_env"]["py_modules"]
    )
    assert "rayfed/examples/quickstart.toml" in ZipFile(io.BytesIO(package)).namelist()


# Paths in jobs
# ------------------------------------------------------------------------------------------


def job(**given):
    return read_job(
        {"name": "tiny"}, {key.replace("__", "."): value for key, value in given.items()}
    )


def test_relative_paths_begin_at_the_users_folder():
    given = job(
        data__source="mine.parquet",
        data__test="s3://bucket/test.parquet",
        output__checkpoints="~/kept",
    )
    here = Path("/here")
    assert anchored([given], here, "x") == {
        "output.path": "/here/runs",
        "data.source": "/here/mine.parquet",
    }
    assert anchored([job(output__path="/shared/runs")], here, "x") == {}
    assert anchored([given, given], here, "x") == anchored([given], here, "x")


def test_relative_paths_are_refused_for_another_machine_and_where_runs_differ():
    elsewhere = (
        r"output.path = 'runs': the job's driver runs on another machine \(of http://x:8265\);"
    )
    with pytest.raises(InputError, match=elsewhere):
        anchored([job()], None, "another machine (of http://x:8265)")
    assert anchored([job(output__path="/shared/runs")], None, "another machine") == {}
    with pytest.raises(
        InputError, match=r"data.source = 'a.parquet', 'b.parquet': these runs of a grid differ"
    ):
        anchored([job(data__source="a.parquet"), job(data__source="b.parquet")], Path("/here"), "x")
