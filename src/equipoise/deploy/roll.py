"""Who is there: which node of the carrier is which client. A node that is not known is asked for its name.

One that cannot take part, is not expected or is not who it says is left out, and asked again from time to time: what
was wrong may have been put right since. Nobody else waits for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from equipoise.deploy.carrier import Carrier
from equipoise.deploy.wire import Packet
from equipoise.errors import nearest

AGAIN = 10.0  # seconds before a node that was left out is asked again


class _Doubt(NamedTuple):
    """A node that is no client, or not yet."""

    reason: str  # why it was left out; empty while it has not said anything
    until: float  # when it is asked again


class Roll:
    """Clients by node. `names` binds nodes to names by their keys; without it, a site is who it says it is.

    `patience` is how many seconds a node that was never asked before is waited for.
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
        self.nodes: dict[str, int] = {}  # by name
        self.hellos: dict[str, dict[str, Any]] = {}  # what each site said of itself
        self.hello: dict[str, Any] = {}  # what it is asked with
        self._doubts: dict[int, _Doubt] = {}
        self._asked: dict[str, int] = {}  # the nodes that have not answered yet, by message

    def call(self, carrier: Carrier) -> dict[int, int]:
        """The node of each client that is online, by the client's number."""
        online, now = carrier.nodes(), time.monotonic()
        # Who goes and comes back is asked like one never seen.
        self._doubts = {node: doubt for node, doubt in self._doubts.items() if node in online}
        known = set(self.nodes.values())
        due = [n for n in online if n not in known and (n not in self._doubts or self._doubts[n].until <= now)]
        fresh = {node for node in due if node not in self._doubts}
        if due:
            self._ask(carrier, due)
        self._listen(carrier, fresh, online)
        return {self.roster.index(name): node for name, node in self.nodes.items() if node in online}

    def _ask(self, carrier: Carrier, due: list[int]) -> None:
        for node in due:
            reason = self._doubts[node].reason if node in self._doubts else ""
            self._doubts[node] = _Doubt(reason, time.monotonic() + self.patience)
        self._asked = {message: node for message, node in self._asked.items() if node not in due}
        self._asked |= carrier.push({node: Packet("hello", self.hello, {}) for node in due}, self.patience)

    def _listen(self, carrier: Carrier, fresh: set[int], online: Collection[int]) -> None:
        """Take in the answers that have come, and wait for those of fresh nodes only."""
        until = time.monotonic() + self.patience
        while self._asked:
            for message, reply in carrier.pull(list(self._asked)).items():
                node = self._asked.pop(message)
                self._admit(node, reply, online)
                fresh.discard(node)
            if not fresh or time.monotonic() > until:
                return
            time.sleep(0.1)

    def _admit(self, node: int, reply: Packet, online: Collection[int]) -> None:
        name = str(reply.header.get("name"))
        reason = self._refusal(node, name, reply, online)
        if reason is not None:
            away = reply.kind != "reply" and str(reply.header.get("reason")).startswith("node unavailable")
            if not away and (node not in self._doubts or self._doubts[node].reason != reason):
                self.say(reason)
            self._doubts[node] = _Doubt(reason, time.monotonic() + AGAIN)
            return
        self._doubts.pop(node, None)
        self.say(f"{name} has joined" if name not in self.nodes else f"{name} is back")
        self.nodes[name], self.hellos[name] = node, reply.header

    def _refusal(self, node: int, name: str, reply: Packet, online: Collection[int]) -> str | None:
        if reply.kind != "reply":
            return f"{self._who(node)} cannot take part: {reply.header.get('reason')}"
        if name not in self.roster:
            return f"a site called {name!r} is not expected and is left out; {nearest(name, self.roster)}"
        if self.names is not None and self.names.get(node) != name:
            return f"{self._who(node)} calls itself {name}, which its key does not prove; it is left out"
        if self.nodes.get(name, node) != node and self.nodes[name] in online:
            return f"a second node calls itself {name}; it is left out as long as the first is online"
        if not _readable(reply.header):
            return f"{name} describes its samples in a way that cannot be read; is its Equipoise of another version?"
        return None

    def _who(self, node: int) -> str:
        return f"the site {self.names[node]}" if self.names and node in self.names else f"the node {node}"


def _readable(hello: Mapping[str, Any]) -> bool:
    """Does it say what the server relies on?"""
    shape, lists = hello.get("shape"), (hello.get("features"), hello.get("classes", []))
    return (
        isinstance(hello.get("version"), str)
        and hello.get("dtype") in ("uint8", "float32")
        and isinstance(shape, list)
        and len(shape) in (1, 3)
        and all(type(length) is int and length > 0 for length in shape)
        and all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists)
    )
