"""A try-out with a method and a model of the user's own, whose modules are in the current directory."""

from __future__ import annotations

import json
import time

import pytest
from safetensors.torch import load_file

from equipoise.deploy.agreement import Agreement
from equipoise.deploy.site import Site, reading
from equipoise.deploy.tryout import share
from equipoise.runs.config import Config
from equipoise.testing.contract import compare as close
from tests.deploy import outside
from tests.deploy.simulation import simulated

from .stage import Stage

METHOD, MODEL = "mylab.smooth:Smooth", "mylab.net:small"


def test_a_try_out_with_allowed_code_equals_the_stacked_engine(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    outside.write(stage.folder)
    stage.set(
        ("fedavg", f"{METHOD}(amount=0.2) + climb(every=1)"),
        ("logistic", MODEL),
        ('source = "sites"', 'source = "digits"'),
        ('options = { label = "digit" }\n', ""),
    )
    words = ("local", "run.toml", "--sites", 3, "--out", "run", "--allow-model", MODEL)
    began = time.monotonic()
    refused = stage.start(*words)
    assert refused.ends() == 2
    assert time.monotonic() - began < 60, "the refusal must not wait for deploy.wait, which is 120 seconds"
    assert f"error: method '{METHOD}' is code from outside Equipoise" in refused.text()
    assert f"--allow-method {METHOD}" in refused.text()
    assert not (stage.folder / "run").exists()

    allowed = stage.start(*words, "--allow-method", METHOD)
    assert allowed.ends() == 0, allowed.text()
    run = stage.folder / "run"
    assert [record["clients"] for record in stage.records()] == [3, 3, 3]
    agreement = Agreement.from_dict(json.loads((run / "agreement.json").read_text()))
    config = Config.from_dict(json.loads((run / "config.json").read_text())["config"])
    monkeypatch.syspath_prepend(str(stage.folder))
    with outside.forgotten():
        files = share(config, 3, stage.folder / "parts")
        sites = [Site(file.stem, reading(file), stage.folder / "unused") for file in files]
        close(load_file(run / "model.safetensors"), simulated(config, agreement, sites), 1e-10)
