"""FedShift: "Federated Learning with Classifier Shift for Class Imbalance", 2022.

While client i trains, its logits are shifted by  s_i = ln(P_i / P)  (Eq. 5); the shift is left out when the model is
used. Then every client has the same optimum, that of all data together (Theorem 1). P_i is smoothed,
(n_ik + 1) / (n_i + K), and P = sum_i (n_i / n) P_i, which the server learns as a sum.

The shift is ln(source / prior), so that this is also the balanced softmax of a client's own classes (prior="uniform")
and the logit adjustment by the classes of all (source="global", prior="uniform").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from equipoise import tree
from equipoise.errors import ConfigError
from equipoise.local import Data, Env
from equipoise.method import Chain, Method
from equipoise.methods.settings import above, needs_cross_entropy, one_of, refuse_beside
from equipoise.questions import KeptCounts
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.federation import Federation
    from equipoise.server import Turn


def smoothed(counts: Tensor) -> Tensor:
    """Class shares by Laplace's rule: never zero."""
    return (counts + 1) / (counts.sum() + len(counts))


@dataclass(frozen=True)
class Shares(KeptCounts):
    """n_i P_i of each client, which keeps its counts."""

    def answer(self, totals: Tree, n: Tensor, msg: Tree, memory: Tree) -> tuple[Tree, Tree]:
        _, kept = super().answer(totals, n, msg, memory)
        return {"mass": n * smoothed(kept["counts"])}, kept


@dataclass(frozen=True)
class FedShift(Method):
    prior: Literal["global", "uniform"] | tuple[float, ...] = "global"  # the class shares that the model is to assume
    source: Literal["local", "global"] = "local"  # whose class shares are taken for those of the training data
    temperature: float = 1.0  # multiplies the shift

    name = "fedshift"
    about = "shift logits in training by the client's class shares (FedShift, 2022)"
    words = {  # noqa: RUF012
        "prior": "the class shares that the model is to assume",
        "shares": "the class shares of all clients together",
        "mass": "its smoothed class shares times its number of samples",
        "counts": "its number of samples of each class",
    }

    def __post_init__(self) -> None:
        above(self, "temperature", 0)
        one_of(self, "source", ("local", "global"))
        if isinstance(self.prior, str):
            one_of(self, "prior", ("global", "uniform"))
        elif not (min(self.prior, default=0) > 0 and abs(sum(self.prior) - 1) < 1e-6):
            raise ConfigError(f"method: fedshift(prior={self.prior}): expected shares above 0 with a sum of 1")
        if self.source == self.prior:
            raise ConfigError(
                "method: fedshift(source='global', prior='global') shifts nothing; expected prior='uniform'"
            )

    def check(self, fed: Federation, chain: Chain) -> None:
        needs_cross_entropy(self, chain)
        if self.prior != "global":
            others = ("class_weights", "fedre", "ratio_loss")
            refuse_beside(
                self, chain, others, f"each correct for the class shares of all, the one by prior={self.prior!r}"
            )
        if not isinstance(self.prior, str) and len(self.prior) != len(fed.classes):
            raise ConfigError(
                f"method: fedshift(prior={self.prior}): expected {len(fed.classes)} shares, one per class,"
                f" not {len(self.prior)}"
            )

    def init(self, turn: Turn) -> Tree:
        mass = turn.ask(Shares(len(turn.fed.classes)))["mass"]
        shares = mass / mass.sum()
        if self.prior == "global":
            return {"shares": shares, "prior": shares}
        given = [1 / len(shares)] * len(shares) if self.prior == "uniform" else self.prior
        return {"shares": shares, "prior": shares.new_tensor(given)}

    def remember(self, params: Tree, classes: int) -> Tree:
        return {"counts": next(tree.leaves(params)).new_zeros(classes)}

    def broadcast(self, slot: Tree) -> Tree:
        return slot if self.source == "global" else {"prior": slot["prior"]}

    def begin(self, env: Env, data: Data | None) -> Tree:
        source = smoothed(env.memory["counts"]) if self.source == "local" else env.msg["shares"]
        return {"shift": self.temperature * (source / env.msg["prior"]).log()}

    def logits(self, logits: Tensor, env: Env) -> Tensor:
        shift: Tensor = env.note["shift"]
        return logits + shift
