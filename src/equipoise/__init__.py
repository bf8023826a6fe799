"""Equipoise: federated learning when the classes are not balanced."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise import data, metrics, models
    from equipoise.data import load
    from equipoise.engines import Serial, Stacked
    from equipoise.errors import EquipoiseError
    from equipoise.experiment import fit
    from equipoise.federation import Federation
    from equipoise.federation import build as federate
    from equipoise.local import Local
    from equipoise.method import Chain, FedAvg, Method
    from equipoise.methods import (
        AFL,
        CUCB,
        QFFL,
        Active,
        Astraea,
        ClassWeights,
        Climb,
        FedAdagrad,
        FedAdam,
        FedAvgM,
        FedCurv,
        FedDyn,
        FedNova,
        FedPD,
        FedProx,
        FedRE,
        FedSGD,
        FedShift,
        FedYogi,
        Focal,
        RatioLoss,
        Scaffold,
    )
    from equipoise.questions import Question
    from equipoise.round import one_round, start
    from equipoise.server import State

__version__ = "0.1.0"

__all__ = [
    "AFL",
    "CUCB",
    "QFFL",
    "Active",
    "Astraea",
    "Chain",
    "ClassWeights",
    "Climb",
    "EquipoiseError",
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
    "Federation",
    "Focal",
    "Local",
    "Method",
    "Question",
    "RatioLoss",
    "Scaffold",
    "Serial",
    "Stacked",
    "State",
    "data",
    "federate",
    "fit",
    "load",
    "metrics",
    "models",
    "one_round",
    "start",
]

# Loaded when first used: a process that only hands messages over must not wait for torch.
_MODULES = ("data", "metrics", "models")
_HOMES = {
    "Chain": "method",
    "EquipoiseError": "errors",
    "Federation": "federation",
    "Local": "local",
    "Method": "method",
    "Question": "questions",
    "Serial": "engines",
    "Stacked": "engines",
    "State": "server",
    "federate": "federation:build",
    "fit": "experiment",
    "load": "data",
    "one_round": "round",
    "start": "round",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'equipoise' has no attribute {name!r}")
    if name in _MODULES:
        return import_module(f"equipoise.{name}")
    module, _, original = _HOMES.get(name, "methods").partition(":")  # all others are methods
    return getattr(import_module(f"equipoise.{module}"), original or name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
