"""Astraea: Duan et al., "Self-Balancing Federated Learning With Global Imbalanced Data in Mobile Systems", TPDS 2021.

Algorithm 2: with C_y samples of class y, mean mu and deviation sigma over classes, z_y = (C_y - mu) / sigma and
tau_a = -1 / tau_d, a class with z_y < tau_a is augmented and one with z_y > tau_d is thinned out, to R_y C_y samples:
R_y = (mu + sigma sqrt(|z_y| tau_d)) / C_y for both. This is the printed formula, under which augmented classes end
above the mean. The text wants them below mu + sigma tau_a, which takes (mu - sigma sqrt(z_y tau_a)) / C_y:
`sign="minus"`.

Algorithm 3 forms mediators of up to gamma clients: the next client is always the one that brings the pooled labels
nearest to uniform. Algorithm 1: the clients of a mediator train one after another, and this sequence is repeated E_m
times; the server averages the mediators, weighted by their numbers of samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from equipoise.core.augmentations import warp
from equipoise.core.chain import Chain
from equipoise.core.client import Env
from equipoise.core.method import Method
from equipoise.core.questions import ClassCounts
from equipoise.core.tree import Tree
from equipoise.methods.shared import mediators
from equipoise.methods.shared.checks import (
    above,
    at_least,
    between,
    needs_images,
    one_of,
    refuse_single_visits,
    whole,
)
from equipoise.methods.shared.mediators import kld
from equipoise.methods.shared.resampling import multiply, zscore_ratios

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView
    from equipoise.core.turn import Turn


@dataclass(frozen=True)
class Astraea(Method):
    gamma: int = 10  # the most clients of a mediator
    tau_d: float | None = 3.5  # None: clients keep their data as they are
    mediator_epochs: int = 2  # E_m
    reschedule: Literal["round", "once"] = "round"
    sign: Literal["plus", "minus"] = "plus"
    augment: Literal["warp", "repeat"] = "warp"
    shift: float = 0.1  # as a share of the side of an image
    rotation: float = 10.0  # degrees
    shear: float = 10.0  # degrees
    zoom: float = 0.1

    name = "astraea"
    about = "resample classes by z-score; train clients in balanced chains (Duan et al., 2021)"
    reveals = frozenset({"class_counts"})
    words = {"ratios": "the factor by which each class grows or shrinks", "counts": "class counts"}  # noqa: RUF012

    def __post_init__(self) -> None:
        whole(self, "gamma", 1)
        whole(self, "mediator_epochs", 1)
        if self.tau_d is not None:
            above(self, "tau_d", 0)
        one_of(self, "reschedule", ("round", "once"))
        one_of(self, "sign", ("plus", "minus"))
        one_of(self, "augment", ("warp", "repeat"))
        at_least(self, "shift", 0)
        for field, high in {"rotation": 360, "shear": 90, "zoom": 1}.items():
            between(self, field, 0, high)

    def check(self, fed: ServerView, chain: Chain) -> None:
        if self._warps:
            needs_images(self, fed, "use astraea(augment='repeat') for plain copies, or tau_d=None for none")
        if self.gamma * self.mediator_epochs > 1:
            refuse_single_visits(self, chain, "resample only: astraea(gamma=1, mediator_epochs=1)")

    @property
    def _warps(self) -> bool:
        return self.tau_d is not None and self.augment == "warp"

    def init(self, turn: Turn) -> Tree:
        fed, question = turn.fed, ClassCounts(len(turn.fed.classes))
        before = turn.ask(question, rows=True)["counts"].cpu()
        total = before.sum(0)
        slot = turn.engine.place({"ratios": zscore_ratios(total, self.tau_d, self.sign)})
        turn.engine.resample(self, slot)
        after = turn.ask(question, rows=True)["counts"].cpu()
        counts, order = after.new_zeros(fed.clients, len(total)), after.new_zeros(fed.clients)
        counts[fed.eligible] = after
        if self.reschedule == "once":
            order[fed.eligible] = mediators.assign(after, self.gamma)
        numbers = {
            "kld_clients": kld(before).mean(),
            "kld_resampled": kld(after).mean(),
            "kld_mediators": torch.zeros(()),
            "storage": (after - before).clamp(min=0).sum() / total.sum(),
        }
        return slot | turn.engine.place({"counts": counts, "order": order, "numbers": numbers})

    def broadcast(self, slot: Tree) -> Tree:
        return {"ratios": slot["ratios"]}

    def resample(self, y: Tensor, msg: Tree, key: Tensor) -> tuple[Tensor, Tensor]:
        return multiply(y, msg["ratios"], key)

    def batch(self, x: Tensor, y: Tensor, env: Env) -> tuple[Tensor, Tensor]:
        if not self._warps:
            return x, y
        copies = warp(x, env.copies, shift=self.shift, rotation=self.rotation, shear=self.shear, zoom=self.zoom)
        return torch.where(env.copies[:, None, None, None] > 0, copies, x), y

    def plan(self, lanes: Tensor, slot: Tree, fed: ServerView) -> Tensor:
        ids = lanes[lanes >= 0]
        if self.reschedule == "once":
            order = slot["order"].cpu()[ids]
        else:
            order = mediators.assign(slot["counts"].cpu()[ids], self.gamma)
        return mediators.lanes(ids, order, self.gamma, self.mediator_epochs)

    def close(self, slot: Tree, turn: Turn) -> Tree:
        assert turn.plan is not None
        pooled = mediators.pooled(slot["counts"].cpu(), turn.plan)
        now = turn.engine.place({"kld_mediators": kld(pooled).mean()})
        return slot | {"numbers": slot["numbers"] | now}

    def metrics(self, slot: Tree) -> dict[str, float]:
        return {name: float(value) for name, value in slot["numbers"].items()}
