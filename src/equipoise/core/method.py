"""A method is a frozen dataclass whose fields are its settings and whose methods are taps.

A federated round is a flow of values; a tap is a point of it where a method may change a value. Every tap defaults
to "leave it as it is", so that an empty chain of methods is FedAvg. A method sees only its own `slot` (what the
server remembers for it), `msg` (what it sends to a client) and `memory` (what it keeps at a client). Values pass the
methods in the order written, at every tap.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from equipoise.core import expression
from equipoise.core.client import Data, Env, log_likelihood
from equipoise.core.errors import ConfigError
from equipoise.core.local import Local
from equipoise.core.tree import Tree

if TYPE_CHECKING:
    from equipoise.core.chain import Chain
    from equipoise.core.server_view import ServerView
    from equipoise.core.sums import Sums
    from equipoise.core.turn import Turn

F = TypeVar("F", bound=Callable[..., Any])


def helper(function: F) -> F:
    """Mark a public function of a method whose name is close to a tap's and which is none, such as `weights`."""
    function.__is_helper__ = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Method:
    name: ClassVar[str] = ""
    about: ClassVar[str] = ""  # one line: the paper and the idea
    reveals: ClassVar[frozenset[str]] = frozenset()  # what the server learns of a single client, beyond sums
    single_visits: ClassVar[bool] = False  # is it only defined from the global model? Then it refuses lanes
    needs_data: ClassVar[bool] = False  # do `begin` or `finish` read all local data? That costs a pass over it
    needs_features: ClassVar[bool] = False  # does it read `env.features`? Then it refuses models without a head
    words: ClassVar[dict[str, str]] = {}  # what the leaves of slot, msg, memory and upload mean, for the ledger
    _abstract: ClassVar[bool] = True

    def __init_subclass__(cls, abstract: bool = False, **options: Any) -> None:
        """Refuse, where the class is defined, what would go wrong in silence. An `abstract` class has no name."""
        super().__init_subclass__(**options)
        cls._abstract = abstract or cls.__dict__.get(
            "_abstract", False
        )  # a dataclass with slots is made a second time
        if not cls._abstract and not cls.__dict__.get("name"):
            raise ConfigError(
                f"the method {reference(cls)} has no name of its own: expected a line such as"
                f" name = {cls.__name__.lower()!r} in the class"
            )
        for name, value in vars(cls).items():
            if inspect.isfunction(value) and not name.startswith("_") and not hasattr(value, "__is_helper__"):
                _check_tap(cls, name, value)

    # -- once, at the server -----------------------------------------------------------------------------------------
    def check(self, fed: ServerView, chain: Chain) -> None:
        """Refuse, with the reason, a federation or a chain in which this method has no meaning."""

    def local(self, settings: Local) -> Local:
        """The settings of local training."""
        return settings

    def init(self, turn: Turn) -> Tree:
        """The slot before the first round; may ask the clients, have them train, or have them resample their data."""
        return {}

    # -- once, at each client ----------------------------------------------------------------------------------------
    def remember(self, params: Tree, classes: int) -> Tree:
        """The memory of a client that was never visited: the same for all of them."""
        return {}

    def resample(self, y: Tensor, msg: Tree, key: Tensor) -> tuple[Tensor, Tensor]:
        """Which of a client's samples it trains on: positions, and for each 0 (the sample itself) or a number above 0
        that names an augmented copy; the number reaches `batch` as `env.copies`."""
        return torch.arange(len(y)), torch.zeros_like(y)

    # -- every round, at the server ----------------------------------------------------------------------------------
    def select(self, slot: Tree, fed: ServerView, round: int) -> Tensor:
        """The clients of this round. At most one method of a chain replaces the uniform draw."""
        return fed.draw(round)

    def plan(self, lanes: Tensor, slot: Tree, fed: ServerView) -> Tensor:
        """Who trains after whom: [waves, lanes] of client numbers, -1 for nobody."""
        return lanes

    def broadcast(self, slot: Tree) -> Tree:
        """What every client of the round is sent."""
        return {}

    def address(self, slot: Tree, ids: Tensor) -> Tree:
        """What each client is sent alone: one row per client in every leaf."""
        return {}

    # -- every visit, at one client: traced, never with a client axis ------------------------------------------------
    def weight(self, weight: Tensor, env: Env) -> Tensor:
        """The weight of the client's delta in the average."""
        return weight

    def begin(self, env: Env, data: Data | None) -> Tree:
        """A note taken before training, from all local data."""
        return {}

    def batch(self, x: Tensor, y: Tensor, env: Env) -> tuple[Tensor, Tensor]:
        """The samples of a step, and their labels."""
        return x, y

    def features(self, features: Tensor, env: Env) -> Tensor:
        """What the head of the model, its last linear layer, reads for a batch."""
        return features

    def logits(self, logits: Tensor, env: Env) -> Tensor:
        """The model's outputs for a batch."""
        return logits

    def loss(self, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        """One loss per sample. At most one method of a chain replaces the cross entropy."""
        return -log_likelihood(logits, y)

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        """The losses of a batch, one per sample; only those where `env.mask` is true count."""
        return losses

    def grads(self, grads: Tree, env: Env) -> Tree:
        """The gradient of a batch; clipping comes after all methods."""
        return grads

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        """After training, from the raw delta: what to upload (it will be summed), and the new memory."""
        return {}, env.memory

    def delta(self, delta: Tree, env: Env) -> Tree:
        """The change of the model that the client sends."""
        return delta

    # -- at the end of a run, at one client: traced, never with a client axis ----------------------------------------
    def personal(self, logits: Tensor, env: Env) -> Tensor:
        """The logits that a client itself uses for its own samples, such as those of a personal head."""
        return logits

    # -- every round, at the server again ----------------------------------------------------------------------------
    def rows(self, delta: Tree, upload: Tree, turn: Turn) -> Tree:
        """What the server computes from one client's tapped delta and upload as they arrive; kept in `sums.rows`.
        `turn.params` is the global model that the round began with, `turn.buffers` are the client's own."""
        return {}

    def update(self, update: Tree, sums: Sums, slot: Tree) -> tuple[Tree, Tree]:
        """What is added to the global model, and the new slot."""
        return update, slot

    def close(self, slot: Tree, turn: Turn) -> Tree:
        """The slot after the round; may ask the clients about the new model, `turn.params`."""
        return slot

    def metrics(self, slot: Tree) -> dict[str, float]:
        """Numbers of this method worth a line in the log of the run."""
        return {}

    def observe(self, slot: Tree, memory: Tree) -> dict[str, float]:
        """More such numbers, which only a simulation can know: from the memories of all clients visited so far, one
        row for each."""
        return {}

    # -- a method is its configuration -------------------------------------------------------------------------------
    def __add__(self, other: Method) -> Chain:
        from equipoise.core.chain import Chain

        return Chain(self, other)

    def __str__(self) -> str:
        """The expression that a configuration file would hold; only settings that differ from their defaults."""
        return expression.term(written_name(type(self)), self)


TAPS = {name: value for name, value in vars(Method).items() if inspect.isfunction(value) and not name.startswith("_")}

# Names by which an expression may call a class. The package of methods fills in its own; all others are written
# `package.module:Class`, so that a stranger's class never takes the place of one that is known by the same name.
SHORT_NAMES: dict[type[Method], str] = {}


def reference(kind: type) -> str:
    """`package.module:Class`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def written_name(kind: type[Method]) -> str:
    """What an expression calls the class."""
    return SHORT_NAMES.get(kind) or reference(kind)


def _check_tap(cls: type[Method], name: str, function: Callable[..., Any]) -> None:
    """Refuse a function that looks like a tap and is none, and a tap with other parameters than a tap has."""
    if name not in TAPS:
        if close := difflib.get_close_matches(name, TAPS, n=1, cutoff=0.8):
            raise ConfigError(
                f"the method {reference(cls)} has a function {name}, which is no tap: did you mean {close[0]}? If"
                " it is a helper, mark it with @helper or begin its name with _"
            )
        return
    wanted, found = list(inspect.signature(TAPS[name]).parameters), inspect.signature(function).parameters
    if len(found) != len(wanted) and not any(p.kind is p.VAR_POSITIONAL for p in found.values()):
        raise ConfigError(
            f"the method {reference(cls)} has a tap {name}({', '.join(found)}), expected {name}({', '.join(wanted)})"
        )


@dataclass(frozen=True)
class FedAvg(Method):
    """The neutral element of chains: averaging and nothing else (McMahan et al., 2017)."""

    name = "fedavg"
    about = "average the clients' models (McMahan et al., 2017)"
