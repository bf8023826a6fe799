"""The door between the sites and the SuperLink: it lets through what a site needs and nothing else.

The SuperLink has one port for everything: whoever reaches it may also start runs and register nodes. So it listens on
this machine alone, and sites come in through the gate, which hands on what they ask of the fleet's interface. A site
that asks for messages waits here until there is one; otherwise it would sleep for seconds before asking again. Who is
refused is named on standard output, once.

    python -m equipoise.deploy.gate HOST PORT UPSTREAM UPSTREAM_CA|- CERTIFICATE|- KEY|-
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import ssl
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import httpx
import uvicorn
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

FLEET = re.compile(r"/v1/fleet/[a-z-]+")  # nothing that could climb out of it
PULL = "/v1/fleet/pull-messages"
KEY = b"flwr-public-key"  # the header in which a node shows its key
LIMIT = 64 << 20  # bytes of a request; Flower sends arrays in pieces of 5 MiB
HOLD = 25.0  # seconds that a site's question may wait; Flower gives up after 30
QUICKEST, SLOWEST = 0.05, 1.0  # seconds between two looks for a message
HUNG_UP, UNAVAILABLE = 499, 503  # Flower tries again after a 503
REMEMBERED = 1000  # refusals: a stranger who knocks all day must not fill the disk

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
Reply = tuple[int, bytes, bytes]  # status, kind of content, content

_told: set[str] = set()


def tell(sentence: str) -> None:
    if sentence not in _told and len(_told) < REMEMBERED:
        _told.add(sentence)
        print(sentence, flush=True)


class Gate:
    """The gate as an ASGI application."""

    def __init__(self, upstream: httpx.AsyncClient) -> None:
        self._upstream = upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, kind, content = await self._answer(scope, receive)
        if 400 <= status < HUNG_UP:
            tell(f"refused {_who(scope)}: {scope['path']} gives {status}, {content[:200].decode(errors='replace')}")
        headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, scope: Scope, receive: Receive) -> Reply:
        if scope["path"] == "/":
            return 200, b"text/plain", b"Sites come in here, with `equipoise join`.\n"
        if scope["method"] != "POST" or not FLEET.fullmatch(scope["path"]):
            return _refusal(404, "not offered to sites")
        body = bytearray()
        more = True
        while more:
            part = await receive()
            if part["type"] == "http.disconnect":
                return _refusal(HUNG_UP, "the site hung up")
            body += part.get("body", b"")
            if len(body) > LIMIT:
                return _refusal(413, f"a request has at most {LIMIT} bytes")
            more = part.get("more_body", False)
        if scope["path"] == PULL:
            return await self._wait(scope, bytes(body), receive)
        return await self._hand_on(scope, bytes(body))

    async def _wait(self, scope: Scope, body: bytes, receive: Receive) -> Reply:
        """Ask until there is a message. One that is given to a site which has hung up would be lost."""
        hung_up = asyncio.ensure_future(receive())
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            while not hung_up.done():
                reply = await self._hand_on(scope, body)
                waited = clock() - began
                if reply[0] != 200 or reply[2] or waited > HOLD:
                    return reply
                await asyncio.wait([hung_up], timeout=min(max(waited / 20, QUICKEST), SLOWEST))
            return _refusal(HUNG_UP, "the site hung up")
        finally:
            hung_up.cancel()

    async def _hand_on(self, scope: Scope, body: bytes) -> Reply:
        headers = [(name, value) for name, value in scope["headers"] if name not in (b"host", b"connection")]
        try:
            reply = await self._upstream.post(scope["path"], content=body, headers=headers)
        except httpx.TransportError as error:
            return _refusal(UNAVAILABLE, f"the SuperLink cannot be reached ({error})")
        return reply.status_code, reply.headers.get("content-type", "").encode(), reply.content


def _refusal(status: int, reason: str) -> Reply:
    return status, b"text/plain", reason.encode()


def _who(scope: Scope) -> str:
    """The address of a caller, and the fingerprint of its key as `ssh-keygen -l -f key.pub` shows it."""
    address = (scope.get("client") or ("unknown",))[0]
    shown = dict(scope["headers"]).get(KEY)
    if shown is None:
        return f"{address} without a key"
    try:
        key = load_pem_public_key(base64.b64decode(shown, validate=True))
    except ValueError:
        return f"{address} with a key that cannot be read"
    blob = base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    return f"{address} with key SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


class Handshake(ssl.SSLObject):
    """A TLS connection in the making; one that fails would leave no trace."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            reason = "it does not speak TLS" if error.reason == "HTTP_REQUEST" else f"TLS failed, {error.reason}"
            tell(f"refused a connection: {reason}")
            raise


def main(host: str, port: str, upstream: str, authority: str, certificate: str, key: str) -> None:
    secure = authority != "-"
    client = httpx.AsyncClient(
        base_url=f"{'https' if secure else 'http'}://{upstream}",
        verify=ssl.create_default_context(cafile=authority) if secure else False,
        timeout=30.0,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,  # no proxy on the way to this machine
    )
    config = uvicorn.Config(
        Gate(client),
        host=host,
        port=int(port),
        ssl_certfile=certificate if secure else None,
        ssl_keyfile=key if secure else None,
        lifespan="off",
        proxy_headers=False,
        access_log=False,
        log_level="warning",
    )
    config.load()
    if config.ssl is not None:
        config.ssl.sslobject_class = Handshake
    uvicorn.Server(config).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
