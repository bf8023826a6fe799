"""What methods keep at the clients, in a simulation: one row per client visited so far, none for the others."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.errors import TrainingError
from equipoise.core.tree import Tree
from equipoise.engines.cohort_cache import CohortCache
from equipoise.engines.transfer import to_device

GIB = 1 << 30


class Memories:
    """What every method of a chain keeps. Each method has a stack of its own: a method that keeps one number at every
    client must not make another one, which keeps a model, allocate a row for each of them."""

    def __init__(self, initial: Tree, clients: int, limit: int) -> None:
        self.methods = {name: ClientMemory(name, own, clients, limit) for name, own in initial.items()}

    def get(self, ids: Tensor, names: Iterable[str]) -> Tree:
        return {name: self.methods[name].get(ids) for name in names if name in self.methods}

    def put(self, ids: Tensor, memory: Tree) -> None:
        for name, new in memory.items():
            if new:
                self.methods[name].put(ids, new)

    def seen(self, names: Iterable[str]) -> Tree:
        """What the named methods keep at every client visited so far, one row per client."""
        return {name: own.save()["rows"] for name in names if (own := self.methods[name]).seen}

    def save(self) -> Tree:
        return {name: saved for name, own in self.methods.items() if (saved := own.save())}

    def load(self, saved: Tree) -> None:
        for name, rows in saved.items():
            self.methods[name].load(rows)


class ClientMemory:
    """A growing stack of one method's memories. `limit` is the most it may take, in bytes."""

    def __init__(self, name: str, initial: Tree, clients: int, limit: int) -> None:
        self.name, self.initial, self.limit = name, initial, limit
        self.row_bytes = tree.nbytes(initial)
        self.empty = self.row_bytes == 0
        self.place = torch.full((0 if self.empty else clients,), -1, dtype=torch.int32)
        self.seen = 0
        self.slices = CohortCache()
        self.stack: Tree = tree.map(lambda leaf: leaf.new_empty(0, *leaf.shape), initial)

    def get(self, ids: Tensor) -> Tree:
        """The memories of these clients; `initial` for those never visited."""
        if self.empty:
            return self.initial
        if self.seen == 0:
            return tree.map(lambda leaf: leaf.expand(len(ids), *leaf.shape).clone(), self.initial)
        if (adjacent := self._adjacent(ids)) is not None:
            return tree.map(lambda stack: stack[adjacent].clone(), self.stack)
        place = self.place[ids].long()
        device = next(tree.leaves(self.initial)).device
        known, row = place >= 0, to_device(place.clamp(min=0), device)
        if bool(known.all()):
            return tree.rows(self.stack, row)
        known = to_device(known, device)

        def pick(stack: Tensor, initial: Tensor) -> Tensor:
            return torch.where(known.view(-1, *[1] * initial.dim()), stack[row], initial)

        return tree.map(pick, self.stack, self.initial)

    def put(self, ids: Tensor, memory: Tree) -> None:
        if self.empty:
            return
        if self._adjacent(ids) is None:
            self._add_rows(ids[self.place[ids] < 0])
        if (adjacent := self._adjacent(ids)) is not None:
            tree.map(lambda stack, values: stack[adjacent].copy_(values), self.stack, memory)
            return
        rows = to_device(self.place[ids].long(), next(tree.leaves(memory)).device)
        tree.map(lambda stack, values: stack.index_copy_(0, rows, values), self.stack, memory)

    def _add_rows(self, new: Tensor) -> None:
        """Allocate rows for clients that were never visited."""
        if len(new := torch.unique(new)):  # a cohort drawn with replacement may name a client twice
            self._grow(self.seen + len(new))
            self.place[new] = torch.arange(self.seen, self.seen + len(new), dtype=torch.int32)
            self.seen += len(new)

    def _adjacent(self, ids: Tensor) -> slice | None:
        """The clients' rows as a slice, which is read and written faster, where they follow one another."""
        found: slice | None = self.slices.of(ids, self.seen, find=lambda: _slice(self.place[ids].long()))
        return found

    def _grow(self, rows: int) -> None:
        have = len(next(tree.leaves(self.stack)))
        if rows <= have:
            return
        if rows * self.row_bytes > self.limit:
            raise TrainingError(
                f"train.memory_gib = {self.limit / GIB:g}: {self.name} keeps {self.row_bytes:,} bytes at each client,"
                f" and {rows:,} clients seen so far need {rows * self.row_bytes / GIB:.2f} GiB;"
                " raise the limit, or take a smaller model, fewer clients or a method that keeps less"
            )
        size = min(max(rows, 2 * have), self.limit // self.row_bytes, len(self.place))
        self.stack = tree.map(
            lambda leaf: torch.cat([leaf, leaf.new_empty(size - have, *leaf.shape[1:])]), self.stack
        )

    def save(self) -> Tree:
        if self.empty:
            return {}
        known = (self.place >= 0).nonzero()[:, 0]
        return {"clients": known, "rows": self.get(known)} if len(known) else {}

    def load(self, saved: Tree) -> None:
        if saved and not self.empty:
            rows = tree.map(lambda leaf, like: leaf.to(like.device), saved["rows"], self.initial)
            self.put(saved["clients"].cpu(), rows)


def _slice(places: Tensor) -> slice | None:
    first = int(places[0])
    return slice(first, first + len(places)) if first >= 0 and bool((places.diff() == 1).all()) else None
