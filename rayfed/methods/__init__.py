"""Federated methods: the contract of a part, the parts, and the recipes that make a paper's method of them."""

# fmt: off
from rayfed.methods.adaptive import AdaptiveStep, ExtrapolatedAverage
from rayfed.methods.anchors import ControlVariates, Curvature, Proximal
from rayfed.methods.distill import (
    Distill, LabelMaskedDistill, NotTrueDistill, PastTeachersDistill, PrototypeSimilarityDistill, SelectiveDistill,
)
from rayfed.methods.features import ModelContrast, Prototypes, SlimAlign
from rayfed.methods.part import Method, Part, Parts, switch
from rayfed.methods.personal import LocalHead, LocalNorm
from rayfed.methods.recipes import (
    compose, fedacg, fedadagrad, fedadam, fedalign, fedavg, fedavgm, fedbn, fedcad, fedcsd, fedcurv, feddyn, fedexp,
    fedgkd, fedlmd, fedlmd_tf, fedlsd, fednova, fedntd, fedper, fedproto, fedprox, fedrs, fedssd, fedyogi, kd,
    label_smoothing, moon, scaffold,
)
from rayfed.methods.registry import PARTS, RECIPES, read_method, write_method
from rayfed.methods.server import Average, DynamicRegularizer, NormalizedAverage, ServerMomentum
from rayfed.methods.supervise import ClassAdaptiveDistill, CrossEntropy, RestrictedCrossEntropy
from rayfed.methods.views import Batch, ClientView, Fit, ServerView, Step

__all__ = [
    "PARTS", "RECIPES", "AdaptiveStep", "Average", "Batch", "ClassAdaptiveDistill", "ClientView", "ControlVariates",
    "CrossEntropy", "Curvature", "Distill", "DynamicRegularizer", "ExtrapolatedAverage", "Fit",
    "LabelMaskedDistill", "LocalHead", "LocalNorm", "Method", "ModelContrast", "NormalizedAverage",
    "NotTrueDistill", "Part", "Parts", "PastTeachersDistill", "PrototypeSimilarityDistill", "Prototypes",
    "Proximal", "RestrictedCrossEntropy", "SelectiveDistill", "ServerMomentum", "ServerView", "SlimAlign", "Step",
    "compose", "fedacg", "fedadagrad", "fedadam", "fedalign", "fedavg", "fedavgm", "fedbn", "fedcad", "fedcsd",
    "fedcurv", "feddyn", "fedexp", "fedgkd", "fedlmd", "fedlmd_tf", "fedlsd", "fednova", "fedntd", "fedper",
    "fedproto", "fedprox", "fedrs", "fedssd", "fedyogi", "kd", "label_smoothing", "moon", "read_method", "scaffold",
    "switch", "write_method",
]
