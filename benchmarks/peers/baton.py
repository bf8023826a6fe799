"""For the programs of peers: what they are to train, and when they have their turn. Needs numpy and nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

TASK = "EQUIPOISE_TASK"
MARK = "@equipoise"  # begins what is told; a library may print whatever it likes besides


@dataclass(frozen=True)
class Task:
    """FedAvg of an MLP with leaky ReLU, one epoch of plain SGD in a round, everybody taking part."""

    clients: int
    samples: int  # of each client
    batch: int
    lr: float
    widths: tuple[int, ...]  # of the layers, from the inputs to the classes

    @staticmethod
    def given() -> Task:
        """By the environment, which processes that a library starts have too."""
        numbers = json.loads(os.environ[TASK])
        return Task(**numbers | {"widths": tuple(numbers["widths"])})

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Samples and labels by client: numbers that a network takes as they are."""
        draw = np.random.default_rng(0)
        x = draw.standard_normal((self.clients, self.samples, self.widths[0]), dtype=np.float32)
        return x, draw.integers(0, self.widths[-1], (self.clients, self.samples))


def turns(version: str) -> Iterator[int]:
    """The numbers of rounds to carry out, one after another; a turn ends when the next is asked for."""
    tell(f"ready {version}")
    for line in sys.stdin:
        yield int(line)
        tell("done")


def tell(words: str) -> None:
    print(f"{MARK} {words}", flush=True)
