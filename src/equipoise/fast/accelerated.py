"""The stacked engine with compiled and recorded programs.

A visit is three programs: `begin`, before the first step; `advance`, some steps; and `end`, after the last. Where
neither compiling nor recording is on, visits are those of the plain engine. Programs that are compiled or recorded
should have few shapes: the stack shrinks to one of few sizes, and until then a client that has finished stays in it
unchanged. On a GPU clients with many steps and with few are separate stacks, which run side by side in one recorded
program, or one after another (`schedule.groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.client import Carry, Task, Visit
from equipoise.core.local import Local
from equipoise.core.questions import Question
from equipoise.core.sums import Part, Result, Sums
from equipoise.core.tree import Tree
from equipoise.engines import visits
from equipoise.engines.precision import arithmetic
from equipoise.engines.stacked import Stacked, in_given_order
from equipoise.engines.visits import Shapes, Stack, client_axes, joined
from equipoise.fast import programs, schedule
from equipoise.fast.compiling import compiled
from equipoise.fast.graphs import Graphs
from equipoise.fast.pace import latency_clients
from equipoise.fast.schedule import Group, Stage, bucket, groups, padded_steps, round_up

if TYPE_CHECKING:
    from equipoise.core.turn import State, Turn
    from equipoise.fast.together import Seat


LONGEST_RECORDED = 512  # the most steps of a client in a visit that is recorded as a whole
AHEAD_BYTES = 32 << 20  # of samples that are looked up ahead, at most: so many stay in a GPU's cache until their use
END_INPUTS = ("buffers", "first", "runs")  # inputs of a visit that the program `end` reads again


class Call(NamedTuple):
    """A request to train some clients: the arguments of `train_stack`, and the engine that makes it."""

    engine: Accelerated
    task: Task
    visit: Visit
    buffers: Tree  # one row per client; if `summed`, the buffers with which all of them begin
    ids: Tensor
    shared_start: bool
    summed: bool


class Accelerated(Stacked):
    def __init__(
        self,
        fed: Any,
        *,
        width: int | None = None,
        compile: bool | str = False,
        compile_from: int | None = None,
        seat: Seat | None = None,
        **options: Any,
    ) -> None:
        """`compile`: compile with inductor, or with the backend of that name; from the first round on, or from the
        round `compile_from` on. `seat`: the run's place among several that train at once."""
        super().__init__(fed, width=width, **options)
        self.seat = seat
        self.fitting_widths: dict[tuple[Chain, Local], int] = {}
        self.backend = compile if isinstance(compile, str) else "inductor"
        self.compile_from = 0 if compile and compile_from is None else compile_from
        self.compiled = False
        self.fitting_width = self._fitting_cache()
        self.compile_around = self.device.type == "cuda"  # also `begin` and `end`, which take no time on a CPU
        self.graphs = Graphs(self.device)
        self.largest: dict[Local, tuple[Tensor, tuple[int, int, int]]] = {}
        self.latency_clients: dict[Local, int] = {}
        self.last_visit, self.repeated = 0, set[int]()  # hashes of visits
        self.counters: dict[int, Tensor] = {}  # by length; kept, since recorded programs read them at their address

    @property
    def width(self) -> int:
        return self.given_width or self.fitting_width

    def _like(self, fed: Any) -> Accelerated:
        return type(self)(fed, device=str(self.device), precision=self.precision, seat=self.seat)

    def train(self, state: State, plan: Tensor, chain: Chain, local: Local, turn: Turn) -> Sums:
        self.compiled = self.compile_from is not None and max(state.round, 0) >= self.compile_from
        if self.given_width is None:
            on_cpu = self.device.type == "cpu"
            self.fitting_width = self._fitting_cache() if on_cpu else self._fitting_memory(state, plan, chain, local)
        return super().train(state, plan, chain, local, turn)

    def _fitting_cache(self) -> int:
        """As many clients as stay in the CPU's cache; in a smaller, nearer one if compiled."""
        return self.fitting(1 << 20) if self.compiled else self.fitting()

    def _fitting_memory(self, state: State, plan: Tensor, chain: Chain, local: Local) -> int:
        """The largest stack that fits the GPU's memory, estimated from one step of the largest clients."""
        if (chain, local) not in self.fitting_widths:
            ids = plan[plan >= 0]
            if len(ids) < 2:
                return self._fitting_cache()
            task = Task(chain, self.fed.network, local, self.autocast)
            ids = ids[self.sizes(ids).argsort(descending=True, stable=True)[:4]]
            one, several = (self._step_bytes(task, state, some) for some in (ids[:1], ids))
            # Twice a step's memory, since a recorded program has memory of its own; and what `begin` and `end` take.
            each = 2 * (several - one) // (len(ids) - 1) + 4 * tree.nbytes(state.params)
            self.fitting_widths[chain, local] = max(1, int(0.8 * self.device_memory) // max(1, each))
        return self.fitting_widths[chain, local]

    def _step_bytes(self, task: Task, state: State, ids: Tensor) -> int:
        """The peak memory of one step of these clients."""
        axes = client_axes(True)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        shared, own = task.chain.broadcast(state.slots), task.chain.address(state.slots, ids)
        visit = self.prepare(task, ids, state.round, 0, state.params, shared, own)
        _, inputs = self.in_order(task.local, visit, ids, axes)
        shapes = self.shapes(task.local, ids, axes, True)
        begun = visits.begin(task, self.store, shapes, {**inputs, "buffers": state.buffers})
        visit, carry = Visit(**begun["visit"]), Carry(**begun["carry"])
        first = torch.zeros(1, dtype=torch.int64, device=self.device)
        visits.step(task, visit, carry, self.store, begun["rows"], begun["counts"], first, axes, False)
        return torch.cuda.max_memory_allocated(self.device) - before

    def train_stack(
        self, task: Task, visit: Visit, buffers: Tree, ids: Tensor, shared_start: bool, summed: bool
    ) -> Any:
        call = Call(self, task, visit, buffers, ids, shared_start, summed)
        return self.train_alone(call) if self.seat is None else self.seat.train(call)

    def train_alone(self, call: Call) -> Result | Part:
        """Train the clients of a call without those of other runs."""
        if not self._few_shapes:
            found: Result | Part = super().train_stack(*call[1:])
            return found
        axes = client_axes(call.shared_start)
        order, inputs = self.in_order(call.task.local, call.visit, call.ids, axes)
        inputs["buffers"] = call.buffers if order is None or call.summed else tree.rows(call.buffers, order)
        found = in_given_order(self.run_programs(call.task, inputs, call.ids, axes, call.summed), order)
        return found

    def reply(self, question: Question, inputs: Tree, most: int) -> tuple[Tree, Tree]:
        name = (question, most, self._data_version())
        replied: tuple[Tree, Tree] = self.graphs.run(
            name, lambda given: super(Accelerated, self).reply(question, given, most), inputs
        )
        return replied

    def run_programs(self, task: Task, inputs: Tree, ids: Tensor, axes: Visit, summed: bool) -> Any:
        """Run the programs of a visit. Everything that fixes their shapes is decided here, on the host; inside the
        programs, the device never waits for the host."""
        shapes = self.shapes(task.local, ids, axes, summed)
        before, after = (
            partial(self._for_task(program, task, outside_steps=True), self.store, shapes)
            for program in self._begin_and_end()
        )
        ordered, repeats = self.cohorts.of(ids, task.local, "steps", find=lambda: self._steps(task.local, ids))

        def visit(inputs: Tree) -> Any:
            begun = self._recorded("begin", before, task, shapes, inputs)
            kept = {name: inputs[name] for name in END_INPUTS if name in inputs}
            carry = self._train_groups(task, shapes, begun, ordered, repeats)
            ending = {**kept, **begun["visit"], "plain": begun["plain"], "carry": carry._asdict()}
            return self._recorded("end", after, task, shapes, ending)

        with self.explained(len(ids)), arithmetic(self.device, self.precision):
            if self._worth_recording(task, shapes, ordered):
                return self._recorded("visit", visit, task, shapes, inputs, ordered)
            return visit(inputs)

    def _steps(self, local: Local, ids: Tensor) -> tuple[tuple[int, ...], bool]:
        """The clients' steps in falling order, and whether these are all clients of the federation, so that the same
        visit comes in every round."""
        steps: list[int] = self.batches(local, ids)[1].tolist()
        return tuple(sorted(steps, reverse=True)), int(self.sizes(ids).sum()) == int(self.offsets[-1])

    def _worth_recording(self, task: Task, shapes: Shapes, steps: Sequence[int]) -> bool:
        """Is the visit worth recording as a whole? It is if it came twice in a row and is not too long."""
        this = hash((task.chain, task.local, shapes, self.compiled, self._data_version(), *steps))
        if this == self.last_visit and this not in self.repeated and steps[0] <= LONGEST_RECORDED:
            self.repeated.add(this)
            self.graphs.forget("begin", "advance", "end")  # recordings of its parts, which it no longer needs
        self.last_visit = this
        return this in self.repeated

    def _begin_and_end(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The programs before the first step and after the last."""
        return visits.begin, visits.end

    @property
    def _few_shapes(self) -> bool:
        """Should there be few shapes, since each takes time to compile or to record?"""
        return self.compiled or self.device.type == "cuda"

    def shapes(self, local: Local, ids: Tensor, axes: Visit, summed: bool) -> Shapes:
        if not self._few_shapes:
            return super().shapes(local, ids, axes, summed)
        most, width, steps = self.cohorts.of(ids, local, "padded sizes", find=lambda: self._padded_sizes(local, ids))
        return Shapes(most, width, steps, axes, summed)

    def _padded_sizes(self, local: Local, ids: Tensor) -> tuple[int, int, int]:
        """The most samples of a client, the widest batch and the most steps, each rounded up to one of few values."""
        n, (size, steps) = self.sizes(ids), self.batches(local, ids)
        most, width, longest = int(n.max()), int(torch.minimum(size, n).max()), int(steps.max())
        most_of_all, widest, longest_of_all = self._largest(local)
        # Padding the samples and steps costs little; padding the batch costs time.
        return (
            bucket(most, most_of_all, 8),
            bucket(width, widest, 1),
            padded_steps(bucket(longest, longest_of_all, 8)),
        )

    def _largest(self, local: Local) -> tuple[int, int, int]:
        """The most samples, the widest batch and the most steps of any client."""
        known = self.largest.get(local)
        if known is None or known[0] is not self.offsets:
            n = self.offsets.diff()
            size, steps = local.batches(n)
            most, widest, longest = int(n.max()), int(torch.minimum(size, n).max()), int(steps.max())
            if local.steps_per_epoch is not None:  # then a batch may have any width, each of which is another shape
                widest = round_up(widest, 8)
            largest = round_up(most, 32), widest, longest
            known = self.largest[local] = self.offsets, largest
        return known[1]

    def _data_version(self) -> int:
        """The address of the list of the clients' samples. A recorded program reads this address alone, so that
        another list needs another recording."""
        return self.indices.data_ptr()

    def _for_task(
        self, function: Callable[..., Any], task: Task, outside_steps: bool = False, sizes_vary: bool = False
    ) -> Callable[..., Any]:
        """`function` with `task` as its first argument; compiled if this round is. Programs that are not steps are
        compiled only where that saves time."""
        if self.compiled and (not outside_steps or self.compile_around):
            return compiled(function, task, self.backend, self.device.type, sizes_vary)
        return partial(function, task)

    def _recorded(
        self, name: str, program: Callable[[Tree], Any], task: Task, shapes: Shapes, inputs: Tree, *fixed: Any
    ) -> Any:
        """The outputs of a program of a visit. On CUDA the program is recorded, and replayed when it runs again.
        `fixed`: what the recording depends on besides the task and the shapes."""
        same = (task.chain, task.local, shapes, self.compiled, self._data_version())
        return self.graphs.run((name, *fixed, *same), program, inputs, at_once=True)

    def _advance(self, task: Task, shapes: Shapes, ahead: bool) -> Callable[..., Carry]:
        """The program of some steps. If `ahead`, it looks up the samples of several steps at once."""
        if ahead:
            look_up = self._for_task(programs.samples_ahead, task, sizes_vary=True)
            return partial(programs.advance_ahead, look_up, self._for_task(visits.step_on, task), self.store, shapes)
        return partial(programs.advance, self._for_task(visits.step, task), self.store, shapes)

    def _looks_ahead(self, shapes: Shapes, clients: int) -> bool:
        """Should samples be looked up ahead? They should where clients are so few that a step's time goes into
        launching kernels, and not into moving data."""
        ahead_bytes = programs.AHEAD * clients * shapes.width * self.x[0].numel() * self.dtype.itemsize
        return self.graphs.enabled and ahead_bytes <= AHEAD_BYTES

    def _train_groups(self, task: Task, shapes: Shapes, begun: Tree, steps: Sequence[int], repeats: bool) -> Carry:
        """Train all clients, and return what they end with, in their order."""
        if shapes.steps not in self.counters:
            # Each number twice, in rows of 16 bytes: compiled programs want inputs that begin at multiples of that.
            counter = torch.arange(shapes.steps + programs.AHEAD, device=self.device).clamp(max=shapes.steps - 1)
            self.counters[shapes.steps] = counter.repeat_interleave(2).view(-1, 2)
        ended: list[Carry] = []
        for group in groups(steps, self._latency_clients(task.local)):
            ended += self._train_group(
                task, shapes, begun, group, list(group.stages(steps, self._few_shapes, repeats))
            )
        return joined(ended)

    def _train_group(self, task: Task, shapes: Shapes, begun: Tree, group: Group, stages: list[Stage]) -> list[Carry]:
        """Train the clients of a group, stage by stage."""
        stacks = {some.start: Stack(begun, some, shapes.axes) for some in group.tracks}
        counter = self.counters[shapes.steps]

        def inputs(part: schedule.Part) -> Tree:
            stack = stacks[part.track]
            stack.shrink(part.clients)
            return {
                "visit": stack.visit._asdict(),
                "carry": stack.carry._asdict(),
                "rows": stack.rows,
                "counts": stack.counts,
                "index": counter[part.first : part.first + round_up(part.steps, programs.AHEAD)],
            }

        made = cache(partial(self._advance, task, shapes))

        def advance(part: schedule.Part, mine: Tree) -> Carry:
            return made(self._looks_ahead(shapes, part.clients))(part.steps, part.ragged, mine)

        def whole_track(track: int) -> None:
            for part in (part for stage in stages for part in stage if part.track == track):
                stacks[track].carry = advance(part, inputs(part))

        if self.graphs.inside:  # one recording for all stages: no track waits for the other between them
            self.graphs.branches([partial(whole_track, track) for track in stacks])
            stages = []
        for stage in stages:
            program = partial(_advance_all, self.graphs, advance, stage)
            # Each track has recordings of its own, since a recording overwrites its outputs when it runs again.
            key = tuple((part.track, part.steps, part.ragged) for part in stage)
            given = {str(part.track): inputs(part) for part in stage}
            for part, carry in zip(stage, self._recorded("advance", program, task, shapes, given, key), strict=True):
                stacks[part.track].carry = carry
        return [carry for stack in stacks.values() for carry in stack.carries()]

    def _latency_clients(self, local: Local) -> int:
        """How many clients a GPU trains in the time of one; 0 on a CPU."""
        if local not in self.latency_clients:
            self.latency_clients[local] = latency_clients(self.fed, local) if self.device.type == "cuda" else 0
        return self.latency_clients[local]


def _advance_all(graphs: Graphs, advance: Callable[..., Carry], stage: Stage, inputs: Tree) -> list[Carry]:
    """Some steps of each track of a stage."""
    tracks = zip(stage, inputs.values(), strict=True)
    return graphs.branches([partial(advance, part, mine) for part, mine in tracks])
