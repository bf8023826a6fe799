"""The same engine in Flower's own simulation, as docs/deploy.md describes it; it needs Ray."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from equipoise.deploy.transport.processes import environment, free_port
from equipoise.deploy.tryout import share
from equipoise.runs.config import load_config
from tests.deploy.test_simulation import CONFIG
from tests.test_docs import WITH_SITES

from .stage import Stage

pytest.importorskip("ray")


def test_a_run_on_ray(stage: Stage) -> None:
    folder = stage.folder
    (folder / "run.toml").write_text(CONFIG)
    share(load_config(folder / "run.toml"), 3, folder / "parts")
    (app,) = re.findall(r"```text\n(\[project\].*?)\n\nexport", WITH_SITES.read_text(), re.DOTALL)
    (folder / "app").mkdir()
    paths = app.replace("/shared/runs/ray", f"{folder}/out").replace("/shared", str(folder))
    (folder / "app" / "pyproject.toml").write_text(paths)
    flower = folder / "flower"
    flower.mkdir()
    (flower / "config.toml").write_text('[superlink.local]\naddress = ":local-in-memory:"\n')
    settings = {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()), "RAY_TMPDIR": str(stage.temporary)}
    stage.env |= environment(flower, settings) | {"HOME": str(stage.home), "TMPDIR": str(stage.temporary)}
    program = shutil.which("flwr", path=stage.env["PATH"])
    assert program is not None
    size = "num-supernodes=3 client-resources-num-cpus=1"
    running = stage.run([program, "run", "app", "local", "--stream", "--federation-config", size])
    assert running.ends(300) == 0, running.text()
    assert "3 of 3 sites have the final model" in running.text()
    assert (folder / "out" / "result.json").exists()
    for process in stage.processes("flower-superlink"):  # Flower leaves it running
        os.kill(process, signal.SIGTERM)
    shutil.rmtree(Path(stage.temporary) / "ray", ignore_errors=True)
