"""Several runs at once: the clients of all runs train in one stack.

A small run leaves a GPU idle, and a step of several runs takes no longer than a step of one. Every run executes the
ordinary code in a thread of its own, but only one thread is awake at a time: a run goes on until it ends or calls for
clients to be trained, and then waits for the answer. When all runs wait, the thread that started them trains calls
that can be stacked as one visit, and answers each run with its own rows or sums. So nothing depends on timing, and
all programs are compiled and launched by one thread.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from equipoise.core import tree
from equipoise.core.client import Task, Visit
from equipoise.core.sums import Part, Result, summed
from equipoise.core.tree import Tree
from equipoise.engines import visits
from equipoise.engines.store import Store
from equipoise.engines.transfer import to_device
from equipoise.engines.visits import Shapes, client_axes, take
from equipoise.fast.accelerated import Accelerated, Call

T = TypeVar("T")
_client_axis: Any = 0
ALL_PER_CLIENT = Visit(*[_client_axis] * len(Visit._fields))  # axes of a visit in which clients share nothing


class Seat:
    """The place of one run among `runs` runs. Through it a run hands its calls to the coordinator and waits."""

    def __init__(self, runs: int) -> None:
        self.runs = runs
        self.calls: SimpleQueue[Any] = SimpleQueue()
        self.answers: SimpleQueue[Any] = SimpleQueue()

    def train(self, call: Call) -> Any:
        """The result of a call. Called by the thread of the run, which waits until the coordinator answers."""
        self.calls.put(call)
        answer = self.answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer


Work = Callable[[Seat | None], T]


def side_by_side(works: Sequence[Work[T]]) -> Generator[tuple[int, T]]:
    """Carry out several runs at once, and yield the number and the result of each as it ends. A run that fails does
    not stop the others: the first error is raised when all have ended."""
    if len(works) == 1:
        yield 0, works[0](None)
        return
    runs = [_Run(work, Seat(len(works))) for work in works]
    coordinator, waiting = _Coordinator(len(works)), dict[int, Call]()
    failed: list[Exception] = []
    turns: list[tuple[int, Any]] = [(number, None) for number in range(len(works))]
    try:
        while turns:
            for number, answer in turns:
                found = runs[number].resume(answer)
                if isinstance(found, Call):
                    waiting[number] = found
                elif found.error is None:
                    yield number, found.result
                elif isinstance(found.error, Exception):
                    failed.append(found.error)
                else:
                    raise found.error
            turns = coordinator.answer(waiting)
    finally:
        for run in runs:
            run.interrupt()
    if failed:
        raise failed[0]


class _Ended(NamedTuple):
    result: Any
    error: BaseException | None


class _Run(Generic[T]):
    """A run in a thread of its own, which is awake only while `resume` waits for it."""

    def __init__(self, work: Work[T], seat: Seat) -> None:
        self.seat = seat
        self.thread = Thread(target=self._work, args=(work,), daemon=True)

    def _work(self, work: Work[T]) -> None:
        try:
            ended = _Ended(work(self.seat), None)
        except BaseException as error:
            ended = _Ended(None, error)
        self.seat.calls.put(ended)

    def resume(self, answer: Any) -> Call | _Ended:
        """Give the run the answer to its last call, and wait for its next call or its end."""
        if self.thread.ident is None:
            self.thread.start()
        else:
            self.seat.answers.put(answer)
        found: Call | _Ended = self.seat.calls.get()
        return found

    def interrupt(self) -> None:
        """End the run, unless it has ended, by an exception at its current or next call, so that it leaves its folder
        in order; and wait for its thread."""
        if self.thread.ident is not None:
            self.seat.answers.put(KeyboardInterrupt())
            self.thread.join()


class _Coordinator:
    """Trains the clients of all runs, in stacks."""

    def __init__(self, runs: int) -> None:
        self.most = runs  # the most runs in one stack
        self.joint_engines: list[JointEngine] = []

    @torch.no_grad()
    def answer(self, waiting: dict[int, Call]) -> list[tuple[int, Any]]:
        """Train the call that has waited longest, together with calls that can be stacked with it. Returns their runs
        and results, and removes them from `waiting`."""
        while waiting:
            first = next(iter(waiting.values()))
            key = _stacking_key(first)
            alike = {number: call for number, call in waiting.items() if _stacking_key(call) == key}
            numbers = list(alike)[: min(self.most, _fitting(list(alike.values()), first.engine.width))]
            calls = [waiting[number] for number in numbers]
            try:
                found = (
                    [_train_alone(first)] if len(calls) == 1 else self._joint_engine(alike.values()).train_all(calls)
                )
            except Exception as error:
                self.most = len(calls) // 2  # they are too many, or one of them fails and should do so alone
                if not isinstance(error.__cause__ or error, torch.OutOfMemoryError):
                    warnings.warn(
                        f"training {len(calls)} runs at once failed, so that smaller groups are tried: {error}",
                        stacklevel=2,
                    )
                continue
            for number in numbers:
                del waiting[number]
            return list(zip(numbers, found, strict=True))
        return []

    def _joint_engine(self, calls: Collection[Call]) -> JointEngine:
        """An engine of the clients of all these calls; a new one if none of those made so far has all of them."""
        known = next(
            (engine for engine in self.joint_engines if all(engine.has_clients_of(call.engine) for call in calls)),
            None,
        )
        if known is None:
            known = JointEngine([call.engine for call in calls])
            self.joint_engines.append(known)
        return known


def _fitting(calls: Sequence[Call], width: int) -> int:
    """How many of the calls, from the first on, make a stack of at most `width` clients; one at least."""
    clients = torch.tensor([len(call.ids) for call in calls]).cumsum(0)
    return max(1, int((clients <= width).sum()))


def _train_alone(call: Call) -> Any:
    """The result of a single call. An error is returned, for the run itself to raise."""
    try:
        return call.engine.train_alone(call)
    except Exception as error:
        return error


def _stacking_key(call: Call) -> Hashable:
    """Calls with the same key can be trained in one stack."""
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


class JointEngine(Accelerated):
    """An engine whose federation has the clients of several runs. Samples that runs share are stored once."""

    def __init__(self, engines: Sequence[Accelerated]) -> None:
        first = engines[0]
        pools = {_pool(engine): engine for engine in engines}
        sizes = [len(engine.y) for engine in pools.values()]
        shifts = dict(zip(pools, torch.tensor([0, *sizes[:-1]]).cumsum(0).tolist(), strict=True))
        rows = [engine.indices[: int(engine.offsets[-1])] + shifts[_pool(engine)] for engine in engines]
        rows_before = torch.tensor([0, *map(len, rows)]).cumsum(0)
        fed = replace(
            first.fed,
            x=first.x if len(pools) == 1 else torch.cat([engine.x for engine in pools.values()]),
            y=first.y if len(pools) == 1 else torch.cat([engine.y for engine in pools.values()]),
            indices=torch.cat(rows),
            offsets=torch.cat([engine.offsets + int(at) for engine, at in zip(engines, rows_before, strict=False)]),
            roster=None,
        )
        super().__init__(
            fed, width=first.width, compile=first.backend, device=str(first.device), precision=first.precision
        )
        if first.copies is not None:
            self.copies = torch.cat([engine.copies for engine in engines if engine.copies is not None])
        # The offsets of a run with n clients are n + 1 numbers, so that an empty client lies between two runs.
        numbers = torch.tensor([0, *(len(engine.offsets) for engine in engines)]).cumsum(0).tolist()
        self.first_client = dict(zip(engines, numbers, strict=False))
        self.sources = {engine: engine.indices for engine in engines}

    def has_clients_of(self, engine: Accelerated) -> bool:
        """Does this engine have the clients of that one, with the samples that they have now?"""
        return self.sources.get(engine) is engine.indices

    def train_all(self, calls: Sequence[Call]) -> list[Result | Part]:
        """The results of calls with the same stacking key, trained in one stack."""
        first, axes = calls[0], client_axes(calls[0].shared_start)
        self.compiled = first.engine.compiled
        ids = torch.cat([call.ids + self.first_client[call.engine] for call in calls])
        columns = zip(*(call.visit for call in calls), strict=True)
        visit = Visit(*(_combined(parts, axis) for parts, axis in zip(columns, axes, strict=True)))
        order, inputs = self.in_order(first.task.local, visit, ids, axes)
        counts = [len(call.ids) for call in calls]
        run = to_device(torch.arange(len(calls)).repeat_interleave(torch.tensor(counts)), self.device)
        place = torch.arange(len(ids), device=self.device)
        if order is not None:
            run, place = run[order], order.argsort()
        same = {name: inputs.pop(name) for name, axis in zip(Visit._fields, axes, strict=True) if axis is None}
        buffers = _combined([call.buffers for call in calls], None if first.summed else 0)
        if first.summed:
            same["buffers"] = buffers
        else:
            inputs["buffers"] = buffers if order is None else tree.rows(buffers, order)
        places = {str(number): mine for number, mine in enumerate(torch.split(place, counts))}
        inputs["runs"] = {"of": run, "same": same, "places": places}
        found: list[Result | Part] = self.run_programs(first.task, inputs, ids, ALL_PER_CLIENT, first.summed)
        return found

    def _begin_and_end(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return _begin_runs, _end_runs


def _pool(engine: Accelerated) -> tuple[int, int, int]:
    """Identifies an engine's samples by their addresses."""
    return engine.x.data_ptr(), engine.y.data_ptr(), len(engine.y)


def _combined(parts: Sequence[Any], axis: int | None) -> Any:
    """Parts of several runs as one: concatenated if they have a client axis; otherwise stacked, one row per run."""
    join = torch.stack if axis is None else torch.cat
    return tree.map(lambda *leaves: join(leaves), *parts) if isinstance(parts[0], dict) else join(list(parts))


def _begin_runs(task: Task, store: Store, shapes: Shapes, inputs: Tree) -> Tree:
    """`visits.begin` for several runs: what the clients of a run share is repeated for each of them."""
    inputs = dict(inputs)
    runs = inputs.pop("runs")
    return visits.begin(task, store, shapes._replace(summed=False), inputs | tree.rows(runs["same"], runs["of"]))


def _end_runs(task: Task, store: Store, shapes: Shapes, inputs: Tree) -> list[Result | Part]:
    """`visits.end` for several runs: the result of each."""
    inputs = dict(inputs)
    runs = inputs.pop("runs")
    before = inputs.setdefault("buffers", runs["same"].get("buffers"))
    result = visits.end(task, store, shapes._replace(summed=False), inputs)
    found: list[Any] = [take(result, place) for place in runs["places"].values()]
    if not shapes.summed:
        return found
    return [Part(summed(mine, tree.rows(before, run)), mine.memory, mine.finite) for run, mine in enumerate(found)]
