"""FedCurv with an explicit penalty for every other client, and Fisher information computed sample by sample."""

from __future__ import annotations

import copy

import torch
from torch import nn

from equipoise.core.federation import Federation
from equipoise.core.local import Local
from tests.reference.loop import State, average_buffers, client_rows, load, named, train_client, weights


def fisher_diagonal(module: nn.Module, fed: Federation, client: int) -> State:
    module.eval()
    rows = client_rows(fed, client).tolist()
    total = {k: torch.zeros_like(p) for k, p in module.named_parameters()}
    for row in rows:
        module.zero_grad()
        nn.functional.cross_entropy(module(fed.x[row : row + 1].double()), fed.y[row : row + 1]).backward()
        for k, p in module.named_parameters():
            total[k] += p.grad**2 / len(rows)
    module.zero_grad()
    return {k: t.detach() for k, t in total.items()}


def fedcurv(fed: Federation, module: nn.Module, rounds: int, local: Local, lam: float) -> State:
    module = copy.deepcopy(module).double()
    w = named(module)
    buffers = {k: b.clone() for k, b in module.named_buffers()}
    known: dict[int, tuple[State, State]] = {}  # client -> the model it ended with, and its Fisher information there
    for round in range(rounds):
        cohort, results, new = fed.draw(round).tolist(), [], {}
        for i in cohort:
            load(module, w, buffers)

            def correct(m: nn.Module) -> None:
                for k, p in m.named_parameters():
                    for j, (end, information) in known.items():  # noqa: B023
                        if j != i:  # noqa: B023
                            p.grad += 2 * lam * information[k] * (p.detach() - end[k])

            train_client(module, fed, i, round, local, correct)
            results.append({k: v.clone() for k, v in module.state_dict().items()})
            new[i] = (named(module), fisher_diagonal(module, fed, i))
        known |= new
        shares = weights(fed, cohort, local)
        w = {k: sum(p * s[k] for p, s in zip(shares, results, strict=True)) for k in w}
        buffers = average_buffers(module, results, shares)
    return {**w, **buffers}
