"""Who carries packets between the server and the sites; and a carrier at the other end of a socket."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from equipoise.deploy import wire
from equipoise.deploy.wire import Packet, WireError
from equipoise.errors import EquipoiseError

DAY = 86_400.0
PATIENCE = 1.0  # seconds between two looks at whether the other end still lives
GRACE = 10.0  # seconds in which the cause of a fault must show
TRUSTED = 1 << 40  # bytes: what comes from a process of our own has been checked one packet at a time


class CarrierLost(EquipoiseError):
    """Whoever carried the packets is gone: nothing can be sent any more, and no answer will come."""


class Carrier(Protocol):
    def nodes(self) -> list[int]:
        """The nodes that are online now."""

    def push(self, packets: Mapping[int, Packet], ttl: float = DAY) -> dict[str, int]:
        """Send a packet to each node, to be answered within `ttl` seconds; gives the node of each message's id."""

    def pull(self, ids: Collection[str]) -> dict[str, Packet]:
        """The answers that have arrived, by the id of the message they answer. Each is given once."""


def bundle(kind: str, packets: Mapping[Any, Packet], header: Mapping[str, Any] | None = None) -> Packet:
    """Several packets, each under its key, as one. An array that several of them share is held once."""
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
    return {
        key: Packet(kind, header, {name: packet.arrays[number] for name, number in names.items()})
        for key, kind, header, names in packet.header["parts"]
    }


def send(connection: socket.socket, packet: Packet) -> None:
    content = wire.encode(packet)
    connection.sendall(struct.pack("<Q", len(content)))
    connection.sendall(content)


def receive(connection: socket.socket, limit: int = TRUSTED) -> Packet:
    """The next packet; `ConnectionError` when the other end has gone."""
    (size,) = struct.unpack("<Q", _exactly(connection, 8))
    if size > limit:
        raise WireError(f"the message has {size:,} bytes where at most {limit:,} are taken")
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
    """The carrier whose work is done by the process at the other end of a socket (`serve_carrier`).

    `lost` says why that process, or what it depends on, has ended; None while all is well.
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
            while not select.select([self._connection], [], [], PATIENCE)[0]:
                if (reason := self._lost()) is not None:
                    raise CarrierLost(reason)
            reply = receive(self._connection)
        except OSError as error:
            raise CarrierLost(self._why() or f"the process that carries messages has ended ({error})") from error
        if reply.kind == "failure":
            raise CarrierLost(self._why() or f"no message can be carried: {reply.header['reason']}")
        return reply

    def _why(self) -> str | None:
        """The reason for a fault; whatever caused it may take a moment to be seen to have ended."""
        until = time.monotonic() + GRACE
        while (reason := self._lost()) is None and time.monotonic() < until:
            time.sleep(0.1)
        return reason


def serve_carrier(connection: socket.socket, carrier: Carrier) -> None:
    """The other end of a `SocketCarrier`: does what it asks with `carrier`, until it closes the connection."""
    while True:
        try:
            request = receive(connection)
        except ConnectionError:
            return
        send(connection, _obey(request, carrier))


def _obey(request: Packet, carrier: Carrier) -> Packet:
    try:
        match request.kind:
            case "nodes":
                return Packet("nodes", {"nodes": carrier.nodes()}, {})
            case "push":
                return Packet("pushed", {"ids": carrier.push(unbundle(request), request.header["ttl"])}, {})
            case "pull":
                return bundle("pulled", carrier.pull(request.header["ids"]))
        return wire.failure(f"there is no verb {request.kind!r}")
    except Exception as error:  # whatever it is, the other end must learn of it rather than wait
        return wire.failure(f"{type(error).__name__}: {error}")
