"""Engines carry out a round: they are all that differs between a simulation and the real world."""

from equipoise.engines.base import Engine
from equipoise.engines.serial import Serial
from equipoise.engines.stacked import Stacked
from equipoise.engines.sums import Sums

__all__ = ["Engine", "Serial", "Stacked", "Sums"]
