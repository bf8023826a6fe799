"""FedCurv: Shoham et al., "Overcoming Forgetting in Federated Learning on Non-IID Data", 2019.

Client s adds to its loss a penalty on moving parameters that matter to other clients:

    lambda sum_{j != s} (w - w_j)^T diag(I_j) (w - w_j)

w_j is the model with which client j last ended, and I_j the diagonal of its Fisher information there. The server
needs only u = sum_j I_j and v = sum_j I_j w_j, from which a client subtracts its own part: its gradient gains
2 lambda ((u - I_s) w - (v - I_s w_s)). If only some clients train in a round, the sums hold what each client sent
when it last took part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.client import Data, Env
from equipoise.core.method import Method
from equipoise.core.network import Context
from equipoise.core.questions import cross_entropy
from equipoise.core.tree import Tree
from equipoise.methods.shared.checks import at_least

if TYPE_CHECKING:
    from equipoise.core.turn import Turn


def fisher(env: Env, data: Data, chunk: int = 8) -> Tree:
    """The diagonal of the empirical Fisher information: the mean over samples of the squared gradient.

    `chunk` gradients, each as large as the model, are in memory at a time.
    """

    def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
        context = Context(torch.ones_like(y[None], dtype=torch.bool), env.key, False)
        outputs, _ = env.network(params, env.buffers, data.inputs(x[None]), context)
        return cross_entropy(outputs, y[None])[0]

    total = tree.zeros(env.params)
    for low in range(0, len(data.y), chunk):
        some = slice(low, low + chunk)
        grads = torch.vmap(torch.func.grad(loss), (None, 0, 0))(env.params, data.x[some], data.y[some])
        counted = data.mask[some].to(env.lr.dtype)
        total = tree.map(lambda t, g: t + torch.tensordot(counted, g * g, 1), total, grads)  # noqa: B023
    return tree.map(lambda t: t / env.n, total)


@dataclass(frozen=True)
class FedCurv(Method):
    lam: float = 1.0  # lambda

    name = "fedcurv"
    about = "penalise moving parameters that matter to other clients (Shoham et al., 2019)"
    single_visits = True
    needs_data = True
    words = {  # noqa: RUF012
        "fisher": "the diagonal of the Fisher information",
        "pull": "the Fisher information times the model",
    }

    def __post_init__(self) -> None:
        at_least(self, "lam", 0)

    def init(self, turn: Turn) -> Tree:
        return {"fisher": tree.zeros(turn.params), "pull": tree.zeros(turn.params)}

    def remember(self, params: Tree, classes: int) -> Tree:
        return {"fisher": tree.zeros(params), "pull": tree.zeros(params)}

    def broadcast(self, slot: Tree) -> Tree:
        return slot

    def grads(self, grads: Tree, env: Env) -> Tree:
        others = tree.sub(env.msg, env.memory)
        return tree.map(
            lambda g, w, u, v: g + 2 * self.lam * (u * w - v), grads, env.params, others["fisher"], others["pull"]
        )

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        assert data is not None
        information = fisher(env, data)
        new = {"fisher": information, "pull": tree.map(torch.mul, information, env.params)}
        return tree.sub(new, env.memory), new

    def close(self, slot: Tree, turn: Turn) -> Tree:
        assert turn.sums is not None
        return tree.add(slot, turn.sums.uploads) if turn.sums.uploads else slot
