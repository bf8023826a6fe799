"""FedAvg, FedSGD, FedProx and the server optimisers, as in their papers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from equipoise.core.federation import Federation
from equipoise.core.local import Local
from tests.reference.loop import ClientLoss, Loss, State, average_buffers, load, named, train_client, weights

Server = Callable[[str, Tensor, Tensor], Tensor]  # (name, parameter, mean delta) -> new parameter


def plain_server(name: str, w: Tensor, delta: Tensor) -> Tensor:
    return w + delta


def fedavg(
    fed: Federation,
    module: nn.Module,
    rounds: int,
    local: Local,
    mu: float = 0.0,
    server: Server = plain_server,
    loss: Loss = nn.functional.cross_entropy,
    client_loss: ClientLoss | None = None,
) -> State:
    module = copy.deepcopy(module).double()
    params = named(module)
    buffers = {k: b.clone() for k, b in module.named_buffers()}
    for round in range(rounds):
        cohort = fed.draw(round).tolist()
        shares = weights(fed, cohort, local)
        results = []
        for client in cohort:
            load(module, params, buffers)

            def pull(m: nn.Module) -> None:
                for name, p in m.named_parameters():
                    p.grad += mu * (p.detach() - params[name])  # noqa: B023

            mine = loss if client_loss is None else client_loss(client)
            train_client(module, fed, client, round, local, pull if mu else None, loss=mine)
            results.append({k: v.clone() for k, v in module.state_dict().items()})
        old = params
        params = {
            k: server(k, w, sum(p * (s[k] - w) for p, s in zip(shares, results, strict=True))) for k, w in old.items()
        }
        buffers = average_buffers(module, results, shares)
    return {**params, **buffers}


def momentum_server(beta: float, lr: float) -> Server:
    velocity: State = {}

    def step(name: str, w: Tensor, delta: Tensor) -> Tensor:
        velocity[name] = beta * velocity.get(name, torch.zeros_like(w)) + delta
        return w + lr * velocity[name]

    return step


def adaptive_server(kind: str, lr: float, b1: float, b2: float, tau: float) -> Server:
    m: State = {}
    v: State = {}

    def step(name: str, w: Tensor, delta: Tensor) -> Tensor:
        m[name] = b1 * m.get(name, torch.zeros_like(w)) + (1 - b1) * delta
        old = v.get(name, torch.full_like(w, tau**2))
        v[name] = {
            "fedadam": b2 * old + (1 - b2) * delta**2,
            "fedyogi": old - (1 - b2) * delta**2 * torch.sign(old - delta**2),
            "fedadagrad": old + delta**2,
        }[kind]
        return w + lr * m[name] / (v[name].sqrt() + tau)

    return step
