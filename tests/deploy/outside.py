"""Methods and a model outside Equipoise, as a user would write them: the package `mylab` in a temporary folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SMOOTH = '''
from dataclasses import dataclass

from equipoise import Method


@dataclass(frozen=True)
class Smooth(Method):
    """Label smoothing."""

    amount: float = 0.1
    name = "smooth"

    def losses(self, losses, logits, y, env):
        return (1 - self.amount) * losses - self.amount * logits.log_softmax(-1).mean(-1)
'''

CONFIDENCE = '''
from dataclasses import dataclass

import torch
from equipoise import Method, Question


@dataclass(frozen=True)
class Confident(Question):
    """How often the model gives a probability above each level."""

    levels: tuple[float, ...]

    def measure(self, outputs, y, mask):
        top = outputs.softmax(-1).amax(-1)
        return {"above": torch.stack([((top > level) & mask).sum().to(outputs.dtype) for level in self.levels])}

    def answer(self, totals, n, msg, memory):
        {self.levels: "a setting must be hashable at a site too"}
        return totals, memory


@dataclass(frozen=True)
class Temper(Method):
    """Divide the logits by a temperature that depends on how confident the model is."""

    levels: tuple[float, ...] = (0.4, 0.6)
    name = "temper"

    def init(self, turn):
        return {"temperature": self._temperature(turn)}

    def broadcast(self, slot):
        return slot

    def logits(self, logits, env):
        return logits / env.msg["temperature"]

    def close(self, slot, turn):
        return {"temperature": self._temperature(turn)}

    def _temperature(self, turn):
        return 1 + turn.ask(Confident(self.levels))["above"].sum() / 100
'''

CHOICE = '''
from dataclasses import dataclass

import torch
from equipoise import Method


@dataclass(frozen=True)
class Twice(Method):
    """Train on every sample twice."""

    name = "twice"

    def init(self, turn):
        turn.engine.resample(self, {})
        return {}

    def resample(self, y, msg, key):
        return torch.arange(len(y)).repeat(2), torch.zeros(2 * len(y), dtype=torch.int64)
'''

NET = """
import math

from torch import nn


def small(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))
"""

MODULES = {"smooth": SMOOTH, "confidence": CONFIDENCE, "choice": CHOICE, "net": NET}


def write(folder: Path) -> None:
    """Write the package `mylab` into a folder."""
    (folder / "mylab").mkdir()
    (folder / "mylab" / "__init__.py").touch()
    for name, text in MODULES.items():
        (folder / "mylab" / f"{name}.py").write_text(text)


def imported() -> list[str]:
    """The modules of `mylab` that are imported."""
    return [name for name in sys.modules if name.split(".")[0] == "mylab"]


@contextmanager
def forgotten() -> Iterator[None]:
    """Remove the modules of `mylab` afterwards, so that the next test can write its own."""
    assert imported() == []
    try:
        yield
    finally:
        for name in imported():
            del sys.modules[name]
