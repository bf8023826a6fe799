"""AFL: Mohri, Sivek and Suresh, "Agnostic Federated Learning", ICML 2019.

The model is trained for the worst mixture lambda of clients, lambda in the simplex:

    min_w max_lambda sum_i lambda_i f_i(w);   lambda <- P(lambda + eta (N / |S|) f(w_t))

The minimisation is a round of training in which client i has the weight lambda_i. The maximisation uses the losses of
the model that the round began with; P is the projection onto the simplex. If only a cohort S of the N clients
answers, the factor N / |S| makes its losses an unbiased estimate of those of all clients. With all clients and one
full-batch step each, this is the paper's algorithm. The paper returns the mean of the models of all rounds; this
method returns the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.core.chain import Chain
from equipoise.core.client import Data, Env
from equipoise.core.method import Method
from equipoise.core.tree import Tree
from equipoise.methods.shared.checks import at_least, refuse_beside
from equipoise.methods.shared.start_loss import start_loss

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView
    from equipoise.core.turn import Turn


def simplex(v: Tensor) -> Tensor:
    """Project v onto the simplex: the nearest point with entries of 0 or more that sum to 1.

    >>> simplex(torch.tensor([0.9, 0.5, -1.0]))
    tensor([0.7000, 0.3000, 0.0000])
    """
    falling = v.sort(descending=True).values
    above = (falling.cumsum(0) - 1) / torch.arange(1, len(v) + 1, dtype=v.dtype, device=v.device)
    return (v - above[(falling > above).sum() - 1]).clamp(min=0)


@dataclass(frozen=True)
class AFL(Method):
    eta: float = 0.1

    name = "afl"
    about = "train for the worst mixture of clients (Mohri et al., 2019)"
    reveals = frozenset({"loss"})
    single_visits = True
    needs_data = True
    words = {"lambda": "its weight in the mixture", "loss": "its mean loss under the model it received"}  # noqa: RUF012

    def __post_init__(self) -> None:
        at_least(self, "eta", 0)

    def check(self, fed: ServerView, chain: Chain) -> None:
        refuse_beside(self, chain, ("qffl", "climb"), "each weigh clients by their losses")

    def init(self, turn: Turn) -> Tree:
        even = torch.zeros(turn.fed.clients, dtype=torch.float64)
        even[turn.fed.eligible] = 1 / len(turn.fed.eligible)
        return turn.engine.place({"lambda": even})

    def address(self, slot: Tree, ids: Tensor) -> Tree:
        return {"lambda": slot["lambda"][ids]}

    def weight(self, weight: Tensor, env: Env) -> Tensor:
        mine: Tensor = env.msg["lambda"]
        return mine

    def begin(self, env: Env, data: Data | None) -> Tree:
        return {"loss": start_loss(env, data)}

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        return env.note, env.memory

    def rows(self, delta: Tree, upload: Tree, turn: Turn) -> Tree:
        return upload

    def close(self, slot: Tree, turn: Turn) -> Tree:
        assert turn.sums is not None
        if not turn.sums.rows:
            return slot
        ids, losses, everyone = turn.sums.rows["ids"], turn.sums.rows["values"]["loss"], turn.fed.eligible
        raised = slot["lambda"].index_add(0, ids.to(losses.device), self.eta * len(everyone) / len(ids) * losses)
        raised[everyone] = simplex(raised[everyone])
        return {"lambda": raised}

    def metrics(self, slot: Tree) -> dict[str, float]:
        mixture = slot["lambda"]
        return {"largest": float(mixture.max()), "effective_clients": float(1 / mixture.square().sum())}
