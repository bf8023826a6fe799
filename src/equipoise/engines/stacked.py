"""The stacked engine: all clients of a wave trained at once, by vmap over the code of one client.

A visit is three programs (`programs.py`): `begin`, before the first step, `advance`, some steps, and `end`.
Clients are sorted by their number of steps; as soon as the shortest have finished, the stack shrinks, so that they do
not pay for the long ones. Programs that are compiled or recorded want few shapes: there the stack is only
ever halved, and a client that has finished stands still in it. On a GPU clients with many steps and with few are
stacks of their own, which go side by side in one recorded program, or one after another (`parts.groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from equipoise import tree
from equipoise.engines import parts, programs
from equipoise.engines.base import Engine, client_axes, take
from equipoise.engines.compiling import compiled
from equipoise.engines.graphs import Graphs
from equipoise.engines.pace import crowd
from equipoise.engines.parts import Group, Stage, few, groups, room, up
from equipoise.engines.precision import arithmetic
from equipoise.engines.programs import Shapes
from equipoise.engines.sums import Part, Result, Sums
from equipoise.engines.transfer import there
from equipoise.errors import TrainingError
from equipoise.local import Carry, Local, Task, Visit
from equipoise.method import Chain
from equipoise.questions import Question
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.engines.together import Seat
    from equipoise.server import State, Turn

LONGEST = 512  # steps of a client, in a visit that is recorded as a whole
READY = 32 << 20  # bytes of samples, looked up ahead, that stay in the cache of a GPU until they are used
KEPT = ("buffers", "first", "runs")  # inputs of a visit that are not part of it, and are read when it ends


class Call(NamedTuple):
    """A visit of some clients, to be carried out."""

    engine: Stacked
    task: Task
    visit: Visit
    buffers: Tree  # one row per client, or if `summed` those that all begin with
    ids: Tensor
    shared_start: bool
    summed: bool


class Stacked(Engine):
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
        """`compile`: with inductor, or with the backend of that name; from the first round or from a later one on.
        `seat`: of a run that is carried out together with others."""
        super().__init__(fed, **options)
        self.seat = seat
        self.given_width = width
        self.planned: dict[tuple[Chain, Local], int] = {}
        self.device_memory = 0
        if self.device.type == "cuda":
            self.device_memory = torch.cuda.get_device_properties(self.device).total_memory
        self.backend = compile if isinstance(compile, str) else "inductor"
        self.compile_from = 0 if compile and compile_from is None else compile_from
        self.compiled = False
        self.fitting = self._fitting()
        self.compile_around = self.device.type == "cuda"  # on CPU what is around the steps takes no time
        self.graphs = Graphs(self.device)
        self.largest: dict[Local, tuple[Tensor, tuple[int, int, int]]] = {}
        self.crowds: dict[Local, int] = {}
        self.last_visit, self.repeated = 0, set[int]()  # hashes
        self.counters: dict[int, Tensor] = {}  # by length; recorded programs read them where they lie

    @property
    def width(self) -> int:
        return self.given_width or self.fitting

    def train(self, state: State, plan: Tensor, chain: Chain, local: Local, turn: Turn) -> Sums:
        self.compiled = self.compile_from is not None and max(state.round, 0) >= self.compile_from
        if self.given_width is None:
            self.fitting = (
                self._fitting() if self.device.type == "cpu" else self._fitting_memory(state, plan, chain, local)
            )
        return super().train(state, plan, chain, local, turn)

    def _fitting(self) -> int:
        """On CPU a stack that stays in the cache, if compiled in the nearest, and one client at a time where there
        are convolutions, which gain nothing from a stack there. On CUDA one that fits for sure."""
        params = self.fed.network.params
        numbers = max(1, tree.count(params))
        if self.device.type == "cuda":
            return max(1, self.device_memory // (160 * numbers))
        if any(leaf.dim() > 2 for leaf in tree.leaves(params)):
            return 1
        return max(1, min(64, (1 << (20 if self.compiled else 22)) // numbers))

    def _fitting_memory(self, state: State, plan: Tensor, chain: Chain, local: Local) -> int:
        """On CUDA the largest stack that fits, by the memory that one step of the largest clients takes."""
        if (chain, local) not in self.planned:
            ids = plan[plan >= 0]
            if len(ids) < 2:
                return self._fitting()
            task = Task(chain, self.fed.network, local, self.autocast)
            ids = ids[self.sizes(ids).argsort(descending=True, stable=True)[:4]]
            one, several = (self._step_bytes(task, state, some) for some in (ids[:1], ids))
            # Twice, since what is recorded has memory of its own; and what begins and ends a visit.
            each = 2 * (several - one) // (len(ids) - 1) + 4 * tree.nbytes(state.params)
            self.planned[chain, local] = max(1, int(0.8 * self.device_memory) // max(1, each))
        return self.planned[chain, local]

    def _step_bytes(self, task: Task, state: State, ids: Tensor) -> int:
        """The most memory that is taken while these clients make one step."""
        axes = client_axes(True)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        shared, own = task.chain.broadcast(state.slots), task.chain.address(state.slots, ids)
        visit = self.prepare(task, ids, state.round, 0, state.params, shared, own)
        _, inputs = self._sorted(task, visit, ids, axes)
        shapes = self._shapes(task.local, ids, axes, True)
        begun = programs.begin(task, self.store, shapes, {**inputs, "buffers": state.buffers})
        visit, carry = Visit(**begun["visit"]), Carry(**begun["carry"])
        first = torch.zeros(1, dtype=torch.int64, device=self.device)
        programs.step(task, visit, carry, self.store, begun["rows"], begun["counts"], first, axes, False)
        return torch.cuda.max_memory_allocated(self.device) - before

    def visit(self, task: Task, visit: Visit, buffers: Tree, ids: Tensor, shared_start: bool) -> Result:
        result: Result = self._meet(Call(self, task, visit, buffers, ids, shared_start, summed=False))
        return result

    def visit_summed(self, task: Task, visit: Visit, buffers: Tree, ids: Tensor) -> Part:
        part: Part = self._meet(Call(self, task, visit, buffers, ids, shared_start=True, summed=True))
        return part

    def _meet(self, call: Call) -> Any:
        return self.carry_out(call) if self.seat is None else self.seat.meet(call)

    def carry_out(self, call: Call) -> Result | Part:
        """A visit of this run alone."""
        axes = client_axes(call.shared_start)
        order, inputs = self._sorted(call.task, call.visit, call.ids, axes)
        inputs["buffers"] = call.buffers if order is None or call.summed else tree.rows(call.buffers, order)
        found: Any = self._run(call.task, inputs, call.ids, axes, call.summed)
        if order is None:
            return found  # type: ignore[no-any-return]
        back = order.argsort()
        if call.summed:
            return Part(found.sums, tree.rows(found.memory, back), found.finite[back])
        return take(found, back)  # type: ignore[no-any-return]

    def reply(self, question: Question, inputs: Tree, most: int) -> tuple[Tree, Tree]:
        name = (question, most, self._data_version())
        replied: tuple[Tree, Tree] = self.graphs.run(
            name, lambda given: super(Stacked, self).reply(question, given, most), inputs
        )
        return replied

    def _sorted(self, task: Task, visit: Visit, ids: Tensor, axes: Visit) -> tuple[Tensor | None, Tree]:
        """The inputs of a program with the clients in falling order of steps, and that order where it is another."""
        order, which = self.recent.of(ids, task.local, "order", find=lambda: self._order(task.local, ids))
        visit = visit._replace(note={})
        return order, {**(visit if order is None else take(visit, order, axes))._asdict(), **which}

    def _order(self, local: Local, ids: Tensor) -> tuple[Tensor | None, Tree]:
        """That of their steps, and in it the clients' batches and where their samples begin; on the device."""
        size, steps = self.batches(local, ids)
        by_steps = steps.argsort(descending=True, stable=True)
        size, first, order = there(torch.stack([size, self.offsets[ids], by_steps]), self.device)
        which = {"size": size, "first": first}
        return (None, which) if bool((steps[:-1] >= steps[1:]).all()) else (order, tree.rows(which, order))

    def _run(self, task: Task, inputs: Tree, ids: Tensor, axes: Visit, add_up: bool) -> Any:
        """Everything that fixes the programs is settled here, on the host; they themselves never wait for it."""
        shapes = self._shapes(task.local, ids, axes, add_up)
        before, after = (partial(self._fast(made, task, around=True), self.store, shapes) for made in self._around())
        ordered, again = self.recent.of(ids, task.local, "steps", find=lambda: self._steps(task.local, ids))

        def visit(inputs: Tree) -> Any:
            begun = self._recorded("begin", before, task, shapes, inputs)
            kept = {name: inputs[name] for name in KEPT if name in inputs}
            trained = self._train(task, shapes, begun, ordered, again)
            ending = {**kept, **begun["visit"], "plain": begun["plain"], **trained}
            return self._recorded("end", after, task, shapes, ending)

        try:
            with arithmetic(self.device, self.precision):
                if self._comes_again(task, shapes, ordered):
                    return self._recorded("visit", visit, task, shapes, inputs, ordered)
                return visit(inputs)
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

    def _steps(self, local: Local, ids: Tensor) -> tuple[tuple[int, ...], bool]:
        """In falling order; and is everybody here, and so will be in the rounds to come?"""
        steps: list[int] = self.batches(local, ids)[1].tolist()
        return tuple(sorted(steps, reverse=True)), int(self.sizes(ids).sum()) == int(self.offsets[-1])

    def _comes_again(self, task: Task, shapes: Shapes, steps: Sequence[int]) -> bool:
        """Is it a visit that is worth recording as a whole: like the one before it, and not too long?"""
        this = hash((task.chain, task.local, shapes, self.compiled, self._data_version(), *steps))
        if this == self.last_visit and this not in self.repeated and steps[0] <= LONGEST:
            self.repeated.add(this)
            self.graphs.forget("begin", "advance", "end")  # its parts, which need no memory from here on
        self.last_visit = this
        return this in self.repeated

    def _around(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """What comes before the steps, and after them."""
        return programs.begin, programs.end

    @property
    def _few(self) -> bool:
        """Are there to be few shapes, since each of them costs time to compile or to record?"""
        return self.compiled or self.device.type == "cuda"

    def _shapes(self, local: Local, ids: Tensor, axes: Visit, add_up: bool) -> Shapes:
        most, width, steps = self.recent.of(ids, local, "room", self._few, find=lambda: self._room(local, ids))
        return Shapes(most, width, steps, axes, add_up)

    def _room(self, local: Local, ids: Tensor) -> tuple[int, int, int]:
        """For how many samples of a client, of a batch, and for how many steps there must be room."""
        n, (size, steps) = self.sizes(ids), self.batches(local, ids)
        most, width, longest = int(n.max()), int(torch.minimum(size, n).max()), int(steps.max())
        if self._few:
            most_of_all, widest, longest_of_all = self._largest(local)
            # Room for more samples and steps costs little; a wider batch costs time.
            most, longest = few(most, most_of_all, 8), room(few(longest, longest_of_all, 8))
            width = few(width, widest, 1)
        return most, width, longest

    def _largest(self, local: Local) -> tuple[int, int, int]:
        """The most samples, the widest batch and the most steps of any client."""
        known = self.largest.get(local)
        if known is None or known[0] is not self.offsets:
            n = self.offsets.diff()
            size, steps = local.batches(n)
            most, widest, longest = int(n.max()), int(torch.minimum(size, n).max()), int(steps.max())
            if local.steps_per_epoch is not None:  # then a batch may have any width, which would be as many shapes
                widest = up(widest, 8)
            largest = up(most, 32), widest, longest
            known = self.largest[local] = self.offsets, largest
        return known[1]

    def _data_version(self) -> int:
        """Recorded programs read these tensors where they lay."""
        return self.indices.data_ptr()

    def _fast(
        self, function: Callable[..., Any], task: Task, around: bool = False, sizes_vary: bool = False
    ) -> Callable[..., Any]:
        """A function of a task, compiled if it is to be; what is `around` the steps only where that pays."""
        if self.compiled and (not around or self.compile_around):
            return compiled(function, task, self.backend, self.device.type, sizes_vary)
        return partial(function, task)

    def _recorded(
        self, name: str, program: Callable[[Tree], Any], task: Task, shapes: Shapes, inputs: Tree, *fixed: Any
    ) -> Any:
        """What a part of a visit makes of its inputs; on CUDA it is recorded, and replayed when it comes again."""
        same = (task.chain, task.local, shapes, self.compiled, self._data_version())
        return self.graphs.run((name, *fixed, *same), program, inputs, at_once=True)

    def _advance(self, task: Task, shapes: Shapes, ahead: bool) -> Callable[..., Carry]:
        """Some steps, with samples looked up ahead or not."""
        if ahead:
            look_up = self._fast(programs.samples_ahead, task, sizes_vary=True)
            return partial(programs.advance_ahead, look_up, self._fast(programs.step_on, task), self.store, shapes)
        return partial(programs.advance, self._fast(programs.step, task), self.store, shapes)

    def _looks_ahead(self, shapes: Shapes, clients: int) -> bool:
        """Are they so few that they wait for every program of a step, and not for memory?"""
        ready = programs.AHEAD * clients * shapes.width * self.x[0].numel() * self.dtype.itemsize
        return self.graphs.recording and ready <= READY

    def _train(self, task: Task, shapes: Shapes, begun: Tree, steps: Sequence[int], again: bool) -> Tree:
        if shapes.steps not in self.counters:
            # Twice, since compiled programs want what they read to begin at multiples of 16 bytes.
            counter = torch.arange(shapes.steps + programs.AHEAD, device=self.device).clamp(max=shapes.steps - 1)
            self.counters[shapes.steps] = counter.repeat_interleave(2).view(-1, 2)
        ended: list[Carry] = []  # in the order of the clients
        for group in groups(steps, self._crowd(task.local)):
            ended += self._train_group(task, shapes, begun, group, list(group.stages(steps, self._few, again)))
        carry = ended[0]
        if len(ended) > 1:
            carry = Carry(*(tree.map(lambda *rows: torch.cat(rows), *some) for some in zip(*ended, strict=True)))
        return {"carry": carry._asdict()}

    def _train_group(self, task: Task, shapes: Shapes, begun: Tree, group: Group, stages: list[Stage]) -> list[Carry]:
        stacks = {some.start: _Stack(begun, some, shapes.axes) for some in group.tracks}
        counter = self.counters[shapes.steps]

        def inputs(part: parts.Part) -> Tree:
            return stacks[part.track].inputs(
                part.clients, counter[part.first : part.first + up(part.steps, programs.AHEAD)]
            )

        made = cache(partial(self._advance, task, shapes))

        def advance(part: parts.Part, mine: Tree) -> Carry:
            return made(self._looks_ahead(shapes, part.clients))(part.steps, part.ragged, mine)

        def whole_track(track: int) -> None:
            for part in (part for stage in stages for part in stage if part.track == track):
                stacks[track].carry = advance(part, inputs(part))

        if self.graphs.within:  # then no track need wait for another
            self.graphs.branches([partial(whole_track, track) for track in stacks])
            stages = []
        for stage in stages:
            program = partial(_advance_all, self.graphs, advance, stage)
            # Each track has recordings of its own, since the next run of one overwrites what it gave.
            key = tuple((part.track, part.steps, part.ragged) for part in stage)
            given = {str(part.track): inputs(part) for part in stage}
            for part, carry in zip(stage, self._recorded("advance", program, task, shapes, given, key), strict=True):
                stacks[part.track].carry = carry
        return [carry for stack in stacks.values() for carry in stack.carries()]

    def _crowd(self, local: Local) -> int:
        """How many clients train in the time of one; 0 on CPU."""
        if local not in self.crowds:
            self.crowds[local] = crowd(self.fed, local) if self.device.type == "cuda" else 0
        return self.crowds[local]


class _Stack:
    """The clients of a track: those that still train, and what the others have ended with."""

    def __init__(self, begun: Tree, some: slice, axes: Any) -> None:
        self.axes = axes
        self.visit, self.carry = take(Visit(**begun["visit"]), some, axes), take(Carry(**begun["carry"]), some)
        self.rows, self.counts = begun["rows"][some], begun["counts"][some]
        self.ended: list[Carry] = []

    def _shrink(self, clients: int) -> None:
        """To so many: the others have ended."""
        if clients == len(self.counts):
            return
        stay, leave = slice(0, clients), slice(clients, None)
        self.ended.append(take(self.carry, leave))
        self.visit, self.carry = take(self.visit, stay, self.axes), take(self.carry, stay)
        self.rows, self.counts = self.rows[stay], self.counts[stay]

    def inputs(self, clients: int, index: Tensor) -> Tree:
        """Of some steps of so many clients, with these numbers."""
        self._shrink(clients)
        visit, carry = self.visit._asdict(), self.carry._asdict()
        return {"visit": visit, "carry": carry, "rows": self.rows, "counts": self.counts, "index": index}

    def carries(self) -> list[Carry]:
        """In the order of the clients: the first end last."""
        return [self.carry, *self.ended[::-1]]


def _advance_all(graphs: Graphs, advance: Callable[..., Carry], stage: Stage, inputs: Tree) -> list[Carry]:
    """Some steps of each track that is going."""
    tracks = zip(stage, inputs.values(), strict=True)
    return graphs.branches([partial(advance, part, mine) for part, mine in tracks])
