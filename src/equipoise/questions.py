"""Questions the server may put to clients outside training. Each is answered by a total, never by one client.

A question is, like a method, a frozen dataclass: it can be written down, sent and rebuilt at the other end. `measure`
adds up something over batches of a client's data; `answer` turns the total into the reply and the new memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from equipoise import metrics
from equipoise.local import log_likelihood
from equipoise.tree import Tree


@dataclass(frozen=True)
class Question:
    needs_model: ClassVar[bool] = True  # if not, the outputs given to `measure` are empty
    needs_data: ClassVar[bool] = True  # if not, `measure` is never called

    def measure(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tree:
        """Totals over one batch of one client; only where `mask` is true do samples count."""
        return {}

    def answer(self, totals: Tree, n: Tensor, msg: Tree, memory: Tree) -> tuple[Tree, Tree]:
        """The reply, which will be summed over clients, and the new memory of the asking method."""
        return totals, memory


@dataclass(frozen=True)
class ClassCounts(Question):
    """How many samples of each class there are."""

    classes: int
    needs_model = False

    def measure(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tree:
        hit = (y[:, None] == torch.arange(self.classes, device=y.device)) & mask[:, None]
        return {"counts": hit.sum(0)}


@dataclass(frozen=True)
class KeptCounts(ClassCounts):
    """The same, and each client keeps its own."""

    def answer(self, totals: Tree, n: Tensor, msg: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return totals, {"counts": totals["counts"].to(memory["counts"].dtype)}


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return -log_likelihood(outputs, y)


@dataclass(frozen=True)
class MeanLoss(Question):
    """The mean cross entropy of each client's data under the model, in evaluation mode."""

    def measure(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tree:
        return {"loss": torch.where(mask, cross_entropy(outputs, y), 0).sum()}

    def answer(self, totals: Tree, n: Tensor, msg: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return {"loss": totals["loss"] / n}, memory


@dataclass(frozen=True)
class Scores(Question):
    """Everything the metrics need, as sums: losses, the confusion matrix, and in full what areas under curves and
    calibration are read off."""

    classes: int
    full: bool = True

    def measure(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tree:
        place = y * self.classes + outputs.argmax(-1)
        confusion = torch.zeros(self.classes**2, dtype=torch.int64, device=y.device)
        sums = {
            "loss": torch.where(mask, cross_entropy(outputs, y), 0).sum(),
            "confusion": confusion.scatter_add(0, place, mask.long()).view(self.classes, self.classes),
        }
        if not self.full:
            return sums
        probabilities = outputs.softmax(-1)
        return sums | {
            "histograms": metrics.histograms(probabilities, y, mask=mask),
            "reliability": metrics.reliability(probabilities, y, mask=mask),
        }
