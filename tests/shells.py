"""The environment of a user's shell, for the processes that tests start."""

import os


def without_ray(*others: str) -> dict[str, str]:
    """The variables of this process but those of Ray, and those that begin with one of `others`.

    The niceness of Ray's workers stays: beside other tests, nicer ones would wait for minutes.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_", *others)) or name == "RAY_worker_niceness"
    }
