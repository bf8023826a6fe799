"""The stacked engine: all clients of a wave trained at once, by vmap over the code of one client.

Clients are sorted by their number of steps; as soon as the shortest have finished, the stack shrinks, so that they do
not pay for the long ones. Compiled programs want few shapes: there the stack shrinks by halves, and a client that has
finished stands still in it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from equipoise import local as L
from equipoise import tree
from equipoise.engines.base import Engine, Result, client_axes, take
from equipoise.local import Batch, Carry, Data, Task, Visit
from equipoise.tree import Tree


class Stacked(Engine):
    def __init__(self, fed: Any, *, width: int | None = None, compile: bool = False, **options: Any) -> None:
        super().__init__(fed, **options)
        self.width = width or self._auto_width()
        self.compiled = compile
        self._step = torch.compile(_step, dynamic=False) if compile else _step

    def _auto_width(self) -> int:
        """On CPU a stack that stays in the cache; on CUDA one that fits in a part of the free memory."""
        numbers = max(1, tree.count(self.fed.network.params))
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            return max(1, int(0.1 * free) // (numbers * 4 * 4))
        return max(1, min(64, (1 << 20) // numbers))

    def visit(self, task: Task, visit: Visit, buffers: Tree, ids: Tensor, shared_start: bool) -> Result:
        size, steps = task.local.batches(self.sizes(ids))
        longest = steps.argsort(descending=True, stable=True)
        back = longest.argsort().to(self.device)
        place = longest.to(self.device)
        ids, size, steps = ids[longest], size[longest], steps[longest]
        dims = client_axes(shared_start)
        visit = take(visit._replace(note={}), place, dims)
        carry = Carry(
            tree.map(torch.clone, tree.repeat(visit.start, len(ids))) if shared_start else visit.start,
            tree.rows(buffers, place),
            {},
        )
        carry = carry._replace(opt=L.optimiser_state(task.local, carry.params))
        data = self.all_data(ids) if any(m.needs_data for m in task.chain) else None
        visit, plain = _arrive(task, visit, carry, data, dims)
        carry = self._train(task, visit, carry, ids, size, steps, dims)
        result = _leave(task, visit, carry, data, dims, plain)
        answer: Result = take(result, back)
        return answer

    def _train(
        self, task: Task, visit: Visit, carry: Carry, ids: Tensor, size: Tensor, steps: Tensor, dims: Visit
    ) -> Carry:
        most, width, longest = int(self.sizes(ids).max()), int(size.max()), int(steps.max())
        plan = L.schedule(task.local, visit.key, visit.n, size.to(self.device), most, min(width, most), longest)
        rows = self.samples(ids, plan.positions)
        index = torch.arange(longest, device=self.device)
        done: list[Carry] = []
        active = [int((steps > t).sum()) for t in range(longest)]
        for t in range(longest):
            need = active[t]
            have = len(next(tree.leaves(carry.params)))
            if need < have and (not self.compiled or 2 * need <= have):
                done.append(take(carry, slice(need, have)))
                carry, visit = take(carry, slice(0, need)), take(visit, slice(0, need), dims)
                have = need
            x, y, copies = self.look_up(rows[:have, t])
            batch = Batch(self.features(x), y, copies, plan.counts[:have, t])
            carry = self._step(task, visit, carry, batch, index[t], dims, need < have)
        if not done:
            return carry
        return Carry(*(tree.map(lambda *p: torch.cat(p), *parts) for parts in zip(carry, *done[::-1], strict=True)))


def _step(task: Task, visit: Visit, carry: Carry, batch: Batch, index: Tensor, dims: Visit, ragged: bool) -> Carry:
    def one(visit: Visit, carry: Carry, batch: Batch, index: Tensor) -> Carry:
        return L.step(task, visit, carry, batch, index, ragged)

    return torch.vmap(one, in_dims=(dims, 0, 0, None))(visit, carry, batch, index)


def _arrive(task: Task, visit: Visit, carry: Carry, data: Data | None, dims: Visit) -> tuple[Visit, Tensor]:
    """The clients' weights and the notes they take before training; also their plain weights."""
    weight, plain, note = torch.vmap(partial(L.arrive, task), in_dims=(dims, 0, _data_dims(data)))(visit, carry, data)
    return visit._replace(weight=weight, note=note), plain


def _leave(task: Task, visit: Visit, carry: Carry, data: Data | None, dims: Visit, plain: Tensor) -> Result:
    leave = torch.vmap(partial(L.leave, task), in_dims=(dims, 0, _data_dims(data)))
    delta, upload, memory, finite = leave(visit, carry, data)
    return Result(delta, visit.weight, plain, carry.buffers, upload, memory, finite)


def _data_dims(data: Data | None) -> Any:
    return None if data is None else Data(0, 0, 0, None)  # type: ignore[arg-type]
