"""Count the actors that fit on the nodes of a cluster; and put actors and nodes into words.

`spread` fits an actor's part of a GPU to the nodes; gpus.py tells the whole way of that part.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from rich.filesize import decimal

from rayfed.base.errors import InputError
from rayfed.job import RayOptions

Resources = dict[str, float]
log = logging.getLogger(__name__)


def capacity(options: RayOptions, nodes: Sequence[Resources]) -> int:
    """Return the number of actors that fit on the nodes, node by node.

    An actor needs all its resources on one node.
    """

    def fit_on(node: Resources) -> int:
        """Return the number of actors that fit on one node."""
        fit = math.floor(node.get("CPU", 0) / options.num_cpus + 1e-6)
        # A node whose memory is not known has enough.
        if options.memory_bytes and "memory" in node:
            fit = min(fit, int(node["memory"]) // options.memory_bytes)
        if options.gpu_share == 0:
            return fit
        gpus = math.floor(node.get("GPU", 0) + 1e-6)
        if options.gpu_share < 1:
            return min(fit, gpus * round(1 / options.gpu_share))
        return min(fit, gpus // round(options.gpu_share))

    return sum(fit_on(node) for node in nodes)


def selected(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Say whether Ray would choose a node with these labels, as its documentation has it.

    >>> [selected({"card": "H100"}, {"card": wanted}) for wanted in ("H100", "in(L4,H100)")]
    [True, True]
    >>> [selected({"card": "H100"}, {"card": wanted}) for wanted in ("!L4", "!in(L4,H100)")]
    [True, False]
    >>> selected({}, {"card": "H100"}), selected({}, {"card": "!H100"})
    (False, True)
    """
    for name, wanted in selector.items():
        values = re.sub(r"^!?(in\()?|\)$", "", wanted).split(",")
        if (labels.get(name) in values) == wanted.startswith("!"):
            return False
    return True


def spread(options: RayOptions, nodes: Sequence[Resources], most: int) -> RayOptions:
    """Return the options with the part of a GPU with which `most` actors use all GPUs, or nearly.

    The part is no smaller than asked for. Ray puts each actor on the fullest GPU that has room for
    it. So actors have GPUs of their own; or k share a GPU, and fewer than k parts are free in all,
    so that no GPU is idle, in whichever order nodes and actors come. A number of actors that the
    user has set is kept, and `warn_of_idle_gpus` says where that leaves GPUs idle.
    """
    if not 0 < options.gpu_share < 1:
        return options
    # By k, the number of actors on a GPU: the options, and how many actors there are then.
    by_count = {}
    for k in range(1, round(1 / options.gpu_share) + 1):
        by_count[k] = replace(options, num_gpus=1 / k)
    actors = {k: min(most, capacity(shared, nodes)) for k, shared in by_count.items()}
    gpus = capacity(by_count[1], nodes)
    possible = []
    for k in by_count:
        uses_all_gpus = k == 1 or actors[k] > k * (gpus - 1)
        if uses_all_gpus or options.actors != "auto":
            possible.append(k)
    best = max(possible, key=lambda k: (actors[k], -k))
    return by_count[best]


def num_actors(options: RayOptions, nodes: Sequence[Resources], clients_per_round: int) -> int:
    """Return the number of actors to start.

    Raise `InputError`, with the largest number that fits, for a larger request.

    Until an actor's part of a GPU or its memory is measured, a number is refused only where not a
    single actor fits.
    """
    fit = capacity(options, nodes)
    if fit == 0:
        less = "ask for less with ray.num_cpus and ray.num_gpus"
        if options.memory_bytes:
            less += " or ray.memory"
        if capacity(replace(options, num_gpus=0), nodes):
            less = "leave ray.num_gpus out to use what is there, or ask for less"
        raise InputError(
            f"no actor with {actor_text(options)} fits: {nodes_text(nodes)}"
            f"{_memory_text(options, nodes)}; {less}"
        )
    if options.actors == "auto":
        return min(fit, clients_per_round)
    if options.actors > fit and "auto" not in (options.num_gpus, options.memory):
        raise InputError(
            f"ray.actors = {options.actors}, each with {actor_text(options)}: {nodes_text(nodes)}"
            f"{_memory_text(options, nodes)}, so at most {fit} fit; ask for fewer actors, or for "
            "smaller actors (ray.num_cpus = 0.5 lets two share a CPU)"
        )
    return options.actors


def warn_of_idle_gpus(options: RayOptions, nodes: Sequence[Resources]) -> None:
    """Log a warning where GPUs stay idle, or where actors are given GPUs that they do not use.

    A number of GPUs that no node has is refused on Ray; in this process, where a job from elsewhere
    may be replayed, it is a warning.
    """
    gpus = sum(node.get("GPU", 0) for node in nodes)
    num_gpus, actors = options.num_gpus, options.actors
    if gpus and num_gpus == 0:
        log.warning(
            "ray.num_gpus = 0, so clients train on CPUs, and %g GPU stay idle; 'auto' would use "
            "them",
            gpus,
        )
    elif not gpus and num_gpus not in (0, "auto"):
        log.warning(
            "ray.num_gpus = %g, but torch sees no GPU here: this process trains on its CPU",
            num_gpus,
        )
    elif num_gpus != "auto" and num_gpus > 1:
        log.warning(
            "ray.num_gpus = %g, but a client trains on one of its actor's GPUs; 1 would use all of "
            "them",
            num_gpus,
        )
    elif 0 < options.gpu_share < 1 and actors != "auto":
        usable = capacity(replace(options, num_gpus=1.0), nodes)
        idle = usable - math.ceil(actors * options.gpu_share - 1e-6)
        if idle > 0 and actors > 1:
            log.warning(
                "ray.actors = %d, each with %s: Ray fills one GPU after the other, and %d GPU stay "
                "idle; ray.actors = 'auto' would use all of them",
                actors,
                actor_text(options),
                idle,
            )


def actor_text(options: RayOptions) -> str:
    """Return an actor's resources, and the labels of its node, in words."""
    resources = f"{options.num_cpus:g} CPU and {options.gpu_share:g} GPU"
    if options.memory_bytes:
        resources += f" and {decimal(options.memory_bytes)} of memory"
    labels = ", ".join(f"{name} = '{value}'" for name, value in options.labels.items())
    return f"{resources}, on a node with the labels {labels}" if labels else resources


def nodes_text(nodes: Sequence[Resources]) -> str:
    """Return a cluster's resources, in words."""
    cpus = sum(node.get("CPU", 0) for node in nodes)
    gpus = sum(node.get("GPU", 0) for node in nodes)
    resources = f"there are {cpus:g} CPU and {gpus:g} GPU"
    return f"{resources} on {len(nodes)} nodes" if len(nodes) > 1 else resources


def _memory_text(options: RayOptions, nodes: Sequence[Resources]) -> str:
    """Return the most memory of a node in words, if actors ask for memory."""
    most = max((node.get("memory", 0) for node in nodes), default=0)
    if not options.memory_bytes or not most:
        return ""
    return f", and a node has at most {decimal(round(most))} for actors"


def warn_of_small_stores(num_bytes: int, nodes: Sequence[Resources]) -> None:
    """Log a warning where a node's object store holds fewer than four sums of a model's updates.

    The sums are in float64. An actor that adds sums holds that in it: the sum that it adds, the
    next, and the result; its own wait there too. `num_bytes` is the size of the model.
    """
    stores = [node.get("object_store_memory", math.inf) for node in nodes]
    smallest = min(stores, default=math.inf)
    needed = 8 * num_bytes
    if smallest < needed:
        log.warning(
            "a node's object store has %s, and four sums of this model's updates have %s: Ray will "
            "write to disk in between; start the nodes with --object-store-memory=%d or more",
            decimal(round(smallest)),
            decimal(needed),
            needed,
        )


def actors_text(places: Iterable[tuple[str, str]]) -> str:
    """Return the number of actors by node and device, in words.

    >>> actors_text([("10.0.0.1", "cpu"), ("10.0.0.2", "cpu"), ("10.0.0.1", "cpu")])
    'actors: 2 on 10.0.0.1 (cpu), 1 on 10.0.0.2 (cpu)'
    """
    counts = Counter(f"{node} ({device})" for node, device in places)
    by_place = [f"{count} on {place}" for place, count in sorted(counts.items())]
    return "actors: " + (", ".join(by_place) or "none")
