"""How a stack of clients shrinks: who still trains at each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from equipoise.local import Local

if TYPE_CHECKING:
    from equipoise.federation import Federation

DRAWS = 256  # rounds whose cohorts are looked at


class Profile(NamedTuple):
    most: int  # samples of the largest client
    active: tuple[int, ...]  # how many clients still train, by step
    least: int  # steps that every client takes for sure

    @staticmethod
    def of(steps: Tensor, n: Tensor) -> Profile:
        ahead = steps > torch.arange(int(steps.max()))[:, None]
        return Profile(int(n.max()), tuple(ahead.sum(1).tolist()), int(steps.min()))

    def around(self, other: Profile) -> Profile:
        """This profile for clients of the other one, where it has room for them; else the other itself."""
        longer = len(self.active) >= len(other.active) and self.most >= other.most
        if not longer or self.active[:1] != other.active[:1]:
            return other
        room = all(mine >= needed for mine, needed in zip(self.active, other.active, strict=False))
        return self if room and self.least <= other.least else other


def envelope(fed: Federation, offsets: Tensor, local: Local) -> Profile:
    """A profile with room for the cohorts of many rounds, so that all of them run the same program.

    Draws are keyed, so that they can be looked at before they are made. A cohort that does not fit in, or one that is
    drawn otherwise, has a profile of its own: what a round does never depends on the rounds before it.
    """
    cohorts = [fed.eligible] if fed.draw(0) is fed.eligible else [fed.draw(round) for round in range(DRAWS)]
    ids = torch.stack(cohorts)
    n = offsets[ids + 1] - offsets[ids]
    _, steps = local.batches(n)
    longest = int(steps.max())
    active = torch.zeros(longest, dtype=torch.int64)
    for mine in steps:
        counts = torch.bincount(mine, minlength=longest + 1)
        active = torch.maximum(active, len(mine) - counts.cumsum(0)[:longest])
    return Profile(int(n.max()), tuple(active.tolist()), int(steps.min()))
