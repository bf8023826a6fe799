"""What the server and all sites agree on before the first round. Every request to a site contains the agreement."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.core.network import Network
from equipoise.data.samples import positions
from equipoise.deploy.transport.wire import WireError
from equipoise.runs.predict import Card


@dataclass(frozen=True)
class Agreement:
    run: str  # a unique name of the run
    roster: tuple[str, ...]  # the names of the sites, sorted; a client's number is its position here
    classes: tuple[str, ...]
    shape: tuple[int, ...]  # the shape of one sample
    dtype: str  # "uint8" for images, else "float32"
    mean: tuple[float, ...]
    std: tuple[float, ...]
    columns: tuple[str, ...]  # only for tables: the names of the columns, in their order
    model: str
    method: str
    precision: str
    seed: int
    held_out: float  # the share of each class that a site holds out for evaluation
    model_options: dict[str, Any] = field(default_factory=dict)
    data_options: dict[str, Any] = field(default_factory=dict)  # how a site reads its file: the label column, ...

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Agreement:
        try:
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
            if "features" in fields:  # the name of the field in run folders written before it became `columns`
                fields["columns"] = fields.pop("features")
            agreement = cls(**fields)
        except (TypeError, AttributeError) as error:
            raise WireError(f"the server speaks another version of Equipoise ({error})") from error
        run = agreement.run  # a site uses it as the name of a folder
        if not isinstance(run, str) or not re.fullmatch(r"[\w-]{1,64}", run, re.ASCII):
            raise WireError(f"the name of the run is {run!r}, expected letters, digits, - and _")
        return agreement

    def network(self) -> Network:
        """A network with the agreed architecture; its parameters come from the server."""
        return self.card().network()

    def card(self) -> Card:
        """What a site needs to use the trained model."""
        return Card(
            name=self.model,
            classes=self.classes,
            shape=self.shape,
            dtype=self.dtype,  # type: ignore[arg-type]
            mean=self.mean,
            std=self.std,
            precision=self.precision,  # type: ignore[arg-type]
            options=self.model_options,
            columns=self.columns,
            label=self.data_options.get("label"),
            delimiter=self.data_options.get("delimiter", ","),
        )

    def federation(self, x: np.ndarray, y: np.ndarray, client: int, **parts: Any) -> Federation:
        """The federation as one client sees it: all other clients are empty."""
        sizes = torch.zeros(len(self.roster), dtype=torch.int64)
        sizes[client] = len(y)
        return Federation(
            network=self.network(),
            x=torch.from_numpy(np.ascontiguousarray(x)),
            y=torch.from_numpy(y),
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]),
            indices=torch.arange(len(y)),
            classes=self.classes,
            mean=self.mean,
            std=self.std,
            seed=self.seed,
            roster=self.roster,
            columns=self.columns,
            **{"local": Local(), **parts},
        )

    def encode(self, labels: np.ndarray) -> np.ndarray:
        """The labels as class numbers."""
        return positions(labels, self.classes, "this run")
