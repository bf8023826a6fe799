"""Mediators: groups of clients whose pooled labels are nearly uniform, and the plan of visits for their training."""

from __future__ import annotations

import torch
from torch import Tensor


def kld(counts: Tensor) -> Tensor:
    """The Kullback-Leibler divergence, in nats, of class counts (along the last axis) from the uniform distribution.

    A class without samples adds 0, and the divergence of no samples at all is 0.

    >>> kld(torch.tensor([[5, 5], [10, 0], [0, 0]]))
    tensor([0.0000, 0.6931, 0.0000], dtype=torch.float64)
    """
    counts = counts.double()
    shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return torch.xlogy(shares, shares * counts.shape[-1]).sum(-1)


def assign(counts: Tensor, gamma: int) -> Tensor:
    """The place of each client in the greedy order; `place // gamma` is the client's mediator.

    `counts` has a row of class counts per client. A mediator adds, `gamma` times, the client that brings its pooled
    counts nearest to uniform.

    >>> assign(torch.tensor([[4, 0], [3, 0], [0, 3], [0, 5]]), gamma=2)
    tensor([0, 2, 3, 1])
    """
    counts, place = counts.double(), torch.full((len(counts),), -1)
    pooled = torch.zeros_like(counts[:0].sum(0))
    for turn in range(len(counts)):
        if turn % gamma == 0:
            pooled = torch.zeros_like(pooled)
        # Rounded, since equal divergences may differ in their last bits between machines. The first minimum is taken.
        score = (kld(pooled + counts) * 2**32).round()
        taken = torch.where(place < 0, score, torch.inf).argmin()
        place[taken], pooled = turn, pooled + counts[taken]
    return place


def pooled(counts: Tensor, plan: Tensor) -> Tensor:
    """The class counts of each mediator in a plan; `counts` has a row for every client."""
    return torch.where((plan >= 0)[..., None], counts[plan.clamp(min=0)], 0).sum(0)


def lanes(ids: Tensor, place: Tensor, gamma: int, epochs: int) -> Tensor:
    """The plan [waves, mediators]: each column has the clients of a mediator in order of place, `epochs` times over.

    Columns are sorted by their first client, so that with gamma = 1 the plan is the cohort itself. -1 is padding.

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
