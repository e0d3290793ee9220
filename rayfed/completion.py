"""What the shell is offered where a job file, a key or a method stands; with click's own completion."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem


class JobFile(click.ParamType):
    """A job file; those up to two folders down are offered."""

    name = "job"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        folder = Path(incomplete if incomplete.endswith("/") else os.path.dirname(incomplete))
        files = sorted(str(file) for depth in ("", "*/", "*/*/") for file in folder.glob(f"{depth}*.toml"))
        return starting(incomplete.removeprefix("./"), files) or [CompletionItem(incomplete, type="file")]


class Override(click.ParamType):
    """`key.sub=value`; the job file's keys are offered, and where none of them fits, all that there are."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        from rayfed.job import read_override

        return read_override(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith("method="):
            return starting(incomplete, [f"method={name}" for name in method_names()])
        words = ctx.args  # a line that ends in -s is not parsed yet
        job = next((word for word in words if word.endswith(".toml")), "")
        in_file = starting(incomplete, [f"{key}=" for key in keys_of(job)])
        return in_file or starting(incomplete, [f"{key}=" for key in all_keys()])  # takes seconds: it imports torch


class MethodName(click.ParamType):
    """A method or part; all are offered."""

    name = "name"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return starting(incomplete, method_names())


def starting(incomplete: str, words: list[str]) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def method_names() -> list[str]:
    from rayfed.methods.registry import PARTS, RECIPES

    return [*RECIPES, *PARTS]


def keys_of(path: str) -> list[str]:
    """The dotted keys that are in a job file, if it can be read."""
    import tomllib

    try:
        return dotted(tomllib.loads(Path(path).read_text()))
    except (OSError, ValueError):
        return []


def all_keys() -> list[str]:
    """The dotted keys that a job can have, whichever its partition."""
    from rayfed.job import SECTIONS

    keys = [f"{section}.{field.name}" for section, cls in SECTIONS for field in fields(cls)]
    return sorted({"name", "seed", "method", "data.partition.name", "model.name", *keys})


def dotted(tables: dict[str, Any], prefix: str = "") -> list[str]:
    """The keys of nested tables.

    >>> dotted({"seed": 0, "train": {"lr": 0.1}})
    ['seed', 'train.lr']
    """
    return [
        key
        for name, value in tables.items()
        for key in (dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name])
    ]
