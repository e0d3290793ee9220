"""The kinds of figure: what each shows, which figures of papers it redraws, and its options."""

from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of figure: the function in `rayfed.papers` that draws it, and what it shows.

    `papers` are the figures of papers that it redraws; empty if it is none of theirs.
    """

    drawn_by: str
    what: str
    papers: str
    # The options that the kind has and others do not have.
    takes: tuple[str, ...] = ()
    # The measure that a run's job must have; empty if the figure needs none.
    needs: str = ""


KINDS = {
    "curves": Kind(
        "curves:curves",
        "accuracy or other numbers by round",
        "FedNTD 7, 11 to 13, FedLMD 4, 6, FedCAD 1, FedSSD 2b, 7, 8, FedCSD 1d, 5, 6",
        ("of", "by_setting"),
    ),
    "forgetting": Kind(
        "global_model:forgetting", "accuracy that each class has lost, by round", ""
    ),
    "classes": Kind(
        "classes:accuracy",
        "accuracy of each class, by round",
        "FedNTD 2a, 10, FedSSD 3",
        ("client", "normalised"),
    ),
    "consistency": Kind(
        "classes:consistency",
        "similarity of class accuracies to the round before",
        "FedNTD 2b",
    ),
    "counts": Kind(
        "classes:counts", "labels of the round's clients and predicted labels", "FedLMD 2"
    ),
    "sweep": Kind(
        "sweep:sweep",
        "a number by a key of the job",
        "FedNTD 2c, 15, 16, FedLMD 7, 9, FedSSD 9, FedCSD 3, 4",
        ("x", "of"),
    ),
    "bars": Kind("sweep:bars", "a number of each method", "FedLMD 5, 8", ("of", "by_setting")),
    "scatter": Kind(
        "sweep:scatter",
        "a number of each run or round against another one",
        "FedSSD 2a",
        ("x", "of", "by_round"),
    ),
    "local": Kind("clients:local", "accuracy before and after local training", "", needs="local"),
    "in-out": Kind(
        "clients:in_out",
        "the same on a client's own and on other classes",
        "FedNTD 4",
        ("round",),
        needs="local",
    ),
    "epochs": Kind(
        "epochs:epochs",
        "the same, or a distance, by local epoch",
        "FedNTD 6, FedCSD 1a, 1b, 1c",
        ("of", "round"),
        needs="epochs",
    ),
    "divergence": Kind(
        "clients:divergence",
        "distances of weights and of label distributions",
        "FedNTD 8",
        needs="drift",
    ),
    "confusion": Kind(
        "global_model:confusion",
        "confusion matrices of models",
        "FedSSD 4",
        ("round",),
        needs="confusion",
    ),
    "client": Kind(
        "one_client:client",
        "a client's data, and the class accuracies of its models",
        "FedCAD 2",
        ("client", "round"),
        needs="confusion",
    ),
    "partition": Kind(
        "partition:of_runs",
        "labels of the first clients",
        "FedNTD 3, FedSSD 6",
        ("outside",),
    ),
    "t-sne": Kind(
        "embedding:t_sne",
        "t-SNE of test features of the global and local models",
        "FedNTD 19 to 21, FedCSD 7",
        ("round", "clients", "images"),
    ),
    "neurons": Kind(
        "neurons:neurons",
        "the class that each neuron prefers, in the global and local models",
        "FedNTD 17",
        ("round", "clients", "images"),
    ),
    "noise": Kind(
        "loss_space:noise",
        "change of the loss under noise on the weights",
        "FedNTD 14a",
        ("round", "images"),
    ),
    "landscape": Kind(
        "loss_space:landscape",
        "loss along two eigenvectors of its Hessian",
        "FedNTD 14b",
        ("round", "images", "grid"),
    ),
    "circle": Kind(
        "circle:circle",
        "density of two-dimensional features of length 1",
        "FedNTD 18",
        ("round", "clients", "images"),
    ),
    "unevenness": Kind(
        "uneven:unevenness", "last accuracy by how uneven the clients' data are", ""
    ),
}
