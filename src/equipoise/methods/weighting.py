"""Weighted cross entropy: the losses of a batch times the weights of their classes."""

from __future__ import annotations

import torch
from torch import Tensor


def weighted(losses: Tensor, y: Tensor, weights: Tensor, mask: Tensor, normalised: bool) -> Tensor:
    """The losses times w_y. The batch's mean is taken over its samples; `normalised`, over their weights.

    PyTorch's `CrossEntropyLoss(weight=...)` is the normalised one. There the weights of a batch cancel where all of
    it is of one class, so that a client with a single class does not notice them.
    """
    w = weights[y]
    if normalised:
        w = w * (mask.sum() / torch.where(mask, w, 0).sum())
    return losses * w
