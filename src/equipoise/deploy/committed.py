"""What the server knows of the memories that sites keep: their versions."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.core.tree import Tree
from equipoise.deploy.versions import NEVER, Version
from equipoise.engines.memory import Memories


class Committed(Memories):
    """Which version of its memories each site has. The memories themselves stay at the sites.

    `saved` holds the versions at the last two checkpoints: the server may go back to them, however old they are.
    """

    def __init__(self, initial: Tree, clients: int) -> None:
        super().__init__(initial, clients, 0)
        self.versions = torch.tensor([NEVER] * clients, dtype=torch.int64).view(-1, 2)
        self.saved: list[Tensor] = []

    def version(self, client: int) -> Version:
        return Version(*self.versions[client].tolist())

    def set(self, client: int, version: Version) -> None:
        self.versions[client] = torch.tensor(version)

    def needed(self, client: int) -> list[Version]:
        return [Version(*versions[client].tolist()) for versions in self.saved]

    def save(self) -> Tree:
        self.saved = [*self.saved[-1:], self.versions.clone()]
        return {"versions": self.versions.clone()}

    def load(self, saved: Tree) -> None:
        self.versions = saved["versions"].clone()
        self.saved = [self.versions.clone()]
