"""What a submission asks for besides its files.

These are variables and packages for its processes, and a place for its driver. Packages are
installed by pip: it builds on the packages of the cluster's nodes, where uv would install another
torch.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from rayfed.base.errors import InputError

# rayfed and Ray set these variables in a submitted job.
SET = "RAYFED_COMMIT|RAY_ADDRESS|RAY_JOB_CONFIG_JSON_ENV_VAR"
# The value of a label as Ray selects by it.
SELECTOR = r"!?(?:in\([\w.-]+(?:,[\w.-]+)*\)|[\w.-]+)"
# The cluster has these packages already.
OF_CLUSTER = {"ray", "rayfed", "rayfed-distill"}
# A requirement that ends with one of these is a file of this machine.
FILES = (".txt", ".toml", ".whl", ".zip", ".gz")


class Written(click.ParamType):
    """A type of option whose value matches a pattern, and is read by a function of the match."""

    def __init__(
        self, name: str, pattern: str, how: str, read: Callable[[re.Match[str]], Any]
    ) -> None:
        self.name = name
        self._pattern = re.compile(pattern)
        self._how = how
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        match = self._pattern.fullmatch(value)
        read = self._read(match) if match else None
        if not read:
            option = param.opts[0] if param else ""
            name, equals, _ = value.partition("=")
            # The value of a variable may be secret.
            shown = f"{name}=..." if equals and option == "--env" else value
            raise InputError(f"{option} '{shown}': write {self._how}")
        return read


def requirement(match: re.Match[str]) -> str | None:
    """Return the package of a match; None if pip does not take it or the cluster has it anyway."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    try:
        wanted = Requirement(match[0])
    except InvalidRequirement:
        return None
    is_here = wanted.name.lower().endswith(FILES) or "://" not in (wanted.url or "://")
    return None if is_here or canonicalize_name(wanted.name) in OF_CLUSTER else match[0]


def distinct(
    ctx: click.Context, param: click.Parameter, pairs: Sequence[tuple[str, str]]
) -> dict[str, str]:
    """Return the values of an option that may be given often, by their names.

    Raises `InputError` for a name that is given twice.
    """
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"{param.opts[0]} {name} is given {names.count(name)} times; give it once"
            )
    return dict(pairs)


VARIABLE = Written(
    "KEY=VALUE",
    rf"(?s)(?!(?:{SET})=)([A-Za-z_]\w*)=(.*)",
    "KEY=VALUE, with a name of letters, digits and _ that rayfed and Ray do not set themselves",
    re.Match.groups,
)
PACKAGE = Written(
    "PACKAGE",
    ".+",
    "a package as pip does, such as timm==1.0.31 or 'timm @ git+https://...'; no file of this "
    "machine is sent, and Ray and rayfed are there",
    requirement,
)
NUMBER = Written(
    "NUMBER",
    r"[0-9]{1,6}(\.[0-9]+)?",
    "a number above 0, such as 1 or 0.5",
    lambda match: float(match[0]),
)
BYTES = Written(
    "BYTES", "[0-9]{1,15}", "a number of bytes, such as 4000000000", lambda match: int(match[0])
)
LABEL = Written(
    "KEY=VALUE",
    rf"([\w./-]+)=({SELECTOR})",
    "KEY=VALUE, with a value as Ray selects by it: H100, !H100, in(H100,H200) or !in(H100)",
    re.Match.groups,
)


def places(nodes: Sequence[Mapping[str, Any]], asked: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the nodes where a driver may run, once no other work is there.

    `asked` are the arguments of Ray's client of a job server. If nothing is asked, a driver runs on
    the head node.
    """
    from rayfed.runtime.placement import selected

    if not asked:
        return [node for node in nodes if node.get("isHeadNode")]
    labels = asked.get("entrypoint_label_selector", {})
    least = {
        "CPU": asked.get("entrypoint_num_cpus", 0),
        "memory": asked.get("entrypoint_memory", 0),
    }
    fitting = []
    for node in nodes:
        has_room = all(node["resourcesTotal"].get(name, 0) >= least[name] for name in least)
        if has_room and selected(node["labels"], labels):
            fitting.append(node)
    return fitting
