"""What a submission asks for beside its files: variables and packages for its processes, and a place for its driver.

Packages are installed by pip: it builds on those of the cluster's nodes, where uv would install another torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from rayfed.base.errors import InputError

OF_CLUSTER = {"ray", "rayfed", "rayfed-distill"}
FILES = (".txt", ".toml", ".whl", ".zip", ".gz")


def pairs(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    """The values of an option that is given as KEY=VALUE, by their keys."""
    values = {}
    for word in given:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise InputError(f"{param.opts[0]} '{key}': write KEY=VALUE")  # without a value, which may be secret
        values[key] = value
    return values


def packages(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> list[str]:
    """Packages that pip takes, and that the cluster does not have of its own accord."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    for word in given:
        try:
            name = Requirement(word).name
        except InvalidRequirement:
            name = ""
        if not name or name.lower().endswith(FILES) or canonicalize_name(name) in OF_CLUSTER:
            raise InputError(
                f"{param.opts[0]} '{word}': write a package as pip does, such as timm==1.0.31 or "
                "'timm @ git+https://...'; no file of this machine is sent, and Ray and rayfed are there"
            )
    return list(given)


def places(nodes: Sequence[Mapping[str, Any]], asked: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The nodes where a driver may run, once no other work is there; `asked` as Ray's client of a job server has it."""
    from rayfed.runtime.placement import selected

    if not asked:
        return [node for node in nodes if node.get("isHeadNode")]
    labels = asked.get("entrypoint_label_selector", {})
    least = {"CPU": asked.get("entrypoint_num_cpus", 0), "memory": asked.get("entrypoint_memory", 0)}
    rooms = [node for node in nodes if all(node["resourcesTotal"].get(name, 0) >= least[name] for name in least)]
    return [node for node in rooms if selected(node["labels"], labels)]
