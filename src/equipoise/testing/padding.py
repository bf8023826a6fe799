"""The stacked engine with other padding: what a method computes must not change with it."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.core.client import Data, Task
from equipoise.core.tree import Tree
from equipoise.engines.stacked import Stacked
from equipoise.engines.store import Store
from equipoise.engines.visits import Shapes


class _LastSample(Store):
    """Pads all local data with a client's last sample instead of its first."""

    __slots__ = ()

    def all_data(self, first: Tensor, n: Tensor, most: int) -> Data:
        place = torch.arange(most, device=n.device)
        mask = place < n[:, None]
        x, y, _ = self.look_up(first[:, None] + torch.where(mask, place, n[:, None] - 1))
        return Data(x, y, mask, self.inputs)


class OtherData(Stacked):
    """Other padding in the data that `begin`, `finish` and questions read."""

    @property
    def store(self) -> Store:
        return _LastSample(*super().store)


class OtherBatches(Stacked):
    """Other padding in batches."""

    def begin(self, task: Task, shapes: Shapes, inputs: Tree) -> Tree:
        begun = super().begin(task, shapes, inputs)
        place = torch.arange(shapes.width, device=self.device)
        last = (inputs["first"] + begun["visit"]["n"] - 1)[:, None, None]
        rows = torch.where(place < begun["counts"][..., None], begun["rows"], last)
        return begun | {"rows": rows}
