"""The stacked engine: all clients of a wave trained at once, by vmap over the code of one client.

Clients are sorted by their number of steps; as soon as the shortest have finished, the stack shrinks, so that they do
not pay for the long ones. Programs that are compiled or recorded want few shapes: there the stack of a drawn cohort
shrinks as that of any cohort would, and a client that has finished stands still in it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from equipoise import local as L
from equipoise import tree
from equipoise.engines.base import Engine, Store, client_axes, take
from equipoise.engines.compiling import compiled
from equipoise.engines.graphs import Graphs
from equipoise.engines.profile import Profile, envelope
from equipoise.engines.sums import Part, Result, Sums, summed
from equipoise.engines.transfer import there
from equipoise.errors import TrainingError
from equipoise.local import Batch, Carry, Data, Local, Task, Visit
from equipoise.method import Chain
from equipoise.questions import Question
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.server import State, Turn


class Shapes(NamedTuple):
    """What fixes the shapes of a program, beside those of its inputs."""

    profile: Profile
    width: int  # of a batch
    axes: Any  # of a visit, as vmap wants them told
    summed: bool  # give sums, or one row per client?


class Stacked(Engine):
    def __init__(
        self,
        fed: Any,
        *,
        width: int | None = None,
        compile: bool | str = False,
        compile_from: int | None = None,
        **options: Any,
    ) -> None:
        """`compile`: with inductor, or with the backend of that name; from the first round or from a later one on."""
        super().__init__(fed, **options)
        self.given_width = width
        self.backend = compile if isinstance(compile, str) else "inductor"
        self.compile_from = 0 if compile and compile_from is None else compile_from
        self.compiled = False
        self.graphs = Graphs(self.device)
        self.envelopes: dict[Local, Profile] = {}

    @property
    def width(self) -> int:
        return self.given_width or self._auto_width()

    def _auto_width(self) -> int:
        """On CUDA a stack that fits in a part of the memory. On CPU one that stays in the cache, if compiled in the
        nearest; and one client at a time where there are convolutions, which gain nothing from a stack there."""
        params = self.fed.network.params
        numbers = max(1, tree.count(params))
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            return max(1, int(0.1 * total) // (numbers * 4 * 4))
        if any(leaf.dim() > 2 for leaf in tree.leaves(params)):
            return 1
        return max(1, min(64, (1 << (20 if self.compiled else 22)) // numbers))

    def open(self, chain: Chain, params: Tree) -> None:
        super().open(chain, params)
        self.envelopes = {}

    def train(self, state: State, plan: Tensor, chain: Chain, local: Local, turn: Turn) -> Sums:
        self.compiled = self.compile_from is not None and max(state.round, 0) >= self.compile_from
        return super().train(state, plan, chain, local, turn)

    def visit(self, task: Task, visit: Visit, buffers: Tree, ids: Tensor, shared_start: bool) -> Result:
        order, inputs = self._sorted(task, visit, ids, client_axes(shared_start))
        inputs["buffers"] = buffers if order is None else tree.rows(buffers, order)
        result: Result = self._run(task, inputs, ids, client_axes(shared_start), False)
        return result if order is None else take(result, order.argsort())

    def visit_summed(self, task: Task, visit: Visit, buffers: Tree, ids: Tensor) -> Part:
        order, inputs = self._sorted(task, visit, ids, client_axes(True))
        part: Part = self._run(task, {**inputs, "buffers": buffers}, ids, client_axes(True), True)
        if order is None:
            return part
        back = order.argsort()
        return Part(part.sums, tree.rows(part.memory, back), part.finite[back])

    def reply(self, question: Question, inputs: Tree, most: int) -> tuple[Tree, Tree]:
        signature = (question, most, _alike(inputs), self._data_version())
        replied: tuple[Tree, Tree] = self.graphs.run(
            signature, lambda given: super(Stacked, self).reply(question, given, most), inputs
        )
        return replied

    def _sorted(self, task: Task, visit: Visit, ids: Tensor, axes: Visit) -> tuple[Tensor | None, Tree]:
        """The inputs of a program with the clients in falling order of steps, and that order where it is another."""
        n = self.sizes(ids)
        size, steps = task.local.batches(n)
        inputs = {
            **visit._replace(note={})._asdict(),
            "size": there(size, self.device),
            "first": there(self.offsets[ids], self.device),
        }
        if bool((steps[:-1] >= steps[1:]).all()):
            return None, inputs
        order = there(steps.argsort(descending=True, stable=True), self.device)
        sorted_visit = take(visit._replace(note={}), order, axes)
        return order, {
            **sorted_visit._asdict(),
            **tree.rows({"size": inputs["size"], "first": inputs["first"]}, order),
        }

    def _run(self, task: Task, inputs: Tree, ids: Tensor, axes: Visit, add_up: bool) -> Any:
        """Everything that fixes the program is settled here, on the host; the program itself never waits for it."""
        n = self.sizes(ids)
        size, steps = task.local.batches(n)
        profile = Profile.of(steps, n)
        if self.device.type == "cuda" or self.compiled:
            profile = self._envelope(task.local).around(profile)
        shapes = Shapes(profile, int(torch.minimum(size, n).max()), axes, add_up)
        signature = (task.chain, task.local, shapes, self.compiled, _alike(inputs), self._data_version())
        try:
            return self.graphs.run(signature, partial(self._program, task, shapes), inputs)
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

    def _envelope(self, local: Local) -> Profile:
        if local not in self.envelopes:
            self.envelopes[local] = envelope(self.fed, self.offsets, local)
        return self.envelopes[local]

    def _data_version(self) -> int:
        """Recorded programs read these tensors where they lay."""
        return self.indices.data_ptr()

    def _program(self, task: Task, shapes: Shapes, inputs: Tree) -> Result | Part:
        """Everything between what the clients are given and what comes back; no step waits for the host."""
        inputs = dict(inputs)
        before, size, first = inputs.pop("buffers"), inputs.pop("size"), inputs.pop("first")
        visit, axes = Visit(**inputs), shapes.axes
        clients = len(visit.n)
        params = visit.start if axes.start == 0 else tree.map(torch.clone, tree.repeat(visit.start, clients))
        buffers = tree.map(torch.clone, tree.repeat(before, clients)) if shapes.summed else before
        carry = Carry(params, buffers, L.optimiser_state(task.local, params))
        most = shapes.profile.most
        data = self.all_data(first, visit.n, most) if any(m.needs_data for m in task.chain) else None
        visit, plain = _arrive(task, visit, carry, data, axes)
        carry = self._train(task, visit, carry, size, first, shapes)
        result = _leave(task, visit, carry, data, axes, plain)
        return Part(summed(result, before), result.memory, result.finite) if shapes.summed else result

    def _train(self, task: Task, visit: Visit, carry: Carry, size: Tensor, first: Tensor, shapes: Shapes) -> Carry:
        profile, store = shapes.profile, self.store
        longest = len(profile.active)
        plan = L.schedule(task.local, visit.key, visit.n, size, profile.most, shapes.width, longest)
        rows = first[:, None, None] + plan.positions
        index = torch.arange(longest, device=self.device)
        step = compiled(_step, task, self.backend) if self.compiled else partial(_step, task)
        done: list[Carry] = []
        have = len(visit.n)
        for t, need in enumerate(profile.active):
            if need < have and (not self.compiled or 2 * need <= have):
                done.append(take(carry, slice(need, have)))
                carry, visit = take(carry, slice(0, need)), take(visit, slice(0, need), shapes.axes)
                have = need
            ragged = t >= profile.least or need < have
            carry = step(visit, carry, store, rows[:have, t], plan.counts[:have, t], index[t], shapes.axes, ragged)
        if not done:
            return carry
        parts = zip(carry, *done[::-1], strict=True)
        return Carry(*(tree.map(lambda *leaves: torch.cat(leaves), *part) for part in parts))


def _alike(inputs: Tree) -> tuple[tuple[str, torch.Size], ...]:
    """What inputs of one program have in common."""
    return tuple((name, leaf.shape) for name, leaf in tree.flatten(inputs).items())


def _step(
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
    x, y, copies = store.look_up(rows)
    batch = Batch(store.features(x), y, copies, counts)

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
