"""q-FFL: Li, Sanjabi, Beirami and Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020 (q-FedAvg).

Minimises sum_i p_i f_i^(q+1) / (q + 1): the larger q, the more a client's loss raises its weight. With L = 1 / lr and
client i's change d_i of the model,

    w += sum_i p_i f_i^q d_i / sum_i p_i h_i,   h_i = f_i^q + q f_i^(q-1) L ||d_i||^2   (the paper's h_i, over L)

where f_i is the loss of the model that the round began with. The paper draws clients with probability p_i and sums
without weights; here clients are drawn uniformly and have the weight p_i that local.weighting gives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.client import Data, Env
from equipoise.core.method import Method
from equipoise.core.tree import Tree
from equipoise.methods.shared.checks import above, at_least, needs_sgd, refuse_beside
from equipoise.methods.shared.start_loss import start_loss

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView
    from equipoise.core.sums import Sums


@dataclass(frozen=True)
class QFFL(Method):
    q: float = 1.0
    lipschitz: float | None = None  # L; None: 1 / lr, as assumed by the length of the clients' steps

    name = "qffl"
    about = "weight clients by a power of their losses (Li et al., 2020)"
    single_visits = True
    needs_data = True
    words = {"curvature": "its weight times h_i, its part of the divisor of the server's step"}  # noqa: RUF012

    def __post_init__(self) -> None:
        at_least(self, "q", 0)
        if self.lipschitz is not None:
            above(self, "lipschitz", 0)

    def check(self, fed: ServerView, chain: Chain) -> None:
        refuse_beside(self, chain, ("afl", "climb"), "each weigh clients by their losses")
        refuse_beside(self, chain, ("fednova",), "each set the length of the server's step")
        if self.lipschitz is None:
            needs_sgd(self, fed, chain)

    def begin(self, env: Env, data: Data | None) -> Tree:
        return {"loss": start_loss(env, data).clamp(min=1e-10)}  # a loss of 0 would give 0 / 0 in `finish`

    def _loss_power(self, env: Env) -> Tensor:
        power: Tensor = env.note["loss"] ** self.q
        return power

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        length = 1 / env.lr if self.lipschitz is None else self.lipschitz
        slope = self.q * self._loss_power(env) / env.note["loss"]
        h = self._loss_power(env) + slope * length * tree.dot(delta, delta)
        return {"curvature": env.weight * h}, env.memory

    def delta(self, delta: Tree, env: Env) -> Tree:
        return tree.scale(delta, self._loss_power(env))

    def update(self, update: Tree, sums: Sums, slot: Tree) -> tuple[Tree, Tree]:
        if not sums.uploads:
            return update, slot
        return tree.scale(update, sums.weight / sums.uploads["curvature"]), slot
