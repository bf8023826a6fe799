"""The work that is measured: a network, clients and samples, as a config of `equipoise run` and as plain arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.runs.config import Config

CLASSES = 10
ROUNDS = 10_000  # of a run, of which only some are measured: so many that compiling is worth it


@dataclass(frozen=True)
class Work:
    """A network to train, and clients with samples. Samples are random bytes, since speed does not depend on them."""

    model: str = "mlp"
    options: dict[str, Any] = field(default_factory=dict)  # of the model
    shape: tuple[int, int, int] = (1, 28, 28)
    clients: int = 100
    samples: int = 600  # of a client, on average
    cohort: int | None = None  # all clients when not given
    batch: int = 32
    lr: float = 0.05
    alpha: float | None = None  # of a Dirichlet partition; clients have equal sizes when not given
    method: str = "fedavg"
    precision: str = "auto"
    test: int = 0  # samples of the test set
    compile: bool = True  # compile where it is worth it; never when False

    @property
    def pool(self) -> int:
        return self.clients * self.samples

    @property
    def cohort_samples(self) -> int:
        """How many samples a round trains on."""
        return (self.cohort or self.clients) * self.samples

    @property
    def steps(self) -> int:
        """How many steps a client of mean size takes in a round."""
        return math.ceil(self.samples / self.batch)

    def precision_on(self, device: str) -> str:
        if self.precision != "auto":
            return self.precision
        return "tf32" if device.startswith("cuda") else "float32"

    def arrays(self) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(0)

        def split(count: int) -> tuple[np.ndarray, np.ndarray]:
            x = draw.integers(0, 256, (count, *self.shape), dtype=np.uint8)
            return x, draw.integers(0, CLASSES, count)

        x, y = split(self.pool)
        test_x, test_y = split(self.test)
        return {"x": x, "y": y} | ({"test_x": test_x, "test_y": test_y} if self.test else {})

    @property
    def normalise(self) -> str:
        return "mnist" if self.shape[0] == 1 else "cifar10"

    def config(self, folder: Path, device: str, **train: Any) -> Config:
        """The config of a run on these samples, which are written to the folder."""
        file = folder / f"{'x'.join(map(str, self.shape))}-{self.pool}-{self.test}.npz"
        if not file.exists():
            np.savez(file, **self.arrays())
        partition: dict[str, Any] = {"kind": "iid", "clients": self.clients}
        if self.alpha is not None:
            partition = {"kind": "dirichlet", "clients": self.clients, "alpha": self.alpha}
        return Config.from_dict(
            {
                "method": self.method,
                "data": {
                    "source": str(file),
                    "options": {"normalise": self.normalise} | ({} if self.test else {"test": 0.0}),
                    "partition": partition,
                },
                "model": {"name": self.model, **self.options},
                "local": {"lr": self.lr, "batch": self.batch},
                "train": {
                    "rounds": ROUNDS,
                    "evaluate_every": ROUNDS,
                    "device": device,
                    "precision": self.precision,
                    "compile": "auto" if self.compile else False,
                    **({"cohort": self.cohort} if self.cohort else {}),
                    **train,
                },
            }
        )

    def describe(self, device: str) -> str:
        network = " ".join([self.model, *(f"{name}={value}" for name, value in self.options.items())])
        sizes = "" if self.alpha is None else f" in the mean, Dirichlet({self.alpha:g})"
        drawn = f", {self.cohort} drawn" if self.cohort else ""
        clients = f"{self.clients:,} clients x {self.samples}{sizes}{drawn}"
        eager = "" if self.compile else ", not compiled"
        return f"{network}, {clients}, batch {self.batch}, {self.precision_on(device)}{eager}"
