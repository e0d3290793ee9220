"""Standard normal numbers for a private average: of a simulation, or of a secret.

Whoever can guess the numbers can take them away again. So those of a secret come from a
cryptographic stream. Torch's generator would not do: it uses 32 bits of its seed alone.
"""

import hashlib
import hmac
import math

import numpy as np
import torch
from torch import Tensor


class SimulatedNoise:
    """Normal numbers from a seed, which the run records."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Return the next standard normal numbers, float64, on the CPU."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)


class SecretNoise:
    """Normal numbers from a secret, a run's nonce and a round.

    The nonce is drawn for each run. Without it, two runs with one secret would add the same noise,
    and the difference of their models would have none. The numbers are those of Box and Muller
    (1958), from the bytes of SHAKE-256.
    """

    def __init__(self, secret: str, nonce: str, round: int) -> None:
        message = f"noise:{nonce}:{round}".encode()
        self._key = hmac.digest(secret.encode(), message, "sha256")
        self._draws = 0

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Return the next standard normal numbers, float64, on the CPU."""
        number = math.prod(shape)
        pairs = -(-number // 2)
        stream = hashlib.shake_256(self._key + self._draws.to_bytes(8))
        self._draws += 1
        drawn = np.frombuffer(stream.digest(16 * pairs), "<u8").reshape(2, pairs)
        # The first 53 bits of each, as a number between 0 and 1 that is neither.
        uniform = ((drawn >> np.uint64(11)) + 0.5) / 2.0**53
        radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * np.pi * uniform[1]
        values = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:number]
        return torch.from_numpy(values).reshape(shape)


Noise = SimulatedNoise | SecretNoise
