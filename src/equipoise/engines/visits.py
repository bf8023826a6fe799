"""The programs of a visit of stacked clients: before the first step, one step, and after the last.

They are functions of tensors, made from the code of one client by vmap, so that an engine may compile or record them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.core import client, tree
from equipoise.core.client import Batch, Carry, Data, Task, Visit
from equipoise.core.local import optimiser_state, schedule
from equipoise.core.sums import Part, Result, summed
from equipoise.core.tree import Tree
from equipoise.engines.store import Store

Samples = tuple[Tensor, Tensor, Tensor]  # inputs of the model, labels, copy numbers


class Shapes(NamedTuple):
    """What fixes the shapes of a visit's programs, beside the shapes of their inputs."""

    most: int  # samples of a client
    width: int  # of a batch
    steps: int
    axes: Any  # of a visit: 0 where it has a client axis, None where it is shared, as vmap takes them
    summed: bool  # do the programs return sums, or one row per client?


def client_axes(shared_start: bool) -> Any:
    """Which parts of a visit have a client axis (0) and which are shared by all clients (None)."""
    has: Any = 0
    shared: Any = None
    start = shared if shared_start else has
    return Visit(start, shared, has, has, has, has, has, has, has, shared, has)


def take(parts: Any, index: Tensor | slice | int, dims: Any = None) -> Any:
    """The given clients of a named tuple of stacked trees and tensors; `dims` has None where a part is shared."""
    picked = [
        part if dim is None else tree.rows(part, index) if isinstance(part, dict) else part[index]
        for part, dim in zip(parts, dims or [0] * len(parts), strict=True)
    ]
    return type(parts)(*picked)


def begin(task: Task, store: Store, shapes: Shapes, inputs: Tree) -> Tree:
    """What clients have before their first step. Steps change copies, which share no memory with the inputs."""
    inputs = dict(inputs)
    buffers, size, first = inputs.pop("buffers"), inputs.pop("size"), inputs.pop("first")
    visit, axes = Visit(**inputs), shapes.axes
    clients = len(visit.n)
    start = visit.start if axes.start == 0 else tree.repeat(visit.start, clients)
    params = tree.map(torch.clone, start)
    buffers = tree.map(torch.clone, tree.repeat(buffers, clients) if shapes.summed else buffers)
    carry = Carry(params, buffers, optimiser_state(task.local, params))
    # Copies of their own: a recorded program overwrites the memory of the buffers that steps change.
    visit = visit._replace(start_buffers=tree.map(torch.clone, buffers))
    data = _all_data(task, store, visit, first, shapes)
    arrive = torch.vmap(partial(client.arrive, task), in_dims=(axes, 0, _data_dims(data)))
    weight, plain, note = arrive(visit, carry, data)
    plan = schedule(task.local, visit.key, visit.n, size, shapes.most, shapes.width, shapes.steps)
    return {
        "visit": visit._replace(weight=weight, note=note)._asdict(),
        "carry": carry._asdict(),
        "plain": plain,
        "rows": first[:, None, None] + plan.positions,
        "counts": plan.counts,
    }


def step(
    task: Task,
    visit: Visit,
    carry: Carry,
    store: Store,
    rows: Tensor,
    counts: Tensor,
    index: Tensor,
    dims: Visit,
    ragged: bool,
) -> Carry:
    """Step number `index` of all clients of a stack."""
    return step_on(task, visit, carry, samples(store, rows.index_select(1, index)[:, 0]), counts, index, dims, ragged)


def samples(store: Store, rows: Tensor) -> Samples:
    x, y, copies = store.look_up(rows)
    return store.inputs(x), y, copies


def step_on(
    task: Task, visit: Visit, carry: Carry, mine: Samples, counts: Tensor, index: Tensor, dims: Visit, ragged: bool
) -> Carry:
    """A step on samples that were looked up before."""
    batch = Batch(*mine, counts.index_select(1, index)[:, 0])

    def one(visit: Visit, carry: Carry, batch: Batch, index: Tensor) -> Carry:
        return client.step(task, visit, carry, batch, index, ragged)

    if len(counts) == 1 and counts.device.type == "cpu":  # vmap would rearrange images around every convolution
        alone = one(take(visit, 0, dims), take(carry, 0), take(batch, 0), index[0])
        return Carry(*(tree.map(lambda leaf: leaf[None], part) for part in alone))
    return torch.vmap(one, in_dims=(dims, 0, 0, None))(visit, carry, batch, index[0])


def end(task: Task, store: Store, shapes: Shapes, inputs: Tree) -> Result | Part:
    """What comes back from clients after their last step."""
    inputs = dict(inputs)
    before, first, plain, carry = (inputs.pop(name) for name in ("buffers", "first", "plain", "carry"))
    visit, carry = Visit(**inputs), Carry(**carry)
    data = _all_data(task, store, visit, first, shapes)
    leave = torch.vmap(partial(client.leave, task), in_dims=(shapes.axes, 0, _data_dims(data)))
    delta, upload, memory, finite = leave(visit, carry, data)
    result = Result(delta, visit.weight, plain, carry.buffers, upload, memory, finite)
    return Part(summed(result, before), memory, finite) if shapes.summed else result


class Stack:
    """Clients in falling order of steps: those that still train, and what the others have ended with."""

    def __init__(self, begun: Tree, some: slice, axes: Any) -> None:
        self.axes = axes
        self.visit, self.carry = take(Visit(**begun["visit"]), some, axes), take(Carry(**begun["carry"]), some)
        self.rows, self.counts = begun["rows"][some], begun["counts"][some]
        self.ended: list[Carry] = []

    def shrink(self, clients: int) -> None:
        """Keep the first `clients`; the others have finished."""
        if clients == len(self.counts):
            return
        stay, leave = slice(0, clients), slice(clients, None)
        self.ended.append(take(self.carry, leave))
        self.visit, self.carry = take(self.visit, stay, self.axes), take(self.carry, stay)
        self.rows, self.counts = self.rows[stay], self.counts[stay]

    def carries(self) -> list[Carry]:
        """What all clients have ended with, in their order: those that finish first come last."""
        return [self.carry, *self.ended[::-1]]


def joined(carries: list[Carry]) -> Carry:
    """The clients of several stacks as one."""
    if len(carries) == 1:
        return carries[0]
    return Carry(*(tree.map(lambda *rows: torch.cat(rows), *some) for some in zip(*carries, strict=True)))


def _all_data(task: Task, store: Store, visit: Visit, first: Tensor, shapes: Shapes) -> Data | None:
    return store.all_data(first, visit.n, shapes.most) if any(m.needs_data for m in task.chain) else None


def _data_dims(data: Data | None) -> Any:
    return None if data is None else Data(0, 0, 0, None)  # type: ignore[arg-type]
