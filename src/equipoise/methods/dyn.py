"""FedDyn: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021.

Client i minimises  f_i(w) - <g_i, w> + (alpha / 2) ||w - w_t||^2  and then subtracts alpha times its change d_i of
the model from g_i; at the minimum, the new g_i is the gradient of f_i there. Of N clients, those in S take part:

    g_i <- g_i - alpha d_i;   h <- h - (alpha / N) sum_S d_i;   w += mean_S d_i - h / alpha

All clients have the same weight, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.client import Data, Env
from equipoise.core.errors import ConfigError
from equipoise.core.local import Local
from equipoise.core.method import Method
from equipoise.core.tree import Tree
from equipoise.methods.shared.checks import above, refuse_beside

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView
    from equipoise.core.sums import Sums
    from equipoise.core.turn import Turn


@dataclass(frozen=True)
class FedDyn(Method):
    alpha: float = 0.01

    name = "feddyn"
    about = "align each client's minimum with the global one (Acar et al., 2021)"
    single_visits = True
    words = {"gradient": "g_i: its gradient at its last minimum"}  # noqa: RUF012

    def __post_init__(self) -> None:
        above(self, "alpha", 0)

    def check(self, fed: ServerView, chain: Chain) -> None:
        refuse_beside(self, chain, ("scaffold", "fedpd"), "each correct the drift of clients")
        for other in {*chain.having("delta"), *chain.having("weight")}:
            raise ConfigError(
                f"method: feddyn needs the unweighted mean of the clients' deltas, and {other.name} changes it;"
                " keep one of them"
            )

    def local(self, settings: Local) -> Local:
        return replace(settings, weighting="uniform", prox=settings.prox + self.alpha)

    def init(self, turn: Turn) -> Tree:
        clients = torch.tensor(float(len(turn.fed.eligible)))
        return {"h": tree.zeros(turn.params)} | turn.engine.place({"clients": clients})

    def remember(self, params: Tree, classes: int) -> Tree:
        return {"gradient": tree.zeros(params)}

    def grads(self, grads: Tree, env: Env) -> Tree:
        mine = env.memory["gradient"]
        return tree.map(lambda g, g_i, w, w_t: g - g_i + self.alpha * (w - w_t), grads, mine, env.params, env.start)

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        return {}, {"gradient": tree.axpy(-self.alpha, delta, env.memory["gradient"])}

    def update(self, update: Tree, sums: Sums, slot: Tree) -> tuple[Tree, Tree]:
        if sums.clients == 0:
            return update, slot
        h = tree.axpy(-self.alpha / slot["clients"], sums.delta, slot["h"])
        return tree.axpy(-1 / self.alpha, h, update), {**slot, "h": h}
