"""AFL and q-FFL as in their papers, with local training in place of a gradient step."""

from __future__ import annotations

import copy

import torch
from torch import nn

from equipoise.core.federation import Federation
from equipoise.core.local import Local
from tests.reference.loop import State, average_buffers, client_rows, load, named, train_client, weights


@torch.no_grad()
def client_loss(module: nn.Module, fed: Federation, client: int) -> float:
    rows = client_rows(fed, client)
    module.eval()
    return float(nn.functional.cross_entropy(module(fed.x[rows].double()), fed.y[rows]))


def onto_simplex(values: list[float]) -> list[float]:
    """Lower all values by the same amount, but not below 0, so that they sum to 1; found by bisection."""
    low, high = min(values) - 1, max(values)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(max(v - middle, 0) for v in values) > 1:
            low = middle
        else:
            high = middle
    return [max(v - high, 0) for v in values]


def afl(fed: Federation, module: nn.Module, rounds: int, local: Local, eta: float) -> State:
    module = copy.deepcopy(module).double()
    w = named(module)
    buffers = {k: b.clone() for k, b in module.named_buffers()}
    mixture = [1 / fed.clients] * fed.clients
    for round in range(rounds):
        cohort = fed.draw(round).tolist()
        results, raised = [], list(mixture)
        for i in cohort:
            load(module, w, buffers)
            raised[i] += eta * fed.clients / len(cohort) * client_loss(module, fed, i)
            train_client(module, fed, i, round, local)
            results.append({k: v.clone() for k, v in module.state_dict().items()})
        total = sum(mixture[i] for i in cohort)
        if total > 0:
            step = {k: sum(mixture[i] * (s[k] - w[k]) for i, s in zip(cohort, results, strict=True)) for k in w}
            w = {k: w[k] + step[k] / total for k in w}
        mixture = onto_simplex(raised)
        buffers = average_buffers(module, results, weights(fed, cohort, local))
    return {**w, **buffers}


def qffl(
    fed: Federation,
    module: nn.Module,
    rounds: int,
    local: Local,
    q: float,
    lipschitz: float | None = None,
    mu: float = 0.0,
) -> State:
    module = copy.deepcopy(module).double()
    w = named(module)
    buffers = {k: b.clone() for k, b in module.named_buffers()}
    for round in range(rounds):
        cohort = fed.draw(round).tolist()
        shares = weights(fed, cohort, local)
        L = lipschitz or 1 / local.rate(round)
        results, numerator, denominator = [], {k: torch.zeros_like(v) for k, v in w.items()}, 0.0
        for share, i in zip(shares, cohort, strict=True):
            load(module, w, buffers)
            loss = client_loss(module, fed, i)

            def pull(m: nn.Module) -> None:
                for k, p in m.named_parameters():
                    p.grad += mu * (p.detach() - w[k])  # noqa: B023

            train_client(module, fed, i, round, local, pull)
            y = named(module)
            gradient = {k: L * (w[k] - y[k]) for k in w}
            square = sum(float((g**2).sum()) for g in gradient.values())
            for k in w:
                numerator[k] += share * loss**q * gradient[k]
            denominator += share * (q * loss ** (q - 1) * square + L * loss**q)
            results.append({k: v.clone() for k, v in module.state_dict().items()})
        w = {k: w[k] - numerator[k] / denominator for k in w}
        buffers = average_buffers(module, results, shares)
    return {**w, **buffers}
