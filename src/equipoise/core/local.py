"""The settings of local training, and what follows from them: batches, their order, and the optimiser.

Everything here is about one client. The stacked engine adds the client axis with vmap.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from equipoise.core import random, tree
from equipoise.core.augmentations import AUGMENTATIONS
from equipoise.core.errors import ConfigError, nearest
from equipoise.core.tree import Tree


@dataclass(frozen=True)
class Local:
    """How a client trains between two exchanges with the server."""

    optimiser: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0  # added to the gradient, as in torch.optim.SGD and Adam
    clip: float | None = None  # largest norm of a gradient, after every method's changes to it
    batch: int | Literal["full"] = 32
    steps_per_epoch: int | None = None  # if given, a client's batch is n_i // steps_per_epoch
    epochs: int = 1
    schedule: Literal["constant", "step", "cosine", "linear"] = "constant"
    gamma: float = 1.0  # schedule "step": the rate is multiplied by gamma ...
    every: int = 1  # ... once every so many rounds
    horizon: int | None = None  # schedules "cosine" and "linear": the round at which the rate reaches zero
    weighting: Literal["size", "uniform"] = "size"
    augment: str = "none"  # a name in `augmentations.AUGMENTATIONS`; images are changed anew in every step
    prox: float = 0.0  # set by methods that pull towards the start (FedProx), read by those that must know (FedNova)

    def __post_init__(self) -> None:
        def need(ok: bool, field: str, expected: str) -> None:
            if not ok:
                raise ConfigError(f"local.{field} = {getattr(self, field)!r}: expected {expected}")

        for field, choices in {
            "optimiser": ("sgd", "adam"),
            "schedule": ("constant", "step", "cosine", "linear"),
            "weighting": ("size", "uniform"),
            "augment": tuple(AUGMENTATIONS),
        }.items():
            if (value := getattr(self, field)) not in choices:
                need(False, field, f"one of {', '.join(choices)}; {nearest(value, choices)}")

        def number(value: object, low: float = -math.inf, high: float = math.inf) -> bool:
            """Within [low, high), and finite."""
            return isinstance(value, int | float) and abs(value) <= sys.float_info.max and low <= value < high

        def whole(value: object) -> bool:
            return isinstance(value, int) and value > 0

        for field in ("lr", "eps", "gamma"):
            value = getattr(self, field)
            need(number(value) and value > 0, field, "a number above 0")
        need(number(self.momentum, 0, 1), "momentum", "a number in [0, 1)")
        need(not self.nesterov or self.momentum > 0, "nesterov", "false, or momentum above 0")
        need(number(self.weight_decay, 0), "weight_decay", "a number, 0 or above")
        need(len(self.betas) == 2 and all(number(b, 0, 1) for b in self.betas), "betas", "two numbers in [0, 1)")
        need(self.clip is None or (number(self.clip) and self.clip > 0), "clip", "a number above 0, or nothing")
        need(self.batch == "full" or whole(self.batch), "batch", 'a count or "full"')
        need(self.steps_per_epoch is None or whole(self.steps_per_epoch), "steps_per_epoch", "a count, or nothing")
        need(whole(self.epochs), "epochs", "a whole number, 1 or above")
        need(whole(self.every), "every", "a whole number, 1 or above")
        need(self.schedule in ("constant", "step") or whole(self.horizon), "horizon", "a number of rounds")

    def rate(self, round: int) -> float:
        """The learning rate in the given round, counted from 0; a training before round 0 has the rate of round 0."""
        round = max(round, 0)
        if self.schedule == "step":
            return self.lr * self.gamma ** (round // self.every)
        if self.schedule == "constant":
            return self.lr
        assert self.horizon is not None
        done = min(round / self.horizon, 1.0)
        return self.lr * (1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))

    def batches(self, n: Tensor) -> tuple[Tensor, Tensor]:
        """The batch size of clients with n samples, and their number of steps in one visit."""
        if self.steps_per_epoch is not None:
            size = (n // self.steps_per_epoch).clamp(min=1)
        elif self.batch == "full":
            size = n.clamp(min=1)
        else:
            size = torch.full_like(n, self.batch)
        return size, self.epochs * ((n + size - 1) // size)


class Schedule(NamedTuple):
    """Which of a client's samples are in which batch."""

    positions: Tensor  # [step, place in the batch]: positions within the client's own samples
    counts: Tensor  # [step]: how many places are real samples; the others are padding


def schedule(local: Local, key: Tensor, n: Tensor, size: Tensor, most: int, width: int, steps: int) -> Schedule:
    """Every batch of one visit: a fresh permutation in each epoch, the last short batch kept.

    `most`, `width` and `steps` are the largest number of samples, batch size and number of steps among the clients
    that are stacked together. Places beyond a client's own are padded with its first sample and not counted.
    """
    device = key.device
    epochs = torch.arange(local.epochs, device=device)
    keys = random.fold(random.fold(key, random.ORDER)[..., None], epochs)
    valid = torch.arange(most, device=device) < n[..., None, None]
    orders = random.order(keys, most, valid)  # [..., epochs, most]
    per_epoch = ((n + size - 1) // size).clamp(min=1)[..., None]
    step = torch.arange(steps, device=device)
    first = (step % per_epoch) * size[..., None]  # place in the epoch where the batch begins
    counts = torch.minimum(size[..., None], n[..., None] - first)
    counts = torch.where(step < per_epoch * local.epochs, counts, 0)
    place = torch.arange(width, device=device)
    real = place < counts[..., None]
    epoch = (step // per_epoch).clamp(max=local.epochs - 1)
    flat = (epoch * most + first)[..., None] + place
    flat = torch.where(real, flat, 0)
    positions = orders.flatten(-2).gather(-1, flat.flatten(-2)).view(flat.shape)
    return Schedule(torch.where(real, positions, 0), counts)


def optimiser_state(local: Local, params: Tree) -> Tree:
    """The optimiser's state before the first step."""
    if local.optimiser == "adam":
        return {"mean": tree.zeros(params), "square": tree.zeros(params)}
    return {"velocity": tree.zeros(params)} if local.momentum else {}


def optimise(local: Local, params: Tree, grads: Tree, opt: Tree, lr: Tensor, step: Tensor) -> tuple[Tree, Tree]:
    """One step of SGD or Adam as a pure function: the new parameters, and the new state."""
    if local.weight_decay:
        grads = tree.axpy(local.weight_decay, params, grads)
    if local.optimiser == "adam":
        b1, b2 = local.betas
        mean = tree.map(lambda m, g: b1 * m + (1 - b1) * g, opt["mean"], grads)
        square = tree.map(lambda s, g: b2 * s + (1 - b2) * g * g, opt["square"], grads)
        t = (step + 1).to(lr.dtype)
        fix1, fix2 = 1 - b1**t, (1 - b2**t).sqrt()
        new = tree.map(lambda p, m, s: p - (lr / fix1) * m / (s.sqrt() / fix2 + local.eps), params, mean, square)
        return new, {"mean": mean, "square": square}
    if local.momentum:
        opt = {"velocity": tree.axpy(local.momentum, opt["velocity"], grads)}
        grads = tree.axpy(local.momentum, opt["velocity"], grads) if local.nesterov else opt["velocity"]
    return tree.map(lambda p, g: p - lr * g, params, grads), opt


def clip(grads: Tree, most: float | None) -> Tree:
    """The gradient, scaled down to the norm `most` where it is longer."""
    if most is None:
        return grads
    return tree.scale(grads, (most / (tree.norm(grads) + 1e-6)).clamp(max=1.0))
