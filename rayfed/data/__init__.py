"""Data: sources of images, partitions among clients, augmentation of batches."""

from rayfed.data.augment import Augment, Batches, prepare
from rayfed.data.federation import Federation, federate, open_federation
from rayfed.data.partition import PARTITIONS, Partition
from rayfed.data.samples import Dataset, Samples
from rayfed.data.sources import SOURCES, Source, load

__all__ = [
    "PARTITIONS", "SOURCES", "Augment", "Batches", "Dataset", "Federation", "Partition", "Samples", "Source",
    "federate", "load", "open_federation", "prepare",
]  # fmt: skip
