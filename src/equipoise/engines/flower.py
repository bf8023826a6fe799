"""The engine of real clients: the same verbs, carried out by sites that hold their own data.

The server half is here; the client half is `equipoise.deploy.site`. A wave of visits is one exchange of messages.
What a site sends is checked against what its chain of methods would make of two blank samples: names, shapes, types,
finite values, size. Who is late, unreachable or wrong is left out of the round, named and counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from equipoise import tree
from equipoise.deploy.agreement import Agreement
from equipoise.deploy.carrier import Carrier
from equipoise.deploy.packets import pack, unpack, write_local, write_question
from equipoise.deploy.roll import Roll
from equipoise.deploy.site import alone
from equipoise.deploy.versions import NEVER, Version
from equipoise.deploy.wire import LIMIT, Packet, WireError
from equipoise.engines.base import Engine
from equipoise.engines.memory import Memories
from equipoise.engines.serial import Serial
from equipoise.engines.sums import Result, Sums, Total
from equipoise.errors import TrainingError
from equipoise.federation import Federation, Split
from equipoise.local import Local, Task
from equipoise.method import Chain, Method
from equipoise.questions import Question
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.server import State, Turn

POLL = 0.1  # seconds between two looks for replies
AGAIN = 2.0  # seconds before too small a cohort is tried again


@dataclass(frozen=True)
class Patience:
    """How long the server waits, and for how many."""

    deadline: float = 600.0  # seconds that a site has for one request
    wait: float = 600.0  # seconds that too small a cohort is tried for
    minimum: int = 2  # sites without which no sum is taken: a sum of one would show it
    limit: int = LIMIT  # bytes of a message


class Flower(Engine):
    holds_out = True

    def __init__(
        self,
        fed: Federation,
        agreement: Agreement,
        carrier: Carrier,
        roll: Roll,
        *,
        patience: Patience = Patience(),
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__(fed, precision=agreement.precision)
        self.agreement, self.carrier, self.roll, self.patience, self.say = agreement, carrier, roll, patience, say
        self.version, self.stage = NEVER, 0
        self.dropped = 0
        self._expected: dict[Any, Tree] = {}
        self.chain = Chain()
        self.committed = Committed({}, fed.clients)

    # -- verbs -------------------------------------------------------------------------------------------------------
    def open(self, chain: Chain, params: Tree) -> None:
        self.chain = chain
        self.memory = self.committed = Committed(chain.remember(params, len(self.fed.classes)), self.fed.clients)
        self.version, self.stage = Version(-1, -1), 0

    def resample(self, method: Method, slot: Tree) -> None:
        header = {"method": str(method), "stage": self.stage}
        trees = {"msg": method.broadcast(slot)}
        for _ in self._exchange(
            "resample", [(int(c), header, {}) for c in self.fed.eligible], trees, {}, everyone=True
        ):
            pass
        self.stage += 1

    def train(self, state: State, plan: Tensor, chain: Chain, local: Local, turn: Turn) -> Sums:
        if state.round > self.version.round:
            self.version = Version(state.round, -1)
        self._check_lanes(plan, chain)
        total, before = Total(state, self.device, self.dtype), Counter(self.traffic)
        summed = len(plan) == 1 and not chain.having("rows")  # else the server must see each visit
        lanes = [_Lane(state) for _ in range(plan.shape[1])]
        expected = self._visit_like(chain, local, state)
        for wave, clients in enumerate(plan.tolist()):
            here = [lane for lane, client in enumerate(clients) if client >= 0]
            own = chain.address(state.slots, torch.tensor([clients[lane] for lane in here], dtype=torch.int64))
            header = {"method": str(chain), "local": write_local(local), "round": state.round, "wave": wave}
            header["summed"] = summed
            asked = [
                (clients[lane], header, {"own": tree.rows(own, i)} | ({} if summed else lanes[lane].model()))
                for i, lane in enumerate(here)
            ]
            common = {"shared": chain.broadcast(state.slots)} | (lanes[0].model() if summed and lanes else {})
            everyone = state.round < 0
            for i, reply in self._exchange("train", asked, common, expected, everyone=everyone):
                samples = int(reply["numbers"]["samples"])
                if summed:
                    total.part(reply, 1, samples)
                    continue
                client, lane = torch.tensor([clients[here[i]]]), lanes[here[i]]
                lane.visit(int(client), reply)
                total.visits(_stacked(reply), client, samples, chain, turn)
        if not summed and lanes:
            total.lanes(*_together(lanes))
        total.down, total.up = (self.traffic[way] - before[way] for way in ("down", "up"))
        return total.close()

    def ask(
        self,
        question: Question,
        params: Tree,
        buffers: Tree,
        *,
        owner: str = "",
        clients: Tensor | None = None,
        msg: Tree | None = None,
        rows: bool = False,
    ) -> Tree:
        ids = (self.fed.eligible if clients is None else clients).tolist()
        header = {"question": write_question(question), "owner": owner}
        common = {"msg": msg or {}} | ({"params": params, "buffers": buffers} if question.needs_model else {})
        expected = self._answer_like(question, owner, msg or {})
        everyone = rows or self.version.round < 0
        asked: list[_Asked] = [(client, header, {}) for client in ids]
        answers = [reply["answer"] for _, reply in self._exchange("ask", asked, common, expected, everyone=everyone)]
        return tree.stack(answers) if rows else _added(answers)

    def score(self, question: Question, params: Tree, buffers: Tree, split: Split | None) -> Tree:
        if split is not None:
            return super().score(question, params, buffers, split)
        blank = torch.zeros(0, dtype=torch.int64)
        outputs = torch.zeros(0, len(self.fed.classes), dtype=self.dtype)
        expected = {"answer": question.measure(outputs, blank, blank.bool())}
        header = {"question": write_question(question)}
        asked: list[_Asked] = [(int(client), header, {}) for client in self.fed.eligible]
        model = {"params": params, "buffers": buffers}
        return _added([r["answer"] for _, r in self._exchange("score", asked, model, expected)])

    def metrics(self) -> dict[str, float]:
        dropped, self.dropped = self.dropped, 0
        return {"dropped": dropped}

    def deliver(self, params: Tree, buffers: Tree) -> None:
        asked: list[_Asked] = [(int(client), {}, {}) for client in self.fed.eligible]
        model = {"params": params, "buffers": buffers}
        have = [asked[i][0] for i, _ in self._exchange("deliver", asked, model, {}, least=0)]
        self.say(f"{len(have)} of {len(asked)} sites have the final model")

    def moments(self, mean: tuple[float, ...] | None) -> tuple[float, ...]:
        """Over all sites' samples, per channel or feature: the mean, or given that the variance."""
        channels = torch.zeros(self.agreement.shape[0], dtype=torch.float64)
        expected = {"count": torch.zeros(1, dtype=torch.float64), "total": channels}
        common = {} if mean is None else {"mean": torch.tensor(mean, dtype=torch.float64)}
        asked: list[_Asked] = [(int(client), {}, {}) for client in self.fed.eligible]
        sums = _added([reply for _, reply in self._exchange("moments", asked, common, expected, everyone=True)])
        return tuple((sums["total"] / sums["count"]).tolist())

    # -- messages ----------------------------------------------------------------------------------------------------
    def _exchange(
        self,
        kind: str,
        asked: list[_Asked],
        common: Tree,
        expected: Tree,
        *,
        everyone: bool = False,
        least: int | None = None,
    ) -> Iterator[tuple[int, Tree]]:
        """Send requests and give the replies in the order asked, whoever was first, so that sums repeat to the bit.

        Too few of them are waited for; a request that is sent again is answered again, never applied twice.
        """
        self.version = Version(self.version.round, self.version.phase + 1)
        need = len(asked) if everyone else min(len(asked), self.patience.minimum if least is None else least)
        shared = pack(kind, {}, common).arrays
        replies: dict[int, Tree] = {}
        until = time.monotonic() + self.patience.wait
        told: dict[int, str] = {}
        while True:
            # Made anew for every try: a site that has lost its memory is asked to begin again.
            packets = {i: self._request(kind, *one, shared) for i, one in enumerate(asked) if i not in replies}
            faults = self._attempt({i: asked[i][0] for i in packets}, packets, expected, replies)
            for i, reason in faults.items():
                if told.get(i) != reason:
                    self._tell(asked[i][0], reason)
                    told[i] = reason
            if len(replies) >= need:
                break
            if time.monotonic() > until:
                who = "; ".join(f"{self.fed.client_name(asked[i][0])}: {reason}" for i, reason in faults.items())
                raise TrainingError(
                    f"{self._when()}: {len(replies)} of {len(asked)} sites answered within deploy.wait ="
                    f" {self.patience.wait:g} seconds, and {need} are needed ({who})"
                )
            time.sleep(AGAIN)
        self.dropped += len(asked) - len(replies)
        yield from sorted(replies.items())

    def _attempt(
        self, clients: dict[int, int], packets: dict[int, Packet], expected: Tree, replies: dict[int, Tree]
    ) -> dict[int, str]:
        """One try at the given requests: fills in the replies, and gives the reason where there is none."""
        nodes = self.roll.call(self.carrier)
        faults = {i: "it is offline" for i, client in clients.items() if client not in nodes}
        waiting: dict[str, int] = {}
        rest = {i: client for i, client in clients.items() if client in nodes}
        while rest:  # a client that is asked for two visits at once gets them one after another
            once: dict[int, int] = {}
            for i, client in rest.items():
                once.setdefault(client, i)
            pushed = self.carrier.push({nodes[c]: packets[i] for c, i in once.items()}, self.patience.deadline)
            places = {nodes[client]: i for client, i in once.items()}
            waiting |= {message: places[node] for message, node in pushed.items()}
            self.traffic["down"] += sum(packets[i].nbytes for i in once.values())
            rest = {i: client for i, client in rest.items() if i not in once.values()}
        end = time.monotonic() + self.patience.deadline
        while waiting and time.monotonic() < end:
            for message, packet in self.carrier.pull(list(waiting)).items():
                i = waiting.pop(message)
                self.traffic["up"] += packet.nbytes
                try:
                    replies[i] = self._read(packet, clients[i], expected)
                except WireError as error:
                    faults[i] = str(error)
            if waiting:
                time.sleep(POLL)
        late = f"it did not answer within deploy.deadline = {self.patience.deadline:g} seconds"
        return faults | dict.fromkeys(waiting.values(), late)

    def _request(self, kind: str, client: int, header: dict[str, Any], own: Tree, shared: dict[str, Any]) -> Packet:
        base = self.committed.version(client)
        needed = self.committed.needed(client)
        full = {
            "agreement": self.agreement.to_dict(), "version": self.version, "base": base, "needed": needed,
            "stages": self.stage, **header,
        }  # fmt: skip
        # The arrays that all have in common are the same objects in every packet, and travel once.
        return Packet(kind, full, {**shared, **pack(kind, {}, own).arrays})

    def _read(self, packet: Packet, client: int, expected: Tree) -> Tree:
        if packet.kind != "reply":
            if packet.header.get("lost"):
                self.committed.set(client, NEVER)
            raise WireError(str(packet.header.get("reason", f"it sent a {packet.kind!r} instead of a reply")))
        parts = unpack(packet, expected, self.patience.limit)
        if packet.header.get("kept"):
            self.committed.set(client, self.version)
        return parts

    def _tell(self, client: int, reason: str) -> None:
        self.say(f"{self._when()}: {self.fed.client_name(client)} is left out: {reason}")

    def _when(self) -> str:
        return "before the first round" if self.version.round < 0 else f"round {self.version.round + 1}"

    # -- what replies must look like ---------------------------------------------------------------------------------
    def _visit_like(self, chain: Chain, local: Local, state: State) -> Tree:
        """A visit's reply, from a rehearsal with two blank samples."""
        key = (chain, local)
        if key not in self._expected:
            stage = self._rehearsal(chain)
            task = Task(chain, self.fed.network, replace(local, epochs=1), None)
            own, shared = chain.address(state.slots, stage.ids), chain.broadcast(state.slots)
            visit = stage.engine.prepare(task, stage.ids, 0, 0, state.params, shared, own)
            result = stage.engine.visit(task, visit, tree.stack([state.buffers]), stage.ids, shared_start=True)
            self._expected[key] = alone(result, visit.n)
        return self._expected[key]

    def _answer_like(self, question: Question, owner: str, msg: Tree) -> Tree:
        key = (question, owner)
        if key not in self._expected:
            stage = self._rehearsal(self.chain)
            network = self.fed.network
            params, buffers = self.place(network.params), self.place(network.buffers)
            answers, _ = stage.engine.answers(question, params, buffers, stage.ids, owner, msg)
            self._expected[key] = {"answer": tree.rows(answers, 0)}
        return self._expected[key]

    def _rehearsal(self, chain: Chain) -> _Rehearsal:
        x = np.zeros((2, *self.agreement.shape), self.agreement.dtype)
        fed = self.agreement.federation(x, np.arange(2) % len(self.fed.classes), 0)
        engine = Serial(fed, precision=self.agreement.precision)
        engine.open(chain, self.place(fed.network.params))
        return _Rehearsal(engine, torch.tensor([0]))


_Asked = tuple[int, dict[str, Any], Tree]  # a client, its header, and what it alone is sent


@dataclass(frozen=True)
class _Rehearsal:
    engine: Serial
    ids: Tensor


class Committed(Memories):
    """The memories are with the sites; the server knows which version of each it has built on.

    Those at the last two checkpoints it may have to come back to, however long ago they were made.
    """

    def __init__(self, initial: Tree, clients: int) -> None:
        super().__init__(initial, clients, 0)
        self.versions = torch.tensor([NEVER] * clients, dtype=torch.int64).view(-1, 2)
        self.saved: list[Tensor] = []

    def version(self, client: int) -> Version:
        return Version(*self.versions[client].tolist())

    def set(self, client: int, version: Version) -> None:
        self.versions[client] = torch.tensor(version)

    def needed(self, client: int) -> list[Version]:
        return [Version(*versions[client].tolist()) for versions in self.saved]

    def save(self) -> Tree:
        self.saved = [*self.saved[-1:], self.versions.clone()]
        return {"versions": self.versions.clone()}

    def load(self, saved: Tree) -> None:
        self.versions = saved["versions"].clone()
        self.saved = [self.versions.clone()]


class _Lane:
    """Clients one after another: the model as they have moved it so far."""

    def __init__(self, state: State) -> None:
        self.start, self.buffers = state.params, state.buffers
        self.moved = tree.zeros(state.params)
        zero = next(tree.leaves(state.params)).new_zeros(())
        self.weight, self.plain = zero, zero
        self.seen: set[int] = set()

    def model(self) -> Tree:
        return {"params": tree.add(self.start, self.moved) if self.seen else self.start, "buffers": self.buffers}

    def visit(self, client: int, reply: Tree) -> None:
        if client not in self.seen:  # a lane weighs as much as its distinct clients
            self.weight = self.weight + reply["numbers"]["weight"]
            self.plain = self.plain + reply["numbers"]["plain_weight"]
        self.seen.add(client)
        self.moved, self.buffers = tree.add(self.moved, reply["delta"]), reply["buffers"]


def _together(lanes: list[_Lane]) -> tuple[Tree, Tensor, Tensor, Tree]:
    return (
        tree.stack([lane.moved for lane in lanes]),
        torch.stack([lane.weight for lane in lanes]),
        torch.stack([lane.plain for lane in lanes]),
        tree.stack([lane.buffers for lane in lanes]),
    )


def _stacked(reply: Tree) -> Result:
    """One visit as a stack of one. Its memory has stayed where it was made, and it was finite when it was read."""
    numbers = reply["numbers"]
    weight, plain = numbers["weight"][None], numbers["plain_weight"][None]
    delta, buffers, upload = (tree.stack([reply[part]]) for part in ("delta", "buffers", "upload"))
    return Result(delta, weight, plain, buffers, upload, {}, torch.ones(1, dtype=torch.bool))


def _added(answers: list[Tree]) -> Tree:
    total = answers[0]
    for answer in answers[1:]:
        total = tree.add(total, answer)
    return total
