"""A method that leaves the processor to others: for runs beside which a test does something else."""

import time
from dataclasses import dataclass

from rayfed.methods import Part, compose, fedavg


@dataclass(frozen=True)
class Wait(Part):
    """Waits at each client."""

    def begin(self, client):
        time.sleep(0.2)


def waiting():
    return compose(fedavg(), Wait())
