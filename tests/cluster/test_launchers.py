"""The files for `ray up`: Ray's own validator accepts them, without a network, and Ray's defaults add no command."""

import socket

import pytest
from ray.autoscaler._private.util import prepare_config, validate_config

every_file = pytest.mark.parametrize("name", ["aws", "gcp", "on-premise"])


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*given):
        raise AssertionError(f"reached out to {given}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def given(documents):
    return lambda name: documents(f"{name}.yaml")[0]


@every_file
def test_ray_accepts_every_file(name, given):
    validate_config(prepare_config(given(name)))


@every_file
def test_ray_runs_the_commands_of_the_file_and_no_others(name, given):
    """Ray's defaults would replace the image's Ray by a nightly build."""
    prepared = prepare_config(given(name))
    for commands in ("setup_commands", "head_setup_commands", "worker_setup_commands"):
        assert prepared[commands] == []
    for commands in ("initialization_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        assert prepared[commands] == given(name)[commands]
        assert not any("#" in command for command in prepared[commands]), "a comment is part of a command"


@every_file
def test_the_head_does_not_train_and_its_dashboard_is_on_loopback(name, given):
    (start,) = [command for command in given(name)["head_start_ray_commands"] if "ray start" in command]
    for option in ("--num-cpus=0", "--num-gpus=0", "--dashboard-host=127.0.0.1"):
        assert option in start.split()


@every_file
def test_there_is_a_worker_from_the_start(name, given):
    prepared = prepare_config(given(name))
    types = prepared["available_node_types"]
    if name != "on-premise":  # on premise all machines, the head too, are of one type
        head = types.pop(prepared["head_node_type"])
        assert (head["resources"], head["max_workers"]) == ({"CPU": 0, "GPU": 0}, 0)
    (workers,) = types.values()
    assert 1 <= workers["min_workers"] <= workers["max_workers"] == prepared["max_workers"]


@every_file
def test_every_node_has_the_token_and_shared_storage(name, given):
    file = given(name)
    assert "--env RAY_AUTH_MODE=token" in file["docker"]["run_options"]
    assert "--volume /shared:/shared" in file["docker"]["run_options"]
    assert file["file_mounts"] == {"/home/ray/.ray/auth_token": "~/.ray/auth_token"}
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert file[commands][0] == "chmod 600 ~/.ray/auth_token"
    assert any("mountpoint -q /shared" in command for command in file["initialization_commands"])


@every_file
def test_the_container_sees_the_gpus_that_ray_counts(name, given):
    options = given(name)["docker"]["run_options"]
    for setting in ("NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"):
        assert f"--env {setting}" in options


def test_the_security_group_admits_ssh_only(given):
    (rule,) = given("aws")["provider"]["security_group"]["IpPermissions"]
    assert (rule["FromPort"], rule["ToPort"]) == (22, 22)
    assert all(where["CidrIp"].endswith("/32") for where in rule["IpRanges"])
