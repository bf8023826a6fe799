"""Faster versions of plain code in other rooms, with the same results: compiled, recorded, with our own kernels.

They rely on internals of torch, so that `core.speed` loads them only with the versions they were tested with. Below,
each is registered under the name by which the plain code asks for it.
"""

from equipoise.core import speed
from equipoise.fast.accelerated import Accelerated
from equipoise.fast.convolutions import quicken
from equipoise.fast.materialise import materialised
from equipoise.fast.pace import compile_from
from equipoise.fast.together import side_by_side

speed.register("materialise", materialised)
speed.register("layer", quicken)
speed.register("stacked engine", Accelerated)
speed.register("compile from", compile_from)
speed.register("side by side", side_by_side)
