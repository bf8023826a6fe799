"""How good a model is: on samples the server holds, and across the clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise import metrics
from equipoise.engines import Engine
from equipoise.federation import Split
from equipoise.questions import Question, Scores, cross_entropy
from equipoise.tree import Tree


@torch.no_grad()
def evaluate(
    engine: Engine, params: Tree, buffers: Tree, split: Split | None, *, scores: bool = True
) -> dict[str, Any]:
    """Everything from one pass: loss, the confusion matrix, and with `scores` areas under curves and calibration.

    Without a split: on what the clients hold apart, where the engine has such clients.
    """
    fed = engine.fed
    sums = engine.score(Scores(len(fed.classes), scores), params, buffers, split)
    record = {
        "loss": float(sums["loss"] / sums["confusion"].sum()),
        **metrics.summary(sums["confusion"], fed.minority, fed.class_counts.tolist()),
    }
    if scores:
        record |= metrics.scores(sums["histograms"], sums["reliability"])
    return record


def confusion_matrix(outputs: Tensor, y: Tensor) -> Tensor:
    """Rows: the true class; columns: the predicted one."""
    classes = outputs.shape[-1]
    return torch.bincount(y * classes + outputs.argmax(-1), minlength=classes**2).view(classes, classes)


@dataclass(frozen=True)
class _Fit(Question):
    def measure(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tree:
        right = (outputs.argmax(-1) == y) & mask
        return {"loss": torch.where(mask, cross_entropy(outputs, y), 0).sum(), "accuracy": right.sum()}

    def answer(self, totals: Tree, n: Tensor, msg: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return {"loss": totals["loss"] / n, "accuracy": totals["accuracy"] / n}, memory


@torch.no_grad()
def across_clients(engine: Engine, params: Tree, buffers: Tree, most: int = 10_000) -> dict[str, Any]:
    """The spread of loss and accuracy over clients' own training data, which only a simulation can see."""
    clients = engine.fed.eligible[:most]
    rows = engine.ask(_Fit(), params, buffers, clients=clients, rows=True)
    return {f"client_{name}": metrics.spread(values.tolist()) for name, values in rows.items()}
