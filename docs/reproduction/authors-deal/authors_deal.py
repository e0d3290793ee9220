"""The clients and cohorts that the code of FedNTD's authors deals, whatever the run's seed.

    python authors_deal.py       # writes the cohorts, a trace, to cohorts.parquet beside this file

Their repository (Lee-Gihun/FedNTD, commit be00ee5, from which FedLMD's is made) seeds the partition
with 19940817 and the cohort of round r with r - 1 in every run. With these two, and the images in
the same order, clients and cohorts here are theirs.
"""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayfed.data.partition import Partition

COHORTS = Path(__file__).with_name("cohorts.parquet")


@dataclass(frozen=True)
class AuthorsDeal:
    """Shards of one class each, `s` per client; the deck of classes is shuffled, then a shard
    of the class is drawn.
    """

    num_clients: int = 100
    s: int = 2
    seed: int = 19940817

    def split(self, labels, num_classes, groups=None):
        per_class = self.s * self.num_clients // num_classes
        deck = list(range(num_classes)) * per_class
        random.Random(self.seed).shuffle(deck)
        draws = np.random.RandomState(self.seed)
        shards = {
            c: np.array_split(np.flatnonzero(labels == c), per_class) for c in range(num_classes)
        }
        owners = np.empty(len(labels), np.int64)
        for place, c in enumerate(deck):
            owners[shards[c].pop(draws.choice(len(shards[c]), replace=False))] = place // self.s
        return Partition.of_owners(owners, self.num_clients)


def cohorts(rounds: int = 200, num_clients: int = 100, chosen: int = 10) -> pa.Table:
    """A row for each client and round."""
    drawn = [
        np.random.RandomState(round).choice(num_clients, chosen, replace=False)
        for round in range(rounds)
    ]
    return pa.table(
        {"round": np.repeat(np.arange(1, rounds + 1), chosen), "client": np.concatenate(drawn)}
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=f"Write {COHORTS.name}, beside this file.").parse_args()
    pq.write_table(cohorts(), COHORTS)
