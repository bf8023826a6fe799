from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from equipoise.core.errors import DataError
from equipoise.deploy.transport import relay
from equipoise.deploy.transport.relay import GridCarrier, packet_of
from equipoise.deploy.transport.wire import DTYPES, Packet, WireError

from .standin import StandInGrid


def add_one(packet: Packet) -> Packet:
    return Packet("reply", {"of": packet.header}, {name: array + 1 for name, array in packet.arrays.items()})


def exchange(carrier: GridCarrier, packets: dict[int, Packet]) -> dict[int, Packet]:
    ids = carrier.push(packets)
    return {ids[key]: packet for key, packet in carrier.pull(ids).items()}


def test_packets_are_sent_as_flower_messages() -> None:
    grid = StandInGrid({5: add_one, 2**64 - 1: add_one})
    carrier = GridCarrier(grid)
    assert carrier.nodes() == [5, 2**64 - 1]
    x = np.arange(6.0).reshape(2, 3).T  # not in C order
    replies = exchange(carrier, {node: Packet("train", {"round": 3}, {"a/b": x}) for node in carrier.nodes()})
    assert replies.keys() == {5, 2**64 - 1}
    assert replies[5].header == {"of": {"round": 3}}
    assert np.array_equal(replies[5].arrays["a/b"], x + 1)
    assert {message.metadata.message_type for message in grid.sent} == {"train"}
    assert {message.metadata.group_id for message in grid.sent} == {"3"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 1)])
def test_every_type_and_shape_comes_back_unchanged(dtype: str, shape: tuple[int, ...]) -> None:
    carrier = GridCarrier(StandInGrid({1: lambda packet: packet}))
    array = np.ones(shape, dtype)
    came = exchange(carrier, {1: Packet("ask", {}, {"x": array})})[1].arrays["x"]
    assert (came.dtype, came.shape) == (array.dtype, array.shape)
    assert came.flags.writeable
    assert np.array_equal(came, array)


def test_an_array_that_all_nodes_get_is_stored_once() -> None:
    grid = StandInGrid(dict.fromkeys((1, 2, 3), add_one))
    weights = np.random.default_rng(0).normal(size=100_000)
    exchange(GridCarrier(grid), {node: Packet("train", {"node": node}, {"w": weights}) for node in (1, 2, 3)})
    assert sum(size for size in grid.objects.values() if size > 10_000) < 1.01 * weights.nbytes


def test_each_answer_is_returned_once_and_only_after_it_has_arrived() -> None:
    grid = StandInGrid(dict.fromkeys((1, 2), add_one))
    grid.silent = {2}
    carrier = GridCarrier(grid)
    ids = carrier.push({node: Packet("ask", {}, {}) for node in (1, 2)})
    assert [ids[key] for key in carrier.pull(ids)] == [1]
    assert carrier.pull(ids) == {}
    grid.silent = set()
    assert [ids[key] for key in carrier.pull(ids)] == [2]


def test_the_message_of_an_offline_node_gives_a_failure() -> None:
    grid = StandInGrid(dict.fromkeys((1, 2), add_one))
    carrier = GridCarrier(grid)
    ids = carrier.push({node: Packet("ask", {}, {}) for node in (1, 2)})
    grid.offline = {2}
    (message,) = (key for key, node in ids.items() if node == 2)
    answer = carrier.pull(ids)[message]
    assert answer.kind == "failure"
    assert answer.header["reason"] == "node unavailable: the site sends no sign of life"


@pytest.mark.parametrize("given", [[], ["a", None]])
def test_a_message_that_is_not_accepted_gives_a_failure(given: list[str | None]) -> None:
    class Full(StandInGrid):
        def push_messages(self, messages: object) -> list[str | None]:  # type: ignore[override]
            return given

    carrier = GridCarrier(Full({}))
    ids = carrier.push({node: Packet("ask", {}, {}) for node in (1, 2)})
    assert set(ids.values()) == {1, 2}
    refused = {ids[key]: packet.header["reason"] for key, packet in carrier.pull(ids).items()}
    assert 2 in refused
    assert "did not accept the message" in refused[2]
    assert carrier.pull(ids) == {}


def test_a_site_that_cannot_answer_says_why() -> None:
    def fail(packet: Packet) -> Packet:
        raise DataError("site.csv has no column 'label'")

    reply = exchange(GridCarrier(StandInGrid({1: fail})), {1: Packet("ask", {}, {})})[1]
    assert reply == Packet("failure", {"reason": "site.csv has no column 'label'"}, {})


def test_an_answer_above_the_limit_is_refused() -> None:
    grid = StandInGrid({1: lambda packet: Packet("reply", {}, {"w": np.zeros(1000)})})
    reply = exchange(GridCarrier(grid, limit=4000), {1: Packet("ask", {}, {})})[1]
    assert reply.kind == "failure"
    assert "at most 4,000" in reply.header["reason"]


HEAD = ConfigRecord({"kind": "reply", "header": "{}"})
FINE = Array(np.zeros(3))


def forged(**changes: object) -> Array:
    fields = {"dtype": FINE.dtype, "shape": FINE.shape, "stype": FINE.stype, "data": FINE.data} | changes
    return Array(**fields)


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        ({"arrays": ArrayRecord(), "head": HEAD, "more": MetricRecord()}, "holds the records"),
        ({"arrays": MetricRecord(), "head": HEAD}, "holds the records"),
        ({"arrays": ArrayRecord(), "head": ConfigRecord({"kind": 1, "header": "{}"})}, "malformed"),
        ({"arrays": ArrayRecord(), "head": ConfigRecord({"kind": "a", "header": "[]"})}, "malformed"),
        ({"arrays": ArrayRecord(), "head": ConfigRecord({"kind": "a", "header": "{"})}, "cannot be read"),
        ({"arrays": ArrayRecord({"w": forged(data=b"\x80\x04pickle")}), "head": HEAD}, "'w' of the message cannot"),
        ({"arrays": ArrayRecord({"w": forged(shape=(10**12,))}), "head": HEAD}, "type and shape in its description"),
        ({"arrays": ArrayRecord({"w": forged(dtype="float32")}), "head": HEAD}, "type and shape in its description"),
        ({"arrays": ArrayRecord({"w": forged(data=FINE.data[:-1])}), "head": HEAD}, "23 bytes for shape"),
        (
            {"arrays": ArrayRecord({"w": Array(np.array(["a"]))}), "head": HEAD},
            "is <U1 by row, expected one of float32",
        ),
        ({"arrays": ArrayRecord({"w": Array(np.zeros(2, ">f8"))}), "head": HEAD}, "is >f8 by row"),
        ({"arrays": ArrayRecord({"w": Array(np.zeros((2, 3)).T)}), "head": HEAD}, "is float64 by column"),
    ],
)
def test_a_message_without_a_packet_is_refused(records: dict[str, object], sentence: str) -> None:
    StandInGrid({})  # it sets the ids that Flower sets in every process of an app
    message = Message(RecordDict(records), 1, "query")
    with pytest.raises(WireError, match=sentence):
        packet_of(message)


def test_an_array_with_a_false_shape_allocates_no_memory() -> None:
    StandInGrid({})
    head = FINE.data.replace(b"(3,), }            ", b"(3000000000000,), }")
    assert head != FINE.data
    record = ArrayRecord({"w": forged(data=head, shape=(3_000_000_000_000,))})
    with pytest.raises(WireError, match="24 bytes for shape"):
        packet_of(Message(RecordDict({"arrays": record, "head": HEAD}), 1, "query"))


def test_the_apps_that_flower_starts_need_no_torch() -> None:
    code = "import sys; from equipoise.deploy.transport import apps, gate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_relay_names_what_the_engine_uses() -> None:
    assert {"Carrier", "CarrierLost", "SocketCarrier", "GridCarrier"} <= set(relay.__all__)
