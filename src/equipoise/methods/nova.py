"""FedNova: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", 2020.

A client's delta is divided by a_i, the effective number of its steps, and the average is multiplied by
tau_eff = sum_i p_i a_i (with a proximal term: sum_i p_i tau_i). So no client counts more
because it took more steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.client import Data, Env, reach
from equipoise.core.method import Method
from equipoise.core.tree import Tree
from equipoise.methods.shared.checks import needs_sgd

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView
    from equipoise.core.sums import Sums


@dataclass(frozen=True)
class FedNova(Method):
    name = "fednova"
    about = "average normalised deltas, so that unequal numbers of steps do no harm (Wang et al., 2020)"
    single_visits = True
    words = {"steps": "its weight times its effective number of steps"}  # noqa: RUF012

    def check(self, fed: ServerView, chain: Chain) -> None:
        needs_sgd(self, fed, chain)

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        steps = env.steps.to(env.weight.dtype) if env.local.prox else reach(env)
        return {"steps": env.weight * steps}, env.memory

    def delta(self, delta: Tree, env: Env) -> Tree:
        return tree.scale(delta, 1 / reach(env))

    def update(self, update: Tree, sums: Sums, slot: Tree) -> tuple[Tree, Tree]:
        if not sums.uploads:
            return update, slot
        return tree.scale(update, sums.uploads["steps"] / sums.weight), slot
