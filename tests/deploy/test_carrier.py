from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from equipoise.deploy.transport import carrier as module
from equipoise.deploy.transport.carrier import (
    CarrierLost,
    SocketCarrier,
    bundle,
    receive,
    send,
    serve_carrier,
    unbundle,
)
from equipoise.deploy.transport.wire import Packet, WireError, decode, encode


class Echo:
    """A carrier whose nodes answer with the packet that they received."""

    def __init__(self) -> None:
        self.ttl = 0.0
        self.waiting: dict[str, Packet] = {}

    def nodes(self) -> list[int]:
        return [2**63 + 1, 7]

    def push(self, packets: dict[int, Packet], ttl: float = 1.0) -> dict[str, int]:
        self.ttl = ttl
        self.waiting = {f"m{node}": packet for node, packet in packets.items()}
        return {f"m{node}": node for node in packets}

    def pull(self, ids: list[str]) -> dict[str, Packet]:
        if "bad" in ids:
            raise RuntimeError("no such message")
        return {key: self.waiting.pop(key) for key in ids if key in self.waiting}


@pytest.fixture
def far() -> Iterator[tuple[SocketCarrier, Echo]]:
    here, there = socket.socketpair()
    echo = Echo()
    thread = threading.Thread(target=serve_carrier, args=(there, echo))
    thread.start()
    carrier = SocketCarrier(here)
    yield carrier, echo
    carrier.close()
    thread.join(5)
    there.close()
    assert not thread.is_alive(), "the other end must notice that the connection is closed"


def test_calls_are_passed_to_the_carrier_at_the_other_end(far: tuple[SocketCarrier, Echo]) -> None:
    carrier, echo = far
    assert carrier.nodes() == [2**63 + 1, 7]
    shared = np.arange(6.0).reshape(2, 3)
    packets = {
        node: Packet("train", {"node": node}, {"w": shared, "own": np.array(i)}) for i, node in enumerate((7, 9))
    }
    ids = carrier.push(packets, 30.0)
    assert ids == {"m7": 7, "m9": 9}
    assert echo.ttl == 30.0
    answers = carrier.pull(ids)
    assert answers["m9"].header == {"node": 9}
    assert np.array_equal(answers["m9"].arrays["w"], shared)
    assert answers["m9"].arrays["own"].shape == ()
    assert answers["m9"].arrays["own"] == 1
    assert carrier.pull(ids) == {}


def test_an_array_that_packets_share_is_sent_once() -> None:
    big = np.zeros(1000)
    packets = {node: Packet("train", {}, {"w": big, "v": np.zeros(1)}) for node in range(5)}
    together = bundle("push", packets)
    assert together.nbytes == 8000 + 5 * 8
    again = unbundle(decode(encode(together)))
    assert list(again) == list(packets)
    assert all(packet.arrays["w"].nbytes == 8000 for packet in again.values())


def test_an_error_at_the_other_end_is_raised_here(
    far: tuple[SocketCarrier, Echo], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE", 0.0)
    with pytest.raises(CarrierLost, match="RuntimeError: no such message"):
        far[0].pull(["bad"])


def test_a_closed_connection_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 2.0)
    here, there = socket.socketpair()
    there.close()
    reasons = iter([None, None, "the SuperLink ended (killed by signal 9)"])
    with here, pytest.raises(CarrierLost, match="signal 9"):
        SocketCarrier(here, lambda: next(reasons)).nodes()


def test_a_call_that_hangs_ends_when_the_reason_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK", 0.05)
    here, there = socket.socketpair()
    checks = iter([None, None])
    carrier = SocketCarrier(here, lambda: next(checks, "the gate ended (exit code 1)"))
    with here, there, pytest.raises(CarrierLost, match="the gate ended"):
        carrier.nodes()


def test_a_message_above_the_limit_is_not_read() -> None:
    here, there = socket.socketpair()
    with here, there:
        send(here, Packet("train", {}, {"w": np.zeros(100)}))
        with pytest.raises(WireError, match="at most 64"):
            receive(there, limit=64)
