"""The engine for real sites: it has the verbs of every engine, and the sites, which hold the data, carry them out.

This module is the server half; the client half is `equipoise.deploy.site`. One wave of visits is one exchange of
messages. To know what a reply must look like, the server rehearses the request with two blank samples; it then checks
the names, shapes, types and size of a reply, and that its values are finite. A site that is late, offline or sends a
wrong reply is left out of the round; the server says which site it was and why, and counts it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.chain import Chain
from equipoise.core.client import Task
from equipoise.core.errors import ConfigError, TrainingError
from equipoise.core.federation import Federation, Split
from equipoise.core.local import Local
from equipoise.core.method import Method
from equipoise.core.questions import Question
from equipoise.core.sums import Result, Sums, Total
from equipoise.core.tree import Tree
from equipoise.deploy.agreement import Agreement
from equipoise.deploy.committed import Committed
from equipoise.deploy.packets import pack, unpack, write_local, write_question
from equipoise.deploy.roll import Roll
from equipoise.deploy.site import single_visit
from equipoise.deploy.transport.carrier import Carrier
from equipoise.deploy.transport.wire import LIMIT, Packet, WireError
from equipoise.deploy.versions import NEVER, Version
from equipoise.engines import Serial, Simulator, stacked_engine

if TYPE_CHECKING:
    from equipoise.core.turn import State, Turn

POLL = 0.1  # seconds between two checks for replies
RETRY = 2.0  # seconds until sites that did not answer are asked again, where they are needed


@dataclass(frozen=True)
class Patience:
    """How long the server waits for sites, and how many it needs."""

    deadline: float = 600.0  # seconds that a site has for one request
    wait: float = 600.0  # seconds for which the server asks again while too few sites have answered
    minimum: int = 2  # sites that a sum needs: a sum over one site would reveal that site's values
    limit: int = LIMIT  # the most bytes that a reply may have


class Flower(Simulator):
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
        # With several waves, or a method that looks at single clients, the server must see each visit on its own.
        summed = len(plan) == 1 and not chain.having("rows")
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
            total.lanes(*_stack_lanes(lanes))
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
        return tree.stack(answers) if rows else _sum(answers)

    def trial(
        self,
        question: Question,
        params: Tree,
        buffers: Tree,
        chain: Chain,
        *,
        clients: Tensor | None = None,
        rows: bool = False,
    ) -> Tree:
        if rows:
            raise ConfigError(
                "rows = True: a site tries the model on its own samples for a sum; expected rows = False"
            )
        ids = (self.fed.eligible if clients is None else clients).tolist()
        asked: list[_Asked] = [(client, {"question": write_question(question)}, {}) for client in ids]
        model = {"params": params, "buffers": buffers}
        return _sum([r["answer"] for _, r in self._exchange("trial", asked, model, self._trial_like(question))])

    @property
    def tried_on(self) -> str:
        return "held out" if self.agreement.held_out else "training"

    def score(self, question: Question, params: Tree, buffers: Tree, split: Split | None) -> Tree:
        if split is not None:
            return super().score(question, params, buffers, split)
        blank = torch.zeros(0, dtype=torch.int64)
        outputs = torch.zeros(0, len(self.fed.classes), dtype=self.dtype)
        expected = {"answer": question.measure(outputs, blank, blank.bool())}
        header = {"question": write_question(question)}
        asked: list[_Asked] = [(int(client), header, {}) for client in self.fed.eligible]
        model = {"params": params, "buffers": buffers}
        return _sum([r["answer"] for _, r in self._exchange("score", asked, model, expected)])

    def metrics(self) -> dict[str, float]:
        dropped, self.dropped = self.dropped, 0
        return {"dropped": dropped}

    def deliver(self, params: Tree, buffers: Tree) -> None:
        asked: list[_Asked] = [(int(client), {}, {}) for client in self.fed.eligible]
        model = {"params": params, "buffers": buffers}
        have = [asked[i][0] for i, _ in self._exchange("deliver", asked, model, {}, least=0)]
        self.say(f"{len(have)} of {len(asked)} sites have the final model")

    def moments(self, mean: tuple[float, ...] | None) -> tuple[float, ...]:
        """The mean over the samples of all sites, per channel or feature; given the mean, the variance."""
        channels = torch.zeros(self.agreement.shape[0], dtype=torch.float64)
        expected = {"count": torch.zeros(1, dtype=torch.float64), "total": channels}
        common = {} if mean is None else {"mean": torch.tensor(mean, dtype=torch.float64)}
        asked: list[_Asked] = [(int(client), {}, {}) for client in self.fed.eligible]
        sums = _sum([reply for _, reply in self._exchange("moments", asked, common, expected, everyone=True)])
        return tuple((sums["total"] / sums["count"]).tolist())

    def _like(self, fed: Federation) -> Simulator:
        return stacked_engine()(fed, precision=self.precision)

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
        """Send requests and yield the replies in the order of the requests, so that sums repeat to the bit.

        While there are fewer replies than needed, the server asks again. A site answers a repeated request once more
        and never applies it twice. Asking again does not help with sites that refuse the code of the run: if there
        are too few others, the run stops at once.
        """
        self.version = Version(self.version.round, self.version.phase + 1)
        need = len(asked) if everyone else min(len(asked), self.patience.minimum if least is None else least)
        shared = pack(kind, {}, common).arrays
        replies: dict[int, Tree] = {}
        until = time.monotonic() + self.patience.wait
        told: dict[int, str] = {}
        while True:
            # Each try makes new packets: a site that has lost its memories is told to begin without them.
            packets = {i: self._request(kind, *one, shared) for i, one in enumerate(asked) if i not in replies}
            faults = self._attempt({i: asked[i][0] for i in packets}, packets, expected, replies)
            refused = {i: fault.reason for i, fault in faults.items() if fault.final}
            if len(asked) - len(refused) < need:
                raise TrainingError(self._refusal([(asked[i][0], reason) for i, reason in refused.items()]))
            for i, fault in faults.items():
                if told.get(i) != fault.reason:
                    self._tell(asked[i][0], fault.reason)
                    told[i] = fault.reason
            if len(replies) >= need:
                break
            if time.monotonic() > until:
                who = "; ".join(f"{self.fed.client_name(asked[i][0])}: {fault.reason}" for i, fault in faults.items())
                raise TrainingError(
                    f"{self._when()}: {len(replies)} of {len(asked)} sites answered within deploy.wait ="
                    f" {self.patience.wait:g} seconds, and {need} are needed ({who})"
                )
            time.sleep(RETRY)
        self.dropped += len(asked) - len(replies)
        yield from sorted(replies.items())

    def _attempt(
        self, clients: dict[int, int], packets: dict[int, Packet], expected: Tree, replies: dict[int, Tree]
    ) -> dict[int, _Fault]:
        """Try the given requests once: add the replies to `replies`, and return why the others have none."""
        nodes = self.roll.call(self.carrier)
        faults = {i: _Fault("it is offline") for i, client in clients.items() if client not in nodes}
        waiting: dict[str, int] = {}
        rest = {i: client for i, client in clients.items() if client in nodes}
        while rest:  # a push holds one packet for a node, so several requests for one client need several pushes
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
                    final = packet.kind == "failure" and packet.header.get("final") is True
                    faults[i] = _Fault(str(error), final)
            if waiting:
                time.sleep(POLL)
        late = _Fault(f"it did not answer within deploy.deadline = {self.patience.deadline:g} seconds")
        return faults | dict.fromkeys(waiting.values(), late)

    def _request(self, kind: str, client: int, header: dict[str, Any], own: Tree, shared: dict[str, Any]) -> Packet:
        base = self.committed.version(client)
        needed = self.committed.needed(client)
        full = {
            "agreement": self.agreement.to_dict(), "version": self.version, "base": base, "needed": needed,
            "stages": self.stage, **header,
        }  # fmt: skip
        # The arrays in `shared` are the same objects in every packet, so that they are sent once.
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

    def _refusal(self, refused: list[tuple[int, str]]) -> str:
        """One sentence that says which sites refuse the code of the run, and why."""
        sites: dict[str, list[str]] = {}
        for client, reason in refused:
            sites.setdefault(reason, []).append(self.fed.client_name(client))
        who = [f"{', '.join(dict.fromkeys(names))} refused to take part: {reason}" for reason, names in sites.items()]
        return f"{self._when()}: {'; '.join(who)}"

    def _when(self) -> str:
        return "before the first round" if self.version.round < 0 else f"round {self.version.round + 1}"

    # -- what replies must look like ---------------------------------------------------------------------------------
    def _visit_like(self, chain: Chain, local: Local, state: State) -> Tree:
        """A tree like the reply to a request to train, from a rehearsal with two blank samples."""
        key = (chain, local)
        if key not in self._expected:
            stage = self._rehearsal(chain)
            task = Task(chain, self.fed.network, replace(local, epochs=1), None)
            own, shared = chain.address(state.slots, stage.ids), chain.broadcast(state.slots)
            visit = stage.engine.prepare(task, stage.ids, 0, 0, state.params, shared, own)
            result = stage.engine.visit(task, visit, tree.stack([state.buffers]), stage.ids, shared_start=True)
            self._expected[key] = single_visit(result, visit.n)
        return self._expected[key]

    def _answer_like(self, question: Question, owner: str, msg: Tree) -> Tree:
        """A tree like the reply to a question, from a rehearsal with two blank samples."""
        key = (question, owner)
        if key not in self._expected:
            stage = self._rehearsal(self.chain)
            network = self.fed.network
            params, buffers = self.place(network.params), self.place(network.buffers)
            answers, _ = stage.engine.answers(question, params, buffers, stage.ids, owner, msg)
            self._expected[key] = {"answer": tree.rows(answers, 0)}
        return self._expected[key]

    def _trial_like(self, question: Question) -> Tree:
        """A tree like the reply to a trial, from a rehearsal with two blank samples."""
        key = ("trial", question)
        if key not in self._expected:
            network, engine = self.fed.network, self._rehearsal(self.chain).engine
            params, buffers = self.place(network.params), self.place(network.buffers)
            self._expected[key] = {"answer": engine.trial(question, params, buffers, self.chain)}
        return self._expected[key]

    def _rehearsal(self, chain: Chain) -> _Rehearsal:
        x = np.zeros((2, *self.agreement.shape), self.agreement.dtype)
        fed = self.agreement.federation(x, np.arange(2) % len(self.fed.classes), 0)
        engine = Serial(fed, precision=self.agreement.precision)
        engine.open(chain, self.place(fed.network.params))
        return _Rehearsal(engine, torch.tensor([0]))


_Asked = tuple[int, dict[str, Any], Tree]  # a client, the header of its request, and the trees for this client alone


class _Fault(NamedTuple):
    """Why a request has no reply. After a `final` fault the site would give the same answer again."""

    reason: str
    final: bool = False


@dataclass(frozen=True)
class _Rehearsal:
    engine: Serial
    ids: Tensor


class _Lane:
    """A lane of clients that train one after another, and the model as they have changed it so far."""

    def __init__(self, state: State) -> None:
        self.start, self.buffers = state.params, state.buffers
        self.moved = tree.zeros(state.params)
        zero = next(tree.leaves(state.params)).new_zeros(())
        self.weight, self.plain = zero, zero
        self.seen: set[int] = set()

    def model(self) -> Tree:
        return {"params": tree.add(self.start, self.moved) if self.seen else self.start, "buffers": self.buffers}

    def visit(self, client: int, reply: Tree) -> None:
        if client not in self.seen:  # the weight of a lane counts each of its clients once
            self.weight = self.weight + reply["numbers"]["weight"]
            self.plain = self.plain + reply["numbers"]["plain_weight"]
        self.seen.add(client)
        self.moved, self.buffers = tree.add(self.moved, reply["delta"]), reply["buffers"]


def _stack_lanes(lanes: list[_Lane]) -> tuple[Tree, Tensor, Tensor, Tree]:
    return (
        tree.stack([lane.moved for lane in lanes]),
        torch.stack([lane.weight for lane in lanes]),
        torch.stack([lane.plain for lane in lanes]),
        tree.stack([lane.buffers for lane in lanes]),
    )


def _stacked(reply: Tree) -> Result:
    """One visit as a stack of one row. The memory is left out, as it stays at the site; `_read` has checked that all
    values are finite."""
    numbers = reply["numbers"]
    weight, plain = numbers["weight"][None], numbers["plain_weight"][None]
    delta, buffers, upload = (tree.stack([reply[part]]) for part in ("delta", "buffers", "upload"))
    return Result(delta, weight, plain, buffers, upload, {}, torch.ones(1, dtype=torch.bool))


def _sum(answers: list[Tree]) -> Tree:
    total = answers[0]
    for answer in answers[1:]:
        total = tree.add(total, answer)
    return total
