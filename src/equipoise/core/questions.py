"""Questions the server may put to clients outside training. Each is answered by a total, never by one client.

A question is, like a method, a frozen dataclass: it can be written down, sent and rebuilt at the other end. `measure`
adds up something over batches of a client's data; `answer` turns the total into the reply and the new memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise.core.client import log_likelihood
from equipoise.core.tree import Tree


@dataclass(frozen=True)
class Question:
    needs_model: ClassVar[bool] = True  # if not, the outputs given to `measure` are empty
    needs_data: ClassVar[bool] = True  # if not, `measure` is never called
    needs_features: ClassVar[bool] = False  # if so, `measure` takes a fourth argument: what the model's head reads

    def measure(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tree:
        """Totals over one batch of one client; only where `mask` is true do samples count."""
        return {}

    def answer(self, totals: Tree, n: Tensor, msg: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The reply, which will be summed over clients, and the new memory of the asking method."""
        return totals, memory


@dataclass(frozen=True)
class ClassCounts(Question):
    """The number of samples of each class."""

    classes: int
    needs_model = False

    def measure(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tree:
        hit = (y[:, None] == torch.arange(self.classes, device=y.device)) & mask[:, None]
        return {"counts": hit.sum(0)}


@dataclass(frozen=True)
class KeptCounts(ClassCounts):
    """Class counts, of which each client keeps its own."""

    def answer(self, totals: Tree, n: Tensor, msg: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return totals, {"counts": totals["counts"].to(memory["counts"].dtype)}


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """One loss per sample."""
    return -log_likelihood(outputs, y)


@dataclass(frozen=True)
class MeanLoss(Question):
    """The mean cross entropy of each client's data under the model, in evaluation mode."""

    def measure(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tree:
        return {"loss": torch.where(mask, cross_entropy(outputs, y), 0).sum()}

    def answer(self, totals: Tree, n: Tensor, msg: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return {"loss": totals["loss"] / n}, memory
