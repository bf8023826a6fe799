"""FedPD: Zhang et al., "FedPD: A Federated Learning Framework With Adaptivity to Non-IID Data", IEEE TSP 2021.

Client i minimises the augmented Lagrangian  f_i(w) + <lambda_i, w - w_t> + ||w - w_t||^2 / (2 eta)  and ends at w_i:

    lambda_i <- lambda_i + (w_i - w_t) / eta;   its proposal: w_i + eta lambda_i;   w_{t+1}: the mean of the proposals

All clients have the same weight. In the paper all clients take part in every round; here, clients that do not take
part keep their lambda_i. Every round communicates: p = 0 in the paper, which also allows rounds without
communication.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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


@dataclass(frozen=True)
class FedPD(Method):
    eta: float = 1.0

    name = "fedpd"
    about = "a primal-dual solver: clients agree through multipliers (Zhang et al., 2021)"
    single_visits = True
    words = {"dual": "lambda_i: its multipliers, one for each parameter"}  # noqa: RUF012

    def __post_init__(self) -> None:
        above(self, "eta", 0)

    def check(self, fed: ServerView, chain: Chain) -> None:
        refuse_beside(self, chain, ("scaffold", "feddyn"), "each correct the drift of clients")
        refuse_beside(self, chain, ("fednova",), "each change the meaning of a client's delta")
        for other in chain.having("delta"):
            if other.name == self.name:
                return
            raise ConfigError(
                f"method: {other.name} + fedpd: fedpd computes a client's proposal from its unchanged delta,"
                f" so it must come first; write fedpd + {other.name}"
            )

    def local(self, settings: Local) -> Local:
        return replace(settings, weighting="uniform", prox=settings.prox + 1 / self.eta)

    def remember(self, params: Tree, classes: int) -> Tree:
        return {"dual": tree.zeros(params)}

    def grads(self, grads: Tree, env: Env) -> Tree:
        dual = env.memory["dual"]
        return tree.map(lambda g, lam, w, w_t: g + lam + (w - w_t) / self.eta, grads, dual, env.params, env.start)

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        return {}, {"dual": tree.axpy(1 / self.eta, delta, env.memory["dual"])}

    def delta(self, delta: Tree, env: Env) -> Tree:
        """The proposal minus w_t: d + eta lambda_i with the new lambda_i, or 2 d + eta lambda_i with the old one."""
        return tree.map(lambda d, lam: 2 * d + self.eta * lam, delta, env.memory["dual"])
