"""Federated methods: the contract of a part, the parts, and the recipes that make a paper's method of them."""

from rayfed.methods.anchors import Proximal
from rayfed.methods.distill import Distill, LabelMaskedDistill, NotTrueDistill
from rayfed.methods.part import Batch, ClientView, Fit, Method, Part, Parts, ServerView, Step, switch
from rayfed.methods.recipes import compose, fedavg, fedavgm, fedlmd, fedlmd_tf, fedntd, fedprox
from rayfed.methods.registry import PARTS, RECIPES, read_method, write_method
from rayfed.methods.server import Average, ServerMomentum
from rayfed.methods.supervise import CrossEntropy, RestrictedCrossEntropy

__all__ = [
    "PARTS",
    "RECIPES",
    "Average",
    "Batch",
    "ClientView",
    "CrossEntropy",
    "Distill",
    "Fit",
    "LabelMaskedDistill",
    "Method",
    "NotTrueDistill",
    "Part",
    "Parts",
    "Proximal",
    "RestrictedCrossEntropy",
    "ServerMomentum",
    "ServerView",
    "Step",
    "compose",
    "fedavg",
    "fedavgm",
    "fedlmd",
    "fedlmd_tf",
    "fedntd",
    "fedprox",
    "read_method",
    "switch",
    "write_method",
]
