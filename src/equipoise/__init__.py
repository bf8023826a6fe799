"""Equipoise: federated learning when the classes are not balanced."""

from equipoise import data, metrics, models
from equipoise.data import load
from equipoise.engines import Serial, Stacked
from equipoise.errors import EquipoiseError
from equipoise.experiment import fit
from equipoise.federation import Federation
from equipoise.federation import build as federate
from equipoise.local import Local
from equipoise.method import Chain, FedAvg, Method
from equipoise.methods import *  # noqa: F403
from equipoise.methods import __all__ as _methods
from equipoise.questions import Question
from equipoise.round import one_round, start
from equipoise.server import State

__version__ = "0.1.0"

__all__ = [
    "Chain",
    "EquipoiseError",
    "FedAvg",
    "Federation",
    "Local",
    "Method",
    "Question",
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
    *(name for name in _methods if name not in ("METHODS", "FedAvg")),
]
