"""One file per paper. The exported classes are the registry: a method is named by its `name`."""

from equipoise.method import FedAvg, Method
from equipoise.methods.active import Active
from equipoise.methods.afl import AFL
from equipoise.methods.astraea import Astraea
from equipoise.methods.bandit import CUCB
from equipoise.methods.class_weights import ClassWeights
from equipoise.methods.climb import Climb
from equipoise.methods.curv import FedCurv
from equipoise.methods.dyn import FedDyn
from equipoise.methods.fedre import FedRE
from equipoise.methods.focal import Focal
from equipoise.methods.nova import FedNova
from equipoise.methods.pd import FedPD
from equipoise.methods.prox import FedProx
from equipoise.methods.qffl import QFFL
from equipoise.methods.ratio_loss import RatioLoss
from equipoise.methods.scaffold import Scaffold
from equipoise.methods.server import FedAdagrad, FedAdam, FedAvgM, FedYogi
from equipoise.methods.sgd import FedSGD
from equipoise.methods.shift import FedShift

METHODS: dict[str, type[Method]] = {
    kind.name: kind
    for kind in (
        FedAvg,
        FedSGD,
        FedProx,
        Scaffold,
        FedNova,
        FedAvgM,
        FedAdam,
        FedYogi,
        FedAdagrad,
        Climb,
        FedShift,
        Focal,
        ClassWeights,
        FedRE,
        RatioLoss,
        Astraea,
        AFL,
        QFFL,
        FedDyn,
        FedCurv,
        FedPD,
        CUCB,
        Active,
    )
}

__all__ = [
    "AFL",
    "CUCB",
    "METHODS",
    "QFFL",
    "Active",
    "Astraea",
    "ClassWeights",
    "Climb",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedCurv",
    "FedDyn",
    "FedNova",
    "FedPD",
    "FedProx",
    "FedRE",
    "FedSGD",
    "FedShift",
    "FedYogi",
    "Focal",
    "RatioLoss",
    "Scaffold",
]
