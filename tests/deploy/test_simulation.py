"""The apps of Flower's simulation on the stand-in for its grid; tests/deploy_real runs them with Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict

from equipoise.core.errors import ConfigError
from equipoise.deploy import simulation
from equipoise.deploy.tryout import share
from equipoise.runs.config import load_config

from . import outside
from .standin import StandInGrid

CONFIG = """
method = "scaffold"
[data]
source = "digits"
[model]
name = "logistic"
[train]
rounds = 2
threads = 1
"""


def context(folder: Path, number: int = 0) -> Context:
    settings = {name: str(folder / name) for name in ("config", "sites", "out")}
    return Context(1, 1, {"partition-id": number}, RecordDict(), {**settings, "config": str(folder / "run.toml")})


class Simulated(StandInGrid):
    """A grid that passes the messages of every node to the client app, with the number of the node."""

    def __init__(self, folder: Path, nodes: int) -> None:
        super().__init__({100 + number: lambda packet: packet for number in range(nodes)})
        self.folder = folder

    def reply(self, node: int, message: Message) -> Message:
        return simulation.client(message, context(self.folder, node - 100))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(CONFIG)
    share(load_config(tmp_path / "run.toml"), 3, tmp_path / "sites")
    return tmp_path


def test_a_run_of_the_two_apps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulation.main(Simulated(folder, 3), context(folder))
    result = json.loads((folder / "out" / "result.json").read_text())
    assert result["last"]["round"] == 2
    assert result["last"]["clients"] == 3
    assert "3 of 3 sites have the final model" in capsys.readouterr().out
    for name in ("site_1", "site_2", "site_3"):
        assert (folder / "out" / "sites" / name / "model.safetensors").exists()


def test_a_run_that_was_cut_off_goes_on(folder: Path) -> None:
    class Cut(Simulated):
        def push_messages(self, messages: object) -> list[str]:
            if (folder / "out" / "checkpoints").exists():
                raise KeyboardInterrupt
            return super().push_messages(messages)  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        simulation.main(Cut(folder, 3), context(folder))
    assert not (folder / "out" / "result.json").exists()
    simulation.main(Simulated(folder, 3), context(folder))
    rounds = [json.loads(line)["round"] for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert rounds == [1, 2]


def test_a_folder_without_files_is_refused(folder: Path) -> None:
    for file in (folder / "sites").iterdir():
        file.unlink()
    with pytest.raises(ConfigError, match=r"the folder has no \.csv"):
        simulation.main(Simulated(folder, 3), context(folder))


def test_sites_allow_the_code_that_the_config_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside.write(folder)
    monkeypatch.chdir(folder)
    text = CONFIG.replace("scaffold", "mylab.smooth:Smooth + climb").replace("logistic", "mylab.net:small")
    (folder / "run.toml").write_text(text)
    with outside.forgotten():
        simulation.main(Simulated(folder, 3), context(folder))
    assert json.loads((folder / "out" / "result.json").read_text())["last"]["clients"] == 3
