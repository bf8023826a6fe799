"""CUCB: Yang, Wong, Zhu, Wang and Qian, "Federated Learning with Class Imbalance Reduction", EUSIPCO 2021.

The server estimates the class mix R of a client from the client's model. At that model it computes the gradient g_c
of its own samples of each class c. The more samples of class c the client has, the smaller is g_c:

    R_c = (1 / ||g_c||^2) / sum_c' (1 / ||g_c'||^2)

Selection is a combinatorial bandit. At first every client is selected once. After that, the first client of round t
is the one with the largest  r_k + alpha sqrt(3 ln t / (2 T_k)),  where r = 1 / H(U, R) and H is the cross entropy of
the uniform mix under R. The others are added one by one: each time the client whose R brings the mean R of the
selected clients nearest to uniform. r_k and R are means over the T_k visits of a client. Both are as in a public
implementation; the paper may scale R differently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.method import Method
from equipoise.core.network import Context
from equipoise.core.questions import cross_entropy
from equipoise.core.tree import Tree
from equipoise.methods.shared.checks import at_least

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView
    from equipoise.core.turn import Turn


def cross_entropy_from_uniform(mix: Tensor) -> Tensor:
    """H(U, R), the mean of -ln R over classes. The nearer the mix R is to uniform, the smaller it is."""
    return -mix.clamp(min=1e-12).log().mean(-1)


@dataclass(frozen=True)
class CUCB(Method):
    alpha: float = 0.8  # how much clients with few visits are favoured

    name = "cucb"
    about = "select clients whose classes balance each other, with a bandit on gradients (Yang et al., 2021)"
    reveals = frozenset({"delta"})
    single_visits = True

    def __post_init__(self) -> None:
        at_least(self, "alpha", 0)

    def check(self, fed: ServerView, chain: Chain) -> None:
        fed.auxiliary_for(self.name)
        for other in chain.having("delta"):
            raise ConfigError(
                f"method: cucb computes a client's model from its delta, and {other.name} changes deltas;"
                " keep one of them"
            )

    def init(self, turn: Turn) -> Tree:
        clients, classes = turn.fed.clients, len(turn.fed.classes)
        mix = torch.full((clients, classes), 1 / classes)
        return turn.engine.place({"mix": mix, "reward": torch.zeros(clients), "visits": torch.zeros(clients)})

    def select(self, slot: Tree, fed: ServerView, round: int) -> Tensor:
        everyone, size = fed.eligible, len(fed.draw(round))
        if round < math.ceil(len(everyone) / size):
            return everyone[(round * size + torch.arange(size)) % len(everyone)].sort().values
        mix, reward, visits = (slot[k].cpu()[everyone].double() for k in ("mix", "reward", "visits"))
        taken = [int((reward + self.alpha * (3 * math.log(round) / (2 * visits)).sqrt()).argmax())]
        while len(taken) < size:
            score = cross_entropy_from_uniform((mix[taken].sum(0) + mix) / (len(taken) + 1))
            score[taken] = torch.inf
            taken.append(int(score.argmin()))
        return everyone[torch.tensor(taken).sort().values]

    def rows(self, delta: Tree, upload: Tree, turn: Turn) -> Tree:
        held, engine, model = turn.fed.auxiliary_for(self.name), turn.engine, tree.add(turn.params, delta)

        def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
            context = Context(torch.ones_like(y, dtype=torch.bool), torch.zeros_like(y[0]), False)
            outputs, _ = turn.fed.network(params, turn.buffers, engine.inputs(x), context)
            return cross_entropy(outputs, y).mean()

        squared_norms = []
        for label in range(len(turn.fed.classes)):
            mine = held.y == label
            grads = torch.func.grad(loss)(model, held.x[mine].to(engine.device), held.y[mine].to(engine.device))
            squared_norms.append(tree.dot(grads, grads))
        guess = 1 / torch.stack(squared_norms).clamp(min=1e-12)
        return {"mix": guess / guess.sum()}

    def close(self, slot: Tree, turn: Turn) -> Tree:
        assert turn.sums is not None
        if not turn.sums.rows:
            return slot
        ids, mix = turn.sums.rows["ids"].to(slot["mix"].device), turn.sums.rows["values"]["mix"]
        visits = slot["visits"].index_add(0, ids, torch.ones_like(mix[:, 0]))
        share = 1 / visits[ids]
        reward = slot["reward"].index_add(0, ids, share * (1 / cross_entropy_from_uniform(mix) - slot["reward"][ids]))
        return {
            "mix": slot["mix"].index_add(0, ids, share[:, None] * (mix - slot["mix"][ids])),
            "reward": reward,
            "visits": visits,
        }
