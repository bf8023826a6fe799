"""The roll call: unknown sites, wrong names, sites that come back, and sites that could not take part at first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest

from equipoise.deploy import roll as roll_module
from equipoise.deploy.roll import RETRY, Roll
from equipoise.deploy.transport.wire import Packet, failure

HELLO = {"version": "1", "dtype": "float32", "shape": [2], "columns": ["age", "marker"]}
ROSTER = ("clinic", "hospital", "surgery")


class Clock:
    """A clock that advances only when the code under test sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(roll_module, "time", made)
    return made


class Nodes:
    """A carrier whose nodes answer at once; a node with the answer None never answers."""

    def __init__(self, **sites: int) -> None:
        self.answers: dict[int, Callable[[], Packet] | None] = {}
        self.asked: list[int] = []
        self._waiting: dict[str, int] = {}
        for name, node in sites.items():
            self.join(name, node)

    def join(self, name: str, node: int, **hello: Any) -> None:
        self.answers[node] = lambda: Packet("reply", {**HELLO, "name": name, **hello}, {})

    def nodes(self) -> list[int]:
        return list(self.answers)

    def push(self, packets: Mapping[int, Packet], ttl: float = 0) -> dict[str, int]:
        assert all(packet.kind == "hello" for packet in packets.values())
        made = {f"message {len(self.asked) + i}": node for i, node in enumerate(packets)}
        self.asked += packets
        self._waiting |= made
        return made

    def pull(self, ids: Collection[str]) -> dict[str, Packet]:
        found = {}
        for message in ids:
            ask = self.answers.get(self._waiting[message])
            if ask is not None:
                found[message] = ask()
        return found


class Heard(Roll):
    """A roll that records its sentences in `said`."""

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        self.said: list[str] = []
        super().__init__(ROSTER, names, say=self.said.append)


def test_sites_are_found_by_name_and_asked_once() -> None:
    nodes, roll = Nodes(surgery=7, clinic=9), Heard()
    assert roll.call(nodes) == {0: 9, 2: 7}
    assert roll.hellos["clinic"]["columns"] == ["age", "marker"]
    assert sorted(roll.said) == ["clinic has joined", "surgery has joined"]
    assert roll.call(nodes) == {0: 9, 2: 7}
    assert nodes.asked == [7, 9]


def test_a_site_that_is_offline_is_not_listed_and_needs_no_new_hello() -> None:
    nodes, roll = Nodes(clinic=1, hospital=2), Heard()
    roll.call(nodes)
    gone = nodes.answers.pop(1)
    assert roll.call(nodes) == {1: 2}
    nodes.answers[1] = gone
    assert roll.call(nodes) == {0: 1, 1: 2}
    assert nodes.asked == [1, 2]


def test_a_site_that_comes_back_under_a_new_node_takes_its_place() -> None:
    nodes, roll = Nodes(clinic=1, hospital=2), Heard()
    roll.call(nodes)
    del nodes.answers[1]
    nodes.join("clinic", 11)
    assert roll.call(nodes) == {0: 11, 1: 2}
    assert roll.said[-1] == "clinic is back"


def test_a_stranger_is_left_out_and_the_nearest_name_is_given() -> None:
    nodes, roll = Nodes(clinc=1, hospital=2), Heard()
    assert roll.call(nodes) == {1: 2}
    assert "the site 'clinc' is not expected and is left out; did you mean 'clinic'?" in roll.said


def test_an_impostor_is_found_by_its_key(clock: Clock) -> None:
    names = {1: "clinic", 2: "hospital"}
    nodes, roll = Nodes(clinic=1, surgery=2), Heard(names)
    nodes.join("hospital", 3)  # a node whose key is unknown
    assert roll.call(nodes) == {0: 1}
    assert "the site hospital gives the name surgery, which its key does not prove; it is left out" in roll.said
    assert "the node 3 gives the name hospital, which its key does not prove; it is left out" in roll.said
    nodes.join("hospital", 2)  # joined again under its own name, with the same key and so the same node
    clock.now += RETRY
    assert roll.call(nodes) == {0: 1, 1: 2}


def test_a_second_node_cannot_take_the_name_of_a_site_that_is_online(clock: Clock) -> None:
    nodes, roll = Nodes(clinic=1), Heard()
    roll.call(nodes)
    nodes.join("clinic", 5)
    for _ in range(3):
        assert roll.call(nodes) == {0: 1}
        clock.now += RETRY
    assert (
        roll.said.count("a second node gives the name clinic; it is left out as long as the first node is online")
        == 1
    )
    del nodes.answers[1]  # the first node had died, and now the SuperLink has noticed it
    assert roll.call(nodes) == {0: 5}
    assert roll.said[-1] == "clinic is back"


def test_of_two_new_nodes_with_one_name_only_the_first_is_taken() -> None:
    nodes, roll = Nodes(clinic=1), Heard()
    nodes.join("clinic", 2)
    assert roll.call(nodes) == {0: 1}
    assert sum("second node" in line for line in roll.said) == 1


def test_a_site_that_fails_at_first_is_asked_again_and_recovers(clock: Clock) -> None:
    nodes, roll = Nodes(hospital=2), Heard({1: "clinic", 2: "hospital"})
    nodes.answers[1] = lambda: failure("clinic.csv does not exist")
    for _ in range(5):
        assert roll.call(nodes) == {1: 2}
    assert nodes.asked.count(1) == 1  # not at every call
    clock.now += RETRY
    roll.call(nodes)
    assert nodes.asked.count(1) == 2
    assert roll.said.count("the site clinic cannot take part: clinic.csv does not exist") == 1  # said once
    nodes.answers[1] = lambda: failure("clinic.csv is empty")
    clock.now += RETRY
    roll.call(nodes)
    assert roll.said[-1] == "the site clinic cannot take part: clinic.csv is empty"
    nodes.join("clinic", 1)  # the file is there now
    clock.now += RETRY
    assert roll.call(nodes) == {0: 1, 1: 2}
    assert roll.said[-1] == "clinic has joined"


def test_a_node_that_leaves_and_comes_back_is_asked_at_once() -> None:
    nodes, roll = Nodes(), Heard()
    nodes.answers[1] = lambda: failure("no file")
    roll.call(nodes)
    nodes.answers.clear()
    roll.call(nodes)
    nodes.join("clinic", 1)
    assert roll.call(nodes) == {0: 1}


def test_the_server_waits_only_once_for_a_node_that_does_not_answer(clock: Clock) -> None:
    nodes, roll = Nodes(clinic=1), Heard()
    nodes.answers[2] = None
    began = clock.now
    assert roll.call(nodes) == {0: 1}
    assert roll.patience <= clock.now - began < roll.patience + 1
    began = clock.now
    for _ in range(5):
        assert roll.call(nodes) == {0: 1}
    assert clock.now == began  # the server does not wait for it again
    assert nodes.asked.count(2) <= 2
    nodes.join("hospital", 2)
    assert roll.call(nodes) == {0: 1, 1: 2}


def test_a_late_answer_is_read(clock: Clock) -> None:
    nodes, roll = Nodes(), Heard()
    nodes.answers[1] = lambda: failure("busy")
    roll.call(nodes)
    nodes.answers[1] = None
    clock.now += RETRY
    assert roll.call(nodes) == {}
    nodes.join("clinic", 1)
    assert roll.call(nodes) == {0: 1}
    assert nodes.asked == [1, 1]


def test_a_node_that_went_offline_is_not_reported() -> None:
    nodes, roll = Nodes(), Heard()
    nodes.answers[1] = lambda: failure("node unavailable: Node Unavailable (Flower's code 5)")
    assert roll.call(nodes) == {}
    assert roll.said == []


@pytest.mark.parametrize(
    "hello",
    [
        {"shape": None}, {"shape": "2"}, {"shape": []}, {"shape": [0]}, {"shape": [2.0]}, {"shape": [True]},
        {"shape": [1, 2]}, {"dtype": "object"}, {"columns": None}, {"columns": [1]}, {"classes": "ab"},
        {"classes": [1]}, {"version": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_hello_in_an_unknown_format_is_refused(hello: dict[str, Any]) -> None:
    nodes, roll = Nodes(hospital=2), Heard()
    nodes.join("clinic", 1, **hello)
    assert roll.call(nodes) == {1: 2}
    assert any(line.startswith("clinic describes its samples in an unknown format") for line in roll.said)
