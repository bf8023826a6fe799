"""What a method's server half sees of a federation and of its engine: what a real server would have.

A simulation holds every client's samples, but they are the clients'. Reading them through a view raises one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.core import random
from equipoise.core.errors import ConfigError
from equipoise.core.federation import Federation, Split
from equipoise.core.local import Local
from equipoise.core.network import Network
from equipoise.core.tree import Tree

if TYPE_CHECKING:
    from equipoise.core.engine import Engine
    from equipoise.core.method import Method


@dataclass(frozen=True, eq=False)
class ServerView:
    """A federation as its server knows it; made once, by `Federation.server_view`."""

    network: Network = field(repr=False)
    classes: tuple[str, ...]
    shape: tuple[int, ...]  # of one sample
    sample_dtype: torch.dtype  # of raw samples
    mean: tuple[float, ...]
    std: tuple[float, ...]
    local: Local
    cohort: int  # clients per round; 0: all of them
    seed: int
    auxiliary: Split | None = field(repr=False)  # samples of the server's own
    roster: tuple[str, ...] | None = field(repr=False)
    columns: tuple[str, ...] = field(repr=False)
    clients: int
    eligible: Tensor = field(repr=False)  # the clients that have data

    @staticmethod
    def of(fed: Federation) -> ServerView:
        own = {f.name: getattr(fed, f.name) for f in fields(ServerView) if f.name not in ("shape", "sample_dtype")}
        return ServerView(shape=tuple(fed.x.shape[1:]), sample_dtype=fed.x.dtype, **own)

    def __getattr__(self, name: str) -> Any:
        """Called for what the view does not have."""
        if name in ("test", "validation"):
            raise ConfigError(
                f"method: a server tap reads fed.{name}, which is held apart to judge the model; expected"
                " fed.auxiliary for samples of the server's own"
            )
        if name in Federation.__dataclass_fields__ or hasattr(Federation, name):
            raise _refusal(f"fed.{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

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
        scale = 255.0 if self.sample_dtype == torch.uint8 else 1.0
        shape = [-1] + [1] * (len(self.shape) - 1)
        factor = (1 / (torch.tensor(self.std, dtype=torch.float64) * scale)).view(shape).to(device, dtype)
        shift = (-torch.tensor(self.mean, dtype=torch.float64) * scale).view(shape).to(device, dtype)
        return shift, factor

    def inputs(self, device: torch.device, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """The function that turns raw samples into the model's inputs."""
        shift, factor = self.scale(device, dtype)
        return lambda x: (x.to(dtype) + shift) * factor

    def within(self, held: Split, owner: Tensor, roster: tuple[str, ...]) -> Federation:
        """A federation within the server, over samples of its own: sample i is that of client `owner[i]`. No real
        client shares its random draws."""
        sizes = owner.bincount(minlength=len(roster))
        return Federation(
            network=self.network, x=held.x, y=held.y, offsets=torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]),
            indices=owner.argsort(stable=True), classes=self.classes, mean=self.mean, std=self.std, local=self.local,
            cohort=self.cohort, seed=int(random.bits(self.seed, random.SERVER)), auxiliary=self.auxiliary,
            roster=roster, columns=self.columns,
        )  # fmt: skip


class ServerEngine:
    """What a server half may use of an engine. For what the clients do there are `turn.ask` and `turn.train`."""

    __slots__ = ("_engine",)

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        """Called for what the view does not have."""
        if name in ("ask", "train"):
            raise ConfigError(f"method: a server tap reads turn.engine.{name}; expected turn.{name}")
        if not name.startswith("_") and hasattr(self._engine, name):
            raise _refusal(f"turn.engine.{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def dtype(self) -> torch.dtype:
        return self._engine.dtype

    @property
    def precision(self) -> str:
        return self._engine.precision

    def place(self, values: Tree) -> Tree:
        """The tree on the engine's device, in its precision."""
        return self._engine.place(values)

    def resample(self, method: Method, slot: Tree) -> None:
        """Let every client choose, once, which samples it trains on."""
        self._engine.resample(method, slot)

    def inputs(self, x: Tensor) -> Tensor:
        """Raw samples as the model takes them."""
        return self._engine.inputs(x)

    def outputs(self, params: Tree, buffers: Tree, x: Tensor) -> Tensor:
        """The model's outputs for raw samples that the server holds, in evaluation mode."""
        return self._engine.outputs(params, buffers, x)

    def inside(self, make: Callable[[], Federation]) -> Engine:
        """A whole engine within the server, over samples of the server's own; made once and kept."""
        return self._engine.inside(make)


def whole(view: ServerEngine) -> Engine:
    """The engine behind a view: for `Turn`, which asks in the name of a method. Never for a method."""
    return view._engine


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"method: a server tap reads {what}, which no server has: the clients hold their samples; expected"
        " turn.ask(question) for a sum over them"
    )
