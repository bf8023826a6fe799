"""CUCB: Yang, Wong, Zhu, Wang and Qian, "Federated Learning with Class Imbalance Reduction", EUSIPCO 2021.

A client's class mix is guessed from its model. The gradient g_c that samples of class c, held by the server, have
there is the smaller the more of that class the client has:

    R_c = (1 / ||g_c||^2) / sum_c' (1 / ||g_c'||^2)

Selection is a combinatorial bandit. First every client is seen once. From then on the first one taken is that of the
largest  r_k + alpha sqrt(3 ln t / (2 T_k)),  where r = 1 / H(U, R) and H is the cross entropy of the uniform mix
under R; then, one by one, comes the client whose R brings the mean R of those taken nearest to uniform. r_k and R are
means over the T_k visits. Both are as in a public implementation; the paper may scale R differently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise import tree
from equipoise.errors import ConfigError
from equipoise.method import Chain, Method
from equipoise.methods.settings import at_least
from equipoise.network import Context
from equipoise.questions import cross_entropy
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.federation import Federation
    from equipoise.server import Turn


def surprise(mix: Tensor) -> Tensor:
    """H(U, R): the mean of -ln R over classes; the smaller, the nearer to uniform."""
    return -mix.clamp(min=1e-12).log().mean(-1)


@dataclass(frozen=True)
class CUCB(Method):
    alpha: float = 0.8  # how much a rarely seen client is favoured

    name = "cucb"
    about = "select clients whose classes balance, by a bandit on gradients (Yang et al., 2021)"
    reveals = frozenset({"delta"})
    single_visits = True

    def __post_init__(self) -> None:
        at_least(self, "alpha", 0)

    def check(self, fed: Federation, chain: Chain) -> None:
        fed.auxiliary_for(self.name)
        for other in chain.having("delta"):
            raise ConfigError(
                f"method: cucb reads a client's model off its change, and {other.name} changes that; keep one of them"
            )

    def init(self, turn: Turn) -> Tree:
        clients, even = turn.fed.clients, 1 / len(turn.fed.classes)
        mix = torch.full((clients, len(turn.fed.classes)), even)
        return turn.engine.place({"mix": mix, "reward": torch.zeros(clients), "visits": torch.zeros(clients)})

    def select(self, slot: Tree, fed: Federation, round: int) -> Tensor:
        everyone, size = fed.eligible, len(fed.draw(round))
        if round < math.ceil(len(everyone) / size):
            return everyone[(round * size + torch.arange(size)) % len(everyone)].sort().values
        mix, reward, visits = (slot[k].cpu()[everyone].double() for k in ("mix", "reward", "visits"))
        taken = [int((reward + self.alpha * (3 * math.log(round) / (2 * visits)).sqrt()).argmax())]
        while len(taken) < size:
            score = surprise((mix[taken].sum(0) + mix) / (len(taken) + 1))
            score[taken] = torch.inf
            taken.append(int(score.argmin()))
        return everyone[torch.tensor(taken).sort().values]

    def rows(self, delta: Tree, upload: Tree, turn: Turn) -> Tree:
        held, engine, model = turn.fed.auxiliary_for(self.name), turn.engine, tree.add(turn.after, delta)

        def loss(params: Tree, x: Tensor, y: Tensor) -> Tensor:
            context = Context(torch.ones_like(y, dtype=torch.bool), torch.zeros_like(y[0]), False)
            outputs, _ = turn.fed.network(params, turn.buffers, engine.features(x), context)
            return cross_entropy(outputs, y).mean()

        sizes = []
        for label in range(len(turn.fed.classes)):
            mine = held.y == label
            grads = torch.func.grad(loss)(model, held.x[mine].to(engine.device), held.y[mine].to(engine.device))
            sizes.append(tree.dot(grads, grads))
        guess = 1 / torch.stack(sizes).clamp(min=1e-12)
        return {"mix": guess / guess.sum()}

    def close(self, slot: Tree, turn: Turn) -> Tree:
        assert turn.sums is not None
        if not turn.sums.rows:
            return slot
        ids, mix = turn.sums.rows["ids"].to(slot["mix"].device), turn.sums.rows["values"]["mix"]
        visits = slot["visits"].index_add(0, ids, torch.ones_like(mix[:, 0]))
        share = 1 / visits[ids]
        reward = slot["reward"].index_add(0, ids, share * (1 / surprise(mix) - slot["reward"][ids]))
        return {
            "mix": slot["mix"].index_add(0, ids, share[:, None] * (mix - slot["mix"][ids])),
            "reward": reward,
            "visits": visits,
        }
