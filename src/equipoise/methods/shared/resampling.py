"""Resampling: the factor by which each class grows or shrinks, and the samples that a client then trains on."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from equipoise.core import random

ONE = 1 << 32  # ratios are integers in units of 2**-32, so that no draw depends on the last bit of a float


def zscore_ratios(counts: Tensor, tau_d: float | None, sign: Literal["plus", "minus"] = "plus") -> Tensor:
    """Astraea's R_y in units of 1 / ONE. For classes that stay as they are, and for those without samples, it is ONE.

    Classes with a z-score above tau_d shrink to mu + sigma sqrt(|z| tau_d) samples. Classes with a z-score below
    -1 / tau_d grow: with sign="plus" to the same number, with "minus" to mu - sigma sqrt(|z| / tau_d), which is below
    the mean. If tau_d is None, all classes stay as they are.

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
    """Resample a client's data: return the positions of the samples, and for each a key if it is a copy, else 0.

    A sample occurs floor(R_y) times, and once more with the probability R_y - floor(R_y). A client that would lose
    all its samples keeps the first one: without any it could neither train nor answer questions.
    """
    ratio = ratios.to(y.device)[y]
    times = ratio // ONE + ((random.draws(key, len(y)) >> 32) & (ONE - 1) < ratio % ONE)
    if len(y) and not times.any():
        times[0] = 1
    positions = torch.arange(len(y)).repeat_interleave(times)
    copy = torch.arange(len(positions)) - (times.cumsum(0) - times)[positions]
    keys = random.fold(random.fold(key, positions), copy) & ((1 << 63) - 1) | 1
    return positions, torch.where(copy > 0, keys, 0)
