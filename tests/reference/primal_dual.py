"""FedDyn and FedPD: each client adds a linear term and a pull towards the model that it was sent."""

from __future__ import annotations

import copy

import torch
from torch import nn

from equipoise.core.federation import Federation
from equipoise.core.local import Local
from tests.reference.loop import State, average_buffers, load, named, train_client


def feddyn(fed: Federation, module: nn.Module, rounds: int, local: Local, alpha: float, mu: float = 0.0) -> State:
    module = copy.deepcopy(module).double()
    theta = named(module)
    buffers = {k: b.clone() for k, b in module.named_buffers()}
    gradients = [{k: torch.zeros_like(v) for k, v in theta.items()} for _ in range(fed.clients)]
    h = {k: torch.zeros_like(v) for k, v in theta.items()}
    for round in range(rounds):
        cohort, results = fed.draw(round).tolist(), []
        for i in cohort:
            load(module, theta, buffers)

            def correct(m: nn.Module) -> None:
                for k, p in m.named_parameters():
                    p.grad += -gradients[i][k] + (alpha + mu) * (p.detach() - theta[k])  # noqa: B023

            train_client(module, fed, i, round, local, correct)
            results.append({k: v.clone() for k, v in module.state_dict().items()})
            gradients[i] = {k: g - alpha * (results[-1][k] - theta[k]) for k, g in gradients[i].items()}
        h = {k: h[k] - alpha / fed.clients * sum(s[k] - theta[k] for s in results) for k in theta}
        theta = {k: sum(s[k] for s in results) / len(cohort) - h[k] / alpha for k in theta}
        buffers = average_buffers(module, results, [1 / len(cohort)] * len(cohort))
    return {**theta, **buffers}


def fedpd(fed: Federation, module: nn.Module, rounds: int, local: Local, eta: float) -> State:
    module = copy.deepcopy(module).double()
    x0 = named(module)
    buffers = {k: b.clone() for k, b in module.named_buffers()}
    duals = [{k: torch.zeros_like(v) for k, v in x0.items()} for _ in range(fed.clients)]
    for round in range(rounds):
        cohort, results, proposals = fed.draw(round).tolist(), [], []
        for i in cohort:
            load(module, x0, buffers)

            def correct(m: nn.Module) -> None:
                for k, p in m.named_parameters():
                    p.grad += duals[i][k] + (p.detach() - x0[k]) / eta  # noqa: B023

            train_client(module, fed, i, round, local, correct)
            results.append({k: v.clone() for k, v in module.state_dict().items()})
            duals[i] = {k: lam + (results[-1][k] - x0[k]) / eta for k, lam in duals[i].items()}
            proposals.append({k: results[-1][k] + eta * duals[i][k] for k in x0})
        x0 = {k: sum(p[k] for p in proposals) / len(cohort) for k in x0}
        buffers = average_buffers(module, results, [1 / len(cohort)] * len(cohort))
    return {**x0, **buffers}
