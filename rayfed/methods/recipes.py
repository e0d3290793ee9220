"""Methods by the names of their papers: a line and a citation each.

Each function here is a method, and each `Part` of this package is a part: there is no other list.
`registry.py` finds both, and `part.py` says what a part can do.

>>> from rayfed.methods import Proximal, ServerMomentum, compose
>>> compose(fedlmd(), Proximal(mu=0.01), ServerMomentum(beta=0.9))  # doctest: +NORMALIZE_WHITESPACE
(Average(by='samples'), ServerMomentum(beta=0.9, nesterov=False), CrossEntropy(weight=1.0,
smoothing=0.0),
 LabelMaskedDistill(beta=1.0, tau=1.0, teacher=True), Proximal(mu=0.01))
"""

from typing import Literal

from rayfed.methods import (
    adaptive,
    anchors,
    at_server,
    calibrate,
    compress,
    cosines,
    distill,
    features,
    normal_levels,
    own_model,
    personal,
    prototypes,
    pseudo_data,
    server,
    sharpness,
    slim,
    supervise,
)
from rayfed.methods.composition import compose, recipe
from rayfed.methods.part import Parts


def fedavg() -> Parts:
    """Average the clients' weights, by their numbers of samples.

    FedAvg (McMahan et al., AISTATS 2017), algorithm 1.
    """
    return compose()


# Li et al., MLSys 2020.
fedprox = recipe("fedprox", anchors.Proximal)
# Hsu et al., 2019.
fedavgm = recipe("fedavgm", server.ServerMomentum)
# Lee et al., NeurIPS 2022.
fedntd = recipe("fedntd", distill.NotTrueDistill)
# Lu et al., ACM MM 2023.
fedlmd = recipe("fedlmd", distill.LabelMaskedDistill)


def fedlmd_tf(beta: float = 1.0, tau: float = 1.0) -> Parts:
    """Distil like FedLMD, but without a teacher: uniformly over the classes that remain.

    FedLMD-Tf (Lu et al., ACM MM 2023), eq. 7 and 8.
    """
    return compose(distill.LabelMaskedDistill(beta, tau, teacher=False))


# Hinton et al., 2015, from the global model.
kd = recipe("kd", distill.Distill)
# FedCSD's eq. 5 (Yan et al., 2023), from the global model.
fd = recipe("fd", features.FeatureDistill)


def fedlsd(beta: float = 0.5, tau: float = 1.0) -> Parts:
    """Mix cross-entropy, with the share `1 - beta`, and distillation from the global model.

    Local self-distillation (FedNTD, eq. 3; FedCAD's baseline).
    """
    return compose(supervise.CrossEntropy(weight=1 - beta), distill.Distill(beta, tau))


# He et al., AAAI 2022.
fedcad = recipe("fedcad", supervise.ClassAdaptiveDistill)
# He et al., IEEE Trans. Big Data 2022.
fedssd = recipe("fedssd", distill.SelectiveDistill)
# Yan et al., 2023.
fedcsd = recipe("fedcsd", distill.PrototypeSimilarityDistill)


def label_smoothing(smoothing: float = 0.1) -> Parts:
    """Smooth the labels at every client (Szegedy et al., CVPR 2016)."""
    return compose(supervise.CrossEntropy(smoothing=smoothing))


# Yao et al., 2021.
fedgkd = recipe("fedgkd", distill.PastTeachersDistill)


def fedvls(beta: float = 0.1, strength: float = 0.005) -> Parts:
    """Adjust logits, distil the classes that a client lacks, and push other classes' logits down.

    FedVLS (Guo et al., AAAI 2025).
    """
    parts = distill.VacantClassDistill(beta), calibrate.LogitSuppression(strength)
    return compose(calibrate.AdjustedCrossEntropy(), parts)


# Li and Zhan, KDD 2021.
fedrs = recipe("fedrs", supervise.RestrictedCrossEntropy)
# Zhang et al., ICML 2022.
fedlc = recipe("fedlc", calibrate.CalibratedCrossEntropy)
# Li et al., ICCV 2023.
fedetf = recipe("fedetf", cosines.SimplexHead)
# Fan et al., NeurIPS 2023.
fedgela = recipe("fedgela", cosines.ShareScaledSimplex)
# Li et al., CVPR 2021.
moon = recipe("moon", features.ModelContrast)
# Tan et al., AAAI 2022, on top of averaging.
fedproto = recipe("fedproto", prototypes.Prototypes)
# Shi et al., ICLR 2023.
feddecorr = recipe("feddecorr", features.Decorrelation)
# Seo et al., CVPR 2024.
fedrcl = recipe("fedrcl", features.RelaxedContrast)
# Fan et al., TMLR 2023.
fedmr = recipe("fedmr", features.ClassDecorrelation)


def feduv(variance: float = 2.5, uniformity: float = 0.5) -> Parts:
    """Make predictions vary as with even classes, and push features apart.

    FedUV (Son et al., CVPR 2024).
    """
    return compose(features.PredictionVariance(variance), features.FeatureUniformity(uniformity))


# Qu et al., ICML 2022.
fedsam = recipe("fedsam", sharpness.SharpnessAware)


def mofedsam(alpha: float = 0.1, rho: float = 0.1) -> Parts:
    """Mix FedSAM's gradients with the server's last step, as in FedCM.

    MoFedSAM (Qu et al., ICML 2022), algorithm 2.
    """
    return compose(sharpness.SharpnessAware(rho, weight=alpha), anchors.ClientMomentum(alpha))


def fedgamma(rho: float = 0.1) -> Parts:
    """Correct FedSAM's gradients by control variates, as in SCAFFOLD.

    FedGAMMA (Dai et al., IEEE TNNLS 2023).
    """
    return compose(
        server.Average(by="client"), sharpness.SharpnessAware(rho), anchors.ControlVariates()
    )


# Fan et al., ICML 2024.
fedlesam = recipe("fedlesam", sharpness.GlobalPerturbation)
# Lee et al., CVPR 2024.
fedsol = recipe("fedsol", sharpness.ProximalPerturbation)
# Dai et al., AAAI 2023.
fednh = recipe("fednh", prototypes.PrototypeHead)
# Mu et al., FGCS 2023.
fedproc = recipe("fedproc", prototypes.PrototypeContrast)
# Shoham et al., 2019.
fedcurv = recipe("fedcurv", anchors.Curvature)


def scaffold(by: Literal["client", "samples"] = "client") -> Parts:
    """Correct gradients by control variates, and average clients uniformly.

    SCAFFOLD (Karimireddy et al., ICML 2020), algorithm 1. FedNTD's code averages by samples.
    """
    return compose(server.Average(by), anchors.ControlVariates())


def fedcm(alpha: float = 0.1) -> Parts:
    """Mix the clients' gradients with the server's last step.

    FedCM (Xu et al., 2021).
    """
    return compose(supervise.CrossEntropy(weight=alpha), anchors.ClientMomentum(alpha))


# Ye et al., ICML 2023.
feddisco = recipe("feddisco", server.DiscrepancyAverage)
# Wang et al., NeurIPS 2020.
fednova = recipe("fednova", server.NormalizedAverage)
# Acar et al., ICLR 2021.
feddyn = recipe("feddyn", server.DynamicRegularizer)


def feddc(alpha: float = 0.01) -> Parts:
    """Correct clients by a drift variable, which is FedDyn's, and by control variates.

    FedDC (Gao et al., CVPR 2022), algorithm 1.
    """
    return compose(server.DynamicRegularizer(alpha), anchors.ControlVariates())


def fedspeed(alpha: float = 0.1, rho: float = 0.1) -> Parts:
    """Add FedDyn's corrected proximal term to gradients that are taken a step uphill.

    FedSpeed (Sun et al., ICLR 2023), algorithm 1.
    """
    return compose(server.DynamicRegularizer(alpha), sharpness.SharpnessAware(rho))


def fedsmoo(alpha: float = 0.1, rho: float = 0.1) -> Parts:
    """Train as FedSpeed, but let all clients agree on the step uphill.

    FedSMOO (Sun et al., ICML 2023), algorithm 1.
    """
    return compose(server.DynamicRegularizer(alpha), sharpness.AgreedPerturbation(rho))


# Mendieta et al., CVPR 2022.
fedalign = recipe("fedalign", slim.SlimAlign)


def fedadam(lr: float = 0.03, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Parts:
    """Take a step of Adam on the server, along the clients' mean update.

    FedAdam (Reddi et al., ICLR 2021), algorithm 2.
    """
    return compose(adaptive.AdaptiveStep("adam", lr, beta1, beta2, tau))


def fedyogi(lr: float = 0.03, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Parts:
    """Take a step of Yogi on the server, whose squares change slowly.

    FedYogi (Reddi et al., ICLR 2021), algorithm 2.
    """
    return compose(adaptive.AdaptiveStep("yogi", lr, beta1, beta2, tau))


def fedadagrad(lr: float = 0.03, tau: float = 1e-3) -> Parts:
    """Take a step of Adagrad on the server, without momentum.

    FedAdagrad (Reddi et al., ICLR 2021), algorithm 2.
    """
    return compose(adaptive.AdaptiveStep("adagrad", lr, beta1=0.0, beta2=0.0, tau=tau))


# Jhunjhunwala et al., ICLR 2023.
fedexp = recipe("fedexp", adaptive.ExtrapolatedAverage)


def fedacg(beta: float = 0.85, mu: float = 0.002) -> Parts:
    """Start clients a step of momentum ahead, and pull them to that point.

    FedACG (Kim et al., CVPR 2024), algorithm 1.
    """
    return compose(server.ServerMomentum(beta, nesterov=True), anchors.Proximal(mu))


# Stich et al., NeurIPS 2018.
topk = recipe("topk", compress.SparseAverage)
# Reisizadeh et al., AISTATS 2020.
fedpaq = recipe("fedpaq", compress.QuantizedAverage)
# Kim et al., ICCV 2025; it also needs model.weight_standardisation.
fedwsq = recipe("fedwsq", normal_levels.NormalQuantizedAverage)
# Xu et al., ICLR 2022.
fedreg = recipe("fedreg", pseudo_data.PseudoData)
# Lin et al., NeurIPS 2020.
feddf = recipe("feddf", at_server.EnsembleDistill)
# Luo et al., NeurIPS 2021, for the last round.
ccvr = recipe("ccvr", at_server.HeadCalibration)
# The lower bound: each client trains alone.
local = recipe("local", personal.LocalModel)
# Li et al., ICLR 2021.
fedbn = recipe("fedbn", personal.LocalNorm)
# Arivazhagan et al., 2019.
fedper = recipe("fedper", personal.LocalHead)


def fedrep(head: float = 0.9) -> Parts:
    """Train each client's own head first, then the common body.

    FedRep (Collins et al., ICML 2021), algorithm 1.
    """
    return compose(personal.LocalHead(), personal.HeadThenBody(head))


def fedbabu() -> Parts:
    """Train the body, and leave the head as it was initialised.

    FedBABU (Oh et al., ICLR 2022).
    """
    return compose(personal.HeadThenBody(head=0.0))


# Li et al., ICML 2021.
ditto = recipe("ditto", own_model.OwnModel)


def fedrod() -> Parts:
    """Train a common head with adjusted logits, and for each client an own head added to it.

    FedRoD (Chen and Chao, ICLR 2022).
    """
    return compose(calibrate.AdjustedCrossEntropy(), own_model.PersonalHead())
