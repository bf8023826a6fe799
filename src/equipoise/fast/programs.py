"""Several steps of a stack of clients as one program, which an engine may compile or record."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from equipoise.core.client import Carry, Task, Visit
from equipoise.core.tree import Tree
from equipoise.engines.store import Store
from equipoise.engines.visits import Samples, Shapes, samples

AHEAD = 8  # steps whose samples `advance_ahead` looks up at once


def advance(
    one_step: Callable[..., Carry], store: Store, shapes: Shapes, steps: int, ragged: bool, inputs: Tree
) -> Carry:
    """Take some steps, each of which looks up its own samples."""
    visit, carry = Visit(**inputs["visit"]), Carry(**inputs["carry"])
    for number in range(steps):
        index = inputs["index"][number, :1]
        carry = one_step(visit, carry, store, inputs["rows"], inputs["counts"], index, shapes.axes, ragged)
    return carry


def advance_ahead(
    look_up: Callable[..., Samples], one_step: Callable[..., Carry], store: Store, shapes: Shapes, steps: int,
    ragged: bool, inputs: Tree,
) -> Carry:  # fmt: skip
    """Take some steps, and look up the samples of several at once: with few clients, each launch saved saves time."""
    visit, carry, counts = Visit(**inputs["visit"]), Carry(**inputs["carry"]), inputs["counts"]
    for number in range(steps):
        if number % AHEAD == 0:
            ready = look_up(store, inputs["rows"], inputs["index"][number : number + AHEAD, 0])
        mine = tuple(part[number % AHEAD] for part in ready)
        carry = one_step(visit, carry, mine, counts, inputs["index"][number, :1], shapes.axes, ragged)
    return carry


def samples_ahead(task: Task, store: Store, rows: Tensor, index: Tensor) -> Samples:
    """The samples of several steps, with the steps as first axis."""
    return samples(store, rows.index_select(1, index).transpose(0, 1))
