"""Contestants take turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Timed = Callable[[int], float]  # carries out the given number of rounds, and returns how many seconds they took


@dataclass(frozen=True)
class Turns:
    """How long contestants are measured."""

    count: int = 5
    seconds: float = 0.5  # the least length of a turn
    most: float = 10.0  # seconds after which a contestant gets no further turn, except for its first two
    multiple: int = 1  # the rounds of a turn are a multiple of this


def compete(contestants: Mapping[str, Timed], turns: Turns) -> dict[str, dict[str, Any]]:
    """Seconds of a round of each contestant, as the median over turns. The contestants must be warm."""
    rounds = {name: _enough(contestant, turns) for name, contestant in contestants.items()}
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(turns.count):
        for name, contestant in contestants.items():
            spent = sum(taken[name]) * rounds[name]
            if len(taken[name]) < 2 or spent < turns.most:
                taken[name].append(contestant(rounds[name]) / rounds[name])
    return {
        name: {"seconds": statistics.median(times), "all_seconds": times, "rounds_per_turn": rounds[name]}
        for name, times in taken.items()
    }


def _enough(contestant: Timed, turns: Turns) -> int:
    """How many rounds fill a turn."""
    rounds = turns.multiple
    while (took := contestant(rounds)) < turns.seconds / 2:
        rounds *= 2
    groups = math.ceil(rounds * turns.seconds / took / turns.multiple)
    return max(1, groups) * turns.multiple
