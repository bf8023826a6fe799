"""Class re-weighting: a sample's loss is multiplied by the weight of its class.

inverse    n / (K n_k): all classes count the same
effective  (1 - beta) / (1 - beta^n_k), scaled to sum to K; equal weights for beta = 0, and `inverse` for beta -> 1
           (Cui et al., "Class-Balanced Loss Based on Effective Number of Samples", CVPR 2019)
ratio      P(k) / P_i(k): the classes of each client count as much as in the data of all clients together
           (the "Reweighting" of FedShift's Table 1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.client import Data, Env
from equipoise.core.method import Method, helper
from equipoise.core.questions import ClassCounts, KeptCounts
from equipoise.core.tree import Tree
from equipoise.methods.shared.checks import at_least, one_of, refuse_beside, share
from equipoise.methods.shared.weighting import weighted

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView
    from equipoise.core.turn import Turn


@dataclass(frozen=True)
class ClassWeights(Method):
    rule: Literal["inverse", "effective", "ratio"] = "inverse"
    beta: float = 0.999  # only for the rule "effective"
    clip: float | None = None  # no weight is above clip or below 1 / clip
    normalised: bool = False  # divide a batch's loss by the sum of its weights instead of its number of samples

    name = "class_weights"
    about = "weigh classes by how rare they are (Cui et al., 2019)"
    words = {  # noqa: RUF012
        "weights": "the weight of each class; with rule='ratio' its share, which the client divides by its own share",
        "counts": "its number of samples of each class",
    }

    def __post_init__(self) -> None:
        one_of(self, "rule", ("inverse", "effective", "ratio"))
        share(self, "beta")
        if self.clip is not None:
            at_least(self, "clip", 1)

    def check(self, fed: ServerView, chain: Chain) -> None:
        refuse_beside(self, chain, ("fedre", "ratio_loss"), "each weigh the classes")
        if self.rule == "ratio":
            both = "each correct for how a client's class shares differ from those of all clients"
            refuse_beside(self, chain, ("fedshift",), both)

    def init(self, turn: Turn) -> Tree:
        question = KeptCounts if self.rule == "ratio" else ClassCounts
        counts = turn.ask(question(len(turn.fed.classes)))["counts"].double()
        return {"weights": self.weights(counts).to(turn.engine.dtype)}

    @helper
    def weights(self, counts: Tensor) -> Tensor:
        """The class weights, from the counts of all clients; a class without samples is treated as if it had one."""
        if self.rule == "ratio":
            return counts / counts.sum()
        rare = 1 / counts.clamp(min=1)
        if self.rule == "inverse":
            return counts.sum() / len(counts) * rare
        rare = (1 - self.beta) / (1 - self.beta ** counts.clamp(min=1))
        return rare * (len(counts) / rare.sum())

    def remember(self, params: Tree, classes: int) -> Tree:
        return {"counts": next(tree.leaves(params)).new_zeros(classes)} if self.rule == "ratio" else {}

    def broadcast(self, slot: Tree) -> Tree:
        return slot

    def begin(self, env: Env, data: Data | None) -> Tree:
        weights = env.msg["weights"]
        if self.rule == "ratio":
            own = env.memory["counts"] / env.memory["counts"].sum()
            weights = torch.where(own > 0, weights / own, 1)  # an absent class's weight is never used
        return {"weights": weights if self.clip is None else weights.clamp(1 / self.clip, self.clip)}

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        return weighted(losses, y, env.note["weights"], env.mask, self.normalised)
