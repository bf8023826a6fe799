"""Local training: settings, optimisers, the order of samples, and one step. The step is the only hot, traced code.

Everything here speaks of one client; the stacked engine adds the client axis with vmap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from equipoise import augment, random, tree
from equipoise.errors import ConfigError, nearest
from equipoise.network import Context, Network
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.method import Chain


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
    gamma: float = 1.0  # step: the rate is multiplied by gamma ...
    every: int = 1  # ... once in so many rounds
    horizon: int | None = None  # cosine, linear: the round at which the rate reaches zero
    weighting: Literal["size", "uniform"] = "size"
    augment: Literal["none", "flip_crop"] = "none"  # images mirrored and moved by up to 4 pixels, anew in every step
    prox: float = 0.0  # set by methods that pull towards the start (FedProx), read by those that must know (FedNova)

    def __post_init__(self) -> None:
        def need(ok: bool, field: str, expected: str) -> None:
            if not ok:
                raise ConfigError(f"local.{field} = {getattr(self, field)!r}: expected {expected}")

        for field, choices in {
            "optimiser": ("sgd", "adam"),
            "schedule": ("constant", "step", "cosine", "linear"),
            "weighting": ("size", "uniform"),
            "augment": ("none", "flip_crop"),
        }.items():
            if (value := getattr(self, field)) not in choices:
                need(False, field, f"one of {', '.join(choices)}; {nearest(value, choices)}")

        def number(value: object, low: float = -math.inf, high: float = math.inf) -> bool:
            """Within [low, high), and finite."""
            return isinstance(value, int | float) and math.isfinite(value) and low <= value < high

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
        """The learning rate in the given round, counted from 0; a training before the first has the first rate."""
        round = max(round, 0)
        if self.schedule == "step":
            return self.lr * self.gamma ** (round // self.every)
        if self.schedule == "constant":
            return self.lr
        assert self.horizon is not None
        done = min(round / self.horizon, 1.0)
        return self.lr * (1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))

    def batches(self, n: Tensor) -> tuple[Tensor, Tensor]:
        """For clients of sizes n: the batch size of each and its number of steps in one visit."""
        if self.steps_per_epoch is not None:
            size = (n // self.steps_per_epoch).clamp(min=1)
        elif self.batch == "full":
            size = n.clamp(min=1)
        else:
            size = torch.full_like(n, self.batch)
        return size, self.epochs * ((n + size - 1) // size)


class Schedule(NamedTuple):
    """Which of a client's samples are in which batch: positions[step, place], and how many places are real."""

    positions: Tensor
    counts: Tensor


def schedule(local: Local, key: Tensor, n: Tensor, size: Tensor, most: int, width: int, steps: int) -> Schedule:
    """Every batch of one visit: a fresh order each epoch, the last short batch kept.

    `most`, `width` and `steps` are the largest client, batch and number of steps among those stacked together; the
    places past a client's own are filled with its first sample and not counted.
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


def log_likelihood(logits: Tensor, y: Tensor) -> Tensor:
    """The logarithm of the probability of each sample's own class."""
    # Not by `gather`: its gradient is two dozen kernels on CUDA, where it must be deterministic.
    own = y[:, None] == torch.arange(logits.shape[-1], device=y.device)
    return torch.where(own, logits.log_softmax(-1), 0).sum(-1)


class Task(NamedTuple):
    """What is the same for every client and fixed while a program is traced."""

    chain: Chain
    network: Network
    local: Local
    autocast: str | None = None  # the device type to run in bfloat16 on, if any


def optimiser_state(local: Local, params: Tree) -> Tree:
    if local.optimiser == "adam":
        return {"mean": tree.zeros(params), "square": tree.zeros(params)}
    return {"velocity": tree.zeros(params)} if local.momentum else {}


def _optimise(local: Local, params: Tree, grads: Tree, opt: Tree, lr: Tensor, step: Tensor) -> tuple[Tree, Tree]:
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


def _clip(grads: Tree, most: float | None) -> Tree:
    if most is None:
        return grads
    return tree.scale(grads, (most / (tree.norm(grads) + 1e-6)).clamp(max=1.0))


class Carry(NamedTuple):
    """What a step changes."""

    params: Tree
    buffers: Tree
    opt: Tree


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    copies: Tensor  # 0 for a sample itself, k for its k-th augmented copy
    real: Tensor  # how many of the batch are real


class Visit(NamedTuple):
    """What is fixed while one client trains once; trees are keyed by method."""

    start: Tree
    shared: Tree  # what every client was sent
    own: Tree  # what this client was sent
    memory: Tree
    note: Tree
    n: Tensor
    steps: Tensor
    weight: Tensor
    key: Tensor
    lr: Tensor


class Env(NamedTuple):
    """What a tap may read at one client: never more than that client could know."""

    local: Local
    network: Network
    params: Tree  # now
    start: Tree  # when this visit began
    buffers: Tree
    msg: Tree  # what the server sent to this method
    memory: Tree  # what this method keeps at this client
    note: Tree  # what this method noted in `begin`
    n: Tensor  # the client's number of samples
    steps: Tensor  # how many steps it takes in this visit
    step: Tensor  # which one this is
    lr: Tensor
    weight: Tensor  # of its delta in the average; known from `begin` on
    key: Tensor  # of this client's draws in this visit
    mask: Tensor  # which samples of the batch are real
    copies: Tensor


class Data(NamedTuple):
    """All of one client's samples, as `begin` and `finish` see them."""

    x: Tensor
    y: Tensor
    mask: Tensor
    features: Callable[[Tensor], Tensor]

    def totals(self, env: Env, params: Tree, measure: Callable[[Tensor, Tensor, Tensor], Tree]) -> Tree:
        """`measure(outputs, y, mask)` in evaluation mode, added up over the data in chunks."""
        total: Tree = {}
        for low in range(0, len(self.y), 1024):
            part = slice(low, low + 1024)
            context = Context(self.mask[part], env.key, False)
            outputs, _ = env.network(params, env.buffers, self.features(self.x[part]), context)
            some = measure(outputs, self.y[part], self.mask[part])
            total = tree.add(total, some) if total else some
        return total


def environment(task: Task, visit: Visit, carry: Carry, step: Tensor, mask: Tensor, copies: Tensor) -> Env:
    names = {*visit.shared, *visit.own}
    msg = {name: {**visit.shared.get(name, {}), **visit.own.get(name, {})} for name in names}
    return Env(
        task.local, task.network, carry.params, visit.start, carry.buffers, msg, visit.memory, visit.note,
        visit.n, visit.steps, step, visit.lr, visit.weight, visit.key, mask, copies,
    )  # fmt: skip


def step(task: Task, visit: Visit, carry: Carry, batch: Batch, index: Tensor, ragged: bool) -> Carry:
    """One step of one client. `ragged`: it may already have finished, and then stands still."""
    chain, network, local, autocast = task
    mask = torch.arange(len(batch.y), device=batch.y.device) < batch.real
    env = environment(task, visit, carry, index, mask, batch.copies)
    x = batch.x
    if local.augment == "flip_crop":
        x = augment.flip_crop(x, random.fold(random.fold(visit.key, random.FLIP), index))
    x, y = chain.batch(x, batch.y, env)
    context = Context(mask, random.fold(random.fold(visit.key, random.DROPOUT), index), True)

    def objective(params: Tree) -> tuple[Tensor, Tree]:
        now = env._replace(params=params)
        with torch.autocast(autocast or "cpu", torch.bfloat16, enabled=autocast is not None):
            outputs, buffers = network(params, carry.buffers, x, context)
        outputs = outputs.float() if autocast else outputs
        logits = chain.logits(outputs, now)
        losses = chain.losses(chain.loss(logits, y, now), logits, y, now)
        total = torch.where(mask, losses, 0).sum()  # never losses * mask: inf * 0 is not a number
        return total / batch.real.clamp(min=1), buffers

    grads, buffers = torch.func.grad(objective, has_aux=True)(carry.params)
    grads = _clip(chain.grads(grads, env), local.clip)
    params, opt = _optimise(local, carry.params, grads, carry.opt, visit.lr, index)
    new = Carry(params, buffers, opt)
    if not ragged:
        return new
    active = index < visit.steps
    return Carry(*(tree.where(active, a, b) for a, b in zip(new, carry, strict=True)))


def arrive(task: Task, visit: Visit, carry: Carry, data: Data | None) -> tuple[Tensor, Tensor, Tree]:
    """Before training: the client's weight, its plain weight (which buffers are averaged by), and its notes."""
    nothing = visit.n > 0
    env = environment(task, visit, carry, torch.zeros_like(visit.n), nothing, visit.n)
    plain = visit.n.to(visit.lr.dtype) if task.local.weighting == "size" else torch.ones_like(visit.weight)
    weight = task.chain.weight(plain, env)
    return weight, plain, task.chain.begin(env._replace(weight=weight), data)


def leave(task: Task, visit: Visit, carry: Carry, data: Data | None) -> tuple[Tree, Tree, Tree, Tensor]:
    """After training: the tapped delta, what is uploaded, the new memory, and whether all is finite."""
    env = environment(task, visit, carry, visit.steps, visit.n > 0, visit.n)
    raw = tree.sub(carry.params, visit.start)
    upload, memory = task.chain.finish(raw, env, data)
    delta = task.chain.delta(raw, env)
    return delta, upload, memory, tree.finite({"delta": delta, "upload": upload, "weight": visit.weight})


def reach(env: Env) -> Tensor:
    """How far a constant gradient of one would carry the model in this visit, in units of the learning rate.

    It is the number of steps for plain SGD, more with momentum, less with a proximal pull: FedNova's normaliser, and
    the divisor that turns a delta back into a mean gradient (SCAFFOLD). One step is a linear map of (velocity, reach,
    1), so that a visit is its power, found by repeated squaring because the number of steps is traced.
    """
    m, mu = env.local.momentum, env.local.prox
    if m == 0 and mu == 0:
        return env.steps.to(env.lr.dtype)
    dtype, device = torch.float64, env.steps.device
    pull = env.lr.to(dtype) * mu
    zero, one = torch.zeros((), dtype=dtype, device=device), torch.ones((), dtype=dtype, device=device)
    # v' = m v + 1 - pull r;  r' = r + v', or with Nesterov r + (1 - pull r) + m v'
    v = torch.stack([one * m, -pull, one])
    r = torch.stack([m * v[0], one - pull + m * v[1], one + m * v[2]]) if env.local.nesterov else v + _unit(1, v)
    power = torch.stack([v, r, torch.stack([zero, zero, one])])
    result = torch.eye(3, dtype=dtype, device=device)
    for bit in range(24):
        result = torch.where(((env.steps >> bit) & 1).bool(), power @ result, result)
        power = power @ power
    return result[1, 2].to(env.lr.dtype)


def _unit(place: int, like: Tensor) -> Tensor:
    return (torch.arange(3, device=like.device) == place).to(like.dtype)
