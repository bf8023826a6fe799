"""FedRE: "Tackling Imbalanced Class in Federated Learning via Class Distribution Estimation", 2022.

Before the first round, every client k trains the initial model once on the square loss; the global model does not
move. The server estimates class shares from the outputs f(w_k, x) of the results on its balanced auxiliary set A:

    D_k = mean of f(w_k, x) over A;   D = sum_k (n_k / n) D_k;   R = alpha + beta / D^2

After that, clients minimise the cross entropy weighted by R (Eq. 2). D is scaled to sum to one, and shares below
floor / classes are raised to it. The paper has no such floor; without it, a share near zero would have a huge weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from equipoise.core.chain import Chain
from equipoise.core.client import Env
from equipoise.core.local import Local
from equipoise.core.method import Method
from equipoise.core.tree import Tree
from equipoise.methods.shared.checks import above, at_least, refuse_beside, share, whole
from equipoise.methods.shared.estimation import FLOOR, PRELUDE, probe, shares
from equipoise.methods.shared.weighting import weighted

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView
    from equipoise.core.turn import Turn


@dataclass(frozen=True)
class FedRE(Method):
    alpha: float = 1.0
    beta: float = 0.01
    floor: float = FLOOR
    probe_lr: float = PRELUDE.lr  # the settings of the training before the first round
    probe_epochs: int = PRELUDE.epochs
    probe_batch: int = 32
    normalised: bool = False  # divide a batch's loss by the sum of its weights instead of its number of samples

    name = "fedre"
    about = "weight rare classes more, by shares estimated from the clients' models (FedRE, 2022)"
    reveals = frozenset({"class_shares"})
    words = {"weights": "the weight of each class in the loss"}  # noqa: RUF012

    def __post_init__(self) -> None:
        for field in ("alpha", "beta"):
            at_least(self, field, 0)
        for field in ("floor", "probe_lr"):
            above(self, field, 0)
        share(self, "floor")
        for field in ("probe_epochs", "probe_batch"):
            whole(self, field, 1)

    def check(self, fed: ServerView, chain: Chain) -> None:
        refuse_beside(self, chain, ("ratio_loss",), "each weigh the classes")
        fed.auxiliary_for(self.name)

    def init(self, turn: Turn) -> Tree:
        answers = probe(turn, Local(lr=self.probe_lr, epochs=self.probe_epochs, batch=self.probe_batch))
        d = shares(answers.pooled(), self.floor)
        return {"shares": d, "weights": self.alpha + self.beta / d.square()}

    def broadcast(self, slot: Tree) -> Tree:
        return {"weights": slot["weights"]}

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        return weighted(losses, y, env.msg["weights"], env.mask, self.normalised)

    def metrics(self, slot: Tree) -> dict[str, float]:
        return {f"share_{c}": float(share) for c, share in enumerate(slot["shares"])}
