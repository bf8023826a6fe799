"""A federation: a model, clients with their samples, what the server holds, and how training goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from equipoise.core import random
from equipoise.core.errors import ConfigError
from equipoise.core.local import Local
from equipoise.core.network import Network


@dataclass(frozen=True, eq=False)
class Split:
    """Samples held apart from the clients: a test set, a validation set, the server's auxiliary set."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Federation:
    network: Network = field(repr=False)
    x: Tensor = field(repr=False)  # all clients' samples, raw; uint8 where they are images
    y: Tensor = field(repr=False)
    offsets: Tensor = field(repr=False)  # client i holds indices[offsets[i] : offsets[i + 1]]
    indices: Tensor = field(repr=False)
    classes: tuple[str, ...]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    local: Local = field(default_factory=Local)
    cohort: int = 0  # clients per round; 0: all of them
    seed: int = 0
    minority: tuple[int, ...] = ()
    test: Split | None = field(default=None, repr=False)
    validation: Split | None = field(default=None, repr=False)
    auxiliary: Split | None = field(default=None, repr=False)
    roster: tuple[str, ...] | None = field(default=None, repr=False)
    counts: Tensor | None = field(default=None, repr=False)  # class counts, where real sites hold the samples
    columns: tuple[str, ...] = field(
        default=(), repr=False
    )  # the names of the columns, where the samples are a table
    # Client i holds out held_indices[held_offsets[i] : held_offsets[i + 1]]; None: no client holds out samples.
    held_offsets: Tensor | None = field(default=None, repr=False)
    held_indices: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.network.find_head(self.x.shape[1:])
        if self.local.augment != "none" and self.x.dim() != 4:
            raise ConfigError(
                f"local.augment = {self.local.augment!r}: it moves images, and these samples have shape"
                f" {tuple(self.x.shape[1:])}; expected none"
            )

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def eligible(self) -> Tensor:
        """The clients that have data; a partition may leave some without."""
        return (self.offsets[1:] > self.offsets[:-1]).nonzero()[:, 0]

    @cached_property
    def tried(self) -> Tensor:
        """The clients that try a model on samples of their own: those that hold out samples or, where none does, all
        that have data."""
        if self.held_offsets is None:
            return self.eligible
        return (self.held_offsets[1:] > self.held_offsets[:-1]).nonzero()[:, 0]

    @cached_property
    def class_counts(self) -> Tensor:
        """The class counts of all clients together; for reports and tests, never for a method."""
        if self.counts is not None:
            return self.counts
        return torch.bincount(self.y[self.indices.long()], minlength=len(self.classes))

    def auxiliary_for(self, method: str) -> Split:
        """The server's own samples, for a method that has no meaning without some of every class."""
        held = 0 if self.auxiliary is None else len(self.auxiliary.y.bincount().nonzero())
        if self.auxiliary is None or held < len(self.classes):
            raise ConfigError(
                f"data.auxiliary: {method} needs samples of every class at the server, which has those of {held} of"
                f" {len(self.classes)} classes; expected a number of samples per class, such as data.auxiliary = 32"
            )
        return self.auxiliary

    def draw(self, round: int) -> Tensor:
        """A uniform cohort without replacement."""
        size = min(self.cohort or len(self.eligible), len(self.eligible))
        if size == len(self.eligible):
            return self.eligible
        return self.eligible[random.choose(self.seed, (random.SELECT, round), len(self.eligible), size)]

    def client_name(self, client: int) -> str:
        return f"{client}" if self.roster is None else f"{self.roster[client]} ({client})"

    def scale(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What turns raw samples into the model's inputs, (x + shift) * factor, by channel or by feature."""
        scale = 255.0 if self.x.dtype == torch.uint8 else 1.0
        shape = [-1] + [1] * (self.x.dim() - 2)
        factor = (1 / (torch.tensor(self.std, dtype=torch.float64) * scale)).view(shape).to(device, dtype)
        shift = (-torch.tensor(self.mean, dtype=torch.float64) * scale).view(shape).to(device, dtype)
        return shift, factor

    def inputs(self, device: torch.device, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """The function that turns raw samples into the model's inputs."""
        shift, factor = self.scale(device, dtype)
        return lambda x: (x.to(dtype) + shift) * factor
