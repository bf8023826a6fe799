from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli import commands as cli
from equipoise.core.errors import CheckpointError, ConfigError
from equipoise.deploy import serve
from equipoise.deploy.transport import certs
from equipoise.deploy.transport.carrier import CarrierLost
from equipoise.deploy.transport.link import Door
from equipoise.deploy.transport.processes import free_port
from equipoise.runs.config import Config
from equipoise.runs.folder import RunFolder


def config(**deploy: Any) -> Config:
    return Config.from_dict({"data": {"source": "sites"}, "model": {"name": "logistic"}, "deploy": deploy})


@pytest.fixture
def door(tmp_path: Path) -> Door:
    certs.make(tmp_path / "certs", ["site_b", "site_a"], ["localhost"])
    return Door("127.0.0.1", free_port(), tmp_path / "certs" / "server")


def test_sites_with_a_key_are_expected_unless_the_config_names_sites(door: Door) -> None:
    assert serve.roster(config(), door) == ("site_a", "site_b")
    assert serve.roster(config(sites=["site_b"]), door) == ("site_b",)
    assert serve.roster(config(sites=["b", "a"]), Door("127.0.0.1", 1, None)) == ("a", "b")
    with pytest.raises(ConfigError, match=r"deploy.sites is missing: without keys"):
        serve.roster(config(), Door("127.0.0.1", 1, None))
    with pytest.raises(ConfigError, match=r"there is no key in sites/"):
        serve.roster(config(), Door("127.0.0.1", 1, Path("nowhere")))


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace Flower and the training: the result is given, and the arguments are recorded."""
    seen: dict[str, Any] = {"result": {"last": {"round": 1}}, "links": 0}

    @contextmanager
    def link(door: Door, roster: Any, logs: Path, limit: int, say: Any, lost: Any) -> Iterator[tuple[str, Any]]:
        seen.update(roster=roster, logs=logs, limit=limit, links=seen["links"] + 1)
        yield "carrier", {7: "site_a"}

    def train(config: Config, folder: RunFolder, carrier: str, names: Any, watch: Any, roster: Any) -> dict[str, Any]:
        seen.update(carrier=carrier, names=names)
        if isinstance(seen["result"], Exception):
            raise seen["result"]
        folder.write("result", seen["result"])
        return dict(seen["result"])

    monkeypatch.setattr(serve, "link", link)
    monkeypatch.setattr(serve.server, "train", train)
    return seen


def test_a_run_is_trained_over_the_link(linked: dict[str, Any], door: Door, tmp_path: Path) -> None:
    result = serve.serve(config(message_mib=3), tmp_path / "run", door)
    assert result == linked["result"]
    assert linked["roster"] == ("site_a", "site_b")
    assert linked["limit"] == 3 << 20
    assert linked["names"] == {7: "site_a"}
    assert linked["logs"] == tmp_path / "run" / "logs"


def test_after_the_superlink_died_the_run_can_be_resumed(
    linked: dict[str, Any], door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, linked["result"] = linked["result"], CarrierLost("the SuperLink ended (killed by signal 9)")
    run = tmp_path / "run"
    sentence = (
        rf"the SuperLink ended \(killed by signal 9\); `equipoise resume {run}` goes on from the last checkpoint"
    )
    with pytest.raises(CarrierLost, match=sentence):
        serve.serve(config(), run, door)
    linked["result"] = result
    assert cli._resumer(run) is serve.resume
    assert serve.resume(run) == result
    assert serve.resume(run) == result, "a finished run gives its result again"
    assert linked["links"] == 2


def test_a_simulated_run_is_resumed_by_the_simulation(tmp_path: Path) -> None:
    assert cli._resumer(tmp_path) is cli.runs.resume
    RunFolder.create(tmp_path / "run", config().to_dict()).close()
    with pytest.raises(CheckpointError, match="is not a run with real sites"):
        serve.resume(tmp_path / "run")


def test_a_site_that_got_its_key_later_is_not_part_of_the_run(
    linked: dict[str, Any], door: Door, tmp_path: Path
) -> None:
    result, linked["result"] = linked["result"], CarrierLost("the gate ended (exit code 1)")
    with pytest.raises(CarrierLost):
        serve.serve(config(), tmp_path / "run", door)
    certs.make(tmp_path / "certs", ["site_c"], [])
    linked["result"] = result
    serve.resume(tmp_path / "run")
    assert linked["roster"] == ("site_a", "site_b")


def test_a_try_out_cannot_be_resumed_without_its_keys(linked: dict[str, Any], door: Door, tmp_path: Path) -> None:
    linked["result"] = CarrierLost("the gate ended (exit code 1)")
    with pytest.raises(CarrierLost):
        serve.serve(config(), tmp_path / "run", door)
    assert door.certs is not None
    door.certs.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="which is gone; a try-out cannot be resumed"):
        serve.resume(tmp_path / "run")


def test_a_mistake_is_refused_before_a_folder_is_made(linked: dict[str, Any], door: Door, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file sites/site_z.pub"):
        serve.serve(config(sites=["site_z"]), tmp_path / "run", door)
    assert not (tmp_path / "run").exists()
    serve.serve(config(), tmp_path / "run", door)
    with pytest.raises(CheckpointError, match="already holds a run"):
        serve.serve(config(), tmp_path / "run", door)
