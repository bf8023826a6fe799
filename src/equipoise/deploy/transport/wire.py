"""A packet between the server and a site: a kind, a header of plain JSON, and named arrays. It is never a pickle.

This module needs numpy only, so that a process which only passes messages on starts fast.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from equipoise.core.errors import EquipoiseError

Array = npt.NDArray[Any]

MAGIC = b"equipoise packet 1\n"
DTYPES = ("float32", "float64", "int64", "int32", "uint8", "bool")
LIMIT = 1 << 31  # the most bytes of a packet; a run may set a lower limit
SENTENCE = 1000  # the most characters of a sentence that quotes another machine


class WireError(EquipoiseError):
    """A message that cannot be used: it is damaged or too large, or its content is not the expected one."""

    def __init__(self, sentence: str) -> None:
        super().__init__(printable(sentence))


def printable(text: str) -> str:
    """The text as one printable line of limited length: another machine must not control our terminal or fill our
    logs."""
    line = "".join(" " if c.isspace() else c if c.isprintable() else "?" for c in text[:SENTENCE])
    return line if len(text) <= SENTENCE else f"{line} ..."


class Packet(NamedTuple):
    kind: str
    header: dict[str, Any]
    arrays: dict[str, Array]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def failure(reason: str) -> Packet:
    """The reply of a site that could not do what the request asked."""
    return Packet("failure", {"reason": reason}, {})


def encode(packet: Packet) -> bytes:
    listing = [[name, str(array.dtype), list(array.shape)] for name, array in packet.arrays.items()]
    for name, dtype, _ in listing:
        if dtype not in DTYPES:
            raise WireError(f"array {name!r} has the type {dtype}, expected one of {', '.join(DTYPES)}")
    head = json.dumps({"kind": packet.kind, "header": packet.header, "arrays": listing}).encode()
    parts = [np.ascontiguousarray(array).tobytes() for array in packet.arrays.values()]
    return b"".join([MAGIC, struct.pack("<Q", len(head)), head, *parts])


def decode(content: bytes | memoryview, limit: int = LIMIT) -> Packet:
    """The packet in `content`, after all checks."""
    view = memoryview(content)
    if len(view) > limit:
        raise WireError(f"the message has {len(view):,} bytes, expected at most {limit:,}")
    start = len(MAGIC) + 8
    if bytes(view[: len(MAGIC)]) != MAGIC or len(view) < start:
        raise WireError("the message is not an Equipoise packet of version 1")
    (size,) = struct.unpack("<Q", view[len(MAGIC) : start])
    if size > len(view) - start:
        raise WireError("the message ends inside its head")
    try:
        head = json.loads(bytes(view[start : start + size]))
        kind, header, listing = head["kind"], head["header"], head["arrays"]
        shapes = {str(name): (str(dtype), tuple(shape)) for name, dtype, shape in listing}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"the head of the message cannot be read ({error})") from error
    if not isinstance(kind, str) or not isinstance(header, dict) or len(shapes) != len(listing):
        raise WireError("the head of the message is malformed")
    arrays, at = {}, start + size
    for name, (dtype, shape) in shapes.items():
        if dtype not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
            raise WireError(f"array {name!r} of the message has type {dtype} and shape {list(shape)}")
        end = at + math.prod(shape) * np.dtype(dtype).itemsize
        if end > len(view):
            raise WireError(f"the message ends inside array {name!r}")
        try:  # a copy, because torch needs memory that is aligned and writable
            arrays[name] = np.frombuffer(view[at:end], dtype).reshape(shape).copy()
        except (ValueError, OverflowError) as error:  # numpy limits the number of dimensions and their lengths
            raise WireError(f"array {name!r} of the message has the impossible shape {list(shape)}") from error
        at = end
    if at != len(view):
        raise WireError(f"the message has {len(view) - at} bytes too many")
    return Packet(kind, header, arrays)
