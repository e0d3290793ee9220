"""Compare the versions of Ray and Python.

A cluster that is joined must have those of this process.
"""

import platform
import re

import ray

from rayfed.base.errors import InputError

# The oldest Ray that rayfed works with, as in pyproject.toml.
OLDEST = (2, 52)
# The oldest Ray that chooses the node of a job's driver by the node's labels.
DRIVER_LABELS = (2, 54)


def minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) where it has none.

    >>> minor("2.56.0rc1")
    (2, 56)
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def refuse_others(named: str, their_ray: str, their_python: str = "") -> None:
    """Raise `InputError` where a Ray has another version, or another minor version of Python.

    `named` says in the message who has given that Ray's address. Ray's processes understand only
    each other's own version. The patch version of Python makes no difference to rayfed.
    """
    our_python = platform.python_version()
    same_python = not their_python or minor(their_python) == minor(our_python)
    if their_ray == ray.__version__ and same_python:
        return
    their_versions, our_versions = f"Ray {their_ray}", f"Ray {ray.__version__}"
    if their_python:
        their_versions += f" on Python {their_python}"
        our_versions += f" on Python {our_python}"
    if minor(their_ray) < OLDEST:
        here = "rayfed needs Ray {}.{} or later".format(*OLDEST)
    else:
        here = f"either install that Ray here: pip install 'ray[default]=={their_ray}'"
        if not same_python:
            here += ", in an environment with Python {}.{}".format(*minor(their_python))
    python = "" if same_python else " and Python {}.{}".format(*minor(our_python))
    elsewhere = f"use a cluster with Ray {ray.__version__}{python}"
    joint = ", so" if minor(their_ray) < OLDEST else "; or"
    raise InputError(
        f"{named}: that cluster has {their_versions}, but this environment has {our_versions}; "
        "a run and its cluster need the same Ray and the same minor version of Python; "
        f"{here}{joint} {elsewhere}"
    )


def refuse_label_of_driver() -> None:
    """Raise `InputError` where this environment's Ray cannot choose a driver's node by labels."""
    if minor(ray.__version__) < DRIVER_LABELS:
        raise InputError(
            f"--entrypoint-label needs Ray {'.'.join(map(str, DRIVER_LABELS))} or later, and this "
            f"environment has Ray {ray.__version__}; leave the option out, or use a newer Ray here "
            "and on the cluster"
        )


def refuse_as_told(named: str, error: BaseException) -> None:
    """Raise `InputError` where Ray's own error says that a cluster has other versions.

    Ray says so itself where a cluster could not be asked before: through Ray's client, or where a
    later Ray lacks a private name.
    """
    versions = re.search(r"cluster was started with:\s+Ray: (\S+)\s+Python: (\S+)", str(error))
    if versions:
        refuse_others(named, versions[1], versions[2])
