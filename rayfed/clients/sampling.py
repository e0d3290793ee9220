"""Rules that choose the clients of a round: the key `clients.sampling`.

A rule is a frozen dataclass. It keeps nothing: what it knows of earlier rounds is its state, which
it returns and gets again. So a choice depends on the job and on the rounds before it alone, and a
run can be resumed and replayed. A round calls its methods in this order:

    ask       which clients shall say the loss of the global model on their data?
    choose    which clients are chosen?
    learn     what does the state become, once the chosen clients have trained?

`N` clients in all, `A` of them there in a round, `Q` asked, `K` chosen.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from rayfed.base.errors import BrokenContract, InputError, told
from rayfed.base.values import Checked, Form, Ge, Gt, Le, build, find, name_in, named, table

# What a rule keeps from round to round: arrays of numbers by name.
State = Mapping[str, np.ndarray]
CLOCK = "clients.seconds_per_example or clients.bytes_per_second"


def _none() -> np.ndarray:
    """Return no clients."""
    return np.empty(0, np.int64)


def _no_losses() -> np.ndarray:
    """Return no losses."""
    return np.empty(0)


@dataclass(frozen=True, eq=False)
class Choice:
    """All that a rule may know when it chooses the clients of a round."""

    round: int
    # How many clients to choose; it is at most A.
    number: int
    # The clients that are there, int64 (A,), in ascending order.
    there: np.ndarray
    # The number of examples of each client, int64 (N,).
    sizes: np.ndarray
    # The virtual seconds that each client that is there would take, (A,); None without a clock.
    seconds: np.ndarray | None
    # What `learn` has returned in the last round, or what `start` returns.
    state: State
    # It follows from the job's seed and the round. Draw from nothing else.
    generator: np.random.Generator
    # The clients that were asked, int64 (Q,), and the global model's loss on each one's data, (Q,).
    asked: np.ndarray = field(default_factory=_none)
    losses: np.ndarray = field(default_factory=_no_losses)


@dataclass(frozen=True, eq=False)
class Seen:
    """What the server has seen of the clients that trained in a round; all arrays are (K,)."""

    round: int
    # int64, in ascending order.
    clients: np.ndarray
    # Their numbers of examples, int64.
    sizes: np.ndarray
    # The mean of a client's losses over its training steps, and the mean of their squares. The loss
    # of a step is the sum of all terms of the method.
    losses: np.ndarray
    squares: np.ndarray
    # The virtual seconds that they took; None without a clock.
    seconds: np.ndarray | None


@dataclass(frozen=True)
class Rule(Checked):
    """The base of all rules. Only `choose` must be written."""

    # With one batch, a client that is asked takes one batch of its examples, not all.
    one_batch: ClassVar[bool] = False

    @property
    def asks(self) -> bool:
        """Say whether clients are asked for a loss before the choice."""
        return type(self).ask is not Rule.ask

    @property
    def learns(self) -> bool:
        """Say whether the rule needs what clients report of their training."""
        return type(self).learn is not Rule.learn

    def start(self, num_clients: int) -> State:
        """Return the state before the first round."""
        return {}

    def ask(self, choice: Choice) -> np.ndarray:
        """Return the clients to ask for the global model's loss on their data, int64 (Q,)."""
        return _none()

    def choose(self, choice: Choice) -> np.ndarray:
        """Return `choice.number` different clients that are there, int64 (K,), in any order."""
        raise NotImplementedError

    def learn(self, state: State, seen: Seen) -> State:
        """Return the state after a round in which clients have trained."""
        return state

    def check(self, number: int, num_clients: int, has_clock: bool) -> None:
        """Raise `InputError` if the job does not fit the rule.

        `number` clients are chosen in a round, of `num_clients` that train.
        """


@dataclass(frozen=True)
class Uniform(Rule):
    """Choose each client with the same probability, without replacement."""

    def choose(self, choice: Choice) -> np.ndarray:
        return draw(choice.generator, choice.there, choice.number)


@dataclass(frozen=True)
class Size(Rule):
    """Choose clients with probabilities proportional to their numbers of examples.

    They are drawn one after the other, without replacement. With the usual average, which weighs
    by examples too, large clients count twice: see `Average(by="client")`, as in Li et al., "On the
    Convergence of FedAvg on Non-IID Data" (ICLR 2020), scheme I. There clients are drawn with
    replacement.
    """

    def choose(self, choice: Choice) -> np.ndarray:
        return draw(choice.generator, choice.there, choice.number, choice.sizes[choice.there])


@dataclass(frozen=True)
class PowerOfChoice(Rule):
    """Draw candidates by size, and choose those with the largest losses.

    Source: Cho, Wang and Joshi, "Towards Understanding Biased Client Selection in Federated
    Learning" (AISTATS 2022; as a preprint of 2020, "Client Selection in Federated Learning:
    Convergence Analysis and Power-of-Choice Selection Strategies"), section 4. `estimate` gives its
    three variants: `all` is pow-d, `batch` is cpow-d, and `last` is rpow-d, in which a client that
    has not trained yet has an infinite loss. The generator breaks ties.
    """

    candidates: Annotated[int, Ge(1), "clients drawn, of which those with the largest losses train"]
    estimate: Annotated[
        Literal["all", "batch", "last"],
        "loss: all examples; one batch; or last: of the client's last training, asking nobody",
    ] = "all"

    @property
    def one_batch(self) -> bool:  # type: ignore[override]
        """Say whether a client that is asked takes a single batch."""
        return self.estimate == "batch"

    @property
    def asks(self) -> bool:
        """Say whether candidates are asked: not if the last training says their losses."""
        return self.estimate != "last"

    @property
    def learns(self) -> bool:
        """Say whether the losses of the training are kept."""
        return self.estimate == "last"

    def start(self, num_clients: int) -> State:
        return {"losses": np.full(num_clients, math.inf)} if self.learns else {}

    def ask(self, choice: Choice) -> np.ndarray:
        return self._candidates(choice) if self.asks else _none()

    def choose(self, choice: Choice) -> np.ndarray:
        candidates, losses = choice.asked, choice.losses
        if self.learns:
            candidates = self._candidates(choice)
            losses = choice.state["losses"][candidates]
        chance = choice.generator.random(len(candidates))
        largest_first = np.lexsort((chance, -losses))
        return candidates[largest_first[: choice.number]]

    def learn(self, state: State, seen: Seen) -> State:
        if not self.learns:
            return state
        losses = state["losses"].copy()
        losses[seen.clients] = seen.losses
        return {"losses": losses}

    def check(self, number: int, num_clients: int, has_clock: bool) -> None:
        if self.candidates < number:
            raise InputError(
                f"clients.sampling.candidates = {self.candidates}: {number} clients are chosen "
                f"from them in a round; give {number} or more"
            )
        if self.candidates > num_clients:
            raise InputError(
                f"clients.sampling.candidates = {self.candidates}: only {num_clients} clients can "
                f"train; give {num_clients} or less"
            )

    def _candidates(self, choice: Choice) -> np.ndarray:
        """Draw the candidates, (Q,), by size; if fewer are there, all of them."""
        number = min(self.candidates, len(choice.there))
        return draw(choice.generator, choice.there, number, choice.sizes[choice.there])


@dataclass(frozen=True)
class Oort(Rule):
    """Choose clients whose losses are large and which are fast, and explore new ones.

    Source: Lai et al., "Oort: Efficient Federated Learning via Guided Participant Selection" (OSDI
    2021), Algorithm 1, from memory, with the formulas of the authors' code (SymbioticLab/Oort).
    With `U_i = n_i * sqrt(mean of squared losses)` of the last round `L_i` in which client i
    trained, and `D_i` the virtual seconds that it took, its score in round `R` is

        (min(U_i, clip) - low) / range + sqrt(0.1 * ln(R) / L_i),   times (T / D_i) ** penalty

    where the last factor is only there if `D_i > T`, `low` is 0.999 times the smallest `U`, and
    `range` is the largest `U` less `low`. Of the clients with at least `cut_off` times the score of
    the last that would be taken, clients are drawn by score; the rest are drawn from those that
    have never trained, the slow ones with the probability factor `(T / D_i) ** penalty`.

    `T` is a quantile of the durations of the clients that are there. As in the authors' code, a
    pacer raises the quantile when the utility stops growing. Different from there: the squared
    losses are those of steps, not of examples; the pacer follows the paper's condition, a sum of
    utilities that falls; and no client is ever excluded for having trained often.
    """

    exploration: Annotated[
        float, Ge(0), Le(1), "share of a round for clients that have never trained, in round 1"
    ] = 0.9
    decay: Annotated[float, Gt(0), Le(1), "factor of this share from round to round"] = 0.98
    least: Annotated[float, Ge(0), Le(1), "smallest share for clients that never trained"] = 0.2
    cut_off: Annotated[
        float, Gt(0), Le(1), "clients with this share of the last score are drawn from, too"
    ] = 0.95
    clip: Annotated[
        float, Gt(0), Le(1), "quantile of the utilities; larger ones count as that one"
    ] = 0.95
    penalty: Annotated[
        float, Ge(0), Le(100), "exponent of the factor for slow clients; 0: speed does not count"
    ] = 2.0
    quantile: Annotated[
        float, Gt(0), Le(1), "share of the clients that do not count as slow, at first"
    ] = 0.3
    pace: Annotated[float, Ge(0), Le(1), "what the pacer adds to the quantile"] = 0.05
    window: Annotated[int, Ge(1), "rounds from one decision of the pacer to the next"] = 20

    def start(self, num_clients: int) -> State:
        return {
            "utility": np.zeros(num_clients),
            "seconds": np.zeros(num_clients),
            # The round in which a client trained last; 0: it never has.
            "last": np.zeros(num_clients, np.int64),
            # The sum of the utilities of each of the last rounds.
            "gained": np.zeros(0),
            "quantile": np.array(self.quantile),
        }

    def choose(self, choice: Choice) -> np.ndarray:
        state, there = choice.state, choice.there
        has_trained = state["last"][there] > 0
        slowness = self._slowness(choice, has_trained)
        known, new = there[has_trained], there[~has_trained]

        share = max(self.least, self.exploration * self.decay ** (choice.round - 1))
        # Without rounding, 10 * (1 - 0.9) would be a little less than 1.
        number = math.floor(round(choice.number * (1 - share), 9))
        # Clients that are not new take the places for which there is no new one.
        number = min(max(number, choice.number - len(new)), len(known))
        chosen = _none()
        if number:
            scores = self._scores(choice, known) * slowness[has_trained]
            last_score = np.sort(scores)[len(scores) - number]
            good = scores >= self.cut_off * last_score
            chosen = draw(choice.generator, known[good], number, scores[good])
        explored = draw(choice.generator, new, choice.number - number, slowness[~has_trained])
        return np.concatenate([chosen, explored])

    def learn(self, state: State, seen: Seen) -> State:
        utility, seconds = state["utility"].copy(), state["seconds"].copy()
        last, quantile = state["last"].copy(), state["quantile"]
        utility[seen.clients] = seen.sizes * np.sqrt(seen.squares)
        last[seen.clients] = seen.round
        if seen.seconds is not None:
            seconds[seen.clients] = seen.seconds
        gained = np.append(state["gained"], utility[seen.clients].sum())[-2 * self.window :]
        decides = len(gained) == 2 * self.window and seen.round % self.window == 0
        if decides and gained[: self.window].sum() > gained[self.window :].sum():
            quantile = np.minimum(1.0, quantile + self.pace)
        return {
            "utility": utility,
            "seconds": seconds,
            "last": last,
            "gained": gained,
            "quantile": np.array(quantile),
        }

    def check(self, number: int, num_clients: int, has_clock: bool) -> None:
        if self.penalty and not has_clock:
            raise InputError(
                "clients.sampling = 'oort': it prefers fast clients, and no work takes virtual "
                f"time; give {CLOCK}, or clients.sampling.penalty = 0"
            )
        if self.least > self.exploration:
            raise InputError(
                f"clients.sampling.least = {self.least}: the share falls from "
                f"clients.sampling.exploration = {self.exploration}; give at most that"
            )

    def _slowness(self, choice: Choice, has_trained: np.ndarray) -> np.ndarray:
        """Return the factor of each client that is there, (A,): 1 if it is not slow."""
        if choice.seconds is None or not self.penalty:
            return np.ones(len(choice.there))
        # The server knows how long a client took when it trained. Of others, it knows the device.
        seconds = np.where(has_trained, choice.state["seconds"][choice.there], choice.seconds)
        quantile = float(choice.state["quantile"])
        place = min(math.floor(round(quantile * len(seconds), 9)), len(seconds) - 1)
        longest = np.sort(seconds)[place]
        slow = seconds > longest
        return np.where(slow, longest / np.where(slow, seconds, 1.0), 1.0) ** self.penalty

    def _scores(self, choice: Choice, known: np.ndarray) -> np.ndarray:
        """Return the scores (n,) of clients (n,) that have trained, without their slowness."""
        utility = choice.state["utility"][known]
        in_order = np.sort(utility)
        place = min(math.floor(round(self.clip * len(utility), 9)), len(utility) - 1)
        low = 0.999 * in_order[0]
        spread = max(in_order[-1] - low, 1e-4)
        scores = (np.minimum(utility, in_order[place]) - low) / spread
        return scores + np.sqrt(0.1 * math.log(choice.round) / choice.state["last"][known])


def draw(
    generator: np.random.Generator,
    clients: np.ndarray,
    number: int,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """Draw some of these clients (n,) one after the other, without replacement.

    Each time, the probability of a client that is left is proportional to its weight, 0 or more.
    Equal weights draw the same clients as none. Where too few weights are above 0, the other
    clients are drawn with equal ones.

    >>> draw(np.random.default_rng(0), np.array([3, 5, 8]), 2, np.array([0.0, 1.0, 2.0])).tolist()
    [5, 8]
    """
    if weights is None or not len(weights) or weights.min() == weights.max():
        places = generator.choice(len(clients), number, replace=False, shuffle=False)
        return np.sort(clients[places])
    positive = weights > 0
    heavy, few = clients[positive], number - int(positive.sum())
    if few >= 0:
        others = draw(generator, clients[~positive], few)
        return np.sort(np.concatenate([heavy, others]))
    share = weights[positive] / weights[positive].sum()
    places = generator.choice(len(heavy), number, replace=False, p=share, shuffle=False)
    return np.sort(heavy[places])


SAMPLINGS: Mapping[str, type[Rule]] = {
    "uniform": Uniform,
    "size": Size,
    "power_of_choice": PowerOfChoice,
    "oort": Oort,
}


def read_sampling(value: Any) -> Rule:
    """Return the rule that `clients.sampling` says: a name, or a table with a name and values.

    >>> read_sampling({"name": "power_of_choice", "candidates": 20})
    PowerOfChoice(candidates=20, estimate='all')
    """
    name, options = named(value, "clients.sampling", default="uniform")
    return build(_find(name), options, "clients.sampling")


def write_sampling(rule: Rule) -> dict[str, Any]:
    """Return a rule in the form that `read_sampling` reads."""
    return {"name": name_in(SAMPLINGS, type(rule)), **table(rule)}


def _find(name: str) -> Any:
    """Return the class of a rule: one of `SAMPLINGS`, or a user's own, by `module:Name`.

    Raises `InputError` for a class that is no rule.
    """
    rule: Any = find(name, SAMPLINGS, "sampling")
    is_rule = inspect.isclass(rule) and issubclass(rule, Rule) and is_dataclass(rule)
    if not is_rule or rule.choose is Rule.choose:
        raise InputError(
            f"sampling '{name}' is {told(rule)}; it must be a frozen dataclass that derives from "
            "rayfed.clients.sampling.Rule and has a method `choose(self, choice)`"
        )
    return rule


SAMPLING = Form(read_sampling, write_sampling, default="uniform", kinds=SAMPLINGS)
SAMPLING_TEXT = f"who takes part: {', '.join(SAMPLINGS)}, or your own, module:Name"


def label_of(rule: Rule) -> str:
    """Return the words for a rule in messages."""
    return f"clients.sampling = '{name_in(SAMPLINGS, type(rule))}'"


def start(rule: Rule, num_clients: int) -> State:
    """Return the state of a rule before the first round. Raises `BrokenContract`."""
    return refuse_state(rule, rule.start(num_clients), "start")


def refuse_choice(rule: Rule, choice: Choice, chosen: Any, verb: str) -> np.ndarray:
    """Return the clients that a rule has chosen, or has asked, int64, in ascending order.

    Raises `BrokenContract` if they are not different clients that are there, or if the rule has not
    chosen as many as it should.
    """
    label = f"{label_of(rule)}, round {choice.round}: {verb}"
    try:
        clients = np.asarray(chosen)
    except ValueError:
        # Lists of different lengths.
        clients = np.asarray(None)
    if clients.ndim != 1 or (clients.size and clients.dtype.kind not in "iu"):
        raise BrokenContract(
            f"{label} gives {told(chosen)}; give the numbers of clients, as an array"
        )
    clients = clients.astype(np.int64)
    absent = clients[~np.isin(clients, choice.there)]
    if len(absent):
        raise BrokenContract(f"{label} gives client {absent[0]}, which is not in choice.there")
    in_order = np.sort(clients)
    repeated = in_order[1:][np.diff(in_order) == 0]
    if len(repeated):
        raise BrokenContract(f"{label} gives client {repeated[0]} twice; give each client once")
    if verb == "choose" and len(in_order) != choice.number:
        raise BrokenContract(
            f"{label} gives {len(in_order)} clients; give choice.number, which is {choice.number}"
        )
    return in_order


def refuse_state(rule: Rule, state: Any, verb: str) -> State:
    """Return the state that a rule gives as arrays.

    Raises `BrokenContract` if it is not arrays of numbers by name, which a checkpoint can hold.
    """
    label = f"{label_of(rule)}: {verb}"
    if not isinstance(state, Mapping):
        raise BrokenContract(f"{label} gives {told(state)}; give a dict of arrays of numbers")
    arrays = {}
    for name, value in state.items():
        array = np.asarray(value)
        if not isinstance(name, str) or array.dtype not in (np.float64, np.int64, np.bool_):
            raise BrokenContract(
                f"{label} gives {told(value)} for {name!r}; a checkpoint holds arrays of float64, "
                "int64 or bool, by a name"
            )
        arrays[name] = array
    return arrays
