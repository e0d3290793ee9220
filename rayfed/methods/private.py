"""Client-level differential privacy: clipped updates, and noise on their sum."""

import hashlib
import logging
import math
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from rayfed.base.errors import InputError
from rayfed.base.values import Ge, Gt, Lt
from rayfed.clients.settings import Training
from rayfed.methods.accountant import epsilon, require_accountant
from rayfed.methods.noise import Noise, SecretNoise, SimulatedNoise
from rayfed.methods.part import Part
from rayfed.methods.views import ClientView, Fit, ServerView, Step
from rayfed.tensors.trees import Tree
from rayfed.tensors.weights import Weights, add, combine, scale, squared_distance

log = logging.getLogger(__name__)

# The variable of the environment with the secret seed of the noise.
SECRET = "RAYFED_NOISE_SECRET"
SHORTEST_SECRET = 32
# The bound on a client's norm is a little below the clipping norm: float32 rounds what is sent.
ROUNDING = 1e-5


@dataclass(frozen=True)
class PrivateAverage(Part):
    """Average clipped updates with equal weights, and add Gaussian noise to their sum.

    DP-FedAvg (McMahan et al., ICLR 2018) with a cohort of fixed size; with `quantile`, the clipping
    norm follows this quantile of the clients' norms (Andrew et al., NeurIPS 2021).

    `w <- w + 1 / m (sum d_k min(1, clip / |d_k|) + clip noise N(0, 1))` over a round's `m` clients,
    with `d_k = w_k - w` on all parameters together. The sum is float64. The round notes
    `privacy.epsilon`, for two federations that differ in the data of one client, and
    `privacy.clip`. A client whose training diverges counts with `d_k = 0`.

    The noise comes from a secret, which is not recorded, and from a nonce that is drawn for each
    run. The secret is the variable RAYFED_NOISE_SECRET or the file in `secret_file`. Without a
    secret the noise comes from the job's seed, which the run records. Then the run is a simulation,
    which the note `privacy.simulation` says, and protects nobody.
    """

    slot: ClassVar[str] = "average"
    # To end the run would tell of the client's data, which no epsilon counts. An update of zero is
    # within every bound.
    skips_diverged: ClassVar[bool] = True
    clip: Annotated[float, Gt(0), "largest norm of a client's update; with quantile, the first"] = (
        1.0
    )
    noise: Annotated[
        float, Ge(0), "deviation of the noise on the sum, over the clipping norm; 0: none"
    ] = 1.0
    delta: Annotated[
        float, Gt(0), Lt(1), "probability that epsilon does not hold; give less than 1 / clients"
    ] = 1e-5
    quantile: Annotated[
        float, Ge(0), Lt(1), "share of updates that the clipping norm lets through; 0: it is fixed"
    ] = 0.0
    quantile_lr: Annotated[float, Gt(0), "how fast the clipping norm follows the quantile"] = 0.2
    hidden_cohorts: Annotated[
        bool, "a smaller epsilon, true only while the job's seed and the run's tables stay secret"
    ] = False
    secret_file: Annotated[str, "file with the secret; '': the variable RAYFED_NOISE_SECRET"] = ""

    def check(self, model: nn.Module, training: Training) -> None:
        require_accountant(self)
        # Here a bad secret is told before the results of an earlier run are replaced.
        self._secret()
        if self.noise == 0:
            log.warning("private_average: noise = 0 protects nobody; epsilon is infinite")

    def init(self, weights: Weights) -> Tree:
        secret = self._secret()
        if secret is None:
            log.warning(
                "private_average: a simulation, not private: the noise comes from the job's seed; "
                "for real noise set %s, or secret_file, to %d random characters or more",
                SECRET,
                SHORTEST_SECRET,
            )
        log.warning(
            "private_average: epsilon is of the global models alone; the run's tables of clients "
            "and labels, and its log, are outside of it, and must not be given away; so are the "
            "mean and deviation that pixels and features are normalised by"
        )
        nonce = "" if secret is None else secrets.token_hex(16)
        return {"rounds": 0, "clip": self.clip, "secret": fingerprint(secret), "nonce": nonce}

    def tell(self, state: Tree, server: ServerView, surveyed: None) -> tuple[Tree, float]:
        """Return the state, and the clipping norm of this round."""
        return state, state["clip"]

    def report(self, client: ClientView, clip: float, fit: Fit) -> tuple[Tree, None]:
        """Return the clipped update, and whether its norm was within the bound."""
        trained = combine(lambda w: w.detach().double(), fit.parameters)
        before = {name: client.weights[name].double() for name in trained}
        norm = math.sqrt(float(squared_distance(trained, before)))
        factor = clipping_factor(norm, clip)
        update = scale(add(trained, before, alpha=-1), factor)
        within = 1 if norm <= clip else 0
        sent = combine(Tensor.float, update)
        return {"clients": 1, "update": sent, "within": within}, None

    def update(self, state: Tree, total: Tree, step: Step) -> tuple[Tree, Step]:
        clients, clip = total["clients"], state["clip"]
        secret = self._secret()
        if fingerprint(secret) != state["secret"]:
            raise InputError(
                "private_average: the secret of the noise is not the one with which the run began; "
                f"give the same {SECRET} or secret_file as before"
            )
        noise = noise_of(secret, state["nonce"], step.server.round)
        noisy = add_noise(total["update"], self._noise_on_updates(clients) * clip, noise)
        moved = combine(
            lambda w, change: w.double() + change / clients,
            step.parameters(step.weights),
            noisy,
        )
        rounds = state["rounds"] + 1
        notes = {"privacy.clip": clip, "privacy.simulation": float(secret is None)}
        if self.noise:
            notes["privacy.epsilon"] = self._epsilon(rounds, clients, step.server.num_clients)
        next_clip = self._next_clip(clip, total["within"], clients, noise)
        proposed = step.towards(dict(step.weights)).changed(moved)
        return {**state, "rounds": rounds, "clip": next_clip}, proposed.noting(notes)

    def _secret(self) -> str | None:
        """Return the secret of the noise; None if there is none."""
        secret = os.environ.get(SECRET)
        where = SECRET
        if self.secret_file:
            where = f"secret_file = '{self.secret_file}'"
            try:
                secret = Path(self.secret_file).expanduser().read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"private_average: {where} cannot be read: {error}") from None
        elif secret is None:
            return None
        if len(secret) < SHORTEST_SECRET:
            raise InputError(
                f"private_average: {where} has {len(secret)} characters, and a secret that nobody "
                f"can guess has {SHORTEST_SECRET} or more; make one: openssl rand -hex 32"
            )
        return secret

    def _noise_on_updates(self, clients: int) -> float:
        """Return the noise on the sum of updates, over the clipping norm.

        With a quantile, the count of updates within the bound has noise too, and both together
        reveal what `noise` says (Andrew et al., theorem 1).
        """
        if not self.quantile or not self.noise:
            return self.noise
        of_count = 2 * self._noise_on_count(clients)
        return (self.noise**-2 - of_count**-2) ** -0.5

    def _noise_on_count(self, clients: int) -> float:
        """Return the deviation of the noise on the count: a twentieth of the clients.

        It is at least the total noise, so that the updates' noise stays near the total.
        """
        return max(clients / 20, self.noise)

    def _next_clip(self, clip: float, within: int, clients: int, noise: Noise) -> float:
        """Return the next clipping norm: smaller if more updates than the quantile were within."""
        if not self.quantile:
            return clip
        deviation = self._noise_on_count(clients) if self.noise else 0.0
        share = (within + deviation * float(noise.normal(()))) / clients
        return clip * math.exp(-self.quantile_lr * (share - self.quantile))

    def _epsilon(self, rounds: int, clients: int, num_clients: int) -> float:
        """Return epsilon after these rounds."""
        return epsilon(self.noise, rounds, self.delta, clients, num_clients, self.hidden_cohorts)


def clipping_factor(norm: float, clip: float) -> float:
    """Return the factor that brings an update of this norm to the clipping norm at most.

    >>> clipping_factor(0.5, clip=1.0), round(clipping_factor(4.0, clip=1.0), 4)
    (0.99999, 0.25)
    """
    return min(1.0, clip / norm if norm else 1.0) * (1 - ROUNDING)


def fingerprint(secret: str | None) -> str:
    """Return a text that tells one secret from another, and from which none can be found."""
    if secret is None:
        return ""
    return hashlib.sha256(f"fingerprint:{secret}".encode()).hexdigest()[:16]


def noise_of(secret: str | None, nonce: str, round: int) -> Noise:
    """Return the source of a round's noise.

    Without a secret, its seed is drawn from the server's generator, which the job's seed fixes.
    """
    if secret is None:
        return SimulatedNoise(int(torch.randint(2**62, ())))
    return SecretNoise(secret, nonce, round)


def add_noise(weights: Weights, deviation: float, noise: Noise) -> Weights:
    """Return the weights, float64, with normal noise added to each number."""
    noisy: Weights = {}
    for name, values in weights.items():
        drawn = noise.normal(tuple(values.shape))
        noisy[name] = values.double() + deviation * drawn.to(values.device)
    return noisy
