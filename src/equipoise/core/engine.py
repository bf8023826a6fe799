"""An engine carries out a round: it is all that differs between a simulation and the real world.

It has four verbs: `open` (make memories, forget what was resampled), `train` (a plan of visits, answered by sums),
`ask` (a question, answered by a sum) and `trial` (a question about the model as each client uses it itself).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from equipoise.core.federation import Federation, Split
from equipoise.core.local import Local
from equipoise.core.questions import Question
from equipoise.core.sums import Sums
from equipoise.core.tree import Tree

if TYPE_CHECKING:
    from equipoise.core.chain import Chain
    from equipoise.core.method import Method
    from equipoise.core.turn import State, Turn


class Seat(Protocol):
    """The place of a run among several that train at once, as one stack."""

    runs: int  # how many they are


class Memories(Protocol):
    """What methods keep at the clients, as a checkpoint needs it."""

    def save(self) -> Tree: ...

    def load(self, saved: Tree) -> None: ...

    def seen(self, names: Iterable[str]) -> Tree:
        """What the named methods keep at every client visited so far, one row per client."""
        ...


class Engine(Protocol):
    fed: Federation
    device: torch.device
    dtype: torch.dtype
    precision: str

    @property
    def holds_out(self) -> bool:
        """Do the clients hold samples apart, on which `score` can be answered?"""
        ...

    @property
    def tried_on(self) -> str:
        """Which samples of the clients `trial` is about: "held out" or "training"."""
        ...

    @property
    def memory(self) -> Memories: ...

    def place(self, values: Tree) -> Tree:
        """The tree on this engine's device, in its precision."""
        ...

    def open(self, chain: Chain, params: Tree) -> None:
        """Begin: the clients have their own samples, and the memories of clients that were never visited."""
        ...

    def resample(self, method: Method, slot: Tree) -> None:
        """Let every client choose, once, which samples it trains on."""
        ...

    def train(self, state: State, plan: Tensor, chain: Chain, local: Local, turn: Turn) -> Sums:
        """The clients of the plan train; the server learns sums."""
        ...

    def ask(
        self,
        question: Question,
        params: Tree,
        buffers: Tree,
        *,
        owner: str = "",
        clients: Tensor | None = None,
        msg: Tree | None = None,
        rows: bool = False,
    ) -> Tree:
        """The sum of the clients' answers; with `rows`, one row per client in the order given."""
        ...

    def trial(
        self,
        question: Question,
        params: Tree,
        buffers: Tree,
        chain: Chain,
        *,
        clients: Tensor | None = None,
        rows: bool = False,
    ) -> Tree:
        """The sum of the clients' answers about the model as each client uses it itself (the tap `personal`), on the
        samples that it holds out or, where no client holds out any, on its training samples. Of the clients given,
        those that hold out nothing while others do are skipped; memories stay as they are."""
        ...

    def score(self, question: Question, params: Tree, buffers: Tree, split: Split | None) -> Tree:
        """The totals of a question over samples that are held apart from training."""
        ...

    def inputs(self, x: Tensor) -> Tensor:
        """Raw samples as the model takes them."""
        ...

    def outputs(self, params: Tree, buffers: Tree, x: Tensor) -> Tensor:
        """The model's outputs for raw samples that the server holds, in evaluation mode."""
        ...

    def inside(self, make: Callable[[], Federation]) -> Engine:
        """An engine within the server, over samples of the server's own; made once and kept."""
        ...

    def settle(self) -> None:
        """Refuse to go on from a training that turned into not-a-number."""
        ...

    def moved(self) -> tuple[int, int]:
        """Bytes that went down to the clients and up from them since the last call."""
        ...

    def metrics(self) -> dict[str, float]:
        """Numbers of the engine worth a line in the log of the run."""
        ...

    def deliver(self, params: Tree, buffers: Tree) -> None:
        """Give the clients the final model."""
        ...
