from __future__ import annotations

import asyncio
import base64
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from equipoise.deploy.transport import certs, gate
from equipoise.deploy.transport.gate import Gate

Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_told", set())


class Caller:
    """A client that sends one request to the gate; a function stands for the SuperLink."""

    def __init__(self, upstream: Handler) -> None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(upstream), base_url="http://link")
        self.gate = Gate(client)
        self.hang_up = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def ask(
        self,
        path: str,
        *parts: bytes,
        method: str = "POST",
        headers: tuple[tuple[bytes, bytes], ...] = (),
        cut: bool = False,
    ) -> tuple[int, bytes]:
        pending = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        pending += [] if cut else [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> dict[str, Any]:
            if pending:
                return pending.pop(0)
            if not cut:
                await self.hang_up.wait()
            return {"type": "http.disconnect"}

        async def send(event: Any) -> None:
            self.sent.append(event)

        scope = {"type": "http", "method": method, "path": path, "headers": headers, "client": ("10.0.0.9", 1)}
        await self.gate(scope, receive, send)
        return self.sent[0]["status"], self.sent[1]["body"]


def upstream(*replies: httpx.Response) -> tuple[Handler, list[httpx.Request]]:
    seen: list[httpx.Request] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return replies[min(len(seen), len(replies)) - 1]

    return handle, seen


def test_requests_to_the_fleet_interface_are_forwarded() -> None:
    handle, seen = upstream(httpx.Response(200, content=b"pong", headers={"content-type": "application/protobuf"}))
    caller = Caller(handle)
    assert asyncio.run(caller.ask("/v1/fleet/push-object", b"pi", b"ng", headers=((b"flwr-x", b"1"),))) == (
        200,
        b"pong",
    )
    assert seen[0].url.path == "/v1/fleet/push-object"
    assert seen[0].content == b"ping"
    assert seen[0].headers["flwr-x"] == "1"
    assert (b"content-type", b"application/protobuf") in caller.sent[0]["headers"]


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/control/start-run", "POST"),
        ("/v1/runtime/acquire-task", "POST"),
        ("/v1/fleet/../control/start-run", "GET"),
        ("/docs", "GET"),
        ("/v1/fleet", "POST"),
    ],
)
def test_all_other_requests_are_refused(path: str, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    handle, seen = upstream(httpx.Response(200))
    assert asyncio.run(Caller(handle).ask(path, method=method))[0] == 404
    assert seen == []
    assert f"refused 10.0.0.9 without a key: {path} gives 404" in capsys.readouterr().out


def test_a_path_cannot_leave_the_fleet_interface() -> None:
    handle, seen = upstream(httpx.Response(200))
    status, _ = asyncio.run(Caller(handle).ask("/v1/fleet/../control/start-run", b"x"))
    assert status == 404
    assert seen == []


def test_a_request_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LIMIT", 10)
    handle, seen = upstream(httpx.Response(200))
    assert asyncio.run(Caller(handle).ask("/v1/fleet/push-object", b"123456", b"789012"))[0] == 413
    assert seen == []


def test_a_site_waits_for_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "QUICKEST", 0.001)
    handle, seen = upstream(httpx.Response(200), httpx.Response(200), httpx.Response(200, content=b"message"))
    assert asyncio.run(Caller(handle).ask("/v1/fleet/pull-messages", b"me")) == (200, b"message")
    assert [request.content for request in seen] == [b"me"] * 3


def test_a_request_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "HOLD", 0.05)
    handle, seen = upstream(httpx.Response(200))
    assert asyncio.run(Caller(handle).ask("/v1/fleet/pull-messages")) == (200, b"")
    assert len(seen) > 1


def test_no_message_is_fetched_for_a_site_that_has_disconnected() -> None:
    handle, seen = upstream(httpx.Response(200))

    async def scene() -> int:
        caller = Caller(handle)
        asked = asyncio.ensure_future(caller.ask("/v1/fleet/pull-messages"))
        await asyncio.sleep(0.02)
        caller.hang_up.set()
        await asked
        return len(seen)

    before = asyncio.run(scene())
    assert before == len(seen) == 1


def test_a_superlink_that_is_down_is_tried_again_by_flower(capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert asyncio.run(Caller(refuse).ask("/v1/fleet/pull-messages"))[0] == 503
    assert capsys.readouterr().out == ""


def test_each_refused_client_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certs.make(tmp_path / "certs", ["site_a"], ["localhost"])
    key = gate.load_pem_public_key(pem(tmp_path / "certs/site_a/key.pub"))
    shown = base64.b64encode(key.public_bytes(gate.Encoding.PEM, gate.PublicFormat.SubjectPublicKeyInfo))
    handle, _ = upstream(httpx.Response(412, content=b'{"code":2004}'))
    for _ in range(3):
        asyncio.run(Caller(handle).ask("/v1/fleet/activate-node", headers=((gate.KEY, shown),)))
    asyncio.run(Caller(handle).ask("/v1/fleet/activate-node", headers=((gate.KEY, b"nonsense"),)))
    first, second = capsys.readouterr().out.splitlines()
    words = ["ssh-keygen", "-l", "-f", str(tmp_path / "certs/site_a/key.pub")]
    fingerprint = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[1]
    assert first == f'refused 10.0.0.9 with key {fingerprint}: /v1/fleet/activate-node gives 412, {{"code":2004}}'
    assert "with an unreadable key" in second


def pem(public: Path) -> bytes:
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    key = load_ssh_public_key(public.read_bytes())
    return key.public_bytes(gate.Encoding.PEM, gate.PublicFormat.SubjectPublicKeyInfo)


def test_a_probe_is_answered_and_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    handle, seen = upstream(httpx.Response(200))
    status, content = asyncio.run(Caller(handle).ask("/", method="GET"))
    assert status == 200
    assert b"equipoise join" in content
    assert seen == []
    assert capsys.readouterr().out == ""
