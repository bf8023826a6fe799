"""Active sampling: Goetz et al., "Active Federated Learning", 2019.

The value of a client is v_k = sqrt(n_k) f_k(w), with its loss f_k at the model that it was last sent; before the
first round, at the initial model. Of K clients, the alpha1 K with the lowest values are set aside. To select m
clients, (1 - alpha3) m are drawn without replacement from the others, with odds exp(alpha2 v_k), and alpha3 m are
drawn uniformly from all clients that were not drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.core import random
from equipoise.core.client import Data, Env
from equipoise.core.method import Method
from equipoise.core.questions import MeanLoss
from equipoise.core.tree import Tree
from equipoise.methods.shared.checks import at_least, share
from equipoise.methods.shared.start_loss import start_loss

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView
    from equipoise.core.turn import Turn


@dataclass(frozen=True)
class Value(MeanLoss):
    """Asks a client for its value: sqrt(n) times its mean loss."""

    def answer(self, totals: Tree, n: Tensor, msg: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return {"value": totals["loss"] / n.to(totals["loss"].dtype).sqrt()}, memory


@dataclass(frozen=True)
class Active(Method):
    alpha1: float = 0.75
    alpha2: float = 0.01
    alpha3: float = 0.1

    name = "active"
    about = "select clients of high loss more often (Goetz et al., 2019)"
    reveals = frozenset({"value"})
    single_visits = True
    needs_data = True
    words = {"value": "the square root of its number of samples, times its mean loss"}  # noqa: RUF012

    def __post_init__(self) -> None:
        share(self, "alpha1")
        at_least(self, "alpha2", 0)
        share(self, "alpha3")

    def init(self, turn: Turn) -> Tree:
        value = turn.ask(Value(), rows=True)["value"]
        return {"value": value.new_zeros(turn.fed.clients).index_copy(0, turn.fed.eligible.to(value.device), value)}

    def select(self, slot: Tree, fed: ServerView, round: int) -> Tensor:
        everyone, size = fed.eligible, len(fed.draw(round))
        value = slot["value"].cpu()[everyone].double()
        aside = value.argsort(stable=True)[: int(self.alpha1 * len(everyone))]
        key = random.bits(fed.seed, random.SELECT, round)
        # Gumbel top-k: the largest sums of log odds and Gumbel noise are a draw without replacement with these odds.
        gumbel = -(-(random.uniform(key, len(everyone), torch.float64) + 2.0**-25).log()).log()
        score = (self.alpha2 * value + gumbel).index_fill(0, aside, -torch.inf)
        by_value = min(size - int(self.alpha3 * size), len(everyone) - len(aside))
        chosen = score.argsort(descending=True, stable=True)[:by_value]
        uniform = random.order(random.fold(key, random.SELECT), len(everyone))
        rest = uniform[~torch.isin(uniform, chosen)][: size - by_value]
        return everyone[torch.cat([chosen, rest]).sort().values]

    def begin(self, env: Env, data: Data | None) -> Tree:
        return {"value": start_loss(env, data) * env.n.to(env.lr.dtype).sqrt()}

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        return env.note, env.memory

    def rows(self, delta: Tree, upload: Tree, turn: Turn) -> Tree:
        return upload

    def close(self, slot: Tree, turn: Turn) -> Tree:
        assert turn.sums is not None
        if not turn.sums.rows:
            return slot
        new = turn.sums.rows["values"]["value"]
        return {"value": slot["value"].index_copy(0, turn.sums.rows["ids"].to(new.device), new)}
