"""A client's loss at the model that it was sent, by which fair methods weight the client."""

from __future__ import annotations

from torch import Tensor

from equipoise.core.client import Data, Env
from equipoise.core.questions import MeanLoss


def start_loss(env: Env, data: Data | None) -> Tensor:
    """The mean cross entropy in evaluation mode, even if the chain trains with another loss. For use in `begin`."""
    assert data is not None
    total: Tensor = data.totals(env, env.start, MeanLoss().measure)["loss"]
    return total / env.n
