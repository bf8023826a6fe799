"""Engines carry out a round: they are all that differs between a simulation and the real world."""

from equipoise.engines.base import Engine, Sums
from equipoise.engines.serial import Serial
from equipoise.engines.stacked import Stacked

__all__ = ["Engine", "Serial", "Stacked", "Sums"]
