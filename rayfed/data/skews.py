"""Skews of features: clients whose examples look different, whatever their labels.

A skew is a frozen dataclass with one method, `change`. It gets the training examples of one client,
and returns what the client trains on. The examples are changed once, when the data are dealt. The
test set and the server's images stay as they are.

Shapes: `n` examples of a client, `N` clients, images of `C` channels and `H` x `W` pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import numpy as np

from rayfed.base.errors import InputError, told
from rayfed.base.values import Checked, Ge, Gt, Le, build, find_dataclass, name_in, named, table


class Skew(Protocol):
    """A value of `data.skew`: one of `SKEWS`, or a frozen dataclass of your own."""

    def change(
        self, examples: np.ndarray, client: int, num_clients: int, generator: np.random.Generator
    ) -> np.ndarray:
        """Return examples of the same shape and type, in place of those of a client.

        The examples (n, ...) are a copy: uint8 (n, C, H, W), floats (n, D) or tokens (n, L). Draw
        from the generator alone: it follows from the partition's seed and the client.
        """
        ...


@dataclass(frozen=True)
class NoSkew(Checked):
    """Leave all examples as they are."""

    def change(
        self, examples: np.ndarray, client: int, num_clients: int, generator: np.random.Generator
    ) -> np.ndarray:
        return examples


@dataclass(frozen=True)
class Noise(Checked):
    """Add Gaussian noise, more from client to client.

    Source: Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study" (ICDE
    2022; NIID-Bench), "noise-based feature imbalance", from memory. Client i of N, from 1 on, has
    the variance `variance * i / N`, in units of pixels in [0, 1]. Each example has its noise for
    the complete run. Different from there: the result is rounded to a byte, and cut off at black
    and white. A feature of a table gets the noise in units of its deviation at the client.
    """

    variance: Annotated[
        float, Gt(0), Le(100), "variance of the last client's noise, for pixels from 0 to 1"
    ] = 0.1

    def change(
        self, examples: np.ndarray, client: int, num_clients: int, generator: np.random.Generator
    ) -> np.ndarray:
        if examples.dtype.kind == "i":
            raise InputError(
                "data.skew = 'noise': tokens are numbers of words, to which no noise can be added; "
                "give images or data.features"
            )
        deviation = np.sqrt(self.variance * (client + 1) / num_clients)
        noise = generator.standard_normal(examples.shape) * deviation
        if examples.dtype == np.uint8:
            return np.clip(np.rint(examples + 255 * noise), 0, 255).astype(np.uint8)
        return (examples + noise * examples.std(axis=0)).astype(examples.dtype)


@dataclass(frozen=True)
class Rotation(Checked):
    """Turn all images of a client by quarters of a circle: client i by `i modulo turns` quarters.

    Rotated MNIST with four groups of clients, as in Ghosh et al., "An Efficient Framework for
    Clustered Federated Learning" (IFCA, NeurIPS 2020), section 6. No pixel changes its value.
    """

    turns: Annotated[int, Ge(2), Le(4), "different angles: 0, 90, ... degrees anticlockwise"] = 4

    def change(
        self, examples: np.ndarray, client: int, num_clients: int, generator: np.random.Generator
    ) -> np.ndarray:
        if examples.ndim != 4 or examples.shape[2] != examples.shape[3]:
            shape = "x".join(map(str, examples.shape[1:]))
            raise InputError(
                f"data.skew = 'rotation': only square images can be turned, and the examples have "
                f"the shape {shape}; give data.size, or another skew"
            )
        return np.rot90(examples, client % self.turns, axes=(2, 3))


CHANGE = "change(self, examples, client, num_clients, generator)"
SKEWS: Mapping[str, type[Any]] = {"none": NoSkew, "noise": Noise, "rotation": Rotation}


def skewed(skew: Skew, examples: np.ndarray, clients: list[np.ndarray], seed: int) -> np.ndarray:
    """Return a training set in which each client's examples are changed by a skew.

    `clients` has the indices of each client's examples. Raises `InputError` if a user's skew gives
    something else than examples of the same kind.
    """
    if isinstance(skew, NoSkew):
        return examples
    changed = examples.copy()
    for client, rows in enumerate(clients):
        # The rule's draws come from `seed`, and those of the server's images from `[seed, 1]`.
        generator = np.random.default_rng([seed, 2, client])
        before = examples[rows]
        after = skew.change(before, client, len(clients), generator)
        # `before` may have been written to; its shape and its type are still what was given.
        if _kind(after) != _kind(before):
            raise InputError(
                f"data.skew: {type(skew).__qualname__}.change gives {_kind(after)} for client "
                f"{client}; give {_kind(before)}, as it got"
            )
        changed[rows] = after
    return changed


def _kind(examples: Any) -> str:
    """Describe examples in words, for a message."""
    if not isinstance(examples, np.ndarray):
        return told(examples)
    return f"an array of {examples.dtype} {examples.shape}"


def read_skew(value: Any) -> Any:
    """Return the skew that `data.skew` says: a name, or a table with a name and values.

    >>> read_skew({"name": "noise", "variance": 0.5})
    Noise(variance=0.5)
    """
    name, options = named(value, "data.skew", default="none")
    skew = find_dataclass(name, SKEWS, "skew", "change", CHANGE)
    return build(skew, options, "data.skew")


def write_skew(skew: Any) -> dict[str, Any]:
    """Return a skew in the form that `read_skew` reads."""
    return {"name": name_in(SKEWS, type(skew)), **table(skew)}
