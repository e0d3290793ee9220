"""Federated learning with distillation against forgetting, on Ray.

>>> import rayfed
>>> result = rayfed.run("jobs/quickstart.toml", overrides={"train.num_rounds": 2})  # doctest: +SKIP
>>> result.rounds.column("test_accuracy")  # doctest: +SKIP
"""

from __future__ import annotations

from typing import Any

__all__ = ["InputError", "Job", "Result", "compose", "read_job", "resume", "run", "switch"]
__version__ = "0.1.0"

_HOME = {
    "InputError": "rayfed.values",
    "Job": "rayfed.job",
    "Result": "rayfed.experiment",
    "compose": "rayfed.methods",
    "read_job": "rayfed.job",
    "resume": "rayfed.experiment",
    "run": "rayfed.experiment",
    "switch": "rayfed.methods",
}


def __getattr__(name: str) -> Any:
    """The package's few names, imported when they are asked for, so that `--help` is quick."""
    if name not in _HOME:
        raise AttributeError(f"module 'rayfed' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
