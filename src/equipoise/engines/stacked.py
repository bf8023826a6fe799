"""The stacked engine: all clients of a wave trained at once, by vmap over the code of one client.

Clients are sorted by their number of steps; as soon as the shortest have finished, the stack shrinks, so that they do
not pay for the long ones. The room `fast` has a subclass of this engine that compiles and records the same programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.client import Task, Visit
from equipoise.core.errors import TrainingError
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.sums import Part, Result
from equipoise.core.tree import Tree
from equipoise.engines import visits
from equipoise.engines.precision import arithmetic
from equipoise.engines.simulator import Simulator
from equipoise.engines.transfer import to_device
from equipoise.engines.visits import Shapes, Stack, client_axes, take


class Stacked(Simulator):
    def __init__(self, fed: Federation, *, width: int | None = None, **options: Any) -> None:
        """`width`: how many clients train at once; if not given, as many as fit."""
        super().__init__(fed, **options)
        self.given_width = width
        self.device_memory = 0
        if self.device.type == "cuda":
            self.device_memory = torch.cuda.get_device_properties(self.device).total_memory

    @property
    def width(self) -> int:
        return self.given_width or self.fitting()

    def fitting(self, cached: int = 1 << 22) -> int:
        """How many clients to stack. On CPU as many as stay in the cache, which holds about so many parameters; one
        where there are convolutions, which gain nothing from a stack there. On CUDA as many as fit for sure."""
        params = self.fed.network.params
        numbers = max(1, tree.count(params))
        if self.device.type == "cuda":
            return max(1, self.device_memory // (160 * numbers))
        if any(leaf.dim() > 2 for leaf in tree.leaves(params)):
            return 1
        return max(1, min(64, cached // numbers))

    def visit(self, task: Task, visit: Visit, buffers: Tree, ids: Tensor, shared_start: bool) -> Result:
        result: Result = self.train_stack(task, visit, buffers, ids, shared_start, summed=False)
        return result

    def visit_summed(self, task: Task, visit: Visit, buffers: Tree, ids: Tensor) -> Part:
        part: Part = self.train_stack(task, visit, buffers, ids, shared_start=True, summed=True)
        return part

    def train_stack(
        self, task: Task, visit: Visit, buffers: Tree, ids: Tensor, shared_start: bool, summed: bool
    ) -> Any:
        """A visit of some clients: sums, if `summed` and all begin with the same buffers; else a row for each."""
        axes = client_axes(shared_start)
        order, inputs = self.in_order(task.local, visit, ids, axes)
        inputs["buffers"] = buffers if order is None or summed else tree.rows(buffers, order)
        shapes = self.shapes(task.local, ids, axes, summed)
        steps: list[int] = sorted(self.batches(task.local, ids)[1].tolist(), reverse=True)
        with self.explained(len(ids)), arithmetic(self.device, self.precision):
            begun = self.begin(task, shapes, inputs)
            stack, done = Stack(begun, slice(None), axes), 0
            while steps:
                stack.shrink(len(steps))
                for index in torch.arange(done, steps[-1], device=self.device)[:, None]:
                    stack.carry = visits.step(
                        task, stack.visit, stack.carry, self.store, stack.rows, stack.counts, index, axes, False
                    )
                done = steps[-1]
                steps = [each for each in steps if each > done]
            carry = visits.joined(stack.carries())
            ending = {**begun["visit"], "plain": begun["plain"], "carry": carry._asdict()}
            kept = {name: inputs[name] for name in ("buffers", "first")}
            return in_given_order(visits.end(task, self.store, shapes, {**kept, **ending}), order)

    # -- for subclasses ----------------------------------------------------------------------------------------------
    def begin(self, task: Task, shapes: Shapes, inputs: Tree) -> Tree:
        """What clients have before their first step."""
        return visits.begin(task, self.store, shapes, inputs)

    def in_order(self, local: Local, visit: Visit, ids: Tensor, axes: Visit) -> tuple[Tensor | None, Tree]:
        """The inputs of a visit's programs with the clients in falling order of steps, and the permutation that made
        that order; None where they were in that order already."""
        order, which = self.cohorts.of(ids, local, "order", find=lambda: self._order(local, ids))
        visit = visit._replace(note={})
        return order, {**(visit if order is None else take(visit, order, axes))._asdict(), **which}

    def _order(self, local: Local, ids: Tensor) -> tuple[Tensor | None, Tree]:
        """The permutation, and in that order the clients' batch sizes and first rows; on the device."""
        size, steps = self.batches(local, ids)
        by_steps = steps.argsort(descending=True, stable=True)
        size, first, order = to_device(torch.stack([size, self.offsets[ids], by_steps]), self.device)
        which = {"size": size, "first": first}
        return (None, which) if bool((steps[:-1] >= steps[1:]).all()) else (order, tree.rows(which, order))

    def shapes(self, local: Local, ids: Tensor, axes: Visit, summed: bool) -> Shapes:
        n, (size, steps) = self.sizes(ids), self.batches(local, ids)
        return Shapes(int(n.max()), int(torch.minimum(size, n).max()), int(steps.max()), axes, summed)

    @contextmanager
    def explained(self, clients: int) -> Iterator[None]:
        """Turn a failure inside a stack into a sentence that says how to find its cause."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"train.block = {self.width}: the device has not enough memory for {clients} clients at once;"
                " expected a smaller block"
            ) from error
        except Exception as error:
            raise TrainingError(
                f"the model or a method failed while clients were trained together: {type(error).__name__}: {error};"
                " train.engine = 'serial' says which one, at which tap and client"
            ) from error


def in_given_order(found: Any, order: Tensor | None) -> Any:
    """What came back from clients that were sorted, in the order in which they were given."""
    if order is None:
        return found
    back = order.argsort()
    if isinstance(found, Part):
        return Part(found.sums, tree.rows(found.memory, back), found.finite[back])
    return take(found, back)
