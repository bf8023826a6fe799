"""Sites that hold the clients of a test's federation and answer over the stand-in for Flower's grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.chain import Chain
from equipoise.core.federation import Federation
from equipoise.data.samples import Samples
from equipoise.deploy.agreement import Agreement
from equipoise.deploy.flower import Flower, Patience
from equipoise.deploy.roll import Roll
from equipoise.deploy.site import Site
from equipoise.deploy.transport.relay import GridCarrier
from tests.deploy.standin import StandInGrid

HASTE = Patience(deadline=2.0, wait=2.0, minimum=1)


def names(fed: Federation) -> tuple[str, ...]:
    return tuple(f"site_{client}" for client in range(fed.clients))


def agreed(fed: Federation, chain: Chain, model: str, **changes: Any) -> Agreement:
    settings: dict[str, Any] = {
        "run": "test", "roster": names(fed), "classes": fed.classes, "shape": tuple(fed.x.shape[1:]),
        "dtype": str(fed.x.dtype).removeprefix("torch."), "columns": (),
        "mean": fed.mean * fed.x.shape[1], "std": fed.std * fed.x.shape[1],
        "model": model, "method": str(chain), "precision": "float64", "seed": fed.seed, "held_out": 0.0,
    }  # fmt: skip
    return Agreement(**(settings | changes))


def sites(fed: Federation, folder: Path, model: str, methods: tuple[str, ...] = ()) -> dict[int, Site]:
    """The sites by their nodes, whose numbers differ from those of the clients, as with Flower."""
    made = {}
    for client, name in enumerate(names(fed)):
        mine = fed.indices[fed.offsets[client] : fed.offsets[client + 1]]
        samples = Samples(fed.x[mine].numpy(), np.array(fed.classes)[fed.y[mine].numpy()])
        made[1000 + client] = Site(
            name, lambda options, s=samples: s, folder / name, models=(model,), methods=methods
        )
    return made


def engine(fed: Federation, chain: Chain, made: dict[int, Site], model: str, **options: Any) -> Flower:
    grid = StandInGrid({node: site.answer for node, site in made.items()})
    return Flower(
        fed, agreed(fed, chain, model), GridCarrier(grid), Roll(names(fed)), **{"patience": HASTE} | options
    )
