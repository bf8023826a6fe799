"""What simulating engines have in common: lanes and waves, the sums, questions, and the clients' memories.

A simulator holds the samples and memories of all clients on this machine. A subclass only says how a few clients
train: `visit`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from equipoise.core import random, tree
from equipoise.core.client import Task, Trial, Visit, personal
from equipoise.core.errors import ConfigError, TrainingError
from equipoise.core.federation import Federation, Split
from equipoise.core.local import Local
from equipoise.core.network import Context
from equipoise.core.questions import Question
from equipoise.core.sums import Part, Result, Sums, Total, summed
from equipoise.core.tree import Tree
from equipoise.engines.cohort_cache import CohortCache
from equipoise.engines.memory import GIB, Memories
from equipoise.engines.precision import arithmetic, checked
from equipoise.engines.store import Store
from equipoise.engines.transfer import shared_copy, to_device

if TYPE_CHECKING:
    from equipoise.core.chain import Chain
    from equipoise.core.method import Method
    from equipoise.core.turn import State, Turn


class Simulator:
    """All clients of a federation on this machine."""

    holds_out = False  # the clients hold no samples apart: test and validation sets are the federation's

    def __init__(
        self, fed: Federation, *, device: str = "cpu", precision: str = "float32", memory_gib: float = 8.0
    ) -> None:
        self.fed, self.precision = fed, precision
        self.device, self.dtype = checked(device, precision)
        self.autocast = self.device.type if precision == "bf16" else None
        self.memory_limit = int(memory_gib * GIB)
        self.x, self.y = shared_copy(fed.x, self.device), shared_copy(fed.y, self.device)
        self.offsets, self.indices = fed.offsets, fed.indices.to(self.device)
        self.copies: Tensor | None = None
        self.scale = fed.scale(self.device, self.dtype)
        self.cohorts = CohortCache()  # emptied when clients get other samples
        self.held: WeakKeyDictionary[Split, tuple[Tensor, Tensor]] = WeakKeyDictionary()  # on the device
        self.unchecked: list[tuple[int, Tensor, Tensor]] = []  # round, clients, whether each is finite
        self.traffic: Counter[str] = Counter()  # bytes up and down
        self.memory = Memories({}, fed.clients, self.memory_limit)
        self.server_side: Simulator | None = None

    def place(self, values: Tree) -> Tree:
        """The tree on this engine's device, in its precision."""
        return tree.map(
            lambda leaf: leaf.to(self.device, self.dtype if leaf.is_floating_point() else leaf.dtype), values
        )

    # -- verbs -------------------------------------------------------------------------------------------------------
    def open(self, chain: Chain, params: Tree) -> None:
        initial = chain.remember(params, len(self.fed.classes))
        self.memory = Memories(initial, self.fed.clients, self.memory_limit)
        self.offsets, self.indices, self.copies = self.fed.offsets, self.fed.indices.to(self.device), None
        self.cohorts.forget()
        self.unchecked = []

    def resample(self, method: Method, slot: Tree) -> None:
        """Let every client choose, once, which samples it trains on."""
        self.resample_with(method, tree.to(method.broadcast(slot), "cpu"))

    def resample_with(self, method: Method, msg: Tree) -> None:
        """The same, given the message that the method sends."""
        indices, copies, sizes = [], [], []
        for client in range(self.fed.clients):
            rows = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
            mine = self.indices[rows].long().cpu()
            old = torch.zeros_like(mine) if self.copies is None else self.copies[rows].cpu()
            key = random.bits(self.fed.seed, random.RESAMPLE, client)
            positions, new = torch.arange(0), torch.arange(0)
            if len(mine):
                positions, new = method.resample(self.fed.y[mine], msg, key)
                if len(positions) == 0:
                    who = self.fed.client_name(client)
                    raise ConfigError(
                        f"method: {method.name} leaves client {who} no sample of its {len(mine)} to train on"
                    )
            indices.append(mine[positions])
            copies.append(torch.where(new > 0, new, old[positions]))
            sizes.append(len(positions))
        self.indices, self.copies = torch.cat(indices).to(self.device), torch.cat(copies).to(self.device)
        self.offsets = torch.tensor([0, *sizes]).cumsum(0)
        self.cohorts.forget()

    def train(self, state: State, plan: Tensor, chain: Chain, local: Local, turn: Turn) -> Sums:
        task = Task(chain, self.fed.network, local, self.autocast)
        total = Total(state, self.device, self.dtype)
        shared = chain.broadcast(state.slots)
        self._check_lanes(plan, chain)
        for lanes in self._blocks(plan, local):
            if len(plan) == 1 and not chain.having("rows"):
                self._train_summed(task, state, plan[0, lanes], shared, total)
            else:
                self._train_lanes(task, state, plan[:, lanes], shared, total, turn)
        self.unchecked += [(state.round, ids, finite) for ids, finite in total.finite]
        self.traffic.update(down=total.down, up=total.up)
        if self.device.type == "cpu" or len(self.unchecked) > 256:
            self.settle()
        return total.close()

    def moved(self) -> tuple[int, int]:
        """Bytes that would have gone down to the clients and up from them over a network since the last call: for
        training, for questions, and for what methods do before the first round."""
        down, up = self.traffic["down"], self.traffic["up"]
        self.traffic.clear()
        return down, up

    def settle(self) -> None:
        """Refuse to go on from a training that turned into not-a-number. On CUDA the check waits for the device, so
        it is put off until something else waits anyway."""
        unchecked, self.unchecked = self.unchecked, []
        for round, ids, finite in unchecked:
            if not bool(finite.all()):
                who = self.fed.client_name(int(ids[(~finite).nonzero()[0, 0].cpu()]))
                raise TrainingError(
                    f"round {round + 1}: the training of client {who} turned into not-a-number; the last good"
                    " checkpoint is kept; try a smaller local.lr, or local.clip"
                )

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
        """The sum of the clients' answers; with `rows`, one row per client in the order given."""
        ids = self.fed.eligible if clients is None else clients
        sent = (params, buffers, msg or {}) if question.needs_model else (msg or {},)

        def answer(some: Tensor) -> Tree:
            answers, memory = self.answers(question, params, buffers, some, owner, msg or {})
            self.memory.put(some, memory)
            return answers

        return self._gather(answer, ids, self.sizes(ids), sum(map(tree.nbytes, sent)), rows)

    @torch.no_grad()
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
        """The clients' answers about the model as each uses it itself, on the samples that it holds out or, where no
        client holds out any, on its training samples; memories stay as they are."""
        fed, store, offsets = self.fed, self.store, self.offsets
        ids = fed.tried if clients is None else clients[torch.isin(clients, fed.tried)]
        if fed.held_offsets is not None and fed.held_indices is not None:
            offsets = fed.held_offsets
            store = store._replace(indices=fed.held_indices.to(self.device), copies=None)
        sizes = offsets[ids + 1] - offsets[ids]

        def answer(some: Tensor) -> Tree:
            n = offsets[some + 1] - offsets[some]
            first = to_device(offsets[some], self.device)
            x, y, mask, _ = store.all_data(first, to_device(n, self.device), int(n.max()))
            return self.tried(question, params, buffers, chain, some, x, y, mask)

        return self._gather(answer, ids, sizes, tree.nbytes(params) + tree.nbytes(buffers), rows)

    def score(self, question: Question, params: Tree, buffers: Tree, split: Split | None) -> Tree:
        """The totals of a question over samples that are held apart from training."""
        assert split is not None, "a simulation holds its own samples apart"
        if split not in self.held:
            self.held[split] = shared_copy(split.x, self.device), shared_copy(split.y, self.device)
        x, y = self.held[split]
        outputs = self.outputs(params, buffers, x)
        return question.measure(outputs, y, torch.ones_like(y, dtype=torch.bool))

    def deliver(self, params: Tree, buffers: Tree) -> None:
        """Give the clients the final model."""

    def metrics(self) -> dict[str, float]:
        """Numbers of the engine worth a line in the log of the run."""
        return {}

    @property
    def tried_on(self) -> str:
        return "training" if self.fed.held_indices is None else "held out"

    @property
    def width(self) -> int:
        """How many clients train at once."""
        return 1

    def inside(self, make: Callable[[], Federation]) -> Simulator:
        """An engine of the same kind within the server, over samples of the server's own; made once and kept, so that
        it finds its programs again."""
        if self.server_side is None:
            self.server_side = self._like(make())
        return self.server_side

    def _like(self, fed: Federation) -> Simulator:
        return type(self)(fed, device=str(self.device), precision=self.precision)

    # -- for subclasses ----------------------------------------------------------------------------------------------
    def visit(self, task: Task, visit: Visit, buffers: Tree, ids: Tensor, shared_start: bool) -> Result:
        """Train some clients once, each from buffers of its own; `shared_start`: all from the same parameters."""
        raise NotImplementedError

    def visit_summed(self, task: Task, visit: Visit, buffers: Tree, ids: Tensor) -> Part:
        """The sums over visits of clients that all start from one model."""
        result = self.visit(task, visit, tree.repeat(buffers, len(ids)), ids, shared_start=True)
        return Part(summed(result, buffers), result.memory, result.finite)

    def sizes(self, ids: Tensor) -> Tensor:
        sizes: Tensor = self.cohorts.of(ids, "sizes", find=lambda: self.offsets[ids + 1] - self.offsets[ids])
        return sizes

    def batches(self, local: Local, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The batch size of each client, and its number of steps in a visit."""
        found: tuple[Tensor, Tensor] = self.cohorts.of(ids, local, find=lambda: local.batches(self.sizes(ids)))
        return found

    def samples(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The rows, in the store, of positions within each client's own samples."""
        first = self.offsets[ids].to(positions.device)
        return first.view(-1, *[1] * (positions.dim() - 1)) + positions

    @property
    def store(self) -> Store:
        return Store(self.x, self.y, self.indices, self.copies, *self.scale)

    def inputs(self, x: Tensor) -> Tensor:
        """Raw samples as the model takes them."""
        return self.store.inputs(x)

    # -- how it is done ----------------------------------------------------------------------------------------------
    def _gather(self, answer: Callable[[Tensor], Tree], ids: Tensor, sizes: Tensor, down: int, rows: bool) -> Tree:
        """The clients' answers, asked for in chunks of clients of similar size: their sum or, with `rows`, one row
        per client in the order given. `down` bytes go to each client."""
        by_size = sizes.argsort(descending=True, stable=True)
        kept: list[Tree] = []
        total: Tree = {}
        for part in _chunks(by_size, sizes, most=8192 if self.device.type == "cpu" else 1 << 17):
            answers = answer(ids[part])
            self.traffic.update(down=len(part) * down, up=tree.nbytes(answers))
            if rows:
                kept.append(tree.map(torch.clone, answers))  # a recorded program overwrites its outputs
            else:
                some = tree.map(lambda leaf: leaf.sum(0), answers)
                total = tree.add(total, some) if total else some
        if not rows:
            return total
        back = by_size.argsort().to(self.device)
        return tree.map(lambda *parts: torch.cat(parts)[back], *kept) if kept else {}

    def _check_lanes(self, plan: Tensor, chain: Chain) -> None:
        """Refuse a client that keeps a memory and stands in two lanes: lanes train side by side, and one of its two
        changes of the memory would be lost."""
        keeping = [m.name for m in chain if m.name in self.memory.methods and not self.memory.methods[m.name].empty]
        if len(plan) == 1 and len(torch.unique(plan)) == plan.shape[1]:
            return
        seen = plan >= 0
        if not keeping or not bool(seen.any()):
            return
        lanes = plan.shape[1]
        pairs = torch.unique((plan * lanes + torch.arange(lanes))[seen])
        clients, times = torch.unique(pairs // lanes, return_counts=True)
        if (most := int(times.max())) > 1:
            who = self.fed.client_name(int(clients[times.argmax()]))
            raise ConfigError(
                f"method: client {who} trains {most} times at once in a round, where {keeping[0]} keeps one memory;"
                f" leave out {keeping[0]}, or draw a client only once"
            )

    def _blocks(self, plan: Tensor, local: Local) -> Iterator[Tensor]:
        """Lanes that train together: of similar batch size and number of steps, so that short ones do not wait for
        long ones."""
        seen, width = plan >= 0, self.width
        n = torch.where(seen, self.sizes(plan.clamp(min=0)), 0)
        if 0 < int(n.min()) == int(n.max()):  # all clients are equal: no need to sort
            for low in range(0, plan.shape[1], width):
                yield torch.arange(low, min(low + width, plan.shape[1]))
            return
        batch, steps = local.batches(n)
        size: list[int] = torch.where(seen, torch.minimum(batch, n), 0).amax(0).tolist()
        work: list[int] = torch.where(seen, steps, 0).sum(0).tolist()
        lanes = [lane for lane, used in enumerate(seen.any(0).tolist()) if used]
        block: list[int] = []
        # On a GPU a few tiny clients in a large block cost nothing, and a block of their own does.
        apart = self.device.type == "cpu" or local.steps_per_epoch is not None or local.batch == "full"
        for lane in sorted(lanes, key=lambda lane: (-size[lane], -work[lane], lane)):
            if block and (len(block) == width or (apart and 2 * size[lane] < size[block[0]])):
                yield torch.tensor(block)
                block = []
            block.append(lane)
        if block:
            yield torch.tensor(block)

    def prepare(self, task: Task, ids: Tensor, round: int, wave: int, start: Tree, shared: Tree, own: Tree) -> Visit:
        """What each of these clients has at the beginning of its visit."""
        n, steps, device = self.sizes(ids), self.batches(task.local, ids)[1], self.device
        key = random.bits(self.fed.seed, random.TRAIN, round, wave, ids)
        numbers = to_device(torch.stack([n, steps, key]), device)  # one copy to the device instead of three
        return Visit(
            start=start,
            shared=shared,
            own=tree.to(own, device),
            memory=self.memory.get(ids, (m.name for m in task.chain)),
            note={},
            n=numbers[0],
            steps=numbers[1],
            weight=torch.ones(len(ids), dtype=self.dtype, device=device),
            key=numbers[2],
            lr=torch.full((), task.local.rate(round), dtype=self.dtype, device=device),
        )

    def _train_summed(self, task: Task, state: State, ids: Tensor, shared: Tree, total: Total) -> None:
        """One wave: all clients start from the global model, and only their sums are needed."""
        own = task.chain.address(state.slots, ids)
        visit = self.prepare(task, ids, state.round, 0, state.params, shared, own)
        part = self.visit_summed(task, visit, state.buffers, ids)
        self.memory.put(ids, part.memory)
        total.part(part.sums, len(ids), int(self.sizes(ids).sum()))
        total.finite.append((ids, part.finite.clone()))
        total.moved_bytes(visit, part.sums["upload"], len(ids))

    def _train_lanes(self, task: Task, state: State, plan: Tensor, shared: Tree, total: Total, turn: Turn) -> None:
        """Several waves: in each lane, a client starts from where the one before it ended."""
        lanes = plan.shape[1]
        moved = tree.zeros(tree.repeat(state.params, lanes))
        buffers = tree.repeat(state.buffers, lanes)
        weight = torch.zeros(lanes, dtype=self.dtype, device=self.device)
        plain = torch.zeros_like(weight)
        for wave, clients in enumerate(plan):
            here = (clients >= 0).nonzero()[:, 0]
            if len(here) == 0:
                continue
            ids, at = clients[here], to_device(here, self.device)
            start = tree.add(state.params, tree.rows(moved, at))
            own = task.chain.address(state.slots, ids)
            visit = self.prepare(task, ids, state.round, wave, start, shared, own)
            result = self.visit(task, visit, tree.rows(buffers, at), ids, shared_start=False)
            self.memory.put(ids, result.memory)
            first = to_device(~(plan[:wave, here] == ids).any(0), self.device)
            weight = weight.index_add(0, at, torch.where(first, result.weight, 0))
            plain = plain.index_add(0, at, torch.where(first, result.plain_weight, 0))
            moved = tree.add_rows(moved, at, result.delta)
            buffers = tree.set_rows(buffers, at, result.buffers)
            total.visits(result, ids, int(self.sizes(ids).sum()), task.chain, turn)
            total.moved_bytes(visit, tree.rows(result.upload, 0), len(ids))
        total.lanes(moved, weight, plain, buffers)

    def answers(
        self, question: Question, params: Tree, buffers: Tree, ids: Tensor, owner: str, msg: Tree
    ) -> tuple[Tree, Tree]:
        """The answers of some clients, one row each, and the new memories of the asking method."""
        n = self.sizes(ids)
        inputs = {
            "params": params if question.needs_model else {},
            "buffers": buffers if question.needs_model else {},
            "msg": msg,
            "own": self.memory.methods[owner].get(ids) if owner else {},
            "n": to_device(n, self.device),
            "first": to_device(self.offsets[ids], self.device),
        }
        answers, new = self.reply(question, inputs, int(n.max()))
        return answers, {owner: new} if owner else {}

    def tried(
        self,
        question: Question,
        params: Tree,
        buffers: Tree,
        chain: Chain,
        ids: Tensor,
        x: Tensor,
        y: Tensor,
        mask: Tensor,
    ) -> Tree:
        """The answers of some clients, one row each, about the model as they use it themselves for these samples."""
        own = bool(chain.having("personal"))
        seen = self._forward(
            params, buffers, x.flatten(0, 1), question.needs_features or (own and chain.reads_features)
        )
        logits, *features = (values.view(*y.shape, -1) for values in seen)
        if own:
            task = Task(chain, self.fed.network, chain.local(self.fed.local), self.autocast)
            n, memory = to_device(self.sizes(ids), self.device), self.memory.get(ids, (m.name for m in chain))
            trial = Trial(params, buffers, memory, n, self.inputs(x), mask, *features)
            axes: Any = Trial(None, None, 0, 0, 0, 0, *[0 for _ in features])  # type: ignore[arg-type]
            with arithmetic(self.device, self.precision):
                logits = torch.vmap(partial(personal, task), in_dims=(axes, 0))(trial, logits)
        totals = torch.vmap(question.measure)(logits, y, mask, *(features if question.needs_features else ()))
        answers, _ = torch.vmap(question.answer, in_dims=(0, 0, None, None))(totals, mask.sum(1), {}, {})
        return answers

    def reply(self, question: Question, inputs: Tree, most: int) -> tuple[Tree, Tree]:
        """The answers of some clients and their new memories; the largest client has `most` samples."""
        totals: Tree = {}
        if question.needs_data:
            x, y, mask, _ = self.store.all_data(inputs["first"], inputs["n"], most)
            seen = [y.flatten()[:, None]]
            if question.needs_model:
                seen = self._forward(inputs["params"], inputs["buffers"], x.flatten(0, 1), question.needs_features)
            outputs, *features = (values.view(*y.shape, -1) for values in seen)
            totals = torch.vmap(question.measure)(outputs, y, mask, *features)
        answer = torch.vmap(question.answer, in_dims=(0, 0, None, 0))
        answers, new = answer(totals, inputs["n"], inputs["msg"], inputs["own"])
        return answers, new

    def outputs(self, params: Tree, buffers: Tree, x: Tensor, chunk: int = 4096) -> Tensor:
        """The model's outputs for raw samples, in evaluation mode."""
        return self._forward(params, buffers, x, chunk=chunk)[0]

    @torch.no_grad()
    def _forward(
        self, params: Tree, buffers: Tree, x: Tensor, features: bool = False, chunk: int = 4096
    ) -> list[Tensor]:
        """The model's outputs for raw samples, in evaluation mode, and if asked for the features its head reads."""
        parts, network = [], self.fed.network
        key = torch.zeros((), dtype=torch.int64, device=self.device)
        for low in range(0, len(x), chunk):
            some = x[low : low + chunk]
            mask = torch.ones(len(some), dtype=torch.bool, device=self.device)
            fast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast is not None)
            with fast, arithmetic(self.device, self.precision):
                model = params, buffers, self.inputs(some.to(self.device)), Context(mask, key, False)
                found = network.split(*model)[:2] if features else network(*model)[:1]
            parts.append([values.to(self.dtype) for values in found])
        return [torch.cat(chunks) for chunks in zip(*parts, strict=True)]


def _chunks(by_size: Tensor, sizes: Tensor, most: int) -> Iterator[Tensor]:
    """Clients in falling order of size, in chunks of at most `most` padded samples."""
    at = 0
    while at < len(by_size):
        step = max(1, most // max(1, int(sizes[by_size[at]])))
        yield by_size[at : at + step]
        at += step
