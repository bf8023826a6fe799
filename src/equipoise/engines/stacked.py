"""The stacked engine: all clients of a wave trained at once, by vmap over the code of one client.

Clients are sorted by their number of steps; as soon as the shortest have finished, the stack shrinks, so that they do
not pay for the long ones. Compiled programs want few shapes: there the stack shrinks by halves, and a client that has
finished stands still in it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise import local as L
from equipoise import tree
from equipoise.engines.base import Engine, Result, client_axes, take
from equipoise.engines.graphs import Graphs
from equipoise.errors import TrainingError
from equipoise.local import Batch, Carry, Data, Task, Visit
from equipoise.tree import Tree


class Shapes(NamedTuple):
    """What fixes the shapes of a program: the largest client, the largest batch, who still trains at each step."""

    most: int
    width: int
    active: tuple[int, ...]
    axes: Any  # of a visit, as vmap wants them told


class Stacked(Engine):
    def __init__(self, fed: Any, *, width: int | None = None, compile: bool = False, **options: Any) -> None:
        super().__init__(fed, **options)
        self.width = width or self._auto_width()
        self.compiled = compile
        self.graphs = Graphs(self.device)
        self._step = torch.compile(_step, dynamic=False, fullgraph=True) if compile else _step

    def _auto_width(self) -> int:
        """On CPU a stack that stays in the cache; on CUDA one that fits in a part of the free memory."""
        numbers = max(1, tree.count(self.fed.network.params))
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            return max(1, int(0.1 * free) // (numbers * 4 * 4))
        return max(1, min(64, (1 << 22) // numbers))

    def visit(self, task: Task, visit: Visit, buffers: Tree, ids: Tensor, shared_start: bool) -> Result:
        # On the host: the order by steps, and everything that fixes the shapes of the program.
        n = self.sizes(ids)
        size, steps = task.local.batches(n)
        order = steps.argsort(descending=True, stable=True)
        steps = steps[order]
        ahead = steps > torch.arange(int(steps.max()))[:, None]
        active = tuple(ahead.sum(1).tolist())  # clients still training, by step
        shapes = Shapes(int(n.max()), int(torch.minimum(size, n).max()), active, client_axes(shared_start))
        # On the device: the same program for every visit of these shapes.
        place = order.to(self.device)
        inputs = {
            **take(visit._replace(note={}), place, shapes.axes)._asdict(),
            "buffers": tree.rows(buffers, place),
            "size": size.to(self.device)[place],
            "first": self.offsets[ids].to(self.device)[place],
        }
        alike = {name: leaf.shape for name, leaf in tree.flatten(inputs).items()}
        signature = (task.chain, task.local, shapes, tuple(alike.items()), self._data_version())
        try:
            result = self.graphs.run(signature, partial(self._program, task, shapes), inputs)
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"train.block = {self.width}: the device has not enough memory for {len(ids)} clients at once;"
                " expected a smaller block"
            ) from error
        except Exception as error:
            raise TrainingError(
                f"the model or a method failed while clients were trained together: {type(error).__name__}: {error};"
                " train.engine = 'serial' says which one, at which tap and client"
            ) from error
        return take(result, order.argsort().to(self.device))  # type: ignore[no-any-return]

    def _data_version(self) -> int:
        """Recorded programs read these tensors where they lay."""
        return self.indices.data_ptr()

    def _program(self, task: Task, shapes: Shapes, inputs: Tree) -> Result:
        """Everything between what the clients are given and what comes back; no step waits for the host."""
        inputs = dict(inputs)
        buffers, size, first = inputs.pop("buffers"), inputs.pop("size"), inputs.pop("first")
        visit, axes = Visit(**inputs), shapes.axes
        clients = len(visit.n)
        stacked = axes.start == 0
        params = visit.start if stacked else tree.map(torch.clone, tree.repeat(visit.start, clients))
        carry = Carry(params, buffers, L.optimiser_state(task.local, params))
        data = self.all_data(first, visit.n, shapes.most) if any(m.needs_data for m in task.chain) else None
        visit, plain = _arrive(task, visit, carry, data, axes)
        carry = self._train(task, visit, carry, size, first, shapes)
        return _leave(task, visit, carry, data, axes, plain)

    def _train(self, task: Task, visit: Visit, carry: Carry, size: Tensor, first: Tensor, shapes: Shapes) -> Carry:
        longest = len(shapes.active)
        plan = L.schedule(task.local, visit.key, visit.n, size, shapes.most, shapes.width, longest)
        rows = first[:, None, None] + plan.positions
        index = torch.arange(longest, device=self.device)
        done: list[Carry] = []
        have = len(visit.n)
        for t, need in enumerate(shapes.active):
            if need < have and (not self.compiled or 2 * need <= have):
                done.append(take(carry, slice(need, have)))
                carry, visit = take(carry, slice(0, need)), take(visit, slice(0, need), shapes.axes)
                have = need
            x, y, copies = self.look_up(rows[:have, t])
            batch = Batch(self.features(x), y, copies, plan.counts[:have, t])
            carry = self._step(task, visit, carry, batch, index[t], shapes.axes, need < have)
        if not done:
            return carry
        parts = zip(carry, *done[::-1], strict=True)
        return Carry(*(tree.map(lambda *leaves: torch.cat(leaves), *part) for part in parts))


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
