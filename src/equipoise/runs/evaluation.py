"""Evaluates a model: on test samples, and by each client on samples of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.core.chain import Chain
from equipoise.core.engine import Engine
from equipoise.core.federation import Split
from equipoise.core.questions import Question, cross_entropy
from equipoise.core.tree import Tree
from equipoise.runs import metrics


@dataclass(frozen=True)
class Scores(Question):
    """The sums from which metrics are computed: losses and the confusion matrix; if `full`, also the histograms for
    areas under curves and the table for calibration."""

    classes: int
    full: bool = True

    def measure(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tree:
        cell = y * self.classes + outputs.argmax(-1)
        confusion = torch.zeros(self.classes**2, dtype=torch.int64, device=y.device)
        sums = {
            "loss": torch.where(mask, cross_entropy(outputs, y), 0).sum(),
            "confusion": confusion.scatter_add(0, cell, mask.long()).view(self.classes, self.classes),
        }
        if not self.full:
            return sums
        probabilities = outputs.softmax(-1)
        return sums | {
            "histograms": metrics.histograms(probabilities, y, mask=mask),
            "reliability": metrics.reliability(probabilities, y, mask=mask),
        }


@torch.no_grad()
def evaluate(
    engine: Engine, params: Tree, buffers: Tree, split: Split | None, *, scores: bool = True
) -> dict[str, Any]:
    """Return the metrics of a model on a split: its loss, the metrics of the confusion matrix, and with `scores` also
    the areas under curves and the calibration error.

    If `split` is None, the model is evaluated on the samples that real sites hold out.
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
    """Count predictions: one row per true class, one column per predicted class."""
    classes = outputs.shape[-1]
    return torch.bincount(y * classes + outputs.argmax(-1), minlength=classes**2).view(classes, classes)


@dataclass(frozen=True)
class _Fit(Question):
    """A client's mean loss and accuracy on samples of its own."""

    def measure(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tree:
        right = (outputs.argmax(-1) == y) & mask
        return {"loss": torch.where(mask, cross_entropy(outputs, y), 0).sum(), "accuracy": right.sum()}

    def answer(self, totals: Tree, n: Tensor, msg: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return {"loss": totals["loss"] / n, "accuracy": totals["accuracy"] / n}, memory


@dataclass(frozen=True)
class Accuracies(Question):
    """The sums from which the mean and the standard deviation of the clients' accuracies are computed."""

    def measure(self, outputs: Tensor, y: Tensor, mask: Tensor) -> Tree:
        return {"right": ((outputs.argmax(-1) == y) & mask).sum()}

    def answer(self, totals: Tree, n: Tensor, msg: Tree, memory: Tree) -> tuple[Tree, Tree]:
        accuracy = totals["right"].double() / n
        return {"accuracy": accuracy, "squared": accuracy**2, "clients": torch.ones_like(n)}, memory


@torch.no_grad()
def across_clients(engine: Engine, params: Tree, buffers: Tree, chain: Chain, most: int = 10_000) -> dict[str, Any]:
    """Return how the model, as each client uses it itself, does on samples of the clients' own.

    In a simulation, this is the spread of loss and accuracy over the first `most` clients that have such samples.
    Real sites send sums only, from which the mean and the standard deviation of their accuracies are computed.
    `client_samples` says which samples they are: those that clients hold out, or their training samples.
    """
    on = {"client_samples": engine.tried_on}
    if engine.holds_out:
        return on | {"client_accuracy": _from_sums(engine.trial(Accuracies(), params, buffers, chain))}
    rows = engine.trial(_Fit(), params, buffers, chain, clients=engine.fed.tried[:most], rows=True)
    return on | {f"client_{name}": metrics.spread(values.tolist()) for name, values in rows.items()}


def _from_sums(sums: Tree) -> dict[str, float | None]:
    """Return mean and standard deviation over clients; of one client alone, nothing."""
    count = int(sums["clients"])
    if count < 2:
        return {"mean": None, "std": None, "count": count}
    mean = float(sums["accuracy"]) / count
    return {"mean": mean, "std": max(0.0, float(sums["squared"]) / count - mean**2) ** 0.5, "count": count}
