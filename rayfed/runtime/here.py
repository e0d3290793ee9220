"""The old name of `LocalWorkers`."""

from rayfed.runtime.local_workers import LocalWorkers as Here

__all__ = ["Here"]
