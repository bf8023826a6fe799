"""Weighted loss: each sample's loss times the weight of its class."""

from __future__ import annotations

import torch
from torch import Tensor


def weighted(losses: Tensor, y: Tensor, weights: Tensor, mask: Tensor, normalised: bool) -> Tensor:
    """Return the losses times w_y, scaled so that their mean over the batch is the weighted loss.

    The sum is divided by the number of samples or, if `normalised`, by the sum of their weights, as in PyTorch's
    `CrossEntropyLoss(weight=...)`. In the latter case the weights cancel in a batch of a single class, so that they
    have no effect on a client with a single class.
    """
    w = weights[y]
    if normalised:
        w = w * (mask.sum() / torch.where(mask, w, 0).sum())
    return losses * w
