"""A proxy between the sites and the SuperLink that forwards only the requests that a site needs.

The SuperLink has one port for all its services: anyone who reaches the port can also start runs and register nodes.
So the SuperLink listens on this machine alone. Sites connect to the gate, which forwards requests to the fleet
interface and refuses all others. When a site asks for messages and there are none, the gate holds the request until a
message arrives; otherwise the site would sleep for seconds before it asks again. The gate prints each refusal once.

    python -m equipoise.deploy.transport.gate HOST PORT UPSTREAM UPSTREAM_CA|- CERTIFICATE|- KEY|-
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

FLEET = re.compile(r"/v1/fleet/[a-z-]+")  # no dots or slashes, with which a path could leave the fleet interface
PULL = "/v1/fleet/pull-messages"
KEY = b"flwr-public-key"  # the HTTP header with the public key of a node
LIMIT = 64 << 20  # the most bytes of a request; Flower sends arrays in pieces of 5 MiB
HOLD = 25.0  # seconds for which a request for messages is held; Flower's timeout is 30 seconds
QUICKEST, SLOWEST = 0.05, 1.0  # seconds between two checks for a message
DISCONNECTED, UNAVAILABLE = 499, 503  # HTTP status codes; Flower tries again after a 503
REMEMBERED = 1000  # the most refusals that are printed, so that repeated requests of a stranger do not fill the disk

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
Reply = tuple[int, bytes, bytes]  # status, content type, content

_told: set[str] = set()


def tell(sentence: str) -> None:
    """Print a sentence, unless it was printed before."""
    if sentence not in _told and len(_told) < REMEMBERED:
        _told.add(sentence)
        print(sentence, flush=True)


class Gate:
    """The proxy as an ASGI application. `upstream` is the HTTP client that reaches the SuperLink."""

    def __init__(self, upstream: httpx.AsyncClient) -> None:
        self._upstream = upstream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status, kind, content = await self._answer(scope, receive)
        if 400 <= status < DISCONNECTED:
            tell(f"refused {_who(scope)}: {scope['path']} gives {status}, {content[:200].decode(errors='replace')}")
        headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, scope: Scope, receive: Receive) -> Reply:
        if scope["path"] == "/":
            return 200, b"text/plain", b"Sites connect here, with `equipoise join`.\n"
        if scope["method"] != "POST" or not FLEET.fullmatch(scope["path"]):
            return _refusal(404, "this request is not for sites")
        body = bytearray()
        more = True
        while more:
            part = await receive()
            if part["type"] == "http.disconnect":
                return _refusal(DISCONNECTED, "the site has disconnected")
            body += part.get("body", b"")
            if len(body) > LIMIT:
                return _refusal(413, f"a request may have at most {LIMIT} bytes")
            more = part.get("more_body", False)
        if scope["path"] == PULL:
            return await self._forward_until_message(scope, bytes(body), receive)
        return await self._forward(scope, bytes(body))

    async def _forward_until_message(self, scope: Scope, body: bytes, receive: Receive) -> Reply:
        """Ask the SuperLink until it has a message, but stop when the site disconnects: the message would be lost."""
        disconnected = asyncio.ensure_future(receive())
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            while not disconnected.done():
                reply = await self._forward(scope, body)
                waited = clock() - began
                if reply[0] != 200 or reply[2] or waited > HOLD:
                    return reply
                await asyncio.wait([disconnected], timeout=min(max(waited / 20, QUICKEST), SLOWEST))
            return _refusal(DISCONNECTED, "the site has disconnected")
        finally:
            disconnected.cancel()

    async def _forward(self, scope: Scope, body: bytes) -> Reply:
        headers = [(name, value) for name, value in scope["headers"] if name not in (b"host", b"connection")]
        try:
            reply = await self._upstream.post(scope["path"], content=body, headers=headers)
        except httpx.TransportError as error:
            return _refusal(UNAVAILABLE, f"the SuperLink cannot be reached ({error})")
        return reply.status_code, reply.headers.get("content-type", "").encode(), reply.content


def _refusal(status: int, reason: str) -> Reply:
    return status, b"text/plain", reason.encode()


def _who(scope: Scope) -> str:
    """The address of a client, and the fingerprint of its key in the format of `ssh-keygen -l -f key.pub`."""
    address = (scope.get("client") or ("unknown",))[0]
    shown = dict(scope["headers"]).get(KEY)
    if shown is None:
        return f"{address} without a key"
    try:
        key = load_pem_public_key(base64.b64decode(shown, validate=True))
    except ValueError:
        return f"{address} with an unreadable key"
    blob = base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    return f"{address} with key SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"


class Handshake(ssl.SSLObject):
    """A TLS connection that prints why its handshake failed; otherwise nothing would report it."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            reason = "it does not use TLS" if error.reason == "HTTP_REQUEST" else f"TLS failed, {error.reason}"
            tell(f"refused a connection: {reason}")
            raise


def main(host: str, port: str, upstream: str, authority: str, certificate: str, key: str) -> None:
    secure = authority != "-"
    client = httpx.AsyncClient(
        base_url=f"{'https' if secure else 'http'}://{upstream}",
        verify=ssl.create_default_context(cafile=authority) if secure else False,
        timeout=30.0,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,  # use no proxy for connections within this machine
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
