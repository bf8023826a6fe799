"""FedRE: the estimate of class shares (Algorithm 1), then FedAvg or FedProx with weighted cross entropy (Eq. 2)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from equipoise.core.federation import Federation
from equipoise.core.local import Local
from tests.reference.fedavg import fedavg
from tests.reference.loop import Loss, State, client_rows, train_client


def square_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, torch.eye(outputs.shape[1]).double()[y], reduction="sum") / len(y)


def class_shares(fed: Federation, module: nn.Module, probe: Local, floor: float) -> Tensor:
    """Every client trains the initial model once, before the first round."""
    total = torch.zeros(len(fed.classes)).double()
    for client in range(fed.clients):
        model = copy.deepcopy(module).double()
        train_client(model, fed, client, -1, probe, loss=square_loss)
        model.eval()
        with torch.no_grad():
            mean = model(fed.auxiliary.x.double()).mean(0)
        total += len(client_rows(fed, client)) / len(fed.indices) * mean
    for c in range(len(total)):
        total[c] = max(float(total[c]), floor / len(total))
    return total / total.sum()


def weighted_cross_entropy(weights: Tensor, normalised: bool) -> Loss:
    if normalised:
        return nn.CrossEntropyLoss(weight=weights)

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return -sum(weights[c] * outputs[i].softmax(0)[c].log() for i, c in enumerate(y.tolist())) / len(y)

    return loss


def fedre(
    fed: Federation,
    module: nn.Module,
    rounds: int,
    local: Local,
    probe: Local,
    alpha: float,
    beta: float,
    floor: float,
    normalised: bool = False,
    mu: float = 0.0,
) -> State:
    weights = alpha + beta / class_shares(fed, module, probe, floor) ** 2
    return fedavg(fed, module, rounds, local, mu=mu, loss=weighted_cross_entropy(weights, normalised))
