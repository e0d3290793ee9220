"""Methods by the names of their papers: one line and one citation each.

>>> from rayfed.methods import Proximal, ServerMomentum, compose
>>> compose(fedlmd(), Proximal(mu=0.01), ServerMomentum(beta=0.9))  # doctest: +NORMALIZE_WHITESPACE
(Average(by='samples'), ServerMomentum(beta=0.9, nesterov=False), CrossEntropy(weight=1.0, smoothing=0.0),
 LabelMaskedDistill(beta=1.0, tau=1.0, teacher=True), Proximal(mu=0.01))
"""

from typing import Literal

from rayfed.methods import (
    adaptive,
    anchors,
    at_server,
    calibrate,
    cosines,
    counted,
    distill,
    features,
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
    """The weighted mean of the clients' weights. FedAvg (McMahan et al., AISTATS 2017), algorithm 1."""
    return compose()


fedprox = recipe("fedprox", anchors.Proximal)  # Li et al., MLSys 2020
fedavgm = recipe("fedavgm", server.ServerMomentum)  # Hsu et al., 2019
fedntd = recipe("fedntd", distill.NotTrueDistill)  # Lee et al., NeurIPS 2022
fedlmd = recipe("fedlmd", distill.LabelMaskedDistill)  # Lu et al., ACM MM 2023


def fedlmd_tf(beta: float = 1.0, tau: float = 1.0) -> Parts:
    """FedLMD without a teacher: uniform over the classes that remain (Lu et al., ACM MM 2023), eq. 7 and 8."""
    return compose(distill.LabelMaskedDistill(beta, tau, teacher=False))


kd = recipe("kd", distill.Distill)  # Hinton et al., 2015, from the global model


def fedlsd(beta: float = 0.5, tau: float = 1.0) -> Parts:
    """Local self-distillation: `(1 - beta)` cross-entropy, `beta` distillation (FedNTD, eq. 3; FedCAD's baseline)."""
    return compose(supervise.CrossEntropy(weight=1 - beta), distill.Distill(beta, tau))


fedcad = recipe("fedcad", supervise.ClassAdaptiveDistill)  # He et al., AAAI 2022
fedssd = recipe("fedssd", distill.SelectiveDistill)  # He et al., IEEE Trans. Big Data 2022
fedcsd = recipe("fedcsd", distill.PrototypeSimilarityDistill)  # Yan et al., 2023


def label_smoothing(smoothing: float = 0.1) -> Parts:
    """Smoothed labels at every client (Szegedy et al., CVPR 2016)."""
    return compose(supervise.CrossEntropy(smoothing=smoothing))


fedgkd = recipe("fedgkd", distill.PastTeachersDistill)  # Yao et al., 2021


def fedvls(beta: float = 0.1, strength: float = 0.005) -> Parts:
    """Adjusted logits, vacant classes distilled, the logits of others pushed down (Guo et al., AAAI 2025)."""
    parts = distill.VacantClassDistill(beta), calibrate.LogitSuppression(strength)
    return compose(calibrate.AdjustedCrossEntropy(), parts)


fedrs = recipe("fedrs", supervise.RestrictedCrossEntropy)  # Li and Zhan, KDD 2021
fedlc = recipe("fedlc", calibrate.CalibratedCrossEntropy)  # Zhang et al., ICML 2022
fedetf = recipe("fedetf", cosines.SimplexHead)  # Li et al., ICCV 2023
fedgela = recipe("fedgela", cosines.ShareScaledSimplex)  # Fan et al., NeurIPS 2023
moon = recipe("moon", features.ModelContrast)  # Li et al., CVPR 2021
fedproto = recipe("fedproto", prototypes.Prototypes)  # Tan et al., AAAI 2022, on top of averaging
feddecorr = recipe("feddecorr", features.Decorrelation)  # Shi et al., ICLR 2023
fedrcl = recipe("fedrcl", features.RelaxedContrast)  # Seo et al., CVPR 2024
fedmr = recipe("fedmr", features.ClassDecorrelation)  # Fan et al., TMLR 2023


def feduv(variance: float = 2.5, uniformity: float = 0.5) -> Parts:
    """Predictions that vary as with even classes, and features that spread (Son et al., CVPR 2024)."""
    return compose(features.PredictionVariance(variance), features.FeatureUniformity(uniformity))


fedsam = recipe("fedsam", sharpness.SharpnessAware)  # Qu et al., ICML 2022


def mofedsam(alpha: float = 0.1, rho: float = 0.1) -> Parts:
    """FedSAM's gradients, mixed with the server's last step as in FedCM (Qu et al., ICML 2022), algorithm 2."""
    return compose(sharpness.SharpnessAware(rho, weight=alpha), anchors.ClientMomentum(alpha))


def fedgamma(rho: float = 0.1) -> Parts:
    """FedSAM's gradients, corrected by control variates as in SCAFFOLD (Dai et al., IEEE TNNLS 2023)."""
    return compose(
        server.Average(by="client"), sharpness.SharpnessAware(rho), anchors.ControlVariates()
    )


fedlesam = recipe("fedlesam", sharpness.GlobalPerturbation)  # Fan et al., ICML 2024
fedsol = recipe("fedsol", sharpness.ProximalPerturbation)  # Lee et al., CVPR 2024
fednh = recipe("fednh", prototypes.PrototypeHead)  # Dai et al., AAAI 2023
fedproc = recipe("fedproc", prototypes.PrototypeContrast)  # Mu et al., FGCS 2023
fedcurv = recipe("fedcurv", anchors.Curvature)  # Shoham et al., 2019


def scaffold(by: Literal["client", "samples"] = "client") -> Parts:
    """Control variates and a uniform mean (Karimireddy et al., ICML 2020), algorithm 1; FedNTD's code: by samples."""
    return compose(server.Average(by), anchors.ControlVariates())


def fedcm(alpha: float = 0.1) -> Parts:
    """Clients share their gradients with the server's last step (Xu et al., 2021)."""
    return compose(supervise.CrossEntropy(weight=alpha), anchors.ClientMomentum(alpha))


feddisco = recipe("feddisco", server.DiscrepancyAverage)  # Ye et al., ICML 2023
fednova = recipe("fednova", server.NormalizedAverage)  # Wang et al., NeurIPS 2020
feddyn = recipe("feddyn", server.DynamicRegularizer)  # Acar et al., ICLR 2021


def feddc(alpha: float = 0.01) -> Parts:
    """A drift variable, which is FedDyn's, and control variates (Gao et al., CVPR 2022), algorithm 1."""
    return compose(server.DynamicRegularizer(alpha), anchors.ControlVariates())


def fedspeed(alpha: float = 0.1, rho: float = 0.1) -> Parts:
    """FedDyn's corrected proximal term, with gradients a step uphill (Sun et al., ICLR 2023), algorithm 1."""
    return compose(server.DynamicRegularizer(alpha), sharpness.SharpnessAware(rho))


def fedsmoo(alpha: float = 0.1, rho: float = 0.1) -> Parts:
    """FedSpeed in which all clients agree on the step uphill (Sun et al., ICML 2023), algorithm 1."""
    return compose(server.DynamicRegularizer(alpha), sharpness.AgreedPerturbation(rho))


fedalign = recipe("fedalign", slim.SlimAlign)  # Mendieta et al., CVPR 2022


def fedadam(lr: float = 0.03, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Parts:
    """Adam on the server, along the clients' mean update (Reddi et al., ICLR 2021), algorithm 2."""
    return compose(adaptive.AdaptiveStep("adam", lr, beta1, beta2, tau))


def fedyogi(lr: float = 0.03, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Parts:
    """Yogi on the server, whose squares change slowly (Reddi et al., ICLR 2021), algorithm 2."""
    return compose(adaptive.AdaptiveStep("yogi", lr, beta1, beta2, tau))


def fedadagrad(lr: float = 0.03, tau: float = 1e-3) -> Parts:
    """Adagrad on the server, without momentum (Reddi et al., ICLR 2021), algorithm 2."""
    return compose(adaptive.AdaptiveStep("adagrad", lr, beta1=0.0, beta2=0.0, tau=tau))


fedexp = recipe("fedexp", adaptive.ExtrapolatedAverage)  # Jhunjhunwala et al., ICLR 2023


def fedacg(beta: float = 0.85, mu: float = 0.002) -> Parts:
    """Clients start a step of momentum ahead, and are pulled to that point (Kim et al., CVPR 2024), algorithm 1."""
    return compose(server.ServerMomentum(beta, nesterov=True), anchors.Proximal(mu))


flashback = recipe("flashback", counted.CountedDistill)  # Aljahdali et al., 2024
fedreg = recipe("fedreg", pseudo_data.PseudoData)  # Xu et al., ICLR 2022
feddf = recipe("feddf", at_server.EnsembleDistill)  # Lin et al., NeurIPS 2020
ccvr = recipe("ccvr", at_server.HeadCalibration)  # Luo et al., NeurIPS 2021, for the last round
local = recipe("local", personal.LocalModel)  # the floor: each client alone
fedbn = recipe("fedbn", personal.LocalNorm)  # Li et al., ICLR 2021
fedper = recipe("fedper", personal.LocalHead)  # Arivazhagan et al., 2019


def fedrep(head: float = 0.9) -> Parts:
    """FedPer in which a client trains its head first, then the body (Collins et al., ICML 2021), algorithm 1."""
    return compose(personal.LocalHead(), personal.HeadThenBody(head))


def fedbabu() -> Parts:
    """The body is trained, and the head stays as it was drawn (Oh et al., ICLR 2022)."""
    return compose(personal.HeadThenBody(head=0.0))


ditto = recipe("ditto", own_model.OwnModel)  # Li et al., ICML 2021


def fedrod() -> Parts:
    """A generic head, by adjusted logits, and each client's own head added to it (Chen and Chao, ICLR 2022)."""
    return compose(calibrate.AdjustedCrossEntropy(), own_model.PersonalHead())
