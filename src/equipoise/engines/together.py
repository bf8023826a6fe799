"""Several runs at once: their visits are stacked into one, with a run axis beside the client axis.

Each run is carried out by the ordinary code, in a thread of its own. They never go at the same time: a run goes on
until it comes to a visit or ends, and hands back. When all have come to one, visits of one kind are carried out as a
single visit by whoever seated the runs, and each run gets its own rows or sums. So nothing depends on the clock, and
all programs are made and launched by one thread. A small run leaves a GPU idle; a step takes no longer for several.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from equipoise import tree
from equipoise.engines import programs
from equipoise.engines.base import client_axes, take
from equipoise.engines.programs import Shapes
from equipoise.engines.stacked import Call, Stacked
from equipoise.engines.store import Store
from equipoise.engines.sums import Part, Result, summed
from equipoise.engines.transfer import there
from equipoise.local import Task, Visit
from equipoise.tree import Tree

T = TypeVar("T")
_has: Any = 0
OWN = Visit(*[_has] * len(Visit._fields))  # the axes of a visit in which each client has everything for itself


class Seat:
    """The place of a run among `runs`: where it waits at every visit until it is its turn again."""

    def __init__(self, runs: int) -> None:
        self.runs = runs
        self.calls: SimpleQueue[Any] = SimpleQueue()
        self.answers: SimpleQueue[Any] = SimpleQueue()

    def meet(self, call: Call) -> Any:
        self.calls.put(call)
        answer = self.answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer


Work = Callable[[Seat | None], T]


def side_by_side(works: Sequence[Work[T]]) -> Generator[tuple[int, T]]:
    """What each of some runs gives, with its number, as it ends. The first error is raised when all have ended."""
    if len(works) == 1:
        yield 0, works[0](None)
        return
    runs = [_Run(work, Seat(len(works))) for work in works]
    company, waiting = _Company(len(works)), dict[int, Call]()
    failed: list[Exception] = []
    turns: list[tuple[int, Any]] = [(number, None) for number in range(len(works))]
    try:
        while turns:
            for number, answer in turns:
                found = runs[number].go_on(answer)
                if isinstance(found, Call):
                    waiting[number] = found
                elif found.error is None:
                    yield number, found.result
                elif isinstance(found.error, Exception):
                    failed.append(found.error)
                else:
                    raise found.error
            turns = company.answer(waiting)
    finally:
        for run in runs:
            run.abandon()
    if failed:
        raise failed[0]


class _Ended(NamedTuple):
    result: Any
    error: BaseException | None


class _Run(Generic[T]):
    """A thread that goes only while somebody waits for it."""

    def __init__(self, work: Work[T], seat: Seat) -> None:
        self.seat = seat
        self.thread = Thread(target=self._carry_out, args=(work,), daemon=True)

    def _carry_out(self, work: Work[T]) -> None:
        try:
            ended = _Ended(work(self.seat), None)
        except BaseException as error:
            ended = _Ended(None, error)
        self.seat.calls.put(ended)

    def go_on(self, answer: Any) -> Call | _Ended:
        """Let it go, with an answer to its call, until it calls again or ends."""
        if self.thread.ident is None:
            self.thread.start()
        else:
            self.seat.answers.put(answer)
        found: Call | _Ended = self.seat.calls.get()
        return found

    def abandon(self) -> None:
        """End it at this visit or the next, unless it has ended, so that it leaves its folder in order."""
        if self.thread.ident is not None:
            self.seat.answers.put(KeyboardInterrupt())
            self.thread.join()


class _Company:
    """Who carries out the visits."""

    def __init__(self, runs: int) -> None:
        self.most = runs  # in one stack
        self.joints: list[Joint] = []

    @torch.no_grad()
    def answer(self, waiting: dict[int, Call]) -> list[tuple[int, Any]]:
        """Carry out the visit that has waited longest, and those of its kind; what is answered waits no more."""
        while waiting:
            first = next(iter(waiting.values()))
            kind = _kind(first)
            alike = {number: call for number, call in waiting.items() if _kind(call) == kind}
            numbers = list(alike)[: min(self.most, _fitting(list(alike.values()), first.engine.width))]
            calls = [waiting[number] for number in numbers]
            try:
                found = [_alone(first)] if len(calls) == 1 else self._joint(alike.values()).carry_out_all(calls)
            except Exception as error:
                self.most = len(calls) // 2  # too many at once; or one of them fails, and should fail alone
                if not isinstance(error.__cause__ or error, torch.OutOfMemoryError):
                    warnings.warn(
                        f"{len(calls)} runs do not go at once, and now in smaller groups: {error}", stacklevel=2
                    )
                continue
            for number in numbers:
                del waiting[number]
            return list(zip(numbers, found, strict=True))
        return []

    def _joint(self, calls: Collection[Call]) -> Joint:
        known = next((joint for joint in self.joints if all(joint.holds(call.engine) for call in calls)), None)
        if known is None:
            known = Joint([call.engine for call in calls])
            self.joints.append(known)
        return known


def _fitting(calls: Sequence[Call], width: int) -> int:
    """How many of the calls make a stack of at most so many clients; one at least."""
    clients = torch.tensor([len(call.ids) for call in calls]).cumsum(0)
    return max(1, int((clients <= width).sum()))


def _alone(call: Call) -> Any:
    """A visit by itself; what it fails with is the run's own to raise."""
    try:
        return call.engine.carry_out(call)
    except Exception as error:
        return error


def _kind(call: Call) -> Hashable:
    """What visits must have in common to be one."""
    engine, task, fed = call.engine, call.task, call.engine.fed
    parts = zip(call.visit._asdict().items(), client_axes(call.shared_start), strict=True)
    shapes = tuple(
        (name, leaf.dtype, leaf.shape if axis is None else leaf.shape[1:])
        for (field, part), axis in parts
        for name, leaf in tree.flatten({field: part}).items()
    )
    return (
        task.chain, task.local, task.autocast, task.network.kind, call.shared_start, call.summed, shapes,
        engine.device, engine.precision, engine.compiled, engine.backend,
        fed.mean, fed.std, fed.x.dtype, fed.x.shape[1:], engine.copies is None,
    )  # fmt: skip


class Joint(Stacked):
    """The clients of several runs as those of one."""

    def __init__(self, engines: Sequence[Stacked]) -> None:
        first = engines[0]
        pools = {_pool(engine): engine for engine in engines}
        sizes = [len(engine.y) for engine in pools.values()]
        shifts = dict(zip(pools, torch.tensor([0, *sizes[:-1]]).cumsum(0).tolist(), strict=True))
        rows = [engine.indices[: int(engine.offsets[-1])] + shifts[_pool(engine)] for engine in engines]
        before = torch.tensor([0, *map(len, rows)]).cumsum(0)
        fed = replace(
            first.fed,
            x=first.x if len(pools) == 1 else torch.cat([engine.x for engine in pools.values()]),
            y=first.y if len(pools) == 1 else torch.cat([engine.y for engine in pools.values()]),
            indices=torch.cat(rows),
            offsets=torch.cat([engine.offsets + int(at) for engine, at in zip(engines, before, strict=False)]),
            roster=None,
        )
        super().__init__(
            fed, width=first.width, compile=first.backend, device=str(first.device), precision=first.precision
        )
        if first.copies is not None:
            self.copies = torch.cat([engine.copies for engine in engines if engine.copies is not None])
        # Between the clients of two runs lies one that has nothing, where the offsets of one end and the next begin.
        numbers = torch.tensor([0, *(len(engine.offsets) for engine in engines)]).cumsum(0).tolist()
        self.first_client = dict(zip(engines, numbers, strict=False))
        self.sources = {engine: engine.indices for engine in engines}

    def holds(self, engine: Stacked) -> bool:
        """Are the engine's clients among these, with the samples that they have now?"""
        return self.sources.get(engine) is engine.indices

    def carry_out_all(self, calls: Sequence[Call]) -> list[Result | Part]:
        """Visits of one kind as one."""
        first, axes = calls[0], client_axes(calls[0].shared_start)
        self.compiled = first.engine.compiled
        ids = torch.cat([call.ids + self.first_client[call.engine] for call in calls])
        visits = zip(*(call.visit for call in calls), strict=True)
        visit = Visit(*(_joined(parts, axis) for parts, axis in zip(visits, axes, strict=True)))
        order, inputs = self._sorted(first.task, visit, ids, axes)
        counts = [len(call.ids) for call in calls]
        run = there(torch.arange(len(calls)).repeat_interleave(torch.tensor(counts)), self.device)
        place = torch.arange(len(ids), device=self.device)
        if order is not None:
            run, place = run[order], order.argsort()
        same = {name: inputs.pop(name) for name, axis in zip(Visit._fields, axes, strict=True) if axis is None}
        buffers = _joined([call.buffers for call in calls], None if first.summed else 0)
        if first.summed:
            same["buffers"] = buffers
        else:
            inputs["buffers"] = buffers if order is None else tree.rows(buffers, order)
        places = {str(number): mine for number, mine in enumerate(torch.split(place, counts))}
        inputs["runs"] = {"of": run, "same": same, "places": places}
        found: list[Result | Part] = self._run(first.task, inputs, ids, OWN, first.summed)
        return found

    def _around(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return _begin_runs, _end_runs


def _pool(engine: Stacked) -> tuple[int, int, int]:
    """Where the samples of an engine lie."""
    return engine.x.data_ptr(), engine.y.data_ptr(), len(engine.y)


def _joined(parts: Sequence[Any], axis: int | None) -> Any:
    """What clients have as rows in a row; of what those of a run share, one row for each run."""
    join = torch.stack if axis is None else torch.cat
    return tree.map(lambda *leaves: join(leaves), *parts) if isinstance(parts[0], dict) else join(list(parts))


def _begin_runs(task: Task, store: Store, shapes: Shapes, inputs: Tree) -> Tree:
    """What clients have before their first step: what those of a run share, each has as its own."""
    inputs = dict(inputs)
    runs = inputs.pop("runs")
    return programs.begin(task, store, shapes._replace(summed=False), inputs | tree.rows(runs["same"], runs["of"]))


def _end_runs(task: Task, store: Store, shapes: Shapes, inputs: Tree) -> list[Result | Part]:
    """What comes back to each run from its clients after their last step."""
    inputs = dict(inputs)
    runs = inputs.pop("runs")
    before = inputs.setdefault("buffers", runs["same"].get("buffers"))
    result = programs.end(task, store, shapes._replace(summed=False), inputs)
    found: list[Any] = [take(result, place) for place in runs["places"].values()]
    if not shapes.summed:
        return found
    return [Part(summed(mine, tree.rows(before, run)), mine.memory, mine.finite) for run, mine in enumerate(found)]
