"""Focal loss and class weights, sample by sample."""

from __future__ import annotations

from torch import Tensor, nn

from equipoise.core.federation import Federation
from tests.reference.fedshift import class_counts
from tests.reference.loop import ClientLoss, Loss


def focal_loss(gamma: float) -> Loss:
    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        p = outputs.softmax(-1)
        terms = [-((1 - p[i, c]) ** gamma) * p[i, c].log() for i, c in enumerate(y.tolist())]
        return sum(terms[1:], terms[0]) / len(terms)

    return loss


def weights_of(fed: Federation, client: int, rule: str, beta: float = 0.0, clip: float | None = None) -> list[float]:
    """The weight of each class at a client."""
    classes = range(len(fed.classes))
    per_client = [class_counts(fed, i) for i in range(fed.clients)]
    counts = [sum(own[k] for own in per_client) for k in classes]
    own = per_client[client]
    if rule == "inverse":
        weights = [sum(counts) / (len(counts) * counts[k]) for k in classes]
    elif rule == "effective":
        raw = [(1 - beta) / (1 - beta ** counts[k]) for k in classes]
        weights = [len(raw) * r / sum(raw) for r in raw]
    else:
        weights = [counts[k] / sum(counts) / (own[k] / sum(own)) if own[k] else 1.0 for k in classes]
    return weights if clip is None else [min(max(w, 1 / clip), clip) for w in weights]


def weighted_loss(fed: Federation, rule: str, normalised: bool = False, **options: float) -> ClientLoss:
    def loss_of(client: int) -> Loss:
        weights = weights_of(fed, client, rule, **options)

        def loss(outputs: Tensor, y: Tensor) -> Tensor:
            losses = nn.functional.cross_entropy(outputs, y, reduction="none")
            terms = [weights[c] * losses[i] for i, c in enumerate(y.tolist())]
            return sum(terms[1:], terms[0]) / (sum(weights[c] for c in y.tolist()) if normalised else len(y))

        return loss

    return loss_of
