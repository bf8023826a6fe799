"""Groups of clients whose pooled labels are near the uniform mix, and the plan of visits they make."""

from __future__ import annotations

import torch
from torch import Tensor


def kld(counts: Tensor) -> Tensor:
    """How far class counts (the last axis) are from uniform: the Kullback-Leibler divergence in nats.

    A class without samples adds nothing, and no samples at all are no imbalance.

    >>> kld(torch.tensor([[5, 5], [10, 0], [0, 0]]))
    tensor([0.0000, 0.6931, 0.0000], dtype=torch.float64)
    """
    counts = counts.double()
    shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return torch.xlogy(shares, shares * counts.shape[-1]).sum(-1)


def assign(counts: Tensor, gamma: int) -> Tensor:
    """The place of each client (a row of class counts) in the greedy order; `place // gamma` is its mediator.

    A mediator takes, `gamma` times, the client that brings its pooled counts nearest to uniform.

    >>> assign(torch.tensor([[4, 0], [3, 0], [0, 3], [0, 5]]), gamma=2)
    tensor([0, 2, 3, 1])
    """
    counts, place = counts.double(), torch.full((len(counts),), -1)
    pooled = torch.zeros_like(counts[:0].sum(0))
    for turn in range(len(counts)):
        if turn % gamma == 0:
            pooled = torch.zeros_like(pooled)
        # Rounded, since equal divergences differ in their last bits between machines; of equals the first is taken.
        score = (kld(pooled + counts) * 2**32).round()
        taken = torch.where(place < 0, score, torch.inf).argmin()
        place[taken], pooled = turn, pooled + counts[taken]
    return place


def pooled(counts: Tensor, plan: Tensor) -> Tensor:
    """The class counts of each mediator of a plan; `counts` has a row for every client."""
    return torch.where((plan >= 0)[..., None], counts[plan.clamp(min=0)], 0).sum(0)


def lanes(ids: Tensor, place: Tensor, gamma: int, epochs: int) -> Tensor:
    """The plan [waves, mediators]: each column a mediator's clients by their places, then all again, `epochs` times.

    Columns are ordered by their first client, so that mediators of one client are the cohort itself.

    >>> lanes(torch.tensor([5, 6, 7]), torch.tensor([2, 0, 1]), gamma=2, epochs=1)
    tensor([[ 5,  6],
            [-1,  7]])
    """
    if len(ids) == 0:
        return ids[None, :]
    order = place.argsort()
    mediator = place[order] // gamma
    _, column, sizes = torch.unique_consecutive(mediator, return_inverse=True, return_counts=True)
    row = torch.arange(len(ids)) - (sizes.cumsum(0) - sizes)[column]
    plan = torch.full((int(sizes.max()), len(sizes)), -1)
    plan[row, column] = ids[order]
    return plan[:, plan[0].argsort()].repeat(epochs, 1)
