"""Print a hash of every method's weights after some rounds of the quickstart, to see that a change
keeps the bits.

    python tools/hash_weights.py > before.txt       # then change the code
    python tools/hash_weights.py | diff before.txt -

With names, only these methods. With --actors N on a Ray with so many actors: the hashes must be the
same. The bits depend on the machine's kind of processor, so compare on one machine.
"""

import argparse
import hashlib
import tempfile

import rayfed
from rayfed.methods import RECIPES
from rayfed.methods.part import trains

# For the methods that refuse the quickstart's own model.
MODELS = {
    "fedbn": {"model.name": "lenet", "model.batch_norm": True},
    "fedwsq": {"model.weight_standardisation": 0.05},
}
SHORT = {
    "train.num_rounds": 3,
    "train.clients_per_round": 4,
    "train.batch_size": 100,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", nargs="*", help="default: all")
    parser.add_argument("--actors", type=int, default=0, help="default: no Ray, in this process")
    arguments = parser.parse_args()
    names = arguments.method or RECIPES
    where = {"ray.mode": "off"}
    if arguments.actors:
        where = {"ray.mode": "on", "ray.actors": arguments.actors}
    if unknown := set(names) - set(RECIPES):
        parser.error(f"no method: {', '.join(sorted(unknown))}; `rayfed methods` lists them")
    with tempfile.TemporaryDirectory() as runs:
        for name in names:
            # CCVR trains no client: it is for the last round.
            last = [{"until": SHORT["train.num_rounds"] - 1, "method": "fedavg"}, {"method": name}]
            method = name if trains(RECIPES[name]()) else last
            model = MODELS.get(name, {})
            changed = {
                **SHORT,
                **where,
                **model,
                "output.path": runs,
                "name": name,
                "method": method,
            }
            digest = hashlib.sha256()
            for key, tensor in rayfed.run("jobs/quickstart.toml", changed).weights.items():
                digest.update(key.encode())
                digest.update(tensor.contiguous().numpy().tobytes())
            print(f"{digest.hexdigest()}  {name}", flush=True)


if __name__ == "__main__":
    main()
