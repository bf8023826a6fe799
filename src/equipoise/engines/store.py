"""The samples of all clients, on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from equipoise.core.client import Data


class Store(NamedTuple):
    """The samples of all clients, as programs read them. A row is a place in the clients' lists of samples."""

    x: Tensor
    y: Tensor
    indices: Tensor  # the sample at each row
    copies: Tensor | None  # 0, or the number of an augmented copy, at each row
    shift: Tensor
    factor: Tensor

    def look_up(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Raw samples, labels and copy numbers at the given rows."""
        where = self.indices[rows].long()
        copies = torch.zeros_like(where) if self.copies is None else self.copies[rows]
        return self.x[where], self.y[where], copies

    def inputs(self, x: Tensor) -> Tensor:
        """Raw samples as the model takes them."""
        return (x.to(self.shift.dtype) + self.shift) * self.factor

    def all_data(self, first: Tensor, n: Tensor, most: int) -> Data:
        """All samples of some clients, padded to `most` with a client's first; `first` is the first row of each."""
        place = torch.arange(most, device=n.device)
        mask = place < n[:, None]
        x, y, _ = self.look_up(first[:, None] + torch.where(mask, place, 0))
        return Data(x, y, mask, self.inputs)
