"""AFL: Mohri, Sivek and Suresh, "Agnostic Federated Learning", ICML 2019.

The model is to be good for the worst mixture of clients, lambda being in the simplex:

    min_w max_lambda sum_i lambda_i f_i(w);   lambda <- P(lambda + eta (N / |S|) f(w_t))

The descent is a round of training in which client i weighs lambda_i. The ascent takes the losses of the model that
the round began with, and P projects onto the simplex. Where only a cohort S answers, N / |S| makes its losses an
unbiased estimate of all clients'; with all clients and one full step each this is the paper's algorithm. The paper
returns the mean of its iterates, this is the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.local import Data, Env
from equipoise.method import Chain, Method
from equipoise.methods.settings import at_least, refuse_beside
from equipoise.methods.start_loss import start_loss
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.federation import Federation
    from equipoise.server import Turn


def simplex(v: Tensor) -> Tensor:
    """The point nearest to v among those with entries of 0 or more that add up to 1.

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

    def check(self, fed: Federation, chain: Chain) -> None:
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
