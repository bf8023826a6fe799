"""A carrier transports packets between the server and the sites; `SocketCarrier` is one in another process."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from equipoise.core.errors import EquipoiseError
from equipoise.deploy.transport import wire
from equipoise.deploy.transport.wire import Packet, WireError

DAY = 86_400.0
CHECK = 1.0  # seconds between two checks that the other process still runs
GRACE = 10.0  # seconds to wait for the cause of an error to become known
TRUSTED = 1 << 40  # the most bytes from a process of our own, which has checked the size of each packet in it


class CarrierLost(EquipoiseError):
    """The carrier has ended: no packet can be sent any more, and no answer will arrive."""


class Carrier(Protocol):
    def nodes(self) -> list[int]:
        """The numbers of the nodes that are online now."""

    def push(self, packets: Mapping[int, Packet], ttl: float = DAY) -> dict[str, int]:
        """Send a packet to each node, which must answer within `ttl` seconds; return the node of each message id."""

    def pull(self, ids: Collection[str]) -> dict[str, Packet]:
        """The answers that have arrived, by the id of the message they answer. Each answer is returned once."""


def bundle(kind: str, packets: Mapping[Any, Packet], header: Mapping[str, Any] | None = None) -> Packet:
    """Combine several packets, each with a key, into one packet. An array that several packets share is sent once."""
    numbers: dict[int, str] = {}
    arrays = {}
    parts = []
    for key, packet in packets.items():
        names = {}
        for name, array in packet.arrays.items():
            if id(array) not in numbers:
                numbers[id(array)] = number = str(len(numbers))
                arrays[number] = array
            names[name] = numbers[id(array)]
        parts.append([key, packet.kind, packet.header, names])
    return Packet(kind, {**(header or {}), "parts": parts}, arrays)


def unbundle(packet: Packet) -> dict[Any, Packet]:
    """The packets that `bundle` has combined, by their keys."""
    return {
        key: Packet(kind, header, {name: packet.arrays[number] for name, number in names.items()})
        for key, kind, header, names in packet.header["parts"]
    }


def send(connection: socket.socket, packet: Packet) -> None:
    content = wire.encode(packet)
    connection.sendall(struct.pack("<Q", len(content)))
    connection.sendall(content)


def receive(connection: socket.socket, limit: int = TRUSTED) -> Packet:
    """Receive the next packet; raise `ConnectionError` if the other end has closed the connection."""
    (size,) = struct.unpack("<Q", _exactly(connection, 8))
    if size > limit:
        raise WireError(f"the message has {size:,} bytes, expected at most {limit:,}")
    return wire.decode(_exactly(connection, size), limit)


def _exactly(connection: socket.socket, size: int) -> memoryview:
    content = memoryview(bytearray(size))
    done = 0
    while done < size:
        count = connection.recv_into(content[done:])
        if count == 0:
            raise ConnectionError("the other end closed the connection")
        done += count
    return content


class SocketCarrier:
    """A carrier that passes every call to the process at the other end of a socket, which runs `serve_carrier`.

    `lost` returns why that process, or a process that it needs, has ended; it returns None while all of them run.
    """

    def __init__(self, connection: socket.socket, lost: Callable[[], str | None] = lambda: None) -> None:
        self._connection, self._lost = connection, lost

    def watch(self, lost: Callable[[], str | None]) -> None:
        self._lost = lost

    def nodes(self) -> list[int]:
        return list(self._call(Packet("nodes", {}, {})).header["nodes"])

    def push(self, packets: Mapping[int, Packet], ttl: float = DAY) -> dict[str, int]:
        return dict(self._call(bundle("push", packets, {"ttl": ttl})).header["ids"])

    def pull(self, ids: Collection[str]) -> dict[str, Packet]:
        return unbundle(self._call(Packet("pull", {"ids": list(ids)}, {})))

    def close(self) -> None:
        self._connection.close()

    def _call(self, request: Packet) -> Packet:
        try:
            if (reason := self._lost()) is not None:
                raise CarrierLost(reason)
            send(self._connection, request)
            while not select.select([self._connection], [], [], CHECK)[0]:
                if (reason := self._lost()) is not None:
                    raise CarrierLost(reason)
            reply = receive(self._connection)
        except OSError as error:
            raise CarrierLost(self._why() or f"the process that carries messages has ended ({error})") from error
        if reply.kind == "failure":
            raise CarrierLost(self._why() or f"no message can be sent: {reply.header['reason']}")
        return reply

    def _why(self) -> str | None:
        """Why the other process failed. It may take a moment until `lost` notices the process that has ended."""
        until = time.monotonic() + GRACE
        while (reason := self._lost()) is None and time.monotonic() < until:
            time.sleep(0.1)
        return reason


def serve_carrier(connection: socket.socket, carrier: Carrier) -> None:
    """The other end of a `SocketCarrier`: pass its calls to `carrier` until it closes the connection."""
    while True:
        try:
            request = receive(connection)
        except ConnectionError:
            return
        send(connection, _call_carrier(request, carrier))


def _call_carrier(request: Packet, carrier: Carrier) -> Packet:
    try:
        match request.kind:
            case "nodes":
                return Packet("nodes", {"nodes": carrier.nodes()}, {})
            case "push":
                return Packet("pushed", {"ids": carrier.push(unbundle(request), request.header["ttl"])}, {})
            case "pull":
                return bundle("pulled", carrier.pull(request.header["ids"]))
        return wire.failure(f"the request {request.kind!r} is unknown; expected nodes, push or pull")
    except Exception as error:  # the other end must get an answer to every request, or it would wait for ever
        return wire.failure(f"{type(error).__name__}: {error}")
