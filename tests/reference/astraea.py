"""Astraea as in the paper: augmented samples are stored, and the clients of a mediator train one after another."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from equipoise.core import random
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from tests.reference.loop import State, average_buffers, client_rows, load, named, train_client


@dataclass(frozen=True)
class Warp:
    shift: float = 0.1
    rotation: float = 10.0
    shear: float = 10.0
    zoom: float = 0.1


def draw(key: Tensor, index: int, bits: int) -> int:
    """The top `bits` bits of a random draw, as an unsigned integer."""
    return (int(random.fold(key, index)) % (1 << 64)) >> (64 - bits)


def ratios(fed: Federation, tau_d: float, sign: str) -> list[float]:
    """Algorithm 2, lines 3 to 12."""
    counts = [sum(int(fed.y[row]) == c for row in fed.indices.tolist()) for c in range(len(fed.classes))]
    mu = sum(counts) / len(counts)
    sigma = math.sqrt(sum((c - mu) ** 2 for c in counts) / len(counts))
    result = []
    for c in counts:
        z, tau_a, ratio = (c - mu) / sigma, -1 / tau_d, 1.0
        if c and z < tau_a:
            ratio = (sigma * math.sqrt(abs(z / tau_a)) + mu) / c
            if sign == "minus":
                ratio = (mu - sigma * math.sqrt(z * tau_a)) / c
        if z > tau_d:
            ratio = (sigma * math.sqrt(z * tau_d) + mu) / c
        result.append(ratio)
    return result


def rendered(image: Tensor, name: int, how: Warp) -> Tensor:
    """A warped copy of an image, computed pixel by pixel."""
    channels, height, width = image.shape
    key = random.fold(torch.tensor(name), random.AUGMENT)
    right, down, turn, slant, wide, high = (2 * draw(key, i, 24) / 2**24 - 1 for i in range(6))
    angle, slope = math.radians(how.rotation) * turn, math.tan(math.radians(how.shear) * slant)
    result = torch.zeros_like(image)
    for i in range(height):
        for j in range(width):
            x = (j - (width - 1) / 2) * (1 + how.zoom * wide)
            y = (i - (height - 1) / 2) * (1 + how.zoom * high)
            x += slope * y
            x, y = math.cos(angle) * x - math.sin(angle) * y, math.sin(angle) * x + math.cos(angle) * y
            x += how.shift * width * right + (width - 1) / 2
            y += how.shift * height * down + (height - 1) / 2
            x, y = min(max(x, 0), width - 1), min(max(y, 0), height - 1)
            left, top = min(int(x), width - 2), min(int(y), height - 2)
            for c in range(channels):
                upper = (1 - (x - left)) * image[c, top, left] + (x - left) * image[c, top, left + 1]
                lower = (1 - (x - left)) * image[c, top + 1, left] + (x - left) * image[c, top + 1, left + 1]
                result[c, i, j] = (1 - (y - top)) * upper + (y - top) * lower
    return result


def rebalanced(fed: Federation, tau_d: float, sign: str = "plus", warp: Warp | None = None) -> Federation:
    """Algorithm 2, lines 14 to 21: a federation whose clients hold the samples that they keep, and the copies."""
    ratio = ratios(fed, tau_d, sign)
    x, y = list(fed.x.double()), fed.y.tolist()
    clients = []
    for client in range(fed.clients):
        key, mine = random.bits(fed.seed, random.RESAMPLE, client), []
        for position, row in enumerate(client_rows(fed, client).tolist()):
            fixed = round(ratio[y[row]] * 2**32)
            times = fixed // 2**32 + (draw(key, position, 32) < fixed % 2**32)
            for number in range(times):
                if number == 0 or warp is None:
                    mine.append(row)
                    continue
                name = int(random.fold(random.fold(key, position), number)) % (1 << 63) | 1
                mine.append(len(x))
                x.append(rendered(x[row], name, warp))
                y.append(y[row])
        clients.append(mine or client_rows(fed, client)[:1].tolist())
    return replace(
        fed,
        x=torch.stack(x),
        y=torch.tensor(y),
        indices=torch.tensor([row for mine in clients for row in mine]),
        offsets=torch.tensor([0, *(len(mine) for mine in clients)]).cumsum(0),
    )


def divergence(labels: list[int], classes: int) -> float:
    shares = [labels.count(c) / len(labels) for c in range(classes)]
    return sum(p * math.log(p * classes) for p in shares if p > 0)


def mediators(fed: Federation, cohort: list[int], gamma: int) -> list[list[int]]:
    """Algorithm 3."""
    labels = {client: fed.y[client_rows(fed, client)].tolist() for client in cohort}
    left, made = list(cohort), []
    while left:
        pooled: list[int] = []
        made.append([])
        while left and len(made[-1]) < gamma:
            scores = [round(divergence(pooled + labels[client], len(fed.classes)) * 2**32) for client in left]
            chosen = left.pop(scores.index(min(scores)))
            pooled += labels[chosen]
            made[-1].append(chosen)
    return made


def astraea(
    fed: Federation,
    module: nn.Module,
    rounds: int,
    local: Local,
    gamma: int,
    mediator_epochs: int,
    tau_d: float | None,
    sign: str = "plus",
    warp: Warp | None = None,
    once: bool = False,
    mu: float = 0.0,
) -> State:
    """Algorithm 1."""
    module = copy.deepcopy(module).double()
    params = named(module)
    buffers = {k: b.clone() for k, b in module.named_buffers()}
    if tau_d is not None:
        fed = rebalanced(fed, tau_d, sign, warp)
    fixed = mediators(fed, list(range(fed.clients)), gamma) if once else []
    for round in range(rounds):
        cohort = fed.draw(round).tolist()
        groups = [[i for i in m if i in cohort] for m in fixed] if once else mediators(fed, cohort, gamma)
        groups = [g for g in groups if g]
        depth = max(len(g) for g in groups)
        results, sizes = [], []
        for group in groups:
            load(module, params, buffers)
            for epoch in range(mediator_epochs):
                for place, client in enumerate(group):
                    start = named(module)

                    def pull(m: nn.Module) -> None:
                        for name, p in m.named_parameters():
                            p.grad += mu * (p.detach() - start[name])  # noqa: B023

                    train_client(module, fed, client, round, local, pull, wave=epoch * depth + place)
            results.append({k: v.clone() for k, v in module.state_dict().items()})
            each = [len(client_rows(fed, c)) if local.weighting == "size" else 1 for c in group]
            sizes.append(sum(each))
        shares = [size / sum(sizes) for size in sizes]
        params = {k: w + sum(p * (s[k] - w) for p, s in zip(shares, results, strict=True)) for k, w in params.items()}
        buffers = average_buffers(module, results, shares)
    return {**params, **buffers}
