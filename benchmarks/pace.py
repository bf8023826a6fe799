"""Contestants that take turns, so that a busy machine slows them all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Timed = Callable[[int], float]  # carries out so many rounds, and gives the seconds that they took


@dataclass(frozen=True)
class Turns:
    """How long contestants are measured."""

    count: int = 5
    seconds: float = 0.5  # of a turn, at least
    most: float = 10.0  # of a contestant: it sits out further turns, but for the first two
    multiple: int = 1  # rounds of a turn come in such groups


def compete(contestants: Mapping[str, Timed], turns: Turns) -> dict[str, dict[str, Any]]:
    """Seconds of a round of each, as the median over turns; all are warm."""
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
    """Rounds that fill a turn."""
    rounds = turns.multiple
    while (took := contestant(rounds)) < turns.seconds / 2:
        rounds *= 2
    groups = math.ceil(rounds * turns.seconds / took / turns.multiple)
    return max(1, groups) * turns.multiple
