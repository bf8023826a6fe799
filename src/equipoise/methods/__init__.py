"""All built-in methods, one file per paper. A class that is imported here can be used by its `name`."""

from equipoise.core.method import SHORT_NAMES, Method
from equipoise.core.method import FedAvg as FedAvg
from equipoise.methods.active import Active as Active
from equipoise.methods.afl import AFL as AFL
from equipoise.methods.astraea import Astraea as Astraea
from equipoise.methods.bandit import CUCB as CUCB
from equipoise.methods.class_weights import ClassWeights as ClassWeights
from equipoise.methods.climb import Climb as Climb
from equipoise.methods.curv import FedCurv as FedCurv
from equipoise.methods.dyn import FedDyn as FedDyn
from equipoise.methods.fedre import FedRE as FedRE
from equipoise.methods.focal import Focal as Focal
from equipoise.methods.nova import FedNova as FedNova
from equipoise.methods.ntd import FedNTD as FedNTD
from equipoise.methods.pd import FedPD as FedPD
from equipoise.methods.prox import FedProx as FedProx
from equipoise.methods.qffl import QFFL as QFFL
from equipoise.methods.ratio_loss import RatioLoss as RatioLoss
from equipoise.methods.scaffold import Scaffold as Scaffold
from equipoise.methods.server_optimisers import FedAdagrad as FedAdagrad
from equipoise.methods.server_optimisers import FedAdam as FedAdam
from equipoise.methods.server_optimisers import FedAvgM as FedAvgM
from equipoise.methods.server_optimisers import FedYogi as FedYogi
from equipoise.methods.sgd import FedSGD as FedSGD
from equipoise.methods.shift import FedShift as FedShift

METHODS: dict[str, type[Method]] = {
    kind.name: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Method) and kind is not Method
}
SHORT_NAMES.update({kind: name for name, kind in METHODS.items()})
