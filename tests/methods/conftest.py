"""What the methods are compared with: a client's data and its round of training, in plain torch."""

import pytest
import torch
import torch.nn.functional as F

from rayfed.base.seeds import Purpose, seed_of
from rayfed.clients.batches import batches
from rayfed.data.augment import prepare
from rayfed.tensors.weights import state_of, with_weights


def _of_client(setup, client):
    data = setup.federation
    rows = data.client(client)
    images = prepare(torch.from_numpy(data.train.examples[rows]), data.mean, data.std)
    return images.plain(torch.arange(len(rows))), torch.from_numpy(data.train.labels[rows])


@pytest.fixture(scope="session")
def of_client():
    """A client's normalised images, and its labels."""
    return _of_client


@pytest.fixture(scope="session")
def plain_sgd():
    """One client's round in plain torch from the given weights; gives the model's state and the
    losses.

    With `head`, that share of the steps trains the head alone, and the others the body; with `lam`,
    each step is pulled to the weights of `anchor`.
    """

    def train(setup, client, weights, round, *, head=None, lam=0.0, anchor=None):
        training = setup.job.train
        model = with_weights(setup.model, weights).train()
        images, labels = _of_client(setup, client)
        lr = training.lr * training.lr_decay ** (round - 1)
        decay = training.weight_decay
        optimizer = torch.optim.SGD(
            model.parameters(), lr, training.momentum, weight_decay=decay, fused=True
        )
        rng = torch.Generator().manual_seed(seed_of(setup.job.seed, Purpose.BATCHES, round, client))
        order = list(batches(len(labels), training, rng))
        losses = []
        for step, index in enumerate(order):
            if head is not None:
                model.features.requires_grad_(step >= int(head * len(order)))
                model.head.requires_grad_(step < int(head * len(order)))
            loss = F.cross_entropy(model(images[index]), labels[index])
            optimizer.zero_grad()
            loss.backward()
            if lam:
                for name, p in model.named_parameters():
                    p.grad += lam * (p.detach() - anchor[name])
            optimizer.step()
            losses.append(loss.item())
        return state_of(model), losses

    return train
