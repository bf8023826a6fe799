"""Hashes of the results of a few short trainings, which a change that only moves code must not change.

    python -m benchmarks.golden > before.json      # at one commit
    python -m benchmarks.golden --against before.json   # at another, on the same machine with the same torch

This file uses public names only, so that it runs at both commits.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import equipoise as eq

ROUNDS = 4


def digest(tree: dict[str, Any]) -> str:
    """A hash of all names and numbers of a tree."""
    whole = hashlib.sha256()

    def add(part: dict[str, Any], path: str) -> None:
        for name, leaf in part.items():
            if isinstance(leaf, dict):
                add(leaf, f"{path}{name}/")
            else:
                whole.update(f"{path}{name}".encode() + leaf.detach().cpu().contiguous().numpy().tobytes())

    add(tree, "")
    return whole.hexdigest()


def federations() -> dict[str, eq.Federation]:
    """Ragged clients: a dense network, and one with convolutions, batch norm, dropout and augmented images."""
    digits = eq.load("digits")

    def mlp() -> torch.nn.Module:
        return eq.models.build("mlp", digits.x.shape[1:], 10, hidden=[32])

    def cnn() -> torch.nn.Module:
        nn = torch.nn
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3),
            nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(32, 10),
        )  # fmt: skip

    dense = eq.Local(lr=0.1, batch=16, epochs=2, momentum=0.5, clip=5.0)
    images = eq.Local(optimiser="adam", lr=0.01, batch=16, augment="flip_crop")
    parts = eq.data.Dirichlet(clients=12, alpha=0.3)
    rare = eq.data.Step(rho=10, minority=(0, 2, 4))
    return {
        "mlp": eq.federate(digits, mlp, parts, imbalance=rare, local=dense, cohort=6, auxiliary=8),
        "cnn": eq.federate(digits, cnn, parts, imbalance=rare, local=images, cohort=6, auxiliary=8),
    }


def methods() -> dict[str, eq.Method]:
    return {
        "fedavg": eq.FedAvg(),
        "climb": eq.Climb(eta=0.5, every=1),
        "fedshift + class weights": eq.FedShift() + eq.ClassWeights(rule="effective"),
        "fedre": eq.FedRE(),
        "astraea": eq.Astraea(gamma=3, tau_d=2.0, augment="repeat"),
        "scaffold + fedavgm": eq.Scaffold() + eq.FedAvgM(),
        "ratio_loss": eq.RatioLoss(),
    }


def runs() -> Iterator[tuple[str, str]]:
    """The name of every training, and the hash of the model, the buffers and the slots that it ends with."""
    torch.set_num_threads(1)
    for network, fed in federations().items():
        for name, method in methods().items():
            if network == "cnn" and "scaffold" in name:
                continue  # it refuses Adam
            for engine, options in {
                "stacked": {"width": 4},
                "serial": None,
                **({"compiled": {"width": 4, "compile": True}} if (network, name) == ("mlp", "climb") else {}),
            }.items():
                made = eq.Serial(fed) if options is None else eq.Stacked(fed, **options)
                state = eq.fit(fed, method, ROUNDS, engine=made).state
                yield (
                    f"{network}, {name}, {engine}",
                    digest({"p": state.params, "b": state.buffers, "s": state.slots}),
                )


def main(words: list[str]) -> int:
    found = dict(runs())
    if words[:1] != ["--against"]:
        print(json.dumps(found, indent=1))
        return 0
    before = json.loads(Path(words[1]).read_text())
    changed = [name for name in before if found.get(name) != before[name]]
    print(f"{len(before) - len(changed)} of {len(before)} trainings end in the same bits")
    for name in changed:
        print(f"changed: {name}")
    return 1 if changed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
