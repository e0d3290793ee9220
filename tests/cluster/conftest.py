"""What several tests read from cluster/."""

import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "cluster"


@pytest.fixture(scope="session")
def documents():
    """Gives the YAML documents of a file below cluster/."""
    return lambda name: list(yaml.safe_load_all((CLUSTER / name).read_text()))


@pytest.fixture(scope="session")
def check():
    """Raises jsonschema.ValidationError for a manifest that Kubernetes or its operators would refuse."""
    return runpy.run_path(str(Path(__file__).with_name("schemas.py")))["check"]


@pytest.fixture(scope="session")
def pinned():
    """Package -> the version in constraints.txt."""
    return dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
