"""Packets as bytes: a packet comes back unchanged, and any other content is an error of one sentence."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import numpy as np
import pytest

from equipoise.deploy.transport.wire import DTYPES, MAGIC, Packet, WireError, decode, encode, failure

SMALL = Packet("train", {"round": 3}, {"w": np.arange(3.0), "n": np.array(7), "none": np.zeros((0, 2), np.float32)})


def written(head: Any, body: bytes = b"") -> bytes:
    """The bytes of a packet with the given head, which may be wrong."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return MAGIC + struct.pack("<Q", len(text)) + text + body


def listing(*entries: list[Any], body: bytes = b"") -> bytes:
    return written({"kind": "train", "header": {}, "arrays": list(entries)}, body)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 0, 3), (2, 3)], ids=str)
def test_arrays_come_back_unchanged(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(np.prod(shape)).reshape(shape) % 2).astype(dtype)
    back = decode(encode(Packet("k", {}, {"a/b": array}))).arrays["a/b"]
    assert (back.dtype, back.shape) == (array.dtype, shape)
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable


def test_the_kind_the_header_and_the_order_come_back() -> None:
    header = {"version": [-1, 0], "text": "é\n", "nothing": None, "deep": {"list": [1, {"x": 0.1}]}}
    back = decode(encode(Packet("ask", header, dict(SMALL.arrays))))
    assert (back.kind, back.header, list(back.arrays)) == ("ask", header, ["w", "n", "none"])
    assert back.nbytes == 3 * 8 + 8
    assert decode(encode(failure("no")))[:2] == ("failure", {"reason": "no"})


def test_special_numbers_and_strided_arrays_survive() -> None:
    odd = np.array([np.nan, -np.inf, -0.0, 5e-324])
    turned = np.arange(6.0).reshape(2, 3).T
    back = decode(encode(Packet("k", {}, {"odd": odd, "turned": turned}))).arrays
    assert back["odd"].tobytes() == odd.tobytes()
    np.testing.assert_array_equal(back["turned"], turned)


def test_an_unknown_type_is_refused_by_the_sender() -> None:
    for array in (np.zeros(2, np.complex64), np.zeros(2, ">f8"), np.array(["text"])):
        with pytest.raises(WireError, match=r"array 'w' has the type .*, expected one of float32"):
            encode(Packet("k", {}, {"w": array}))


def test_a_packet_cut_off_at_any_byte_is_refused() -> None:
    whole = encode(SMALL)
    for length in range(len(whole)):
        with pytest.raises(WireError, match=r"not an Equipoise packet|ends inside"):
            decode(whole[:length])
    with pytest.raises(WireError, match="1 bytes too many"):
        decode(whole + b"\0")


def test_a_packet_with_any_one_byte_changed_never_crashes() -> None:
    whole = encode(SMALL)
    for place in range(len(whole)):
        with contextlib.suppress(WireError):  # every other exception would be a crash
            decode(whole[:place] + bytes([whole[place] ^ 0x80]) + whole[place + 1 :])


def test_a_packet_may_be_as_large_as_the_limit() -> None:
    whole = encode(SMALL)
    assert decode(whole, len(whole)).kind == "train"
    with pytest.raises(WireError, match=rf"has {len(whole)} bytes, expected at most {len(whole) - 1}"):
        decode(memoryview(whole), len(whole) - 1)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not an Equipoise packet"),
        (b"\x80\x04pickle" * 9, "not an Equipoise packet"),
        (MAGIC.replace(b"1", b"2") + bytes(8), "not an Equipoise packet of version 1"),
        (MAGIC + b"\xff" * 8, "ends inside its head"),
        (written(b"{"), "head of the message cannot be read"),
        (written(b"\xff\xfe"), "head of the message cannot be read"),
        (written(b"[" * 200_000), "head of the message cannot be read"),
        (written([1, 2]), "head of the message cannot be read"),
        (written("train"), "head of the message cannot be read"),
        (written({"kind": "train", "header": {}}), "'arrays'"),
        (written({"kind": "train", "header": [], "arrays": []}), "malformed"),
        (written({"kind": 3, "header": {}, "arrays": []}), "malformed"),
        (written({"kind": "train", "header": {}, "arrays": 5}), "head of the message cannot be read"),
        (listing(["w"]), "head of the message cannot be read"),
        (listing(["w", "float64", 3]), "head of the message cannot be read"),
        (listing(["w", "float64", []], ["w", "float64", []], body=bytes(16)), "malformed"),
        (listing([1, "float64", []], ["1", "float64", []], body=bytes(16)), "malformed"),
        (listing(["w", "object", [1]], body=bytes(8)), "array 'w' of the message has type object"),
        (listing(["w", "float16", [1]], body=bytes(2)), "type float16"),
        (listing(["w", "float64", [-1]], body=bytes(8)), r"shape \[-1\]"),
        (listing(["w", "float64", [-2, -4]], body=bytes(64)), r"shape \[-2, -4\]"),
        (listing(["w", "float64", [1.0]], body=bytes(8)), r"shape \[1.0\]"),
        (listing(["w", "float64", [True]], body=bytes(8)), r"shape \[True\]"),
        (listing(["w", "float64", ["1"]], body=bytes(8)), r"shape \['1'\]"),
        (listing(["w", "float64", [10**30]]), "ends inside array 'w'"),
        (listing(["w", "float64", [2**32, 2**32]]), "ends inside array 'w'"),
        (listing(["w", "float64", [0, 10**30]]), "impossible shape"),
        (listing(["w", "float64", [1] * 100], body=bytes(8)), "impossible shape"),
    ],
)
def test_malformed_content_is_an_error(content: bytes, sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        decode(content)
