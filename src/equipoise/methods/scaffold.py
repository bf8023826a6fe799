"""SCAFFOLD: Karimireddy et al., "Stochastic Controlled Averaging for Federated Learning", ICML 2020, option II.

Clients step along g - c_i + c. After K steps of length lr from x to y_i: c_i+ = c_i - c + (x - y_i) / (K lr), and the
server's c moves by (1 / N) sum_i (c_i+ - c_i). K is the number of steps; with momentum or a proximal term it is their
effective number, since only then is (x - y_i) / (K lr) a mean gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.client import Data, Env, reach
from equipoise.core.method import Method
from equipoise.core.tree import Tree
from equipoise.methods.shared.checks import needs_sgd

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView
    from equipoise.core.turn import Turn


@dataclass(frozen=True)
class Scaffold(Method):
    name = "scaffold"
    about = "correct client drift with control variates (Karimireddy et al., 2020)"
    single_visits = True
    words = {  # noqa: RUF012
        "c": "a control variate: a mean gradient",
        "change": "how its control variate changed",
    }

    def check(self, fed: ServerView, chain: Chain) -> None:
        needs_sgd(self, fed, chain)

    def init(self, turn: Turn) -> Tree:
        return {"c": tree.zeros(turn.params)}

    def remember(self, params: Tree, classes: int) -> Tree:
        return {"c": tree.zeros(params)}

    def broadcast(self, slot: Tree) -> Tree:
        return slot

    def grads(self, grads: Tree, env: Env) -> Tree:
        return tree.map(lambda g, c_i, c: g - c_i + c, grads, env.memory["c"], env.msg["c"])

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        length = reach(env) * env.lr
        # With a learning rate of zero, the delta says nothing about the gradient, and c_i stays as it is.
        change = tree.map(lambda d, c: torch.where(length == 0, 0, -c - d / length), delta, env.msg["c"])
        return {"change": change}, {"c": tree.add(env.memory["c"], change)}

    def close(self, slot: Tree, turn: Turn) -> Tree:
        assert turn.sums is not None
        if not turn.sums.uploads:
            return slot
        return {"c": tree.axpy(1 / turn.fed.clients, turn.sums.uploads["change"], slot["c"])}
