"""What some tests need: packages that rayfed uses where they are installed, such as timm, or Linux.

Without it these tests are skipped.
"""

import sys
from importlib.util import find_spec

import pytest

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into Linux's /proc")


def missing(*packages):
    """Return why a test is skipped that needs these packages; '' where all are installed."""
    absent = [name for name in packages if find_spec(name) is None]
    if not absent:
        return ""
    return f"{', '.join(absent)} not installed: pip install -e '.[dev]' installs all extras"


def needs(*packages):
    """Return a mark for a test that needs these packages."""
    reason = missing(*packages)
    return pytest.mark.skipif(bool(reason), reason=reason)
