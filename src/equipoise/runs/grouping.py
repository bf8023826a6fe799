"""Groups small runs that can train at the same time: runs that differ only in their seed and in the division of data.

On a GPU a step takes as long for a few clients as for a few hundred, so a single small run does not fill it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from equipoise.core import speed, tree
from equipoise.core.engine import Seat
from equipoise.runs.config import Config
from equipoise.runs.execution import device_of
from equipoise.runs.federate import federate

T = TypeVar("T")
Work = Callable[[Seat | None], T]  # a run, called with its place among the runs that train at the same time

# The most at the same time: runs, clients of a round, and parameters of these clients.
RUNS, CLIENTS, NUMBERS = 16, 400, 100_000_000
# Keys of [data] that change which client holds which samples, but not the computation. The seed is another such key.
DIVISION = ("imbalance", "partition", "minority", "validation", "local_test", "auxiliary")


def side_by_side(works: Sequence[Work[T]]) -> Iterable[tuple[int, T]]:
    """Yield the number and the result of each run when it ends. The fast code trains all runs as one stack."""
    return speed.faster("side by side", _one_after_another)(works)


def _one_after_another(works: Sequence[Work[T]]) -> Iterable[tuple[int, T]]:
    """Stands in for the fast code where that is off."""
    for number, work in enumerate(works):
        yield number, work(None)


def at_once(config: Config) -> int:
    """Return how many runs of this size one device should train at the same time; on a CPU always one."""
    if config.train.engine != "stacked" or speed.off() is not None or not device_of(config).startswith("cuda"):
        return 1
    fed = federate(config)
    clients = max(1, len(fed.draw(0)))
    return max(1, min(RUNS, CLIENTS // clients, NUMBERS // (clients * tree.count(fed.network.params))))


def groups(configs: Sequence[Config | None], most: Callable[[Config], int] = at_once) -> Iterator[list[int]]:
    """Yield groups of configs, by their numbers, whose runs can train at the same time.

    Each group contains the first config that is left. None in place of a config makes a group of its own.
    """
    left = {number: None if config is None else _program(config) for number, config in enumerate(configs)}
    paces: dict[int, tuple[int, int] | None] = {}
    while left:
        first = next(iter(left))
        config, alike = configs[first], [number for number, program in left.items() if program == left[first]]
        alone = config is None or len(alike) == 1 or (limit := most(config)) == 1
        if alone:
            group = [first]
        else:
            paces |= {number: _pace(configs[number]) for number in alike if number not in paces}
            group = _first_group([number for number in alike if paces[number] == paces[first]], limit)
        for number in group:
            del left[number]
        yield group


def _first_group(alike: list[int], limit: int) -> list[int]:
    """Return the first group of an even division. Groups of one size can share one compiled program."""
    return alike[: -(-len(alike) // -(-len(alike) // limit))]


def _pace(config: Config | None) -> tuple[int, int] | None:
    """Return the number of steps and the (rounded) batch size of a run's clients; None if their steps differ.

    Clients that train at the same time wait for the one with the most steps. So runs with clients of one pace are
    grouped only with runs of that pace; clients with different paces wait for each other anyway.
    """
    assert config is not None
    fed = federate(config)
    n = fed.offsets.diff()
    size, steps = fed.local.batches(n)
    return (int(steps[0]), -(-int(size.max()) // 8) * 8) if bool((steps == steps[0]).all()) else None


def _program(config: Config) -> str:
    """Return all settings but those that may differ within a group, as text to compare."""
    raw = config.to_dict()
    del raw["train"]["seed"]
    for name in DIVISION:
        del raw["data"][name]
    return json.dumps(raw, sort_keys=True)
