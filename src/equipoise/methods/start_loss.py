"""The loss of the model that a client was sent, on its own data: what fair methods weigh it by."""

from __future__ import annotations

from torch import Tensor

from equipoise.local import Data, Env
from equipoise.questions import MeanLoss


def start_loss(env: Env, data: Data | None) -> Tensor:
    """The mean cross entropy in evaluation mode, whatever loss the chain trains with; `begin` calls it."""
    assert data is not None
    total: Tensor = data.totals(env, env.start, MeanLoss().measure)["loss"]
    return total / env.n
