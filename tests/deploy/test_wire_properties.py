"""Laws of the wire: packets come back as they were, and no other bytes do more than raise a short WireError."""

from __future__ import annotations

import contextlib
import json
import math
import struct
import tracemalloc
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from equipoise.core import tree
from equipoise.core.errors import EquipoiseError
from equipoise.core.local import Local
from equipoise.core.tree import Tree
from equipoise.deploy.packets import pack, read_local, read_question, unpack, write_local
from equipoise.deploy.roll import Roll
from equipoise.deploy.transport.wire import DTYPES, LIMIT, MAGIC, SENTENCE, Packet, WireError, decode, encode
from tests.strategies import same, trees

TYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
HEADERS = st.dictionaries(st.text(max_size=6), JSON, max_size=4)
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
PACKETS = st.builds(Packet, st.text(max_size=6), HEADERS, st.dictionaries(st.text(max_size=6), ARRAYS, max_size=4))


def written(head: bytes, body: bytes = b"") -> bytes:
    """Return a packet with any head at all."""
    return MAGIC + struct.pack("<Q", len(head)) + head + body


def equal(one: Packet, other: Packet) -> bool:
    return (
        (one.kind, json.dumps(one.header), list(one.arrays))
        == (other.kind, json.dumps(other.header), list(other.arrays))
        and all(
            a.dtype == b.dtype and a.shape == b.shape
            for a, b in zip(one.arrays.values(), other.arrays.values(), strict=True)
        )
        and all(a.tobytes() == b.tobytes() for a, b in zip(one.arrays.values(), other.arrays.values(), strict=True))
    )


# -- there and back --------------------------------------------------------------------------------------------------
@given(PACKETS)
def test_packets_come_back_as_they_were(packet: Packet) -> None:
    content = encode(packet)
    back = decode(content)
    assert equal(back, packet)
    assert encode(back) == content
    assert back.nbytes == packet.nbytes <= len(content)
    assert all(array.flags.writeable and array.flags.aligned for array in back.arrays.values())
    assert equal(decode(memoryview(bytearray(content)), limit=len(content)), packet)


@given(st.data(), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4), st.sampled_from(DTYPES))
def test_the_strides_of_an_array_do_not_matter(data: st.DataObject, shape: tuple[int, ...], dtype: str) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    turned = array.transpose(data.draw(st.permutations(range(array.ndim))))
    back = decode(encode(Packet("k", {}, {"a": turned, "b": turned[..., ::2] if array.ndim else turned}))).arrays
    assert back["a"].shape == turned.shape
    assert back["a"].tobytes() == turned.tobytes()
    assert back["b"].tobytes() == (turned[..., ::2] if array.ndim else turned).tobytes()


# -- damaged and hostile bytes ---------------------------------------------------------------------------------------
def refusal(content: bytes, limit: int = LIMIT) -> str | None:
    """Return the sentence that refuses the bytes, or None if they are a packet, which must then be a sound one.

    Neither way may take more memory than a small multiple of the bytes themselves.
    """
    tracemalloc.start()
    try:
        with contextlib.suppress(WireError):
            decode(content, limit)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000 + 100 * len(content)
    try:
        packet = decode(content, limit)
    except WireError as error:
        sentence = str(error)
    else:
        (size,) = struct.unpack("<Q", content[len(MAGIC) : len(MAGIC) + 8])
        head, body = content[len(MAGIC) + 8 :][:size], content[len(MAGIC) + 8 :][size:]
        listing = json.loads(head)["arrays"]
        assert body == b"".join(array.tobytes() for array in packet.arrays.values())
        assert [[name, list(array.shape)] for name, array in packet.arrays.items()] == [
            [str(name), shape] for name, _, shape in listing
        ]
        assert isinstance(packet.kind, str)
        assert isinstance(packet.header, dict)
        assert equal(decode(encode(packet)), packet)
        return None
    assert sentence.isprintable()
    assert len(sentence) <= SENTENCE + 4
    return sentence


@given(st.data(), PACKETS)
def test_a_packet_cut_short_or_with_more_at_its_end_is_refused(data: st.DataObject, packet: Packet) -> None:
    content = encode(packet)
    assert refusal(content[: data.draw(st.integers(0, len(content) - 1))])
    assert refusal(content + data.draw(st.binary(min_size=1, max_size=9)))
    assert "at most" in str(refusal(content, limit=len(content) - 1))


@given(st.data(), PACKETS)
@settings(max_examples=120)
def test_a_damaged_packet_is_refused_or_sound(data: st.DataObject, packet: Packet) -> None:
    content = bytearray(encode(packet))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        damage = data.draw(st.sampled_from(["flip", "insert", "delete", "copy"]))
        if damage == "flip":
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        elif damage == "insert":
            content[place:place] = data.draw(st.binary(max_size=8))
        elif damage == "delete":
            del content[place : place + data.draw(st.integers(1, 9))]
        else:
            content[place:place] = content[: data.draw(st.integers(0, 40))]
        assume(content)
    refusal(bytes(content))


@given(st.binary(max_size=200), st.binary(max_size=100))
def test_random_bytes_are_refused(noise: bytes, body: bytes) -> None:
    assert refusal(noise)
    assert refusal(MAGIC + noise)
    assert refusal(written(noise, body))


def mostly(right: st.SearchStrategy[Any], wrong: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 9).flatmap(lambda n: wrong if n == 9 else right)


SIDES = mostly(st.integers(0, 3), st.sampled_from([-1, 2**31, 2**62, 2**63, 2**64, 10**300]) | st.integers() | JSON)
SHAPES = mostly(st.lists(SIDES, max_size=4), st.lists(st.just(1), min_size=30, max_size=80) | JSON)
TYPE_NAMES = mostly(st.sampled_from(DTYPES), st.sampled_from(["object", "float16", "<f8", ""]) | JSON)
ENTRIES = mostly(st.tuples(mostly(st.text(max_size=4), JSON), TYPE_NAMES, SHAPES), JSON)
HEADS = mostly(
    st.fixed_dictionaries(
        {"kind": mostly(st.text(max_size=5), JSON), "header": mostly(HEADERS, JSON)},
        optional={"arrays": mostly(st.lists(ENTRIES, max_size=4), JSON)},
    ),
    st.dictionaries(st.text(max_size=4), JSON, max_size=3) | JSON,
)


def body_of(head: Any) -> bytes:
    """Return as many bytes as the arrays of a head need, if it is a head and they are not too many."""
    try:
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in head["arrays"]]
        return bytes(sum(sizes)) if sum(sizes) < 10_000 else b""
    except (TypeError, KeyError, ValueError, OverflowError):
        return b""


@given(HEADS, mostly(st.just(b""), st.binary(max_size=20)))
@example({"kind": "k", "header": {}, "arrays": [["v", "float64", [-1]], ["w", "float64", [1]]]}, b"")
@example({"kind": "k", "header": {}, "arrays": [["w", "float64", [0]], ["w", "float64", [0]]]}, b"")
@example({"kind": "k", "header": {}, "arrays": [["w", "float64", [True]]]}, b"")
@example({"kind": "k", "header": {}, "arrays": [["w", "float64", ["1"]]]}, b"")
@example({"kind": "k", "header": [], "arrays": []}, b"")
@example({"kind": 1, "header": {}, "arrays": []}, b"")
@example({"kind": "k", "header": {}, "arrays": [["w", "float64", [0, 2**62, 2**62]]]}, b"")
@example({"kind": "k", "header": {}, "arrays": [["w" * 10**4, "float64", [1]]]}, b"")
@example({"kind": "k", "header": {}, "arrays": [["w", "\x1b[2J" * 1000, [1]]]}, b"")
@example({"kind": "k", "header": {}, "arrays": [["w", "uint8", [1] * 10**4]]}, b"\0")
@example({"kind": "k", "header": {}, "arrays": [["w", "uint8", [10**4000] * 100]]}, b"\0")
@example({"kind": "k", "header": {}, "arrays": [["w", "uint8", [0, *[10**4000] * 100]]]}, b"")
@example({"kind": "k", "header": {}, "arrays": [["\ud800", "bool", [-1]]]}, b"")
@settings(max_examples=200)
def test_any_head_is_refused_or_sound(head: Any, more: bytes) -> None:
    refusal(written(json.dumps(head).encode(), body_of(head) + more))


@given(st.text(), st.integers(1, 400))
def test_a_sentence_that_quotes_another_machine_is_one_short_printable_line(text: str, times: int) -> None:
    sentence = str(WireError(text * times))
    assert sentence.isprintable()
    assert len(sentence) <= SENTENCE + 4
    if text.isprintable() and len(text) <= SENTENCE:
        assert str(WireError(text)) == text


class OneNode:
    """A carrier with one node, which answers every message with the same packet."""

    def __init__(self, answer: Packet) -> None:
        self.answer = answer

    def nodes(self) -> list[int]:
        return [1]

    def push(self, packets: Mapping[int, Packet], ttl: float = 0) -> dict[str, int]:
        return {f"message to {node}": node for node in packets}

    def pull(self, ids: Collection[str]) -> dict[str, Packet]:
        return dict.fromkeys(ids, self.answer)

    def close(self) -> None: ...


@given(
    st.dictionaries(
        st.sampled_from(["reason", "name", "version", "dtype", "shape"]), JSON | st.just("\x1b[2J\n" * 999)
    )
)
@example({"reason": "\x1b[2J\n" * 999})
def test_no_answer_of_a_site_reaches_the_terminal_unchecked(header: dict[str, Any]) -> None:
    for kind in ("failure", "reply"):
        said: list[str] = []
        roll = Roll(("clinic",), say=said.append)
        assert roll.call(OneNode(Packet(kind, header, {}))) == {}
        assert all(sentence.isprintable() and len(sentence) < 2 * SENTENCE for sentence in said)


@given(st.integers(1, 3000), st.sampled_from(["[", '{"a":', '{"arrays":[', '[["w","uint8",[']))
def test_deep_heads_are_refused(depth: int, opening: str) -> None:
    assert refusal(written((opening * depth).encode()))


# -- trees in packets ------------------------------------------------------------------------------------------------
@given(trees(TYPES))
def test_trees_come_back_with_their_empty_branches(trees_sent: Tree) -> None:
    packet = decode(encode(pack("reply", {"a": 1}, trees_sent)))
    assert (packet.kind, packet.header, packet.nbytes) == ("reply", {"a": 1}, tree.nbytes(trees_sent))
    assert same(unpack(packet, trees_sent, packet.nbytes), trees_sent)


def renamed(arrays: dict[str, np.ndarray], name: str) -> None:
    arrays[name + "'"] = arrays.pop(name)


def dropped(arrays: dict[str, np.ndarray], name: str) -> None:
    del arrays[name]


def added(arrays: dict[str, np.ndarray], name: str) -> None:
    arrays[f"{name}/more"] = arrays[name]


def longer(arrays: dict[str, np.ndarray], name: str) -> None:
    arrays[name] = np.concatenate([arrays[name].reshape(-1)] * 2 + [np.zeros(1, arrays[name].dtype)])


def one_more_side(arrays: dict[str, np.ndarray], name: str) -> None:
    arrays[name] = arrays[name][None]


def of_another_type(arrays: dict[str, np.ndarray], name: str) -> None:
    arrays[name] = arrays[name].astype(np.float32 if arrays[name].dtype != np.float32 else np.float64)


def not_finite(arrays: dict[str, np.ndarray], name: str) -> None:
    assume(arrays[name].dtype.kind == "f" and arrays[name].size)
    arrays[name].reshape(-1)[-1] = math.nan if arrays[name].size % 2 else -math.inf


DEVIATIONS: list[Callable[[dict[str, np.ndarray], str], None]] = [
    renamed, dropped, added, longer, one_more_side, of_another_type, not_finite,
]  # fmt: skip


@pytest.mark.parametrize("deviation", DEVIATIONS)
@given(data=st.data(), expected=trees(TYPES))
def test_every_deviation_of_a_tree_is_refused(
    deviation: Callable[[dict[str, np.ndarray], str], None], data: st.DataObject, expected: Tree
) -> None:
    packet = decode(encode(pack("reply", {}, expected)))
    deviation(packet.arrays, data.draw(st.sampled_from(sorted(packet.arrays))))
    with pytest.raises(WireError) as refused:
        unpack(decode(encode(packet)), expected, LIMIT)
    assert str(refused.value)


@given(trees(TYPES))
def test_a_tree_larger_than_the_limit_is_refused(expected: Tree) -> None:
    packet = pack("reply", {}, expected)
    with pytest.raises(WireError, match="bytes"):
        unpack(packet, expected, packet.nbytes - 1)


@given(trees(TYPES), PACKETS)
def test_a_packet_of_something_else_is_refused(expected: Tree, packet: Packet) -> None:
    assume(packet.arrays.keys() != tree.flatten(expected).keys())
    with pytest.raises(WireError):
        unpack(packet, expected, LIMIT)


@given(st.data(), HEADERS)
@settings(max_examples=150)
def test_settings_from_the_wire_raise_nothing_but_our_errors(data: st.DataObject, header: dict[str, Any]) -> None:
    plain = json.loads(json.dumps(write_local(Local())))
    for name in data.draw(st.lists(st.sampled_from(sorted(plain)), max_size=3)):
        plain[name] = data.draw(JSON | st.just(10**400))
    for settings_sent in (header, plain):
        with contextlib.suppress(EquipoiseError):
            assert isinstance(read_local(settings_sent), Local)
    kind = data.draw(st.sampled_from(["equipoise.core.questions:ClassCounts", "os:system"]) | JSON)
    with contextlib.suppress(EquipoiseError):
        read_question({**header, "kind": kind})
