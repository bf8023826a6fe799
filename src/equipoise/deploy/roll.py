"""The roll call: which node of the carrier belongs to which client. A new node is asked for its name with a "hello".

A node is left out if it cannot take part, is not expected, or has a name that its key does not prove. It is asked
again from time to time, as its operator may have corrected the mistake. The other nodes do not wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from equipoise.core.errors import nearest
from equipoise.deploy.transport.carrier import Carrier
from equipoise.deploy.transport.wire import Packet, printable

RETRY = 10.0  # seconds until a node that was left out is asked again


class _LeftOut(NamedTuple):
    """A node that is left out, or that has not answered yet."""

    reason: str  # why the node was left out; empty before its first answer
    until: float  # the time at which the node is asked again


class Roll:
    """The clients and their nodes. `names` has the name of each node as its key proves it; without keys, the server
    believes the name that a site gives.

    `patience` is the number of seconds that the server waits for the first answer of a new node.
    """

    def __init__(
        self,
        roster: tuple[str, ...],
        names: Mapping[int, str] | None = None,
        *,
        patience: float = 60.0,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.roster, self.names, self.patience, self.say = roster, names, patience, say
        self.nodes: dict[str, int] = {}  # the node of each site, by the site's name
        self.hellos: dict[str, dict[str, Any]] = {}  # each site's answer to the hello, by the site's name
        self.hello: dict[str, Any] = {}  # the header of the hello that a new node is sent
        self._left_out: dict[int, _LeftOut] = {}
        self._asked: dict[str, int] = {}  # the nodes that have not answered yet, by the id of their message

    def call(self, carrier: Carrier) -> dict[int, int]:
        """The node of each client that is online, by the client's number."""
        online, now = carrier.nodes(), time.monotonic()
        # A node that goes offline and comes back is treated as a new node.
        self._left_out = {node: left_out for node, left_out in self._left_out.items() if node in online}
        known = set(self.nodes.values())
        due = [n for n in online if n not in known and (n not in self._left_out or self._left_out[n].until <= now)]
        new = {node for node in due if node not in self._left_out}
        if due:
            self._ask(carrier, due)
        self._listen(carrier, new, online)
        return {self.roster.index(name): node for name, node in self.nodes.items() if node in online}

    def _ask(self, carrier: Carrier, due: list[int]) -> None:
        for node in due:
            reason = self._left_out[node].reason if node in self._left_out else ""
            self._left_out[node] = _LeftOut(reason, time.monotonic() + self.patience)
        self._asked = {message: node for message, node in self._asked.items() if node not in due}
        self._asked |= carrier.push({node: Packet("hello", self.hello, {}) for node in due}, self.patience)

    def _listen(self, carrier: Carrier, new: set[int], online: Collection[int]) -> None:
        """Read the answers that have arrived, and wait for the answers of new nodes only."""
        until = time.monotonic() + self.patience
        while self._asked:
            for message, reply in carrier.pull(list(self._asked)).items():
                node = self._asked.pop(message)
                self._admit(node, reply, online)
                new.discard(node)
            if not new or time.monotonic() > until:
                return
            time.sleep(0.1)

    def _admit(self, node: int, reply: Packet, online: Collection[int]) -> None:
        name = str(reply.header.get("name"))
        reason = self._refusal(node, name, reply, online)
        if reason is not None:
            reason = printable(reason)
            away = reply.kind != "reply" and str(reply.header.get("reason")).startswith("node unavailable")
            if not away and (node not in self._left_out or self._left_out[node].reason != reason):
                self.say(reason)
            self._left_out[node] = _LeftOut(reason, time.monotonic() + RETRY)
            return
        self._left_out.pop(node, None)
        self.say(f"{name} has joined" if name not in self.nodes else f"{name} is back")
        self.nodes[name], self.hellos[name] = node, reply.header

    def _refusal(self, node: int, name: str, reply: Packet, online: Collection[int]) -> str | None:
        if reply.kind != "reply":
            return f"{self._who(node)} cannot take part: {reply.header.get('reason')}"
        if name not in self.roster:
            return f"the site {name!r} is not expected and is left out; {nearest(name, self.roster)}"
        if self.names is not None and self.names.get(node) != name:
            return f"{self._who(node)} gives the name {name}, which its key does not prove; it is left out"
        if self.nodes.get(name, node) != node and self.nodes[name] in online:
            return f"a second node gives the name {name}; it is left out as long as the first node is online"
        if not _readable(reply.header):
            return f"{name} describes its samples in an unknown format; does it have another version of Equipoise?"
        return None

    def _who(self, node: int) -> str:
        return f"the site {self.names[node]}" if self.names and node in self.names else f"the node {node}"


def _readable(hello: Mapping[str, Any]) -> bool:
    """Whether the answer to a hello has all fields that the server uses, with the right types."""
    shape, lists = hello.get("shape"), (hello.get("columns"), hello.get("classes", []))
    return (
        isinstance(hello.get("version"), str)
        and hello.get("dtype") in ("uint8", "float32")
        and isinstance(shape, list)
        and len(shape) in (1, 3)
        and all(type(length) is int and length > 0 for length in shape)
        and all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists)
    )
