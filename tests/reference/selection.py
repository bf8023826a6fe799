"""FedAvg with clients selected by a bandit on class gradients (CUCB) or by their losses (active sampling)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

from torch import nn

from equipoise.core import random
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from tests.reference.fair import client_loss
from tests.reference.loop import State, average_buffers, client_rows, load, named, train_client, weights

Select = Callable[[int], list[int]]
Learn = Callable[[int, nn.Module, bool], None]  # (client, model, whether it has trained)


def selecting(
    fed: Federation, module: nn.Module, rounds: int, local: Local, select: Select, learn: Learn
) -> tuple[State, list[list[int]]]:
    w = named(module)
    buffers = {k: b.clone() for k, b in module.named_buffers()}
    cohorts = []
    for round in range(rounds):
        cohort, results = select(round), []
        for i in cohort:
            load(module, w, buffers)
            learn(i, module, False)
            train_client(module, fed, i, round, local)
            results.append({k: v.clone() for k, v in module.state_dict().items()})
            learn(i, module, True)
        shares = weights(fed, cohort, local)
        w = {k: sum(p * s[k] for p, s in zip(shares, results, strict=True)) for k in w}
        buffers = average_buffers(module, results, shares)
        cohorts.append(cohort)
    return {**w, **buffers}, cohorts


def class_mix(module: nn.Module, fed: Federation) -> list[float]:
    assert fed.auxiliary is not None
    module.eval()
    guesses = []
    for label in range(len(fed.classes)):
        mine = fed.auxiliary.y == label
        module.zero_grad()
        nn.functional.cross_entropy(module(fed.auxiliary.x[mine].double()), fed.auxiliary.y[mine]).backward()
        guesses.append(1 / sum(float((p.grad**2).sum()) for p in module.parameters()))
    module.zero_grad()
    return [g / sum(guesses) for g in guesses]


def cross_entropy_from_uniform(mix: list[float]) -> float:
    return -sum(math.log(r) for r in mix) / len(mix)


def cucb(
    fed: Federation, module: nn.Module, rounds: int, local: Local, alpha: float
) -> tuple[State, list[list[int]]]:
    module = copy.deepcopy(module).double()
    seen: dict[int, list[list[float]]] = {i: [] for i in range(fed.clients)}

    def select(round: int) -> list[int]:
        size = fed.cohort
        if round < math.ceil(fed.clients / size):
            return sorted((round * size + k) % fed.clients for k in range(size))
        bounds, mixes = [], []
        for i in range(fed.clients):
            visits = seen[i]
            reward = sum(1 / cross_entropy_from_uniform(mix) for mix in visits) / len(visits)
            bounds.append(reward + alpha * math.sqrt(3 * math.log(round) / (2 * len(visits))))
            mixes.append([sum(column) / len(visits) for column in zip(*visits, strict=True)])
        taken = [bounds.index(max(bounds))]
        while len(taken) < size:
            scores = {}
            for i in range(fed.clients):
                if i not in taken:
                    group = [mixes[j] for j in (*taken, i)]
                    scores[i] = cross_entropy_from_uniform(
                        [sum(column) / len(group) for column in zip(*group, strict=True)]
                    )
            taken.append(min(scores, key=lambda i: scores[i]))
        return sorted(taken)

    def learn(client: int, module: nn.Module, trained: bool) -> None:
        if trained:
            seen[client].append(class_mix(module, fed))

    return selecting(fed, module, rounds, local, select, learn)


def active(
    fed: Federation, module: nn.Module, rounds: int, local: Local, alpha1: float, alpha2: float, alpha3: float
) -> tuple[State, list[list[int]]]:
    module = copy.deepcopy(module).double()
    values = {i: math.sqrt(len(client_rows(fed, i))) * client_loss(module, fed, i) for i in range(fed.clients)}

    def select(round: int) -> list[int]:
        key = random.bits(fed.seed, random.SELECT, round)
        by_value = sorted(values, key=lambda i: values[i])
        candidates = by_value[int(alpha1 * fed.clients) :]
        scores = {}
        for i in candidates:
            uniform = ((int(random.fold(key, i)) % 2**64) >> 40) / 2**24 + 2.0**-25
            scores[i] = alpha2 * values[i] - math.log(-math.log(uniform))
        taken = sorted(candidates, key=lambda i: -scores[i])[: fed.cohort - int(alpha3 * fed.cohort)]
        uniform_order = random.order(random.fold(key, random.SELECT), fed.clients).tolist()
        rest = [i for i in uniform_order if i not in taken]
        return sorted(taken + rest[: fed.cohort - len(taken)])

    def learn(client: int, module: nn.Module, trained: bool) -> None:
        if not trained:
            values[client] = math.sqrt(len(client_rows(fed, client))) * client_loss(module, fed, client)

    return selecting(fed, module, rounds, local, select, learn)
