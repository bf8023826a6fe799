"""FedSGD: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017.

Each client takes one step per round, on all its data: distributed gradient descent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from equipoise.core.local import Local
from equipoise.core.method import Method


@dataclass(frozen=True)
class FedSGD(Method):
    name = "fedsgd"
    about = "one full-batch step per round (McMahan et al., 2017)"

    def local(self, settings: Local) -> Local:
        return replace(settings, batch="full", steps_per_epoch=None, epochs=1)
