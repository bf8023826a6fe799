"""CLIMB: Shen et al., "An Agnostic Approach to Federated Learning with Class Imbalance", ICLR 2022, Algorithm 1.

No client's loss may exceed the mean loss f by more than a tolerance:  min f(w)  s.t.  f_i(w) - f(w) <= epsilon.
A client keeps its multiplier lambda_i and scales its delta by  w_i = 1 + lambda_i - mean(lambda).  Every few rounds
lambda_i <- clip(lambda_i + eta (f_i - f - epsilon), 0, cap),  where f_i is the plain cross entropy of the new model
on the client's data, even if the chain trains with another loss. The server learns only the two means (Remark 3.1).

Resilient variant (Hounie et al., NeurIPS 2023): epsilon grows by a slack u_i, with
u_i <- max(0, u_i + slack_eta (lambda_i - slack u_i)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.client import Env
from equipoise.core.local import Local
from equipoise.core.questions import MeanLoss, Question
from equipoise.core.tree import Tree
from equipoise.methods.climb_settings import ClimbSettings
from equipoise.methods.shared.checks import refuse_beside

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView
    from equipoise.core.turn import Turn


@dataclass(frozen=True)
class KeptLoss(MeanLoss):
    """Asks a client for its loss f_i, which the client also keeps: its mean loss times its number of batches.

    With batch="full" there is one batch, and f_i is the mean loss.
    """

    sized: bool  # whether a client is weighted by its number of samples
    batch: int | Literal["full"] = "full"
    steps_per_epoch: int | None = None

    def answer(self, totals: Tree, n: Tensor, msg: Tree, memory: Tree) -> tuple[Tree, Tree]:
        _, batches = Local(batch=self.batch, steps_per_epoch=self.steps_per_epoch).batches(n)
        loss, one = totals["loss"] / n * batches, torch.ones_like(n)
        weight = n if self.sized else one
        return {"loss": weight * loss, "weight": weight, "answered": one}, {**memory, "loss": loss}


@dataclass(frozen=True)
class DualStep(Question):
    """Has a client step its multiplier, from the loss that it kept and the mean loss that it is sent."""

    sized: bool
    eta: float
    epsilon: float
    cap: float
    slack: float | None
    slack_eta: float
    needs_model = False
    needs_data = False

    def answer(self, totals: Tree, n: Tensor, msg: Tree, memory: Tree) -> tuple[Tree, Tree]:
        u = memory.get("slack", 0.0)
        excess = memory["loss"] - msg["mean_loss"] - self.epsilon - u
        dual = (memory["dual"] + self.eta * excess).clamp(0, self.cap)
        new = {**memory, "dual": dual}
        if self.slack is not None:
            new["slack"] = (u + self.slack_eta * (dual - self.slack * u)).clamp(min=0)
        change = dual - memory["dual"]
        return {"change": n * change if self.sized else change}, new


@dataclass(frozen=True)
class Climb(ClimbSettings):
    name = "climb"
    about = "raise the weight of clients whose loss exceeds the mean (Shen et al., 2022)"
    words = {  # noqa: RUF012
        "mean_dual": "the mean of all clients' multipliers",
        "mean_loss": "the mean of the clients' losses",
        "loss": "its mean loss; sent times its weight in the mean",
        "weight": "its weight in the means: 1, or its number of samples",
        "answered": "1, to count the clients behind the mean loss",
        "change": "how its multiplier changed, times its weight",
        "dual": "its multiplier",
        "slack": "by how much its tolerance has grown",
    }

    def check(self, fed: ServerView, chain: Chain) -> None:
        refuse_beside(self, chain, ("afl", "qffl"), "each weigh clients by their losses")

    def local(self, settings: Local) -> Local:
        return replace(settings, weighting=self.weighting)

    def init(self, turn: Turn) -> Tree:
        slot = self._ask_losses({}, turn, None)
        return {**slot, "mean_dual": torch.zeros_like(slot["mean_loss"])}

    def remember(self, params: Tree, classes: int) -> Tree:
        zero = next(tree.leaves(params)).new_zeros(())
        return {"dual": zero, "loss": zero} | ({} if self.constants().slack is None else {"slack": zero})

    def broadcast(self, slot: Tree) -> Tree:
        return {"mean_dual": slot["mean_dual"]}

    def delta(self, delta: Tree, env: Env) -> Tree:
        w = 1 + env.memory["dual"] - env.msg["mean_dual"]
        return tree.scale(delta, w.clamp(min=0) if self.negative == "clip" else w)

    def close(self, slot: Tree, turn: Turn) -> Tree:
        if (turn.state.round + 1) % self.every:
            return slot
        asked = None
        if self.over == "cohort" and turn.plan is not None:
            asked = torch.tensor(sorted(set(turn.plan[turn.plan >= 0].tolist())))
        # With timing="stale" the dual step comes first, and uses the losses that clients kept at the one before.
        fresh = self.constants().timing == "fresh"
        for ask in (self._ask_losses, self._dual_step) if fresh else (self._dual_step, self._ask_losses):
            slot = ask(slot, turn, asked)
        return slot

    def _ask_losses(self, slot: Tree, turn: Turn, asked: Tensor | None) -> Tree:
        """Ask for losses and set their mean. The first call asks all clients, and also sets the total weight."""
        local = turn.chain.local(turn.fed.local)
        batches = () if self.constants().scale == "mean" else (local.batch, local.steps_per_epoch)
        answers = turn.ask(KeptLoss(self.weighting == "size", *batches), clients=asked)
        mean = answers["loss"] / answers["weight"]
        return {"weight": answers["weight"], **slot, "mean_loss": mean, "answered": answers["answered"]}

    def _dual_step(self, slot: Tree, turn: Turn, asked: Tensor | None) -> Tree:
        """Have the clients asked step their multipliers, and update the mean multiplier of all clients."""
        c = self.constants(len(turn.fed.eligible))
        step = DualStep(self.weighting == "size", c.eta, c.epsilon, c.cap, c.slack, c.slack_eta)
        change = turn.ask(step, clients=asked, msg={"mean_loss": slot["mean_loss"]})["change"]
        return {**slot, "mean_dual": slot["mean_dual"] + change / slot["weight"]}

    def metrics(self, slot: Tree) -> dict[str, float]:
        return {k: float(slot[k]) for k in ("mean_dual", "mean_loss", "answered")}

    def observe(self, slot: Tree, memory: Tree) -> dict[str, float]:
        excess = memory["loss"] - slot["mean_loss"] - self.constants().epsilon - memory.get("slack", 0.0)
        return {
            "largest_dual": float(memory["dual"].max()),
            "violation": float(excess.clamp(min=0).max()),
            "violated": float((excess > 0).double().mean()),
        }
