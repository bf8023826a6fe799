"""Class shares read off models: the estimator of FedRE (its Algorithm 1), and how well it does.

Early in training with the square loss a network with sigmoid units answers every input with the class shares of its
data (FedRE's Theorem 1: such a point is critical where all classes have the same mean). Every client trains the same
initial model; the server runs the result on its own balanced samples, and takes the mean output for the shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from equipoise import tree
from equipoise.engines import Engine, Stacked
from equipoise.local import Data, Env, Local
from equipoise.method import Chain, Method
from equipoise.questions import ClassCounts
from equipoise.round import start
from equipoise.server import Turn
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.federation import Federation

PRELUDE = Local(lr=0.01, epochs=5, batch=32)  # as the paper trains for the estimate
FLOOR = 0.05  # the smallest share that is believed, as a part of 1 / classes


@dataclass(frozen=True)
class SquareLoss(Method):
    """The training that makes a network tell its class shares, and how the server hears them."""

    name = "square_loss"
    about = "the square loss; the server runs it on its auxiliary set and keeps the mean output"
    reveals = frozenset({"class_shares"})

    def loss(self, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        target = y[:, None] == torch.arange(logits.shape[-1], device=y.device)
        return (logits - target.to(logits.dtype)).square().sum(-1)

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        return {"samples": env.n}, env.memory

    def rows(self, delta: Tree, upload: Tree, turn: Turn) -> Tree:
        samples = turn.fed.auxiliary_for(self.name).x
        outputs = turn.engine.outputs(tree.add(turn.after, delta), turn.buffers, samples)
        return {"outputs": outputs.mean(0), "samples": upload["samples"]}


class Heard(NamedTuple):
    """Of each client, in their order: its mean output on the server's samples, and how many samples it has."""

    outputs: Tensor
    samples: Tensor

    def pooled(self) -> Tensor:
        n = self.samples.to(self.outputs.dtype)
        return n @ self.outputs / n.sum()


def listen(turn: Turn, local: Local = PRELUDE) -> Heard:
    """All clients train the model as it is, once, on the square loss; it does not move."""
    rows = turn.train(SquareLoss(), local).rows
    return Heard(**tree.rows(rows["values"], rows["ids"].argsort()))


def shares(outputs: Tensor, floor: float = FLOOR) -> Tensor:
    """Mean outputs as shares: none below the floor, with a sum of one."""
    raised = outputs.clamp(min=floor / outputs.shape[-1])
    return raised / raised.sum(-1, keepdim=True)


class Estimate(NamedTuple):
    """Estimated class shares beside the true ones, which only a simulation knows."""

    shares: Tensor  # of all clients together
    truth: Tensor
    clients: Tensor  # one row for each client that has samples
    clients_truth: Tensor

    @property
    def error(self) -> Tensor:
        """Of each class, as a part of its true share."""
        return (self.shares - self.truth).abs() / self.truth


@torch.no_grad()
def estimate(fed: Federation, local: Local = PRELUDE, engine: Engine | None = None) -> Estimate:
    """The estimate and its error, without any training of the global model."""
    engine = engine or Stacked(fed)
    fed.auxiliary_for("the estimate of class shares")
    state = start(fed, Chain(), engine)
    turn = Turn(fed, engine, state, state.params, state.buffers)
    heard = listen(turn, local)
    counts = turn.ask(ClassCounts(len(fed.classes)), rows=True)["counts"].to(engine.dtype)
    return Estimate(
        shares(heard.pooled()),
        counts.sum(0) / counts.sum(),
        shares(heard.outputs),
        counts / counts.sum(-1, keepdim=True),
    )
