"""Class re-weighting: a sample's loss is multiplied by the weight of its class.

inverse    n / (K n_k): all classes count the same
effective  (1 - beta) / (1 - beta^n_k), made to sum to K; from no weights (beta = 0) to inverse (beta -> 1)
           (Cui et al., "Class-Balanced Loss Based on Effective Number of Samples", CVPR 2019)
ratio      P(k) / P_i(k): each client counts like a sample of all (the "Reweighting" of FedShift's Table 1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from equipoise import tree
from equipoise.local import Data, Env
from equipoise.method import Chain, Method
from equipoise.methods.settings import at_least, one_of, refuse_beside, share
from equipoise.methods.weighting import weighted
from equipoise.questions import ClassCounts, KeptCounts
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.federation import Federation
    from equipoise.server import Turn


@dataclass(frozen=True)
class ClassWeights(Method):
    rule: Literal["inverse", "effective", "ratio"] = "inverse"
    beta: float = 0.999  # of "effective"
    clip: float | None = None  # no weight is above clip or below 1 / clip
    normalised: bool = False  # divide a batch's loss by its weights, not by its samples

    name = "class_weights"
    about = "weigh classes by how rare they are (Cui et al., 2019)"
    words = {  # noqa: RUF012
        "weights": "the weight of each class; with rule='ratio' its share, which the client divides by its own",
        "counts": "its number of samples of each class",
    }

    def __post_init__(self) -> None:
        one_of(self, "rule", ("inverse", "effective", "ratio"))
        share(self, "beta")
        if self.clip is not None:
            at_least(self, "clip", 1)

    def check(self, fed: Federation, chain: Chain) -> None:
        refuse_beside(self, chain, ("fedre", "ratio_loss"), "each weigh the classes")
        if self.rule == "ratio":
            refuse_beside(self, chain, ("fedshift",), "each correct for how a client's class shares differ from all")

    def init(self, turn: Turn) -> Tree:
        question = KeptCounts if self.rule == "ratio" else ClassCounts
        counts = turn.ask(question(len(turn.fed.classes)))["counts"].double()
        return {"weights": self.weights(counts).to(turn.engine.dtype)}

    def weights(self, counts: Tensor) -> Tensor:
        """From the counts of all clients together; a class that nobody has is weighed as if it had one sample."""
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
            weights = torch.where(own > 0, weights / own, 1)  # of a class without samples the weight is never used
        return {"weights": weights if self.clip is None else weights.clamp(1 / self.clip, self.clip)}

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        return weighted(losses, y, env.note["weights"], env.mask, self.normalised)
