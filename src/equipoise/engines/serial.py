"""The serial engine: one client at a time, on true short batches, without vmap or padding.

It is slow and plain. The tests hold the other engines against it, and it says which method failed at which tap and
client.
"""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.core import client, tree
from equipoise.core.chain import Chain
from equipoise.core.client import Batch, Carry, Data, Task, Visit
from equipoise.core.errors import EquipoiseError, TrainingError
from equipoise.core.local import optimiser_state, schedule
from equipoise.core.method import TAPS, Method
from equipoise.core.sums import Result
from equipoise.core.tree import Tree
from equipoise.engines.precision import arithmetic
from equipoise.engines.simulator import Simulator
from equipoise.engines.visits import client_axes, take


class Serial(Simulator):
    def visit(self, task: Task, visit: Visit, buffers: Tree, ids: Tensor, shared_start: bool) -> Result:
        """One client: `width` is 1."""
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
        visit = visit._replace(start_buffers=buffers)
        carry = Carry(visit.start, buffers, optimiser_state(task.local, visit.start))
        data = None
        if any(m.needs_data for m in task.chain):
            x, y, mask, inputs = self.store.all_data(self.offsets[ids].to(self.device), visit.n[None], int(visit.n))
            data = Data(x[0], y[0], mask[0], inputs)
        weight, plain, note = client.arrive(task, visit, carry, data)
        visit = visit._replace(weight=weight, note=note)
        n, (size, steps) = int(visit.n), task.local.batches(visit.n)
        plan = schedule(task.local, visit.key, visit.n, size, n, min(int(size), n), int(steps))
        for step in range(int(steps)):
            positions = plan.positions[step, : int(plan.counts[step])]
            x, y, copies = self.store.look_up(self.samples(ids, positions[None])[0])
            batch = Batch(self.inputs(x), y, copies, plan.counts[step])
            carry = client.step(task, visit, carry, batch, torch.tensor(step, device=self.device), ragged=False)
        delta, upload, memory, finite = client.leave(task, visit, carry, data)
        return Result(delta, weight, plain, carry.buffers, upload, memory, finite)


def _blame(error: Exception) -> str:
    """Which method and tap an error came from, by its traceback."""
    blamed, trace = "the model or the optimiser", error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        tap = trace.tb_frame.f_code.co_name
        if isinstance(owner, Method) and not isinstance(owner, Chain) and tap in TAPS:
            blamed = f"method {owner.name}, tap {tap}"
        trace = trace.tb_next
    return blamed
