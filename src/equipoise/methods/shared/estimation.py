"""Class shares estimated from clients' models: the estimator of FedRE (its Algorithm 1).

Early in training with the square loss, the outputs of a network with sigmoid units are the class shares of its data
for every input (FedRE's Theorem 1: such a point is critical where all classes have the same mean). Every client
trains the same initial model; the server runs the trained model on its own balanced samples, and its mean output is
the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.client import Data, Env
from equipoise.core.local import Local
from equipoise.core.method import Method
from equipoise.core.tree import Tree
from equipoise.core.turn import Turn

PRELUDE = Local(lr=0.01, epochs=5, batch=32)  # the paper's training for the estimate, before the first round
FLOOR = 0.05  # smaller estimates are raised to this share, in units of 1 / classes


@dataclass(frozen=True)
class SquareLoss(Method):
    """Training on the square loss, after which the server keeps the mean output of each client's model."""

    name = "square_loss"
    about = "the square loss; the server runs the model on its auxiliary set and keeps the mean output"
    reveals = frozenset({"class_shares"})

    def loss(self, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        target = y[:, None] == torch.arange(logits.shape[-1], device=y.device)
        return (logits - target.to(logits.dtype)).square().sum(-1)

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        return {"samples": env.n}, env.memory

    def rows(self, delta: Tree, upload: Tree, turn: Turn) -> Tree:
        samples = turn.fed.auxiliary_for(self.name).x
        outputs = turn.engine.outputs(tree.add(turn.params, delta), turn.buffers, samples)
        return {"outputs": outputs.mean(0), "samples": upload["samples"]}


class ClientOutputs(NamedTuple):
    """One row per client: the mean output of its model on the server's samples, and its number of samples."""

    outputs: Tensor
    samples: Tensor

    def pooled(self) -> Tensor:
        """The mean output over clients, weighted by their numbers of samples."""
        n = self.samples.to(self.outputs.dtype)
        return n @ self.outputs / n.sum()


def probe(turn: Turn, local: Local = PRELUDE) -> ClientOutputs:
    """Have all clients train the current model once on the square loss. The global model does not change."""
    rows = turn.train(SquareLoss(), local).rows
    return ClientOutputs(**tree.rows(rows["values"], rows["ids"].argsort()))


def shares(outputs: Tensor, floor: float = FLOOR) -> Tensor:
    """Turn mean outputs into shares: raise them to the floor, and scale them to sum to one."""
    raised = outputs.clamp(min=floor / outputs.shape[-1])
    return raised / raised.sum(-1, keepdim=True)
