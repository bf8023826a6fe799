"""FedShift: "Federated Learning with Classifier Shift for Class Imbalance", 2022.

While client i trains, its logits are shifted by  s_i = ln(P_i / P)  (Eq. 5); predictions are made without the shift.
Then every client has the same optimum, that of all data together (Theorem 1). P_i is smoothed,
(n_ik + 1) / (n_i + K), and P = sum_i (n_i / n) P_i, which the server obtains as a sum over clients.

In general the shift is ln(source / prior). With prior="uniform" this is the balanced softmax of a client's own
classes, and with source="global" and prior="uniform" the logit adjustment by the classes of all clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.client import Data, Env
from equipoise.core.errors import ConfigError
from equipoise.core.method import Method
from equipoise.core.questions import KeptCounts
from equipoise.core.tree import Tree
from equipoise.methods.shared.checks import above, needs_cross_entropy, one_of, refuse_beside

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView
    from equipoise.core.turn import Turn


def smoothed(counts: Tensor) -> Tensor:
    """Class shares, smoothed by Laplace's rule so that none is zero."""
    return (counts + 1) / (counts.sum() + len(counts))


@dataclass(frozen=True)
class Shares(KeptCounts):
    """Asks a client for n_i P_i; the client also keeps its class counts."""

    def answer(self, totals: Tree, n: Tensor, msg: Tree, memory: Tree) -> tuple[Tree, Tree]:
        _, kept = super().answer(totals, n, msg, memory)
        return {"mass": n * smoothed(kept["counts"])}, kept


@dataclass(frozen=True)
class FedShift(Method):
    prior: Literal["global", "uniform"] | tuple[float, ...] = "global"  # the class shares that predictions assume
    source: Literal["local", "global"] = "local"  # training data: the shares of the client, or of all clients
    temperature: float = 1.0  # multiplies the shift

    name = "fedshift"
    about = "shift logits in training by the client's class shares (FedShift, 2022)"
    words = {  # noqa: RUF012
        "prior": "the class shares that predictions assume",
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

    def check(self, fed: ServerView, chain: Chain) -> None:
        needs_cross_entropy(self, chain)
        if self.prior != "global":
            others = ("class_weights", "fedre", "ratio_loss")
            both = f"each correct for the class shares of all clients (fedshift by prior={self.prior!r})"
            refuse_beside(self, chain, others, both)
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
