"""What fits into the memory that this process may use, before the system would kill it for more."""

import math
import os
from contextlib import suppress
from pathlib import Path

from rich.filesize import decimal

from rayfed.base.errors import InputError


def _memory(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """The bytes that this process may use: the machine's, or the least that a control group (a pod, a job) allows."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            folder, file = (groups / "memory", "memory.limit_in_bytes") if controllers else (groups, "memory.max")
            place = Path(f"{folder}{path}")  # in a container, this may be a path of its host
            for group in (place, *(parent for parent in place.parents if parent.is_relative_to(folder))):
                with suppress(OSError, ValueError):  # there is no such file, or it says "max"
                    found.append(int((group / file).read_text()))
    return min(found)


MEMORY = _memory()


def has_room(count: int, shape: tuple[int, ...]) -> None:
    """Raises InputError for more images than fit in memory, before the system would kill a process for them."""
    what = f"{count:,} images of {' x '.join(map(str, shape))}"
    fits(count * math.prod(shape), what, "scale them with data.size, or give fewer")


def fits(needed: int, what: str, advice: str) -> None:
    """Raises InputError where so many bytes are more than this process may use."""
    if needed > MEMORY:
        may = f"this process may use {decimal(MEMORY)}"
        raise InputError(f"{what} take {decimal(needed)}, and {may}; {advice}")
