"""FedNova, with the normaliser computed step by step."""

from __future__ import annotations

import copy

from torch import nn

from equipoise.core.federation import Federation
from equipoise.core.local import Local
from tests.reference.loop import State, average_buffers, load, named, train_client, weights


def normaliser(steps: int, lr: float, momentum: float, nesterov: bool, mu: float) -> float:
    """The distance that SGD with these settings moves against a constant gradient of 1, divided by lr."""
    position = velocity = 0.0
    for _ in range(steps):
        gradient = 1 - mu * lr * position  # the proximal term works against the distance moved
        velocity = momentum * velocity + gradient
        position += gradient + momentum * velocity if nesterov else velocity
    return position


def fednova(fed: Federation, module: nn.Module, rounds: int, local: Local, mu: float = 0.0) -> State:
    module = copy.deepcopy(module).double()
    x = named(module)
    buffers = {k: b.clone() for k, b in module.named_buffers()}
    for round in range(rounds):
        cohort = fed.draw(round).tolist()
        shares = weights(fed, cohort, local)
        tau_eff, direction, results = 0.0, {k: 0.0 * w for k, w in x.items()}, []
        for share, i in zip(shares, cohort, strict=True):
            load(module, x, buffers)

            def pull(m: nn.Module) -> None:
                for k, p in m.named_parameters():
                    p.grad += mu * (p.detach() - x[k])  # noqa: B023

            steps = train_client(module, fed, i, round, local, pull)
            y = named(module)
            a = normaliser(steps, local.rate(round), local.momentum, local.nesterov, mu)
            tau_eff += share * (steps if mu else a)
            for k in x:
                direction[k] += share * (y[k] - x[k]) / a
            results.append({k: v.clone() for k, v in module.state_dict().items()})
        x = {k: w + tau_eff * direction[k] for k, w in x.items()}
        buffers = average_buffers(module, results, shares)
    return {**x, **buffers}
