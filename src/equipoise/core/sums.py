"""What comes back from visits, and the sums of a round: all that the server learns from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.client import Visit
from equipoise.core.tree import Tree

if TYPE_CHECKING:
    from equipoise.core.chain import Chain
    from equipoise.core.turn import State, Turn


class Sums(NamedTuple):
    """All that the server learns from the visits of a round."""

    delta: Tree  # the sum of weight * delta
    weight: Tensor
    buffers: Tree  # float buffers: the sum of plain weight * change; integer buffers: the largest value
    plain_weight: Tensor
    uploads: Tree  # by method
    clients: int
    samples: int
    rows: Tree  # by method, only for methods that look at single clients: {"ids", "values"}
    down: int  # bytes to the clients
    up: int  # bytes from the clients

    def of(self, name: str) -> Sums:
        """The same sums, with the uploads and rows of the named method alone."""
        return self._replace(uploads=self.uploads.get(name, {}), rows=self.rows.get(name, {}))

    def mean_buffers(self, before: Tree) -> Tree:
        if not before or self.clients == 0:
            return before
        return tree.map(
            lambda old, total: old + total / self.plain_weight.to(old.dtype) if old.is_floating_point() else total,
            before,
            self.buffers,
        )


class Result(NamedTuple):
    """What comes back from visits, one row per client."""

    delta: Tree
    weight: Tensor
    plain_weight: Tensor
    buffers: Tree
    upload: Tree
    memory: Tree
    finite: Tensor


class Part(NamedTuple):
    """What comes back from visits when no method looks at single clients: sums over the clients, and one row per
    client of what stays there."""

    sums: Tree
    memory: Tree
    finite: Tensor


def buffer_change(new: Tensor, old: Tensor) -> Tensor:
    """How a buffer changed. One that did not change gives 0, also where it is infinite."""
    return torch.where(new == old, 0, new - old)


def summed(result: Result, before: Tree) -> Tree:
    """The part that some visits, all begun with the buffers `before`, add to the sums of a round."""

    def merge(values: Tensor, old: Tensor) -> Tensor:
        if not values.is_floating_point():
            return values.amax(0)
        return _weigh(result.plain_weight.to(values.dtype), buffer_change(values, old))

    return {
        "delta": tree.map(lambda rows: _weigh(result.weight, rows), result.delta),
        "buffers": tree.map(merge, result.buffers, before),
        "upload": tree.map(lambda rows: rows.sum(0), result.upload),
        "numbers": {"weight": result.weight.sum(), "plain_weight": result.plain_weight.sum()},
    }


def _weigh(weights: Tensor, rows: Tensor) -> Tensor:
    """The weighted sum of rows of any shape."""
    total: Tensor = torch.tensordot(weights, rows, 1)
    return total


class Total:
    """The sums of a round while they are added up."""

    def __init__(self, state: State, device: torch.device, dtype: torch.dtype) -> None:
        self.state = state
        self.delta: Tree | None = None
        self.buffers = tree.map(lambda b: torch.zeros_like(b) if b.is_floating_point() else b, state.buffers)
        self.weight = torch.zeros((), dtype=dtype, device=device)
        self.plain = torch.zeros_like(self.weight)
        self.uploads: Tree = {}
        self.clients = self.samples = self.down = self.up = 0
        self.finite: list[tuple[Tensor, Tensor]] = []
        self.rows: list[tuple[Tensor, Tree]] = []

    def visits(self, result: Result, ids: Tensor, samples: int, chain: Chain, turn: Turn) -> None:
        """Add what visits upload and reveal; their deltas are added by `lanes`, at the end of the lanes."""
        self._upload(tree.map(lambda leaf: leaf.sum(0), result.upload))
        if chain.having("rows"):

            def rows(delta: Tree, upload: Tree, buffers: Tree) -> Tree:
                return chain.rows(delta, upload, turn._replace(buffers=buffers))

            self.rows.append((ids, torch.vmap(rows)(result.delta, result.upload, result.buffers)))
        self.clients += len(ids)
        self.samples += samples
        self.finite.append((ids, result.finite.clone()))  # a recorded program overwrites its outputs

    def part(self, sums: Tree, clients: int, samples: int) -> None:
        """Add visits that an engine has added up already."""
        self._move(sums["delta"])
        self.weight = self.weight + sums["numbers"]["weight"]
        self.plain = self.plain + sums["numbers"]["plain_weight"]
        self.buffers = tree.map(
            lambda total, new: total + new if new.is_floating_point() else torch.maximum(total, new),
            self.buffers,
            sums["buffers"],
        )
        self._upload(sums["upload"])
        self.clients += clients
        self.samples += samples

    def _move(self, some: Tree) -> None:
        # The first is copied: a recorded program overwrites its outputs when it runs again.
        self.delta = tree.map(torch.clone, some) if self.delta is None else tree.add(self.delta, some)

    def _upload(self, some: Tree) -> None:
        self.uploads = tree.add(self.uploads, some) if self.uploads else tree.map(torch.clone, some)

    def moved_bytes(self, visit: Visit, upload: Tree, clients: int) -> None:
        """What these visits would move over a network; `upload` is one client's, or a sum of the same shape."""
        model = tree.nbytes(self.state.params) + tree.nbytes(self.state.buffers)
        self.down += clients * (model + tree.nbytes(visit.shared)) + tree.nbytes(visit.own)
        self.up += clients * (model + 8 + tree.nbytes(upload))

    def lanes(self, delta: Tree, weight: Tensor, plain: Tensor, buffers: Tree) -> None:
        self._move(tree.map(lambda d: _weigh(weight, d), delta))
        self.weight = self.weight + weight.sum()
        self.plain = self.plain + plain.sum()

        def merge(total: Tensor, old: Tensor, values: Tensor) -> Tensor:
            if not values.is_floating_point():
                return torch.maximum(total, values.amax(0))
            return total + _weigh(plain.to(values.dtype), buffer_change(values, old))

        self.buffers = tree.map(merge, self.buffers, self.state.buffers, buffers)

    def close(self) -> Sums:
        rows: Tree = {}
        for name in self.rows[0][1] if self.rows else ():
            values = tree.map(lambda *parts: torch.cat(parts), *(part[name] for _, part in self.rows))
            rows[name] = {"ids": torch.cat([ids for ids, _ in self.rows]), "values": values}
        delta = tree.zeros(self.state.params) if self.delta is None else self.delta
        return Sums(
            delta, self.weight, self.buffers, self.plain, self.uploads, self.clients, self.samples, rows,
            self.down, self.up,
        )  # fmt: skip
