"""FedShift: Eq. 4 and 5, with the class shares counted label by label."""

from __future__ import annotations

import math

import torch
from torch import nn

from equipoise.core.federation import Federation
from tests.reference.loop import ClientLoss, Loss, client_rows


def class_counts(fed: Federation, client: int) -> list[int]:
    labels = fed.y[client_rows(fed, client).long()].tolist()
    return [labels.count(k) for k in range(len(fed.classes))]


def shifted_loss(
    fed: Federation, prior: str | tuple[float, ...] = "global", source: str = "local", temperature: float = 1.0
) -> ClientLoss:
    """The local loss of each client: the cross entropy of its outputs plus s_i."""
    classes = range(len(fed.classes))
    own = []  # P_i(y = k), smoothed
    for i in range(fed.clients):
        counts = class_counts(fed, i)
        own.append([(counts[k] + 1) / (sum(counts) + len(counts)) for k in classes])
    total = len(fed.indices)
    everyone = [sum(len(client_rows(fed, i)) / total * own[i][k] for i in range(fed.clients)) for k in classes]

    def loss_of(client: int) -> Loss:
        above = own[client] if source == "local" else everyone
        below = {"global": everyone, "uniform": [1 / len(classes)] * len(classes)}.get(prior, prior)
        s = torch.tensor([temperature * math.log(above[k] / below[k]) for k in classes], dtype=torch.float64)
        return lambda outputs, y: nn.functional.cross_entropy(outputs + s, y)

    return loss_of
