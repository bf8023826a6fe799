"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

Each client minimises f_i(w) + (mu / 2) ||w - w_t||^2, so that its gradient gains mu (w - w_t).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from equipoise.core import tree
from equipoise.core.client import Env
from equipoise.core.local import Local
from equipoise.core.method import Method
from equipoise.core.tree import Tree
from equipoise.methods.shared.checks import at_least


@dataclass(frozen=True)
class FedProx(Method):
    mu: float = 0.01

    name = "fedprox"
    about = "pull each client towards the global model (Li et al., 2020)"

    def __post_init__(self) -> None:
        at_least(self, "mu", 0)

    def local(self, settings: Local) -> Local:
        return replace(settings, prox=settings.prox + self.mu)

    def grads(self, grads: Tree, env: Env) -> Tree:
        return tree.map(lambda g, w, start: g + self.mu * (w - start), grads, env.params, env.start)
