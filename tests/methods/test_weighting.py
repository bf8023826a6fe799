"""Weighted cross entropy, divided by the sum of weights or by the number of samples."""

from __future__ import annotations

import torch
from torch import nn

from equipoise.core.questions import cross_entropy
from equipoise.methods.shared.weighting import weighted

WEIGHTS = torch.tensor([0.5, 2.0, 7.0])


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(5, 3, generator=draw), torch.tensor([0, 2, 1, 2, 0])


def test_normalised_is_the_weighted_mean_of_torch() -> None:
    logits, y = batch()
    mask = torch.tensor([True, True, True, True, False])  # the last is padding
    losses = weighted(cross_entropy(logits, y), y, WEIGHTS, mask, normalised=True)
    torch.testing.assert_close(losses[:4].mean(), nn.functional.cross_entropy(logits[:4], y[:4], weight=WEIGHTS))


def test_unnormalised_divides_by_the_number_of_samples() -> None:
    logits, y = batch()
    losses = weighted(cross_entropy(logits, y), y, WEIGHTS, torch.ones(5, dtype=torch.bool), normalised=False)
    torch.testing.assert_close(
        losses.mean(), nn.functional.cross_entropy(logits, y, weight=WEIGHTS, reduction="sum") / 5
    )
