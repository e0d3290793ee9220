"""Compare federated-learning methods, with the same numbers each time, on Ray.

>>> import rayfed
>>> short = {"train.num_rounds": 2}
>>> result = rayfed.run("jobs/quickstart.toml", short, progress=True)  # doctest: +SKIP
>>> result.rounds.column("test_accuracy")  # doctest: +SKIP
"""

import os
import sys

# `python -m rayfed` looks for modules in the current folder first. Here that folder comes last, as
# a file in it may have the name of a module that rayfed needs.
if sys.argv[:1] == ["-m"] and sys.path[0] in ("", os.getcwd()):
    sys.path.append(sys.path.pop(0))

from typing import TYPE_CHECKING

__all__ = [
    "InputError",
    "Job",
    "LocalModels",
    "Observer",
    "Result",
    "compose",
    "local_models",
    "own_models",
    "read_job",
    "read_rounds",
    "replay",
    "resume",
    "run",
    "switch",
]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from rayfed.api import resume, run
    from rayfed.base.errors import InputError
    from rayfed.experiment import own_models, replay
    from rayfed.job import Job, read_job
    from rayfed.methods import compose, switch
    from rayfed.report.models import LocalModels, local_models
    from rayfed.report.result import Result
    from rayfed.report.runs import read_rounds
    from rayfed.rounds.observer import Observer
else:
    HOMES = {
        "api": ["resume", "run"],
        "base.errors": ["InputError"],
        "experiment": ["own_models", "replay"],
        "job": ["Job", "read_job"],
        "methods": ["compose", "switch"],
        "report.models": ["LocalModels", "local_models"],
        "report.result": ["Result"],
        "report.runs": ["read_rounds"],
        "rounds.observer": ["Observer"],
    }

    def __getattr__(name):
        """Import a name of the package when it is used, so that `rayfed --help` is quick.

        Raises `AttributeError` for a name that the package does not have.
        """
        import importlib

        if name == "Display":
            raise AttributeError(
                "rayfed.Display is now rayfed.Observer: its `started(run)` has the setup as "
                "run.setup, and `run` and `resume` take observers=[...] for display=..."
            )
        for home, names in HOMES.items():
            if name in names:
                return getattr(importlib.import_module(f"rayfed.{home}"), name)
        raise AttributeError(f"module 'rayfed' has no attribute '{name}'")

    def __dir__():
        """Return the names, for completion by a notebook or a shell."""
        return [*__all__, "__version__"]
