"""Server optimisers: Reddi et al., "Adaptive Federated Optimization", ICLR 2021; momentum: Hsu et al., 2019.

The mean delta takes the place of a negative gradient. As in the paper, there is no bias correction, and tau, which
keeps the division finite, stands outside the root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.method import Method
from equipoise.core.tree import Tree
from equipoise.methods.shared.checks import above, share

if TYPE_CHECKING:
    from equipoise.core.sums import Sums
    from equipoise.core.turn import Turn


@dataclass(frozen=True)
class FedAvgM(Method):
    """v = beta v + delta;  w += lr v"""

    momentum: float = 0.9
    lr: float = 1.0

    name = "fedavgm"
    about = "momentum at the server (Hsu et al., 2019)"
    words = {"velocity": "the momentum of the mean delta"}  # noqa: RUF012

    def __post_init__(self) -> None:
        share(self, "momentum")
        above(self, "lr", 0)

    def init(self, turn: Turn) -> Tree:
        return {"velocity": tree.zeros(turn.params)}

    def update(self, update: Tree, sums: Sums, slot: Tree) -> tuple[Tree, Tree]:
        velocity = tree.axpy(self.momentum, slot["velocity"], update)
        return tree.scale(velocity, self.lr), {"velocity": velocity}


@dataclass(frozen=True)
class FedAdam(Method):
    """m = b1 m + (1 - b1) delta;  v = b2 v + (1 - b2) delta^2;  w += lr m / (sqrt(v) + tau)"""

    lr: float = 0.1
    b1: float = 0.9
    b2: float = 0.99
    tau: float = 1e-3

    name = "fedadam"
    about = "Adam at the server (Reddi et al., 2021)"
    words = {"mean": "a running mean of the mean delta", "square": "an average or sum of its squares"}  # noqa: RUF012

    def __post_init__(self) -> None:
        for field in ("lr", "tau"):
            above(self, field, 0)
        for field in ("b1", "b2"):
            share(self, field)

    def init(self, turn: Turn) -> Tree:
        return {"mean": tree.zeros(turn.params), "square": tree.map(lambda w: w * 0 + self.tau**2, turn.params)}

    def square(self, v: Tensor, delta: Tensor) -> Tensor:
        return self.b2 * v + (1 - self.b2) * delta.square()

    def update(self, update: Tree, sums: Sums, slot: Tree) -> tuple[Tree, Tree]:
        mean = tree.map(lambda m, d: self.b1 * m + (1 - self.b1) * d, slot["mean"], update)
        square = tree.map(self.square, slot["square"], update)
        step = tree.map(lambda m, v: self.lr * m / (v.sqrt() + self.tau), mean, square)
        return step, {"mean": mean, "square": square}


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """v -= (1 - b2) delta^2 sign(v - delta^2)"""

    name = "fedyogi"
    about = "Yogi at the server (Reddi et al., 2021)"

    def square(self, v: Tensor, delta: Tensor) -> Tensor:
        return v - (1 - self.b2) * delta.square() * torch.sign(v - delta.square())


@dataclass(frozen=True)
class FedAdagrad(FedAdam):
    """v += delta^2"""

    b1: float = 0.0

    name = "fedadagrad"
    about = "Adagrad at the server (Reddi et al., 2021)"

    def square(self, v: Tensor, delta: Tensor) -> Tensor:
        return v + delta.square()
