"""FedNTD: Lee et al., "Preservation of the Global Knowledge by Not-True Distillation", NeurIPS 2022.

A client forgets the classes that it lacks. The model G that it was sent teaches it about the classes other than a
sample's own, and the cross entropy about the own class:

    l + beta tau^2 KL(G / tau || z / tau),   both softmaxes over the C - 1 logits other than y's
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core.chain import Chain
from equipoise.core.client import Env
from equipoise.core.method import Method
from equipoise.core.server_view import ServerView
from equipoise.methods.shared.checks import above, at_least, needs_cross_entropy


@dataclass(frozen=True)
class FedNTD(Method):
    beta: float = 1.0  # weight of the distillation
    tau: float = 1.0  # temperature

    name = "fedntd"
    about = "distil the classes other than a sample's own from the model received (Lee et al., 2022)"

    def __post_init__(self) -> None:
        at_least(self, "beta", 0)
        above(self, "tau", 0)

    def check(self, fed: ServerView, chain: Chain) -> None:
        needs_cross_entropy(self, chain)

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        true = y[:, None] == torch.arange(logits.shape[-1], device=y.device)

        def log_shares(z: Tensor) -> Tensor:
            return torch.where(true, -torch.inf, z / self.tau).log_softmax(-1)

        teacher, student = log_shares(env.forward(env.start)[0].detach()), log_shares(logits)
        kl = torch.where(true, 0, teacher.exp() * (teacher - student)).sum(-1)
        return losses + self.beta * self.tau**2 * kl
