"""One file per paper. The exported classes are the registry: a method is named by its `name`."""

from equipoise.method import FedAvg, Method
from equipoise.methods.nova import FedNova
from equipoise.methods.prox import FedProx
from equipoise.methods.scaffold import Scaffold
from equipoise.methods.server import FedAdagrad, FedAdam, FedAvgM, FedYogi
from equipoise.methods.sgd import FedSGD

METHODS: dict[str, type[Method]] = {
    kind.name: kind for kind in (FedAvg, FedSGD, FedProx, Scaffold, FedNova, FedAvgM, FedAdam, FedYogi, FedAdagrad)
}

__all__ = [
    "METHODS", "FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedNova", "FedProx", "FedSGD", "FedYogi", "Scaffold",
]  # fmt: skip
