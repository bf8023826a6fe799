"""The programs of a visit: what the clients of a stack do before their first step, in some steps, and after the last.

They are functions of tensors, made from the code of one client by vmap, so that an engine may compile or record them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise import local as L
from equipoise import tree
from equipoise.engines.base import take
from equipoise.engines.store import Store
from equipoise.engines.sums import Part, Result, summed
from equipoise.local import Batch, Carry, Data, Task, Visit
from equipoise.tree import Tree

AHEAD = 8  # steps whose samples are looked up at once, where that is done
Samples = tuple[Tensor, Tensor, Tensor]


class Shapes(NamedTuple):
    """What fixes the shapes of a visit's programs, beside those of their inputs."""

    most: int  # samples of a client
    width: int  # of a batch
    steps: int
    axes: Any  # of a visit, as vmap wants them told
    summed: bool  # give sums, or one row per client?


def begin(task: Task, store: Store, shapes: Shapes, inputs: Tree) -> Tree:
    """What clients have before their first step. Nothing that steps change may lie where an input lies."""
    inputs = dict(inputs)
    buffers, size, first = inputs.pop("buffers"), inputs.pop("size"), inputs.pop("first")
    visit, axes = Visit(**inputs), shapes.axes
    clients = len(visit.n)
    start = visit.start if axes.start == 0 else tree.repeat(visit.start, clients)
    params = tree.map(torch.clone, start)
    buffers = tree.map(torch.clone, tree.repeat(buffers, clients) if shapes.summed else buffers)
    carry = Carry(params, buffers, L.optimiser_state(task.local, params))
    data = _all_data(task, store, visit, first, shapes)
    weigh = torch.vmap(partial(L.arrive, task), in_dims=(axes, 0, _data_dims(data)))
    weight, plain, note = weigh(visit, carry, data)
    plan = L.schedule(task.local, visit.key, visit.n, size, shapes.most, shapes.width, shapes.steps)
    return {
        "visit": visit._replace(weight=weight, note=note)._asdict(),
        "carry": carry._asdict(),
        "plain": plain,
        "rows": first[:, None, None] + plan.positions,
        "counts": plan.counts,
    }


def advance(
    one_step: Callable[..., Carry], store: Store, shapes: Shapes, steps: int, ragged: bool, inputs: Tree
) -> Carry:
    """Some steps."""
    visit, carry = Visit(**inputs["visit"]), Carry(**inputs["carry"])
    for number in range(steps):
        index = inputs["index"][number, :1]
        carry = one_step(visit, carry, store, inputs["rows"], inputs["counts"], index, shapes.axes, ragged)
    return carry


def advance_ahead(
    look_up: Callable[..., Samples], one_step: Callable[..., Carry], store: Store, shapes: Shapes, steps: int,
    ragged: bool, inputs: Tree,
) -> Carry:  # fmt: skip
    """Some steps, the samples of several looked up at once: few clients wait for every program of a step."""
    visit, carry, counts = Visit(**inputs["visit"]), Carry(**inputs["carry"]), inputs["counts"]
    for number in range(steps):
        if number % AHEAD == 0:
            ready = look_up(store, inputs["rows"], inputs["index"][number : number + AHEAD, 0])
        mine = tuple(part[number % AHEAD] for part in ready)
        carry = one_step(visit, carry, mine, counts, inputs["index"][number, :1], shapes.axes, ragged)
    return carry


def samples(store: Store, rows: Tensor) -> Samples:
    """Features, labels and copy numbers."""
    x, y, copies = store.look_up(rows)
    return store.features(x), y, copies


def samples_ahead(task: Task, store: Store, rows: Tensor, index: Tensor) -> Samples:
    """Of these steps, one after another."""
    return samples(store, rows.index_select(1, index).transpose(0, 1))


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
    mine = samples(store, rows.index_select(1, index)[:, 0])
    return step_on(task, visit, carry, mine, counts, index, dims, ragged)


def step_on(
    task: Task, visit: Visit, carry: Carry, mine: Samples, counts: Tensor, index: Tensor, dims: Visit, ragged: bool
) -> Carry:
    """A step on samples that are at hand."""
    batch = Batch(*mine, counts.index_select(1, index)[:, 0])

    def one(visit: Visit, carry: Carry, batch: Batch, index: Tensor) -> Carry:
        return L.step(task, visit, carry, batch, index, ragged)

    if len(counts) == 1 and counts.device.type == "cpu":  # vmap would lay images out anew around every convolution
        alone = one(take(visit, 0, dims), take(carry, 0), take(batch, 0), index[0])
        return Carry(*(tree.map(lambda leaf: leaf[None], part) for part in alone))
    return torch.vmap(one, in_dims=(dims, 0, 0, None))(visit, carry, batch, index[0])


def end(task: Task, store: Store, shapes: Shapes, inputs: Tree) -> Result | Part:
    """What comes back from clients after their last step."""
    inputs = dict(inputs)
    before, first, plain, carry = (inputs.pop(name) for name in ("buffers", "first", "plain", "carry"))
    visit, carry = Visit(**inputs), Carry(**carry)
    data = _all_data(task, store, visit, first, shapes)
    leave = torch.vmap(partial(L.leave, task), in_dims=(shapes.axes, 0, _data_dims(data)))
    delta, upload, memory, finite = leave(visit, carry, data)
    result = Result(delta, visit.weight, plain, carry.buffers, upload, memory, finite)
    return Part(summed(result, before), memory, finite) if shapes.summed else result


def _all_data(task: Task, store: Store, visit: Visit, first: Tensor, shapes: Shapes) -> Data | None:
    return store.all_data(first, visit.n, shapes.most) if any(m.needs_data for m in task.chain) else None


def _data_dims(data: Data | None) -> Any:
    return None if data is None else Data(0, 0, 0, None)  # type: ignore[arg-type]
