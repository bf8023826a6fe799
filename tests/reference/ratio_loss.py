"""Ratio-Loss, computed coordinate by coordinate: the authors' form, and the form that CLIMB was compared with."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from equipoise.core import random
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from tests.reference.fedre import weighted_cross_entropy
from tests.reference.loop import State, average_buffers, client_rows, load, named, train_client, weights


def head(state: State) -> Tensor:
    """The last matrix among the parameters."""
    return [v for v in state.values() if v.dim() == 2][-1]


def moves_by_class(fed: Federation, module: nn.Module, round: int, local: Local) -> list[Tensor]:
    """How the last layer moves when a copy of the model trains on one class of the server's samples."""
    held = fed.auxiliary
    moves = []
    for p in range(len(fed.classes)):
        copied = copy.deepcopy(module)
        mine = [i for i, label in enumerate(held.y.tolist()) if label == p]
        offsets = torch.tensor([0] * (p + 1) + [len(mine)])  # client p holds all of them
        seed = int(random.bits(fed.seed, random.SERVER))
        alone = replace(fed, x=held.x, y=held.y, indices=torch.tensor(mine), offsets=offsets, seed=seed)
        train_client(copied, alone, p, round, local)
        moves.append(head(named(copied)) - head(named(module)))
    return moves


def gradients_by_class(fed: Federation, module: nn.Module) -> list[Tensor]:
    """The gradients of the mean cross entropy of each class with respect to the last layer."""
    gradients = []
    for p in range(len(fed.classes)):
        copied = copy.deepcopy(module).train()
        mine = fed.auxiliary.y == p
        nn.functional.cross_entropy(copied(fed.auxiliary.x[mine].double()), fed.auxiliary.y[mine]).backward()
        gradients.append(head({k: w.grad for k, w in copied.named_parameters()}))
    return gradients


def selected(moves: list[Tensor], threshold: float) -> list[list[tuple[int, int]]]:
    chosen: list[list[tuple[int, int]]] = [[] for _ in moves]
    for i in range(moves[0].shape[0]):
        for j in range(moves[0].shape[1]):
            values = [float(m[i, j]) for m in moves]
            p = values.index(max(values))
            if all(threshold * abs(v) <= abs(values[p]) for q, v in enumerate(values) if q != p):
                chosen[p].append((i, j))
    return chosen


def official_ratios(moves: list[Tensor], threshold: float, cap: float) -> list[float]:
    ratios = []
    for p, places in enumerate(selected(moves, threshold)):
        others = [m for q, m in enumerate(moves) if q != p]
        top = abs(sum(float(moves[p][place]) for place in places))
        bottom = abs(sum(sum(float(m[place]) for m in others) / len(others) for place in places))
        ratios.append(min(top / bottom, cap) if bottom else 10.0)
    return ratios


def climb_ratios(gradients: list[Tensor]) -> list[float]:
    ratios = []
    for p, own in enumerate(gradients):
        others = sum(g for q, g in enumerate(gradients) if q != p)
        ratios.append(abs(float(((len(gradients) - 1) * own[p] / others[p]).mean())))
    return ratios


def class_counts(
    moves: list[Tensor], threshold: float, move: Tensor, clients: int, samples: int, seen: int
) -> Tensor:
    counts = []
    for p, places in enumerate(selected(moves, threshold)):
        kept = []
        for place in places:
            m = sum(float(o[place]) for q, o in enumerate(moves) if q != p) / (len(moves) - 1)
            n = (float(move[place]) * clients * seen - samples * m) / (float(moves[p][place]) - m)
            if 0 < n < 1.5 * samples / len(moves):
                kept.append(n)
        counts.append(sum(kept) / len(kept) if kept else samples / len(moves))
    return torch.tensor(counts, dtype=torch.float64)


def ratio_loss(
    fed: Federation,
    module: nn.Module,
    rounds: int,
    local: Local,
    variant: str = "official",
    alpha: float = 1.0,
    beta: float = 0.1,
    threshold: float = 1.25,
    cap: float = 5000.0,
    seen: int = 4,
    mu: float = 0.0,
) -> tuple[State, Tensor]:
    """Return the model, and for `official` the last round's estimate of class counts."""
    module = copy.deepcopy(module).double()
    params, buffers = named(module), {k: b.clone() for k, b in module.named_buffers()}
    w, counts = torch.ones(len(fed.classes)).double(), torch.zeros(len(fed.classes)).double()
    for round in range(rounds):
        load(module, params, buffers)
        if variant == "official":
            moves = moves_by_class(fed, module, round, local)
            loss = weighted_cross_entropy(w, False)  # with the weights from the round before
            w = alpha + beta * torch.tensor(official_ratios(moves, threshold, cap), dtype=torch.float64)
        else:
            if round % 5 == 0:
                w = alpha + beta * torch.tensor(climb_ratios(gradients_by_class(fed, module)), dtype=torch.float64)
            loss = weighted_cross_entropy(w, True)
        cohort = fed.draw(round).tolist()
        shares = weights(fed, cohort, local)
        results = []
        for client in cohort:
            load(module, params, buffers)

            def pull(m: nn.Module) -> None:
                for k, p in m.named_parameters():
                    p.grad += mu * (p.detach() - params[k])  # noqa: B023

            train_client(module, fed, client, round, local, pull if mu else None, loss=loss)
            results.append({k: v.clone() for k, v in module.state_dict().items()})
        move = {k: sum(s * (r[k] - v) for s, r in zip(shares, results, strict=True)) for k, v in params.items()}
        if variant == "official":
            samples = sum(len(client_rows(fed, client)) for client in cohort)
            counts = class_counts(moves, threshold, head(move), len(cohort), samples, seen)
        params = {k: v + move[k] for k, v in params.items()}
        buffers = average_buffers(module, results, shares)
    return {**params, **buffers}, counts
