"""What a client trains with is the same on actors as in this process."""

import pytest

from rayfed.clients.schedules import Cosine
from rayfed.methods import fedntd

ADAM = {"optimizer": "adamw", "momentum": 0.0, "lr": 0.01, "lr_decay": 1.0, "schedule": Cosine(until=4, warmup=1)}


@pytest.mark.slow
def test_two_actors_train_to_the_bits_of_this_process(cluster, make_site, here, on_ray):
    site = make_site(fedntd(), norm=True, clip=0.5, local_epochs=1.5, clients_per_round=6, **ADAM)
    assert on_ray(site, 2) == here(site)
