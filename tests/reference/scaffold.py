"""SCAFFOLD, option II, with each client's own number of steps (plain SGD)."""

from __future__ import annotations

import copy

import torch
from torch import nn

from equipoise.core.federation import Federation
from equipoise.core.local import Local
from tests.reference.loop import ClientLoss, State, average_buffers, load, named, train_client, weights


def scaffold(
    fed: Federation,
    module: nn.Module,
    rounds: int,
    local: Local,
    mu: float = 0.0,
    client_loss: ClientLoss = lambda client: nn.functional.cross_entropy,
) -> State:
    module = copy.deepcopy(module).double()
    x = named(module)
    buffers = {k: b.clone() for k, b in module.named_buffers()}
    c = {k: torch.zeros_like(w) for k, w in x.items()}
    controls = [{k: torch.zeros_like(w) for k, w in x.items()} for _ in range(fed.clients)]
    for round in range(rounds):
        cohort = fed.draw(round).tolist()
        shares = weights(fed, cohort, local)
        results = []
        new_x, new_c = {k: w.clone() for k, w in x.items()}, {k: v.clone() for k, v in c.items()}
        for share, i in zip(shares, cohort, strict=True):
            load(module, x, buffers)

            def correct(m: nn.Module) -> None:
                for k, p in m.named_parameters():
                    p.grad += c[k] - controls[i][k] + mu * (p.detach() - x[k])  # noqa: B023

            steps = train_client(module, fed, i, round, local, correct, loss=client_loss(i))
            y = named(module)
            # With a proximal term, a constant gradient of one moves the model less far than the number of steps.
            reach, lr = 0.0, local.rate(round)
            for _ in range(steps):
                reach = (1 - lr * mu) * reach + 1
            for k in x:
                c_plus = controls[i][k] - c[k] + (x[k] - y[k]) / (reach * lr)
                new_c[k] += (c_plus - controls[i][k]) / fed.clients
                controls[i][k] = c_plus
                new_x[k] += share * (y[k] - x[k])
            results.append({k: v.clone() for k, v in module.state_dict().items()})
        x, c = new_x, new_c
        buffers = average_buffers(module, results, shares)
    return {**x, **buffers}
