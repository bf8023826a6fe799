"""FedRE's synthetic experiments: when do the outputs of a network show the class shares of its training data?

Early in training with the square loss, the loss stays on a plateau, where the network's output for every input is
close to the class shares. This holds if all classes have the same mean (a square in a frame, nested rings). On
separated blobs it fails with one hidden layer, and holds with three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise import models
from equipoise.core.chain import Chain
from equipoise.core.federation import Federation, Split
from equipoise.core.local import Local
from equipoise.core.network import Network
from equipoise.core.round import one_round, start
from equipoise.engines import Serial
from equipoise.methods.shared.estimation import SquareLoss, shares

LR = 0.1  # the learning rate of plain gradient descent on all samples
SPAN, FLAT = 200, 0.01  # on the plateau the loss falls by less than 1 % in 200 iterations
TEST = 50  # samples per class of the balanced set over which the outputs are averaged

Draw = Callable[[Sequence[int], torch.Generator], list[Tensor]]  # (counts, generator) -> the points of each class


def frame(counts: Sequence[int], draw: torch.Generator) -> list[Tensor]:
    """Figure 1: the first class fills a unit square in the middle, the second class the frame around it."""
    inner = 1 + torch.rand(counts[0], 2, generator=draw)
    many = 3 * torch.rand(20 * counts[1] + 100, 2, generator=draw)
    outer = many[((many < 1) | (many > 2)).any(1)][: counts[1]]
    return [inner, outer]


def rings(counts: Sequence[int], draw: torch.Generator) -> list[Tensor]:
    """Figure 3: nested rings, one per class, each centred on the origin."""
    points = []
    for ring, count in enumerate(counts):
        angle = 2 * math.pi * torch.rand(count, generator=draw)
        radius = 0.4 * ring + 0.25 * torch.rand(count, generator=draw)
        ring_points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
        points.append(ring_points - ring_points.mean(0))
    return points


def blobs(counts: Sequence[int], draw: torch.Generator) -> list[Tensor]:
    """Figure 4: classes with different means, placed on a circle."""
    turns = [2 * math.pi * i / len(counts) for i in range(len(counts))]
    centres = [(0.7 * math.cos(turn), 0.7 * math.sin(turn)) for turn in turns]
    return [
        torch.tensor(centre) + 0.13 * torch.randn(count, 2, generator=draw)
        for centre, count in zip(centres, counts, strict=True)
    ]


def one_client(draw: Draw, counts: Sequence[int], hidden: Sequence[int], every: int, seed: int) -> Federation:
    """Make a federation of one client that has all samples and takes `every` full-batch steps in a round.

    The server's auxiliary samples are the test set.
    """
    source = torch.Generator().manual_seed(seed)
    points, test = draw(counts, source), draw([TEST] * len(counts), source)
    labels = torch.arange(len(counts))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Network(models.build("mlp", (2,), len(counts), hidden=list(hidden), activation="sigmoid"))
    return Federation(
        network=network,
        x=torch.cat(points),
        y=labels.repeat_interleave(torch.tensor(counts)),
        offsets=torch.tensor([0, sum(counts)]),
        indices=torch.arange(sum(counts)),
        classes=tuple(f"class {c + 1}" for c in range(len(counts))),
        local=Local(lr=LR, batch="full", epochs=every),
        auxiliary=Split(torch.cat(test), labels.repeat_interleave(TEST)),
    )


class Point(NamedTuple):
    iteration: int
    loss: float
    shares: Tensor  # the mean output on the test set


def trace(fed: Federation, iterations: int) -> list[Point]:
    """Train as FedRE's clients do, and record a point before the first round and after every round."""
    chain, engine = Chain(SquareLoss()), Serial(fed)
    state = start(fed, chain, engine)
    target = torch.eye(len(fed.classes))[fed.y]

    def point() -> Point:
        held = fed.auxiliary_for("trace")
        fitted = engine.outputs(state.params, state.buffers, fed.x)
        mean = engine.outputs(state.params, state.buffers, held.x).mean(0)
        loss = float((fitted - target).square().sum(1).mean())
        return Point(state.round * fed.local.epochs, loss, shares(mean))

    points = [point()]
    while points[-1].iteration < iterations:
        state, _ = one_round(state, fed, chain, engine)
        points.append(point())
    return points


def plateau(points: Sequence[Point]) -> list[Point]:
    """Return the first consecutive points at which the loss has fallen by less than 1 % in 200 iterations."""
    loss = {point.iteration: point.loss for point in points}

    def flat(point: Point) -> bool:
        before = loss.get(point.iteration - SPAN)
        return before is not None and point.loss > (1 - FLAT) * before

    first = next((place for place, point in enumerate(points) if flat(point)), len(points))
    return list(takewhile(flat, points[first:]))


def errors(point: Point, counts: Sequence[int]) -> Tensor:
    """Return the error of each class, as a fraction of its true share."""
    truth = torch.tensor(counts) / sum(counts)
    return (point.shares - truth).abs() / truth


POINTS: dict[str, Draw] = {"frame": frame, "rings": rings, "blobs": blobs}


def estimate(settings: Mapping[str, Any], seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train one network; return its estimate of the class shares, and its losses.

    The estimate is taken in the middle of the plateau, or at the end if there is no plateau. `settings` has the name
    of the point set (`points`), `counts`, the `hidden` layers, the number of iterations between records (`every`),
    and the number of iterations (`train.rounds`).
    """
    counts = settings["counts"]
    fed = one_client(POINTS[settings["points"]], counts, settings["hidden"], settings["every"], seed)
    points = trace(fed, settings["train"]["rounds"])
    flat = plateau(points)
    seen = flat[len(flat) // 2] if flat else points[-1]
    last = {
        "share_error": float(errors(seen, counts).max()),
        "shares": seen.shares.tolist(),
        "truth": [n / sum(counts) for n in counts],
        "read_at": seen.iteration,
        "plateau": [flat[0].iteration, flat[-1].iteration] if flat else None,
    }
    return last, [{"round": point.iteration, "loss": point.loss} for point in points]
