"""Focal loss: Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017.

A sample's loss is scaled by (1 - p)^gamma, p being the probability given to its class: what is well classified
already counts little. This is the form without class weights alpha; `class_weights` adds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.local import Env, log_likelihood
from equipoise.method import Chain, Method
from equipoise.methods.settings import at_least, needs_cross_entropy

if TYPE_CHECKING:
    from equipoise.federation import Federation


@dataclass(frozen=True)
class Focal(Method):
    gamma: float = 2.0

    name = "focal"
    about = "count hard samples more (Lin et al., 2017)"

    def __post_init__(self) -> None:
        at_least(self, "gamma", 0)

    def check(self, fed: Federation, chain: Chain) -> None:
        needs_cross_entropy(self, chain)

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        log_p = log_likelihood(logits, y)
        # At p = 1 the loss is 0, but a power below 1 has an endless slope there, and 0 times that is not a number.
        rest = (-torch.expm1(log_p)).clamp(min=torch.finfo(log_p.dtype).tiny)
        return rest**self.gamma * losses
