"""Runs by setting: runs that differ in their method alone, and the settings' places on an axis."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rayfed.job import flat
from rayfed.report.read import Group

# Keys that do not make a setting: they change no number, or belong to a method or a seed.
NO_SETTING = (
    "name",
    "seed",
    "data.partition.seed",
    "track",
    "method",
    "model.project",
    "ray.",
    "output.",
)


def settings_of(groups: Mapping[str, Group]) -> dict[str, dict[str, Group]]:
    """Return the groups of each setting by their labels, by the titles of the settings.

    A setting is all of a job but its method. Titles and labels are steps of the groups' names: the
    label is what differs within a setting.
    """
    together: dict[str, list[str]] = {}
    for name, group in groups.items():
        together.setdefault(setting_of(group.runs[0].job), []).append(name)
    steps = {name: name.split("/") for name in groups}
    varying: set[int] = set()
    for names in together.values():
        for place in range(min(len(steps[name]) for name in names)):
            if len({steps[name][place] for name in names}) > 1:
                varying.add(place)
    found: dict[str, dict[str, Group]] = {}
    for names in together.values():
        for name in names:
            title = "/".join(step for at, step in enumerate(steps[name]) if at not in varying)
            label = "/".join(step for at, step in enumerate(steps[name]) if at in varying)
            found.setdefault(title, {})[label or name] = groups[name]
    return found


def setting_of(job: Mapping[str, Any]) -> str:
    """Return all of a job but its method and what changes no number, as text."""
    setting = {}
    for key, value in flat(job).items():
        if not key.startswith(NO_SETTING):
            setting[key] = value
    return json.dumps(setting, sort_keys=True, default=str)


def unique(values: Iterable[str]) -> list[str]:
    """Return values in the order of their first appearance, each once."""
    return list(dict.fromkeys(values))
