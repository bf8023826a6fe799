"""The samples of all clients, on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.local import Data


class Store(NamedTuple):
    """The samples of all clients, as programs read them."""

    x: Tensor
    y: Tensor
    indices: Tensor
    copies: Tensor | None
    shift: Tensor
    factor: Tensor

    def look_up(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Raw samples, labels and copy numbers of rows of the partition."""
        where = self.indices[rows].long()
        copies = torch.zeros_like(where) if self.copies is None else self.copies[rows]
        return self.x[where], self.y[where], copies

    def features(self, x: Tensor) -> Tensor:
        return (x.to(self.shift.dtype) + self.shift) * self.factor

    def all_data(self, first: Tensor, n: Tensor, most: int) -> Data:
        """All samples of some clients, padded to `most` with each client's first; `first` is where its rows begin."""
        place = torch.arange(most, device=n.device)
        mask = place < n[:, None]
        x, y, _ = self.look_up(first[:, None] + torch.where(mask, place, 0))
        return Data(x, y, mask, self.features)
