"""The serial engine: one client at a time, on true short batches, without vmap.

Slow and plain: it is the oracle of the tests, and it says which method failed at which tap and client.
"""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise import local as L
from equipoise import tree
from equipoise.engines.base import Engine, client_axes, take
from equipoise.engines.precision import arithmetic
from equipoise.engines.sums import Result
from equipoise.errors import EquipoiseError, TrainingError
from equipoise.local import Batch, Carry, Data, Task, Visit
from equipoise.method import Chain, Method
from equipoise.tree import Tree


class Serial(Engine):
    def visit(self, task: Task, visit: Visit, buffers: Tree, ids: Tensor, shared_start: bool) -> Result:
        """`ids` holds a single client here, because `width` is 1."""
        alone = take(visit, 0, client_axes(shared_start))
        try:
            with arithmetic(self.device, self.precision):
                result = self._visit(task, alone, tree.rows(buffers, 0), ids)
        except EquipoiseError:
            raise
        except Exception as error:
            who = self.fed.client_name(int(ids[0]))
            raise TrainingError(f"client {who}, {_blame(error)}: {type(error).__name__}: {error}") from error
        stacked = [tree.stack([part]) if isinstance(part, dict) else part[None] for part in result]
        return Result._make(stacked)

    def _visit(self, task: Task, visit: Visit, buffers: Tree, ids: Tensor) -> Result:
        carry = Carry(visit.start, buffers, L.optimiser_state(task.local, visit.start))
        data = None
        if any(m.needs_data for m in task.chain):
            x, y, mask, features = self.store.all_data(self.offsets[ids].to(self.device), visit.n[None], int(visit.n))
            data = Data(x[0], y[0], mask[0], features)
        weight, plain, note = L.arrive(task, visit, carry, data)
        visit = visit._replace(weight=weight, note=note)
        n, (size, steps) = int(visit.n), task.local.batches(visit.n)
        plan = L.schedule(task.local, visit.key, visit.n, size, n, min(int(size), n), int(steps))
        for step in range(int(steps)):
            positions = plan.positions[step, : int(plan.counts[step])]
            x, y, copies = self.store.look_up(self.samples(ids, positions[None])[0])
            batch = Batch(self.features(x), y, copies, plan.counts[step])
            carry = L.step(task, visit, carry, batch, torch.tensor(step, device=self.device), ragged=False)
        delta, upload, memory, finite = L.leave(task, visit, carry, data)
        return Result(delta, weight, plain, carry.buffers, upload, memory, finite)


def _blame(error: Exception) -> str:
    """Which method and tap an error came from, read off its traceback."""
    blamed, trace = "the model or the optimiser", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        tap = trace.tb_frame.f_code.co_name
        if isinstance(owner, Method) and not isinstance(owner, Chain) and hasattr(Method, tap):
            blamed = f"method {owner.name}, tap {tap}"
        trace = trace.tb_next
    return blamed
