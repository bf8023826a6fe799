"""Ratio-Loss: Wang et al., "Addressing Class Imbalance in Federated Learning", AAAI 2021.

After each round, the server trains a copy of the model that the round began with on each class p of its auxiliary
set. It compares the moves Delta_p of the copies' last layers, at the coordinates S_p that class p moves most
(`monitor`). With m_p, the mean of Delta_q over the other classes, the weights of the classes in the next round's
cross entropy are

    w_p = alpha + beta Ra_p,   Ra_p = |sum over S_p of Delta_p| / |sum over S_p of m_p|

as in the authors' code; the paper prints a mean of ratios. The server estimates class counts from the same moves.

`variant="climb"` is what CLIMB was compared with (Shen et al., 2022): Delta_p is a single gradient, of which only row
p is used, Ra_p = |mean over j of Delta_p[p, j] / m_p[p, j]|. The weights are computed every five rounds, and the loss
of a batch is divided by the sum of its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from equipoise.core.chain import Chain
from equipoise.core.client import Env
from equipoise.core.local import Local
from equipoise.core.method import Method, helper
from equipoise.core.tree import Tree
from equipoise.methods.shared import monitor
from equipoise.methods.shared.checks import above, at_least, one_of
from equipoise.methods.shared.weighting import weighted

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView
    from equipoise.core.turn import Turn

UNKNOWN = 10.0  # Ra_p where m_p is zero
GRADIENT = Local(lr=1.0, batch="full")  # a single step of length one
EVERY = 5  # rounds after which the variant "climb" computes new weights


@dataclass(frozen=True)
class RatioLoss(Method):
    alpha: float = 1.0
    beta: float = 0.1
    threshold: float = 1.25
    cap: float = 5000.0  # the largest Ra_p
    variant: Literal["official", "climb"] = "official"

    name = "ratio_loss"
    about = "weight classes by how far each of them moves the last layer (Wang et al., 2021)"
    words = {"weights": "the weight of each class in the loss"}  # noqa: RUF012

    def __post_init__(self) -> None:
        for field in ("alpha", "beta"):
            at_least(self, field, 0)
        at_least(self, "threshold", 1)
        above(self, "cap", 0)
        one_of(self, "variant", ("official", "climb"))

    def check(self, fed: ServerView, chain: Chain) -> None:
        fed.auxiliary_for(self.name)
        monitor.last_layer(fed)

    def init(self, turn: Turn) -> Tree:
        if self.variant == "climb":
            return self._by_gradients(turn)
        ones = torch.ones(len(turn.fed.classes), dtype=turn.engine.dtype, device=turn.engine.device)
        return {"weights": ones, "counts": 0 * ones}

    def broadcast(self, slot: Tree) -> Tree:
        return {"weights": slot["weights"]}

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        return weighted(losses, y, env.msg["weights"], env.mask, normalised=self.variant == "climb")

    def close(self, slot: Tree, turn: Turn) -> Tree:
        if self.variant == "climb":
            return self._by_gradients(turn) if (turn.state.round + 1) % EVERY == 0 else slot
        assert turn.sums is not None
        fed, local = turn.fed, turn.chain.local(turn.fed.local)
        delta = monitor.moves(turn._replace(params=turn.state.params, buffers=turn.state.buffers), local)
        chosen = monitor.select(delta, self.threshold)
        seen = monitor.seen_by_copy(fed, local)
        counts = monitor.class_counts(delta, chosen, turn.sums, monitor.last_layer(fed), seen)
        return {"weights": self.weights(ratios(delta, chosen)), "counts": counts}

    def _by_gradients(self, turn: Turn) -> Tree:
        return {"weights": self.weights(row_ratios(monitor.moves(turn, GRADIENT)))}

    @helper
    def weights(self, ratios: Tensor) -> Tensor:
        return self.alpha + self.beta * ratios.clamp(max=self.cap)

    def metrics(self, slot: Tree) -> dict[str, float]:
        return {f"count_{c}": float(count) for c, count in enumerate(slot.get("counts", ()))}


def ratios(delta: Tensor, chosen: Tensor) -> Tensor:
    """Ra_p of the authors' code; `chosen` are the S_p."""
    own = torch.where(chosen, delta, 0).sum((1, 2)).abs()
    others = torch.where(chosen, monitor.mean_of_others(delta), 0).sum((1, 2)).abs()
    return torch.where(others == 0, UNKNOWN, own / others)


def row_ratios(delta: Tensor) -> Tensor:
    """Ra_p of the variant "climb". Columns that the other classes do not move are left out."""
    own, others = delta.diagonal().T, monitor.mean_of_others(delta).diagonal().T
    known = others != 0
    mean = torch.where(known, own / others, 0).sum(1) / known.sum(1)
    return torch.where(known.any(1), mean.abs(), UNKNOWN)
