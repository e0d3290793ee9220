"""One small Ray for all tests of the runtime, in its own short folder, with more CPUs and GPUs than the machine has."""

import os
import shutil
import tempfile

import pytest
import ray

from rayfed.runtime.session import OUR_RAY


@pytest.fixture(scope="session")
def cluster():
    """The address of a Ray with 4 CPUs and 2 pretended GPUs; it is stopped, and its folder removed, at the end."""
    os.environ.update(OUR_RAY)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a socket's path may have 107 characters
    context = ray.init(
        address="local", num_cpus=4, num_gpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()
    for key in OUR_RAY:
        del os.environ[key]
    shutil.rmtree(folder, ignore_errors=True)
