"""A federation: a model, clients with their samples, what the server holds, and how training goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.core.errors import ConfigError
from equipoise.core.local import Local
from equipoise.core.network import Network

if TYPE_CHECKING:
    from equipoise.core.server_view import ServerView


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

    @cached_property
    def server_view(self) -> ServerView:
        """The federation as its server knows it: all that a method's server half sees."""
        from equipoise.core.server_view import ServerView

        return ServerView.of(self)

    def auxiliary_for(self, method: str) -> Split:
        return self.server_view.auxiliary_for(method)

    def draw(self, round: int) -> Tensor:
        return self.server_view.draw(round)

    def client_name(self, client: int) -> str:
        return self.server_view.client_name(client)

    def scale(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.server_view.scale(device, dtype)

    def inputs(self, device: torch.device, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return self.server_view.inputs(device, dtype)
