"""Small methods that use the taps which few real methods use, and a slow loop over lanes to hold them against."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from equipoise.core import tree
from equipoise.core.client import Data, Env
from equipoise.core.federation import Federation
from equipoise.core.method import Method
from equipoise.core.questions import cross_entropy
from equipoise.core.server_view import ServerView
from equipoise.core.tree import Tree
from tests.reference.loop import State, client_rows, load, named, train_client

if TYPE_CHECKING:
    from equipoise.core.turn import Turn


@dataclass(frozen=True)
class Lanes(Method):
    """A plan written down by hand."""

    lanes: tuple[tuple[int, ...], ...] = ()

    name = "lanes"

    def plan(self, lanes: Tensor, slot: Tree, fed: ServerView) -> Tensor:
        return torch.tensor(self.lanes)


@dataclass(frozen=True)
class Factor(Method):
    """Every client is told a factor of its own for its delta."""

    name = "factor"

    def init(self, turn: Turn) -> Tree:
        return {"factor": 0.5 + 0.1 * torch.arange(turn.fed.clients).to(turn.engine.device, turn.engine.dtype)}

    def address(self, slot: Tree, ids: Tensor) -> Tree:
        return {"factor": slot["factor"][ids]}

    def delta(self, delta: Tree, env: Env) -> Tree:
        return tree.scale(delta, env.msg["factor"])


@dataclass(frozen=True)
class Visits(Method):
    """Every client counts its visits, and uploads the count."""

    name = "visits"

    def remember(self, params: Tree, classes: int) -> Tree:
        return {"visits": torch.zeros((), dtype=torch.int64, device=next(tree.leaves(params)).device)}

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        visits = env.memory["visits"] + 1
        return {"visits": visits}, {"visits": visits}


@dataclass(frozen=True)
class StartLoss(Method):
    """Every client notes its loss before training and looks at it again afterwards."""

    name = "start_loss"
    needs_data = True

    def begin(self, env: Env, data: Data | None) -> Tree:
        return {"loss": self.total(env, data, env.params)}

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        return {"before": env.note["loss"], "after": self.total(env, data, env.params)}, env.memory

    def total(self, env: Env, data: Data | None, params: Tree) -> Tensor:
        assert data is not None

        def measure(outputs: Tensor, y: Tensor, mask: Tensor) -> Tree:
            return {"loss": torch.where(mask, cross_entropy(outputs, y), 0).sum()}

        total: Tensor = data.totals(env, params, measure)["loss"]
        return total


@dataclass(frozen=True)
class Picky(Method):
    """Always the same clients."""

    clients: tuple[int, ...] = (0, 2)

    name = "picky"

    def select(self, slot: Tree, fed: ServerView, round: int) -> Tensor:
        return torch.tensor(self.clients)


@dataclass(frozen=True)
class Looker(Method):
    """The server looks at the length of each client's delta."""

    name = "looker"
    reveals = frozenset({"the length of each delta"})

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        return {"n": env.n}, env.memory

    def rows(self, delta: Tree, upload: Tree, turn: Turn) -> Tree:
        return {"length": tree.norm(delta), "n": upload["n"], "round": torch.tensor(turn.state.round)}


@dataclass(frozen=True)
class Doubles(Method):
    """Every client drops its last sample and trains on two shifted copies of its first."""

    shift: float = 0.5

    name = "doubles"

    def init(self, turn: Turn) -> Tree:
        turn.engine.resample(self, {})
        return {}

    def resample(self, y: Tensor, msg: Tree, key: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.arange(max(1, len(y) - 1))
        return torch.cat([kept, torch.zeros(2, dtype=torch.int64)]), torch.cat(
            [torch.zeros_like(kept), torch.arange(1, 3)]
        )

    def batch(self, x: Tensor, y: Tensor, env: Env) -> tuple[Tensor, Tensor]:
        return x + self.shift * env.copies.view(-1, *[1] * (x.dim() - 1)), y


@dataclass(frozen=True)
class Square(Method):
    """The square loss in place of the cross entropy."""

    name = "square"

    def loss(self, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        return (
            (logits - (y[:, None] == torch.arange(logits.shape[-1], device=y.device)).to(logits.dtype))
            .square()
            .sum(-1)
        )


@dataclass(frozen=True)
class Even(Method):
    """All clients weigh the same; the sum of the weights is a metric."""

    name = "even"

    def init(self, turn: Turn) -> Tree:
        return {"clients": torch.zeros((), device=turn.engine.device)}

    def weight(self, weight: Tensor, env: Env) -> Tensor:
        return torch.ones_like(weight)

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        return {"weight": env.weight}, env.memory

    def close(self, slot: Tree, turn: Turn) -> Tree:
        assert turn.sums is not None
        return {"clients": turn.sums.uploads["weight"]}

    def metrics(self, slot: Tree) -> dict[str, float]:
        return {"clients": float(slot["clients"])}


def lanes_by_hand(fed: Federation, module: nn.Module, plan: list[list[int]], round: int = 0) -> State:
    """One round of `Lanes + Factor`, one visit after another, with torch.optim and true short batches."""
    module = copy.deepcopy(module).double()
    params, buffers = named(module), {k: b.clone() for k, b in module.named_buffers()}
    results = []
    for lane in zip(*plan, strict=True):
        here, kept, weight = params, buffers, 0
        for wave, client in enumerate(lane):
            if client < 0:
                continue
            load(module, here, kept)
            train_client(module, fed, client, round, fed.local, wave=wave)
            factor = 0.5 + 0.1 * client
            here = {k: w + factor * (v - w) for (k, w), v in zip(here.items(), named(module).values(), strict=True)}
            kept = {k: b.clone() for k, b in module.named_buffers()}
        weight = sum(len(client_rows(fed, client)) for client in {*lane} - {-1})
        results.append((weight, here, kept))
    total = sum(weight for weight, _, _ in results)
    moved = {k: w + sum(weight * (here[k] - w) for weight, here, _ in results) / total for k, w in params.items()}
    for name, value in buffers.items():
        if value.is_floating_point():
            moved[name] = sum(weight * kept[name] for weight, _, kept in results) / total
        else:
            moved[name] = torch.stack([kept[name] for weight, _, kept in results if weight]).amax(0)
    return moved
