"""Focal loss: Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017.

A sample's loss is scaled by (1 - p)^gamma, where p is the probability that the model gives to the sample's class:
samples that are already classified well count little. This is the form without class weights alpha; `class_weights`
adds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.core.chain import Chain
from equipoise.core.client import Env, log_likelihood
from equipoise.core.method import Method
from equipoise.methods.shared.checks import at_least, needs_cross_entropy

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView


@dataclass(frozen=True)
class Focal(Method):
    gamma: float = 2.0

    name = "focal"
    about = "count hard samples more (Lin et al., 2017)"

    def __post_init__(self) -> None:
        at_least(self, "gamma", 0)

    def check(self, fed: ServerView, chain: Chain) -> None:
        needs_cross_entropy(self, chain)

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        log_p = log_likelihood(logits, y)
        # At p = 1 the loss is 0. There a power below 1 has an infinite derivative, and 0 times infinity is NaN.
        rest = (-torch.expm1(log_p)).clamp(min=torch.finfo(log_p.dtype).tiny)
        return rest**self.gamma * losses
