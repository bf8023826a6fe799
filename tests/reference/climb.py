"""CLIMB, Algorithm 1, around FedAvg, FedProx, SCAFFOLD, FedNova or a server optimiser."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import nn

from equipoise.core.federation import Federation
from equipoise.core.local import Local
from tests.reference.fedavg import Server, plain_server
from tests.reference.fednova import normaliser
from tests.reference.loop import (
    ClientLoss,
    State,
    average_buffers,
    client_rows,
    load,
    named,
    train_client,
    weights,
)


@dataclass
class Duals:
    """The multipliers of all clients in one place; a real server does not have them."""

    fed: Federation
    local: Local
    eta: float
    epsilon: float
    cap: float
    every: int
    over: str = "all"
    batch_sum: bool = False
    stale: bool = False
    clip: bool = False
    slack: float | None = None
    slack_eta: float = 0.0

    def __post_init__(self) -> None:
        clients = range(self.fed.clients)
        self.dual, self.u, self.loss = ([0.0 for _ in clients] for _ in range(3))
        self.share = weights(self.fed, list(clients), self.local)  # 1 / N, or n_i / n

    def weight(self, client: int) -> float:
        mean = sum(p * d for p, d in zip(self.share, self.dual, strict=True))
        w = 1 + self.dual[client] - mean
        return max(w, 0.0) if self.clip else w

    def measure(self, module: nn.Module, asked: list[int]) -> None:
        module.eval()
        for i in asked:
            rows = client_rows(self.fed, i)
            with torch.no_grad():
                mean = float(nn.functional.cross_entropy(module(self.fed.x[rows].double()), self.fed.y[rows]))
            self.loss[i] = mean * (self.batches(len(rows)) if self.batch_sum else 1)

    def batches(self, n: int) -> int:
        if self.local.steps_per_epoch is not None:
            return math.ceil(n / max(1, n // self.local.steps_per_epoch))
        return 1 if self.local.batch == "full" else math.ceil(n / self.local.batch)

    def step(self, asked: list[int]) -> None:
        share = weights(self.fed, asked, self.local)
        mean = sum(p * self.loss[i] for p, i in zip(share, asked, strict=True))
        for i in asked:
            excess = self.loss[i] - mean - self.epsilon - self.u[i]
            self.dual[i] = min(max(self.dual[i] + self.eta * excess, 0.0), self.cap)
            if self.slack is not None:
                self.u[i] = max(self.u[i] + self.slack_eta * (self.dual[i] - self.slack * self.u[i]), 0.0)

    def close(self, round: int, module: nn.Module, cohort: list[int]) -> None:
        if (round + 1) % self.every:
            return
        asked = cohort if self.over == "cohort" else list(range(self.fed.clients))
        if self.stale:
            self.step(asked)
            self.measure(module, asked)
        else:
            self.measure(module, asked)
            self.step(asked)


def climb(
    fed: Federation,
    module: nn.Module,
    rounds: int,
    local: Local,
    *,
    weighting: str = "uniform",
    mu: float = 0.0,
    scaffold: bool = False,
    nova: bool = False,
    server: Server = plain_server,
    client_loss: ClientLoss = lambda client: nn.functional.cross_entropy,
    **options: object,
) -> State:
    module = copy.deepcopy(module).double()
    local = replace(local, weighting=weighting)
    duals = Duals(fed, local, **options)
    x, buffers = named(module), {k: b.clone() for k, b in module.named_buffers()}
    duals.measure(module, list(range(fed.clients)))
    c = {k: torch.zeros_like(w) for k, w in x.items()}
    controls = [{k: torch.zeros_like(w) for k, w in x.items()} for _ in range(fed.clients)]
    for round in range(rounds):
        cohort = fed.draw(round).tolist()
        shares = weights(fed, cohort, local)
        total, tau, results = {k: torch.zeros_like(w) for k, w in x.items()}, 0.0, []
        new_c = {k: v.clone() for k, v in c.items()}
        for share, i in zip(shares, cohort, strict=True):
            load(module, x, buffers)

            def correct(m: nn.Module) -> None:
                for k, p in m.named_parameters():
                    p.grad += mu * (p.detach() - x[k])  # noqa: B023
                    if scaffold:
                        p.grad += c[k] - controls[i][k]  # noqa: B023

            steps = train_client(module, fed, i, round, local, correct, loss=client_loss(i))
            y, lr = named(module), local.rate(round)
            a = normaliser(steps, lr, local.momentum, local.nesterov, mu) if nova else 1.0
            tau += share * a
            for k in x:
                total[k] += share * duals.weight(i) * (y[k] - x[k]) / a
                if scaffold:  # from the client's own delta, not from the scaled one
                    c_plus = controls[i][k] - c[k] + (x[k] - y[k]) / (steps * lr)
                    new_c[k] += (c_plus - controls[i][k]) / fed.clients
                    controls[i][k] = c_plus
            results.append({k: v.clone() for k, v in module.state_dict().items()})
        x, c = {k: server(k, w, tau * total[k]) for k, w in x.items()}, new_c
        buffers = average_buffers(module, results, shares)
        load(module, x, buffers)
        duals.close(round, module, cohort)
    return {**x, **buffers}
