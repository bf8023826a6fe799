"""FedNova: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", 2020.

A client's delta is divided by a_i, how far its steps reach, and the average is stretched again by
tau_eff = sum_i p_i a_i (with a proximal pull: sum_i p_i tau_i), so that no client counts more for having taken more
steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from equipoise import tree
from equipoise.local import Data, Env, reach
from equipoise.method import Chain, Method
from equipoise.methods.settings import needs_sgd
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.engines import Sums
    from equipoise.federation import Federation


@dataclass(frozen=True)
class FedNova(Method):
    name = "fednova"
    about = "average normalised steps, so that unequal step counts do no harm (Wang et al., 2020)"
    single_visits = True
    words = {"steps": "weight times the effective number of steps"}  # noqa: RUF012

    def check(self, fed: Federation, chain: Chain) -> None:
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
