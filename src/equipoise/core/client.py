"""One client's visit: what its taps may read, one step, and what happens before the first and after the last.

`step` is the only hot, traced code of the library. Nothing here has a client axis; the stacked engine adds it with
vmap.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from equipoise.core import random, tree
from equipoise.core.augmentations import AUGMENTATIONS
from equipoise.core.local import Local, clip, optimise
from equipoise.core.network import Context, Network
from equipoise.core.tree import Tree

if TYPE_CHECKING:
    from equipoise.core.chain import Chain


class Task(NamedTuple):
    """What is the same for every client, and fixed while a program is traced."""

    chain: Chain
    network: Network
    local: Local
    autocast: str | None = None  # the type of device on which the model runs in bfloat16; None: it does not


class Carry(NamedTuple):
    """What a step changes."""

    params: Tree
    buffers: Tree
    opt: Tree  # the optimiser's state


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    copies: Tensor  # 0 for a sample itself, k for its k-th augmented copy
    real: Tensor  # the number of real samples; the places after them are padding


class Visit(NamedTuple):
    """What is fixed while one client trains once. Trees are keyed by the names of methods."""

    start: Tree  # the parameters that the client was sent
    shared: Tree  # messages that every client was sent
    own: Tree  # messages that this client alone was sent
    memory: Tree
    note: Tree
    n: Tensor
    steps: Tensor
    weight: Tensor
    key: Tensor
    lr: Tensor
    start_buffers: Tree = {}  # noqa: RUF012  the buffers that the client was sent


class Trial(NamedTuple):
    """What one client has where it uses the model for samples of its own, without training it."""

    params: Tree
    buffers: Tree
    memory: Tree  # keyed by the names of methods
    n: Tensor  # its number of training samples
    x: Tensor  # the samples as the model takes them
    mask: Tensor
    features: Tensor | None = None  # what the head reads, if a method needs it


class Env(NamedTuple):
    """What a tap may read at one client: never more than that client could know."""

    local: Local  # the settings of local training, after every method's changes to them
    network: Network
    params: Tree  # the client's parameters at this moment
    start: Tree  # its parameters when this visit began: the model that it was sent
    buffers: Tree
    msg: Tree  # what the server sent to this method: its broadcast, and its address to this client
    memory: Tree  # what this method keeps at this client
    note: Tree  # what this method returned from `begin`
    n: Tensor  # the client's number of samples
    steps: Tensor  # its number of steps in this visit
    step: Tensor  # the number of this step, counted from 0
    lr: Tensor
    weight: Tensor  # the weight of its delta in the average; known from `begin` on
    key: Tensor  # the key of this client's draws in this visit
    mask: Tensor  # [batch]: true for real samples, false for padding, which must not count
    copies: Tensor  # [batch]: 0 for a sample itself, k for its k-th augmented copy
    start_buffers: Tree = {}  # noqa: RUF012  its buffers when this visit began
    autocast: str | None = None
    x: Tensor | None = None  # the batch as the model takes it, from the tap `batch` on
    features: Tensor | None = None  # what the head reads, from the tap `logits` on, if a method needs it
    gradient: Callable[[Tree], Tree] | None = None  # in `grads`: the gradient of the whole objective elsewhere

    def forward(self, params: Tree, x: Tensor | None = None, train: bool = False) -> tuple[Tensor, Tensor | None]:
        """The model's logits and features at any parameters, for the batch or for other inputs.

        In evaluation mode, with the buffers that the client was sent; or in training mode, with draws of its own, and
        what it does to the buffers is discarded. A teacher is `env.forward(env.start)[0].detach()`. Features are None
        where the model has no head.
        """
        inputs = self.x if x is None else x
        assert inputs is not None, "there is no batch before the first step and after the last: pass x"
        mask = self.mask if inputs is self.x else torch.ones(len(inputs), dtype=torch.bool, device=inputs.device)
        context = Context(mask, random.fold(random.fold(self.key, random.FORWARD), self.step), train)
        buffers, features = self.buffers if train else self.start_buffers, None
        with torch.autocast(self.autocast or "cpu", torch.bfloat16, enabled=self.autocast is not None):
            if self.network.head is None:
                logits, _ = self.network(params, buffers, inputs, context)
            else:
                logits, features, _ = self.network.split(params, buffers, inputs, context, lambda u: u)
        if self.autocast is None:
            return logits, features
        return logits.float(), None if features is None else features.float()


class Data(NamedTuple):
    """All of one client's samples, as `begin` and `finish` see them: padded where clients are stacked.

    Only places where `mask` is true are samples of this client; whatever is summed must leave the others out.
    """

    x: Tensor  # raw samples
    y: Tensor
    mask: Tensor  # [samples]: true for real samples, false for padding
    inputs: Callable[[Tensor], Tensor]  # raw samples as the model takes them

    def totals(self, env: Env, params: Tree, measure: Callable[..., Tree], features: bool = False) -> Tree:
        """`measure(outputs, y, mask)` in evaluation mode, added up over the samples in chunks; with `features`,
        `measure(outputs, y, mask, features)`, where the features are what the model's head reads."""
        total: Tree = {}
        for low in range(0, len(self.y), 1024):
            part = slice(low, low + 1024)
            context = Context(self.mask[part], env.key, False)
            model = params, env.buffers, self.inputs(self.x[part]), context
            outputs, *read = env.network.split(*model)[:2] if features else env.network(*model)[:1]
            some = measure(outputs, self.y[part], self.mask[part], *read)
            total = tree.add(total, some) if total else some
        return total


def log_likelihood(logits: Tensor, y: Tensor) -> Tensor:
    """The logarithm of the probability of each sample's own class."""
    # Not by `gather`: its gradient is two dozen kernels on CUDA, where it must be deterministic.
    own = y[:, None] == torch.arange(logits.shape[-1], device=y.device)
    return torch.where(own, logits.log_softmax(-1), 0).sum(-1)


def environment(task: Task, visit: Visit, carry: Carry, step: Tensor, mask: Tensor, copies: Tensor) -> Env:
    """The environment of a whole chain; `Chain` gives each method its own part of it."""
    names = {*visit.shared, *visit.own}
    msg = {name: {**visit.shared.get(name, {}), **visit.own.get(name, {})} for name in names}
    return Env(
        task.local, task.network, carry.params, visit.start, carry.buffers, msg, visit.memory, visit.note,
        visit.n, visit.steps, step, visit.lr, visit.weight, visit.key, mask, copies, visit.start_buffers,
        task.autocast,
    )  # fmt: skip


def personal(task: Task, trial: Trial, logits: Tensor) -> Tensor:
    """The logits that a client itself uses for its own samples, from those of the model that it was sent."""
    zero, one = torch.zeros_like(trial.n), torch.ones_like(trial.n, dtype=logits.dtype)
    visit = Visit(
        trial.params, {}, {}, trial.memory, {}, trial.n, zero, one, zero, one * task.local.lr, trial.buffers
    )
    carry = Carry(trial.params, trial.buffers, {})
    env = environment(task, visit, carry, zero, trial.mask, torch.zeros_like(trial.mask, dtype=torch.int64))
    return task.chain.personal(logits, env._replace(x=trial.x, features=trial.features))


def step(task: Task, visit: Visit, carry: Carry, batch: Batch, index: Tensor, ragged: bool) -> Carry:
    """Step number `index` of one client. If `ragged`, the client may have finished already, and nothing changes."""
    chain, network, local, autocast = task
    mask = torch.arange(len(batch.y), device=batch.y.device) < batch.real
    env = environment(task, visit, carry, index, mask, batch.copies)
    augment = AUGMENTATIONS[local.augment]
    x = batch.x if augment is None else augment(batch.x, random.fold(random.fold(visit.key, random.FLIP), index))
    x, y = chain.batch(x, batch.y, env)
    env = env._replace(x=x)
    context = Context(mask, random.fold(random.fold(visit.key, random.DROPOUT), index), True)

    def objective(params: Tree) -> tuple[Tensor, Tree]:
        now = env._replace(params=params)
        with torch.autocast(autocast or "cpu", torch.bfloat16, enabled=autocast is not None):
            if chain.reads_features:
                change = partial(_features, chain, now)
                outputs, features, buffers = network.split(params, carry.buffers, x, context, change)
                now = now._replace(features=features)
            else:
                outputs, buffers = network(params, carry.buffers, x, context)
        outputs = outputs.float() if autocast else outputs
        logits = chain.logits(outputs, now)
        losses = chain.losses(chain.loss(logits, y, now), logits, y, now)
        total = torch.where(mask, losses, 0).sum()  # never losses * mask: inf * 0 is not a number
        return total / batch.real.clamp(min=1), buffers

    grads, buffers = torch.func.grad(objective, has_aux=True)(carry.params)
    elsewhere = env._replace(gradient=lambda params: torch.func.grad(objective, has_aux=True)(params)[0])
    grads = clip(chain.grads(grads, elsewhere), local.clip)
    params, opt = optimise(local, carry.params, grads, carry.opt, visit.lr, index)
    new = Carry(params, buffers, opt)
    if not ragged:
        return new
    active = index < visit.steps
    return Carry(*(tree.where(active, a, b) for a, b in zip(new, carry, strict=True)))


def _features(chain: Chain, env: Env, features: Tensor) -> Tensor:
    return chain.features(features.float() if env.autocast else features, env)


def arrive(task: Task, visit: Visit, carry: Carry, data: Data | None) -> tuple[Tensor, Tensor, Tree]:
    """Before training: the client's weight, its plain weight (by which buffers are averaged), and its notes."""
    env = environment(task, visit, carry, torch.zeros_like(visit.n), visit.n > 0, visit.n)
    plain = visit.n.to(visit.lr.dtype) if task.local.weighting == "size" else torch.ones_like(visit.weight)
    weight = task.chain.weight(plain, env)
    return weight, plain, task.chain.begin(env._replace(weight=weight), data)


def leave(task: Task, visit: Visit, carry: Carry, data: Data | None) -> tuple[Tree, Tree, Tree, Tensor]:
    """After training: the tapped delta, the upload, the new memory, and whether all of it is finite."""
    env = environment(task, visit, carry, visit.steps, visit.n > 0, visit.n)
    raw = tree.sub(carry.params, visit.start)
    upload, memory = task.chain.finish(raw, env, data)
    delta = task.chain.delta(raw, env)
    return delta, upload, memory, tree.finite({"delta": delta, "upload": upload, "weight": visit.weight})


def reach(env: Env) -> Tensor:
    """How far a constant gradient of one would carry the model in this visit, in units of the learning rate.

    It is the number of steps for plain SGD, more with momentum, less with a proximal pull. FedNova normalises by it,
    and SCAFFOLD divides a delta by it to get a mean gradient. One step is a linear map of (velocity, reach, 1), so
    that a visit is a power of that map, found by repeated squaring because the number of steps is traced.
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
