"""Three real sites over TLS give the same model as the stacked engine."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from equipoise.deploy.agreement import Agreement
from equipoise.deploy.site import Site, reading
from equipoise.runs.config import Config
from equipoise.testing.contract import compare as close
from tests.deploy.simulation import simulated

from .stage import SITES, Stage


@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "scaffold + fedshift + climb(every=1)",
        "astraea(gamma=2, mediator_epochs=1, augment='repeat')",  # two lanes of the three sites
    ],
)
def test_real_sites_equal_the_stacked_engine(stage: Stage, method: str) -> None:
    stage.certs()
    stage.tables()
    stage.set(("fedavg", method))
    serve = stage.serve()
    joined = [stage.join(name) for name in SITES]
    assert serve.ends() == 0, serve.text()
    assert [running.ends() for running in joined] == [0, 0, 0]
    run = stage.folder / "run"
    agreement = Agreement.from_dict(json.loads((run / "agreement.json").read_text()))
    config = Config.from_dict(json.loads((run / "config.json").read_text())["config"])
    sites = [Site(name, reading(stage.folder / f"{name}.csv"), stage.folder / "unused") for name in SITES]
    close(load_file(run / "model.safetensors"), simulated(config, agreement, sites), 1e-10)
    assert all(record["clients"] >= 3 for record in stage.records())
