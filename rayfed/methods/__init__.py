"""Federated methods: the contract of a part, the parts, and the recipes that make a paper's method of them."""

# fmt: off
from rayfed.methods.adaptive import AdaptiveStep, ExtrapolatedAverage
from rayfed.methods.anchors import ControlVariates, Curvature, Proximal
from rayfed.methods.calibrate import AdjustedCrossEntropy, CalibratedCrossEntropy, LogitSuppression
from rayfed.methods.distill import (
    Distill, LabelMaskedDistill, NotTrueDistill, PastTeachersDistill, PrototypeSimilarityDistill, SelectiveDistill,
    VacantClassDistill,
)
from rayfed.methods.features import Decorrelation, ModelContrast, PrototypeContrast, Prototypes, SlimAlign
from rayfed.methods.part import Method, Part, Parts, switch
from rayfed.methods.personal import LocalHead, LocalNorm
from rayfed.methods.recipes import (
    compose, fedacg, fedadagrad, fedadam, fedalign, fedavg, fedavgm, fedbn, fedcad, fedcsd, fedcurv, feddecorr,
    feddyn, fedexp, fedgkd, fedlc, fedlmd, fedlmd_tf, fedlsd, fednova, fedntd, fedper, fedproc, fedproto, fedprox,
    fedrs, fedsam, fedsol, fedssd, fedvls, fedyogi, kd, label_smoothing, moon, scaffold,
)
from rayfed.methods.registry import PARTS, RECIPES, read_method, write_method
from rayfed.methods.server import Average, DynamicRegularizer, NormalizedAverage, ServerMomentum
from rayfed.methods.sharpness import ProximalPerturbation, SharpnessAware
from rayfed.methods.supervise import ClassAdaptiveDistill, CrossEntropy, RestrictedCrossEntropy
from rayfed.methods.views import Batch, ClientView, Fit, ServerView, Step

__all__ = [
    "PARTS", "RECIPES", "AdaptiveStep", "AdjustedCrossEntropy", "Average", "Batch", "CalibratedCrossEntropy",
    "ClassAdaptiveDistill", "ClientView", "ControlVariates", "CrossEntropy", "Curvature", "Decorrelation", "Distill",
    "DynamicRegularizer", "ExtrapolatedAverage", "Fit", "LabelMaskedDistill", "LocalHead", "LocalNorm",
    "LogitSuppression", "Method", "ModelContrast", "NormalizedAverage", "NotTrueDistill", "Part", "Parts",
    "PastTeachersDistill", "PrototypeContrast", "PrototypeSimilarityDistill", "Prototypes", "Proximal",
    "ProximalPerturbation", "RestrictedCrossEntropy", "SelectiveDistill", "ServerMomentum", "ServerView",
    "SharpnessAware", "SlimAlign", "Step", "VacantClassDistill", "compose", "fedacg", "fedadagrad", "fedadam",
    "fedalign", "fedavg", "fedavgm", "fedbn", "fedcad", "fedcsd", "fedcurv", "feddecorr", "feddyn", "fedexp",
    "fedgkd", "fedlc", "fedlmd", "fedlmd_tf", "fedlsd", "fednova", "fedntd", "fedper", "fedproc", "fedproto",
    "fedprox", "fedrs", "fedsam", "fedsol", "fedssd", "fedvls", "fedyogi", "kd", "label_smoothing", "moon",
    "read_method", "scaffold", "switch", "write_method",
]
