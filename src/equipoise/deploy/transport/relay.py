"""Packets over Flower: a packet as a Flower message, the carrier that uses Flower's grid, and a site's answer.

A message holds a record "arrays" with the arrays of the packet, and a record "head" with its kind and its header as
JSON. At a site, Flower imports this module in a new process for every message, so it must not need torch.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from io import BytesIO
from typing import Protocol

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from equipoise.core.errors import EquipoiseError
from equipoise.deploy.transport import wire
from equipoise.deploy.transport.carrier import DAY, Carrier, CarrierLost, SocketCarrier
from equipoise.deploy.transport.wire import Packet, WireError

__all__ = ["Carrier", "CarrierLost", "Grid", "GridCarrier", "SocketCarrier", "answer", "content", "packet_of"]

# The meaning of Flower's error codes.
REASONS = {
    3: "the site did not fetch the request in time",
    4: "the answer did not arrive in time",
    5: "the site sends no sign of life",
    8: "the process that Flower started for the request has ended",
}


class Grid(Protocol):
    """The part of Flower's grid that `GridCarrier` uses."""

    def get_node_ids(self) -> Iterable[int]: ...
    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...
    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


class GridCarrier:
    """The carrier that sends packets with Flower's grid. `limit` is the most bytes that an answer may have."""

    def __init__(self, grid: Grid, limit: int = wire.LIMIT) -> None:
        self._grid, self._limit = grid, limit
        self._refused: set[str] = set()  # the ids of messages that the SuperLink did not accept

    def nodes(self) -> list[int]:
        return list(self._grid.get_node_ids())

    def push(self, packets: Mapping[int, Packet], ttl: float = DAY) -> dict[str, int]:
        # Flower stores an array once even if several messages hold it, but it hashes every `Array` object. So
        # messages that share the numbers share one `Array`.
        shared: dict[int, Array] = {}
        nodes = list(packets)
        messages = [
            Message(
                content(packet, shared),
                node,
                MessageType.TRAIN if packet.kind == "train" else MessageType.QUERY,
                ttl=ttl,
                group_id=str(packet.header.get("round", "")),
            )
            for node, packet in packets.items()
        ]
        given = list(self._grid.push_messages(messages)) or [""] * len(nodes)
        ids = [key or f"refused {uuid.uuid4()}" for key in given]
        self._refused.update(key for key in ids if key not in given)
        return dict(zip(ids, nodes, strict=True))

    def pull(self, ids: Collection[str]) -> dict[str, Packet]:
        refused = self._refused.intersection(ids)
        self._refused -= refused
        answers = dict.fromkeys(refused, wire.failure("node unavailable: the SuperLink did not accept the message"))
        if taken := [key for key in ids if key not in refused]:
            for reply in self._grid.pull_messages(taken):
                answers[reply.metadata.reply_to_message_id] = self._read(reply)
        return answers

    def _read(self, message: Message) -> Packet:
        if message.has_error():
            code = message.error.code
            return wire.failure(f"node unavailable: {REASONS.get(code, f'{message.error.reason} (Flower, {code})')}")
        try:
            return packet_of(message, self._limit)
        except WireError as error:
            return wire.failure(str(error))


def answer(message: Message, ask: Callable[[Packet], Packet], limit: int = wire.LIMIT) -> Message:
    """A site's reply to a message: the packet that `ask` returns for the packet of the message, or a failure."""
    try:
        reply = ask(packet_of(message, limit))
    except EquipoiseError as error:
        reply = wire.failure(str(error))
    return Message(content(reply, {}), reply_to=message)


def content(packet: Packet, shared: dict[int, Array]) -> RecordDict:
    """The packet as Flower's records. `shared` has the Flower arrays made so far, by the `id` of the numpy array."""
    record = ArrayRecord()
    for name, array in packet.arrays.items():
        if id(array) not in shared:
            shared[id(array)] = Array(np.asarray(array, order="C"))
        record[name] = shared[id(array)]
    head = ConfigRecord({"kind": packet.kind, "header": json.dumps(packet.header)})
    return RecordDict({"arrays": record, "head": head})


def packet_of(message: Message, limit: int = wire.LIMIT) -> Packet:
    """The packet in a message, after all checks."""
    records = message.content
    arrays, head = records.get("arrays"), records.get("head")
    if len(records) != 2 or not isinstance(arrays, ArrayRecord) or not isinstance(head, ConfigRecord):
        raise WireError(f"the message holds the records {sorted(records)}, expected arrays and head")
    size = sum(len(array.data) for array in arrays.values())
    if size > limit:
        raise WireError(f"the message has {size:,} bytes, expected at most {limit:,}")
    kind, text = head.get("kind"), head.get("header")
    if not isinstance(kind, str) or not isinstance(text, str):
        raise WireError("the head of the message is malformed")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the head of the message cannot be read ({error})") from error
    if not isinstance(header, dict):
        raise WireError("the head of the message is malformed")
    return Packet(kind, header, {name: _values(name, array) for name, array in arrays.items()})


def _values(name: str, array: Array) -> wire.Array:
    """The numbers of a Flower array. Its header is checked first, as numpy would allocate any size that it claims."""
    stream = BytesIO(array.data)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("it has another version of the npy format")
        shape, by_column, dtype = np.lib.format.read_array_header_1_0(stream)
    except ValueError as error:
        raise WireError(f"array {name!r} of the message cannot be read ({error})") from error
    if str(dtype) not in wire.DTYPES or by_column:
        raise WireError(
            f"array {name!r} of the message is {dtype} by {'column' if by_column else 'row'},"
            f" expected one of {', '.join(wire.DTYPES)} by row"
        )
    if (str(dtype), shape) != (array.dtype, tuple(array.shape)):
        raise WireError(f"array {name!r} of the message does not have the type and shape in its description")
    start = stream.tell()
    count = int(np.prod(shape, dtype=object))  # Python integers: an absurd shape must not overflow
    if len(array.data) - start != count * dtype.itemsize:
        raise WireError(f"array {name!r} of the message has {len(array.data) - start} bytes for shape {list(shape)}")
    return np.frombuffer(array.data, dtype, offset=start).reshape(shape).copy()
