"""What tests compare rayfed with: losses, gradients and steps in plain torch and float64.

Nothing of rayfed is in it.

A loss is here as its paper or its authors' code has it, sample by sample or pair by pair, and
autograd gives its gradient. `z` are the student's logits (C,) or features (D,), `t` the teacher's,
`y` is the label.
"""

import copy
import math

import torch
import torch.nn.functional as F


def mean_of(formula):
    """A formula for one sample, as the mean over a batch."""

    def mean(z, t, y):
        return torch.stack(
            [formula(*sample) for sample in zip(z, t, y.tolist(), strict=True)]
        ).mean()

    return mean


def gradient(function, x):
    """Of a scalar function, at `x`."""
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


# Losses on one sample.


def ce(z, y, smoothing=0.0):
    target = torch.full_like(z, smoothing / len(z))
    target[y] += 1 - smoothing
    return -target @ z.log_softmax(0)


def soft_ce(z, t, tau):
    return -(tau**2) * (t / tau).softmax(0) @ (z / tau).log_softmax(0)


def kl(z, t, tau=1):
    return tau**2 * (t / tau).softmax(0) @ ((t / tau).log_softmax(0) - (z / tau).log_softmax(0))


def without(z, y):
    return torch.cat([z[:y], z[y + 1 :]])


def cosine(a, b):
    norm = a.norm() * b.norm()
    return a @ b / norm if norm > 0 else 0 * a.sum()


def cosines(z, rows):
    return torch.stack([cosine(z, row) for row in rows])


def fedlmd(z, t, y, counts, tau):
    """Over the classes left to the teacher; the student's softmax has the majority classes too."""
    others = [c for c in range(len(z)) if c != y]
    taught = [c for c in others if counts[c] <= counts.sum() / len(z)]
    q = dict(zip(others, (z[others] / tau).log_softmax(0), strict=True))
    p = dict(zip(taught, (t[taught] / tau).log_softmax(0), strict=True))
    return tau**2 * sum(p[c].exp() * (p[c] - q[c]) for c in taught)


def fedssd(z, t, y, credible, m_max, inside):
    m = m_max * (credible * (1 - (1 - t.softmax(0)[y]).sqrt()) - 0.1).clamp(min=0)
    return ((m * (t - z)) ** 2).sum() if inside else (m * (t - z) ** 2).sum()


def fedcsd(z, t, y, prototypes, mask, tau, released=False):
    """As the paper has it; or as train_ours.py of IAMJackYan/FedCSD: delta moves with `z`, KL, mask
    on `delta t`.
    """
    student = z if released else z.detach()
    target = t if prototypes is None else cosines(student, prototypes).softmax(0) * t
    seen = target if released else t
    kept = {
        "adaptive": seen.softmax(0)[y] > 1 / len(z),
        "forcible": seen.argmax() == y,
        "none": True,
    }[mask]
    return int(kept) * (kl if released else soft_ce)(z, target, tau)


# Losses of a batch as a whole.


def feddecorr(x):
    """From the correlation matrix; as many times as large as in the authors' code."""
    correlations = torch.corrcoef(x.T)
    others = correlations[~torch.eye(x.shape[1], dtype=torch.bool)]
    return (len(x) - 1) ** 2 / len(x) * (others**2).mean()


def fedmr(x, labels):
    """As the authors' code has it: the sum over classes of several samples, by samples."""
    classes = [x[labels == c] for c in labels.unique() if (labels == c).sum() > 1]
    return sum(len(rows) * feddecorr(rows) for rows in classes) / sum(map(len, classes))


def fedvls(z, labels, counts):
    """Class by class, as the authors' code has it: a sample of the class itself counts with a logit
    of 0.
    """
    total = 0.0
    for c, share in enumerate((counts / counts.sum()).tolist()):
        shifted = z[:, c] - math.log(share + 1e-9) + math.log(1 / len(counts))
        total = total + share * torch.where(labels == c, 0, shifted).exp().mean().log()
    return total


def feduv_variance(z):
    """The deviation that is asked for is that of the columns of the identity, as in the authors'
    code.
    """
    wanted = torch.eye(z.shape[1], dtype=z.dtype).std(dim=0)
    return (wanted - z.softmax(dim=1).std(dim=0)).clamp(min=0).mean()


def feduv_uniformity(x):
    squares = torch.stack([((x[i] - x[j]) ** 2).sum() for i in range(len(x)) for j in range(i)])
    return (-squares / squares.sort().values[(len(squares) - 1) // 2]).exp().mean()


def fedrcl(x, labels, tau, threshold, penalty):
    """Sample by sample; one that is alone in its class is its own nearest and farthest."""
    total, size = 0.0, len(x)
    for i, y in enumerate(labels):
        s = cosines(x[i], x) / tau
        own = [s[j] for j in range(size) if labels[j] == y and j != i]
        wrong = torch.stack([s[j] for j in range(size) if labels[j] != y]).sort().values[-2:]
        pull = min(own, default=s[i])
        total = total + torch.cat([pull[None], wrong]).logsumexp(0) - pull
        push = (
            min(own)
            if own and min(own) >= threshold / tau
            else torch.tensor(-1 / tau, dtype=x.dtype)
        )
        total = total + penalty * F.softplus(push - s[i])
    return total / size


# Gradients and steps of a model.


def loss_of(model, images, labels):
    return F.cross_entropy(model(images), labels)


def gradients(loss, model):
    """By name, of the model's parameters that train."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(
        zip(named, torch.autograd.grad(loss, list(named.values()), retain_graph=True), strict=True)
    )


def length(tree):
    return torch.cat([x.flatten() for x in tree.values()]).norm()


def scaled(tree, rho):
    """The tree's direction, `rho` long."""
    norm = length(tree)
    return {name: rho * x / norm for name, x in tree.items()}


def moved(model, step):
    """A copy of a model, a step away."""
    there = copy.deepcopy(model)
    with torch.no_grad():
        for name, w in there.named_parameters():
            w += step[name]
    return there


def gradient_away(model, step, images, labels):
    """The gradient of the cross-entropy a step away from a model's weights."""
    there = moved(model, step)
    return gradients(loss_of(there, images, labels), there)


def descend(parameters, losses, kind=torch.optim.SGD, **options):
    """Steps of one of torch's optimizers, each on what the next function gives."""
    optimizer = kind(parameters, **options)
    for loss in losses:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
