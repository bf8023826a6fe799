"""Engines that simulate the clients on this machine: `Serial` one at a time, `Stacked` many at once."""

from equipoise.core import speed
from equipoise.engines.serial import Serial as Serial
from equipoise.engines.simulator import Simulator as Simulator
from equipoise.engines.stacked import Stacked


def stacked_engine() -> type[Stacked]:
    """The stacked engine, in the faster form that compiles and records its programs where the room `fast` is on."""
    return speed.faster("stacked engine", Stacked)
