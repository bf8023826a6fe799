"""The parts of link.py that need no Flower; the rest is tested in tests/deploy_real."""

from __future__ import annotations

import socket
import tomllib
from pathlib import Path

import pytest

from equipoise.core.errors import ConfigError
from equipoise.deploy.transport import certs, link
from equipoise.deploy.transport.link import Door
from equipoise.deploy.transport.processes import free_port


@pytest.fixture
def made(tmp_path: Path) -> Path:
    certs.make(tmp_path / "certs", ["site_a", "site_b"], ["localhost"])
    return tmp_path / "certs" / "server"


def test_a_door_with_all_its_files_is_accepted(made: Path) -> None:
    Door("127.0.0.1", free_port(), made).check(["site_a", "site_b"])
    Door("127.0.0.1", free_port(), None).check(["anyone"])


def test_a_missing_file_is_named(made: Path) -> None:
    door = Door("127.0.0.1", free_port(), made)
    with pytest.raises(
        ConfigError, match=r"there is no file sites/site_c.pub; `equipoise certs --sites site_c,site_d`"
    ):
        door.check(["site_a", "site_c", "site_d"])
    (made / "server.key").unlink()
    with pytest.raises(ConfigError, match=r"there is no file server.key"):
        door.check(["site_a"])


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: cannot listen there .Address already in use"):
            Door("127.0.0.1", port, None).check([])


def test_a_door_can_be_read_in_another_folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = Door("0.0.0.0", 9092, Path("certs/server")).to_dict()
    monkeypatch.chdir("/")
    door = Door.from_dict(written)
    assert door.certs == made
    assert Door.from_dict(Door("::", 1, None).to_dict()) == Door("::", 1, None)


def test_the_flower_app_only_names_the_two_apps() -> None:
    app = tomllib.loads(link.APP)
    assert app["project"]["dependencies"] == []
    assert app["tool"]["flwr"]["app"]["components"].keys() == {"serverapp", "clientapp"}


class Writer:
    def __init__(self) -> None:
        self.text = ""

    def output(self) -> str:
        return self.text


def test_each_line_of_a_process_is_passed_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(link, "CHECK", 0.01)
    child = Writer()
    with link._forward_output(child, said.append):  # type: ignore[arg-type]
        child.text = "first\nsecond\nhal"
        while len(said) < 2:
            pass
        child.text += "f\n"
        while len(said) < 3:
            pass
    assert said == ["first", "second", "half"]
