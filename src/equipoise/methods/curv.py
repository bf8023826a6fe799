"""FedCurv: Shoham et al., "Overcoming Forgetting in Federated Learning on Non-IID Data", 2019.

Client s adds to its loss what keeps it from moving where it matters to others:

    lambda sum_{j != s} (w - w_j)^T diag(I_j) (w - w_j)

w_j is the model at which client j last ended and I_j the diagonal of its Fisher information there. The server needs
u = sum_j I_j and v = sum_j I_j w_j only, and a client takes its own part off: its gradient gains
2 lambda ((u - I_s) w - (v - I_s w_s)). Where a part of the clients trains, the sums hold what each client said when
it was last seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise import tree
from equipoise.local import Data, Env
from equipoise.method import Method
from equipoise.methods.settings import at_least
from equipoise.network import Context
from equipoise.questions import cross_entropy
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.server import Turn


def fisher(env: Env, data: Data, chunk: int = 8) -> Tree:
    """The diagonal of the empirical Fisher information: the mean of squared gradients, sample by sample.

    As many gradients as `chunk` are held at a time, each as large as the model.
    """

    def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
        context = Context(torch.ones_like(y[None], dtype=torch.bool), env.key, False)
        outputs, _ = env.network(params, env.buffers, data.features(x[None]), context)
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
    about = "keep each client where it matters to the others (Shoham et al., 2019)"
    single_visits = True
    needs_data = True
    words = {  # noqa: RUF012
        "fisher": "diagonal of the Fisher information",
        "pull": "that, times the model there",
    }

    def __post_init__(self) -> None:
        at_least(self, "lam", 0)

    def init(self, turn: Turn) -> Tree:
        return {"fisher": tree.zeros(turn.after), "pull": tree.zeros(turn.after)}

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
