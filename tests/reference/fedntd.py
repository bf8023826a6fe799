"""FedNTD: the cross entropy, and a distillation from the model received, over the classes that are not true."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from equipoise.core.federation import Federation
from equipoise.core.local import Local
from tests.reference.loop import State, average_buffers, load, named, train_client, weights


def fedntd(fed: Federation, module: nn.Module, rounds: int, local: Local, beta: float, tau: float) -> State:
    module = copy.deepcopy(module).double()
    params, buffers = named(module), {k: b.clone() for k, b in module.named_buffers()}
    for round in range(rounds):
        cohort = fed.draw(round).tolist()
        shares, results = weights(fed, cohort, local), []
        for client in cohort:
            load(module, params, buffers)
            teacher, batch = copy.deepcopy(module).eval(), list[Tensor]()
            hook = module.register_forward_pre_hook(lambda _, given, batch=batch: batch.append(given[0]))

            def loss(outputs: Tensor, y: Tensor, teacher: nn.Module = teacher, batch: list[Tensor] = batch) -> Tensor:
                with torch.no_grad():
                    taught = teacher(batch[-1])
                terms = []
                for z, g, own in zip(outputs, taught, y.tolist(), strict=True):
                    others = [c for c in range(len(z)) if c != own]
                    q, p = (values[others] / tau for values in (z, g))
                    kl = (p.softmax(0) * (p.log_softmax(0) - q.log_softmax(0))).sum()
                    terms.append(-z.log_softmax(0)[own] + beta * tau**2 * kl)
                return torch.stack(terms).mean()

            train_client(module, fed, client, round, local, loss=loss)
            hook.remove()
            results.append({k: v.clone() for k, v in module.state_dict().items()})
        params = {k: w + sum(p * (s[k] - w) for p, s in zip(shares, results, strict=True)) for k, w in params.items()}
        buffers = average_buffers(module, results, shares)
    return {**params, **buffers}
