from __future__ import annotations

import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from equipoise.deploy.transport import apps, carrier
from equipoise.deploy.transport.link import APP
from equipoise.deploy.transport.processes import listen
from equipoise.deploy.transport.relay import GridCarrier
from equipoise.deploy.transport.wire import Packet

from .standin import StandInGrid


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(apps.SOCKET, str(tmp_path / "socket"))
    return tmp_path / "socket"


def answer_once(listener: socket.socket, reply: Packet | None) -> threading.Thread:
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            request = carrier.receive(connection)
            if reply is not None:
                carrier.send(connection, Packet(reply.kind, {"asked": request.kind}, reply.arrays))

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def relayed() -> Packet:
    """Send a request to the site's app, and return the reply as the server receives it."""
    grid = GridCarrier(StandInGrid({1: apps._ask}))
    ids = grid.push({1: Packet("train", {}, {"w": np.ones(3)})})
    (reply,) = grid.pull(ids).values()
    return reply


def test_the_sites_app_passes_a_request_to_the_site_and_its_answer_back(path: Path) -> None:
    with listen(path) as listener:
        thread = answer_once(listener, Packet("reply", {}, {"w": np.zeros(2)}))
        reply = relayed()
        thread.join()
    assert reply.header == {"asked": "train"}
    assert reply.arrays["w"].shape == (2,)


def test_a_site_whose_process_has_ended_gives_a_failure_at_once(path: Path) -> None:
    assert "cannot be reached" in relayed().header["reason"]
    with listen(path) as listener:
        thread = answer_once(listener, None)
        reply = relayed()
        thread.join()
    assert reply.kind == "failure"
    assert "cannot be reached" in reply.header["reason"]


def test_the_servers_app_carries_packets_for_the_process_at_the_socket(path: Path) -> None:
    grid = StandInGrid({4: lambda packet: Packet("reply", packet.header, {})})
    with listen(path) as listener:
        thread = threading.Thread(target=apps.main, args=(grid, None))
        thread.start()
        far = carrier.SocketCarrier(listener.accept()[0])
        assert far.nodes() == [4]
        ids = far.push({4: Packet("ask", {"n": 1}, {})})
        assert [packet.header for packet in far.pull(ids).values()] == [{"n": 1}]
        far.close()
        thread.join(5)
    assert not thread.is_alive()


def test_the_flower_app_names_these_two_apps() -> None:
    for name in ("server", "client"):
        assert f'{name}app = "{apps.__name__}:{name}"' in APP
        assert hasattr(apps, name)
