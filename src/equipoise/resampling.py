"""By how much each class should grow or shrink, and which samples a client then trains on."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from equipoise import random

ONE = 1 << 32  # ratios are whole numbers of 2**-32, so that no draw hangs on the last bit of a float


def zscore_ratios(counts: Tensor, tau_d: float | None, sign: Literal["plus", "minus"] = "plus") -> Tensor:
    """Astraea's R_y as multiples of 1 / ONE; ONE for the classes that are left alone, and for those without samples.

    Classes with a z-score above tau_d shrink, those below -1 / tau_d grow: with `plus` to mu + sigma sqrt(|z| tau_d)
    samples, with `minus` to mu - sigma sqrt(|z| / tau_d), below the mean. Without tau_d all are left alone.

    >>> zscore_ratios(torch.tensor([100, 100, 100, 20]), tau_d=3.0) / ONE
    tensor([1.0000, 1.0000, 1.0000, 7.9482])
    >>> zscore_ratios(torch.tensor([100, 100, 100, 20]), tau_d=3.0, sign="minus") / ONE
    tensor([1.0000, 1.0000, 1.0000, 2.6839])
    """
    if tau_d is None:
        return torch.full_like(counts, ONE)
    c = counts.double()
    mu, sigma = c.mean(), c.std(correction=0)
    z = torch.where(sigma > 0, (c - mu) / sigma, 0)
    far, near = mu + sigma * (z.abs() * tau_d).sqrt(), mu - sigma * (z.abs() / tau_d).sqrt()
    size = torch.where(z < -1 / tau_d, far if sign == "plus" else near, torch.where(z > tau_d, far, c))
    return (torch.where(c > 0, size / c, 1) * ONE).round().long()


def multiply(y: Tensor, ratios: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """A client's samples after their classes grew or shrank: positions, and 0 or the key that names a copy.

    A sample is there floor(R_y) times, and once more with the probability that is left. A client that would lose all
    its samples keeps the first: without any it could neither train nor answer.
    """
    ratio = ratios.to(y.device)[y]
    times = ratio // ONE + ((random.draws(key, len(y)) >> 32) & (ONE - 1) < ratio % ONE)
    if len(y) and not times.any():
        times[0] = 1
    positions = torch.arange(len(y)).repeat_interleave(times)
    copy = torch.arange(len(positions)) - (times.cumsum(0) - times)[positions]
    names = random.fold(random.fold(key, positions), copy) & ((1 << 63) - 1) | 1
    return positions, torch.where(copy > 0, names, 0)
