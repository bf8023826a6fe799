"""Which runs are carried out at once: small ones that differ only in their seed and in how the data are divided.

On a GPU a step takes as long for a few clients as for a few hundred, so that a table of small runs fills it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from equipoise import runs, tree
from equipoise.config import Config
from equipoise.engines.parts import up

RUNS, CLIENTS, NUMBERS = 16, 400, 100_000_000  # the most at once: runs, clients of a round, and parameters of theirs
# What leaves the program as it is, beside the seed: who holds which samples.
DIVISION = ("imbalance", "partition", "minority", "validation", "auxiliary")


def at_once(config: Config) -> int:
    """How many runs such as this fill a device; a core is full with one."""
    if config.train.engine != "stacked" or not runs.device_of(config).startswith("cuda"):
        return 1
    fed = runs.federate(config)
    clients = max(1, len(fed.draw(0)))
    return max(1, min(RUNS, CLIENTS // clients, NUMBERS // (clients * tree.count(fed.network.params))))


def groups(configs: Sequence[Config | None], most: Callable[[Config], int] = at_once) -> Iterator[list[int]]:
    """The numbers of configs whose runs go at once, the first of all in the first group; None goes alone."""
    left = {number: None if config is None else _kind(config) for number, config in enumerate(configs)}
    paces: dict[int, tuple[int, int] | None] = {}
    while left:
        first = next(iter(left))
        config, alike = configs[first], [number for number, kind in left.items() if kind == left[first]]
        alone = config is None or len(alike) == 1 or (limit := most(config)) == 1
        if alone:
            group = [first]
        else:
            paces |= {number: _pace(configs[number]) for number in alike if number not in paces}
            group = _share([number for number in alike if paces[number] == paces[first]], limit)
        for number in group:
            del left[number]
        yield group


def _share(alike: list[int], limit: int) -> list[int]:
    """The first of groups that are as large as the others, so that they have one program."""
    return alike[: -(-len(alike) // -(-len(alike) // limit))]


def _pace(config: Config | None) -> tuple[int, int] | None:
    """The steps and the batch of all clients, who would have to wait for those of another run; None where they differ
    and wait for one another anyway."""
    assert config is not None
    fed = runs.federate(config)
    n = fed.offsets.diff()
    size, steps = fed.local.batches(n)
    return (int(steps[0]), up(int(size.max()), 8)) if bool((steps == steps[0]).all()) else None


def _kind(config: Config) -> str:
    raw = config.to_dict()
    del raw["train"]["seed"]
    for name in DIVISION:
        del raw["data"][name]
    return json.dumps(raw, sort_keys=True)
