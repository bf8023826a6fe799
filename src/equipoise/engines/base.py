"""What the engines have in common: lanes and waves, the sums, questions, and the clients' memories.

An engine has three verbs: `open` (make memories, resample the data), `train` (a plan of visits, answered by sums)
and `ask` (a question, answered by a sum). A simulating engine only says how a few clients train: `visit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from equipoise import random, tree
from equipoise.engines.memory import GIB, Memories
from equipoise.engines.precision import arithmetic, checked
from equipoise.errors import ConfigError, TrainingError
from equipoise.local import Data, Local, Task, Visit
from equipoise.network import Context
from equipoise.questions import Question
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.federation import Federation
    from equipoise.method import Chain, Method
    from equipoise.server import State, Turn


class Sums(NamedTuple):
    """All that the server learns from the visits of a round."""

    delta: Tree  # of weight * delta
    weight: Tensor
    buffers: Tree  # float buffers: of plain weight * change; integer buffers: the largest
    plain_weight: Tensor
    uploads: Tree  # by method
    clients: int
    samples: int
    rows: Tree  # by method, only for methods that look at single clients: {"ids", "values"}
    down: int  # bytes
    up: int

    def of(self, name: str) -> Sums:
        """The part of one method."""
        return self._replace(uploads=self.uploads.get(name, {}), rows=self.rows.get(name, {}))

    def mean_buffers(self, before: Tree) -> Tree:
        if not before or self.clients == 0:
            return before
        return tree.map(
            lambda old, total: old + total / self.plain_weight.to(old.dtype) if old.is_floating_point() else total,
            before,
            self.buffers,
        )


class Result(NamedTuple):
    """What comes back from visits, one row per client."""

    delta: Tree
    weight: Tensor
    plain_weight: Tensor
    buffers: Tree
    upload: Tree
    memory: Tree
    finite: Tensor


def take(parts: Any, index: Tensor | slice | int, dims: Any = None) -> Any:
    """The given clients of a named tuple of stacked trees and tensors; `dims` has None where a part is shared."""
    picked = [
        part if dim is None else tree.rows(part, index) if isinstance(part, dict) else part[index]
        for part, dim in zip(parts, dims or [0] * len(parts), strict=True)
    ]
    return type(parts)(*picked)


def client_axes(shared_start: bool) -> Any:
    """Which parts of a visit have a client axis (0) and which are shared (None), as vmap wants it told."""
    has: Any = 0
    shared: Any = None
    start = shared if shared_start else has
    return Visit(start, shared, has, has, has, has, has, has, has, shared)


class Engine:
    """A simulation of the clients on this machine. Subclasses say how some of them train: `visit`."""

    width = 1  # how many clients train at once

    def __init__(
        self, fed: Federation, *, device: str = "cpu", precision: str = "float32", memory_gib: float = 8.0
    ) -> None:
        self.fed, self.precision = fed, precision
        self.device, self.dtype = checked(device, precision)
        self.autocast = self.device.type if precision == "bf16" else None
        self.memory_limit = int(memory_gib * GIB)
        self.x, self.y = fed.x.to(self.device), fed.y.to(self.device)
        self.offsets, self.indices = fed.offsets, fed.indices.to(self.device)
        self.copies: Tensor | None = None
        self.features = fed.features(self.device, self.dtype)
        self.memory = Memories({}, fed.clients, self.memory_limit)

    def place(self, values: Tree) -> Tree:
        """A tree on this engine's device, in its precision."""
        return tree.map(
            lambda leaf: leaf.to(self.device, self.dtype if leaf.is_floating_point() else leaf.dtype), values
        )

    # -- verbs -------------------------------------------------------------------------------------------------------
    def open(self, chain: Chain, params: Tree) -> None:
        initial = chain.remember(params, len(self.fed.classes))
        self.memory = Memories(initial, self.fed.clients, self.memory_limit)
        self.offsets, self.indices, self.copies = self.fed.offsets, self.fed.indices.to(self.device), None

    def resample(self, method: Method, slot: Tree) -> None:
        """Let every client choose what it trains on, once."""
        indices, copies, sizes = [], [], []
        for client in range(self.fed.clients):
            rows = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
            mine = self.indices[rows].long().cpu()
            old = torch.zeros_like(mine) if self.copies is None else self.copies[rows].cpu()
            key = random.bits(self.fed.seed, random.RESAMPLE, client)
            positions, new = torch.arange(0), torch.arange(0)
            if len(mine):
                positions, new = method.resample(self.fed.y[mine], method.broadcast(slot), key)
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

    def train(self, state: State, plan: Tensor, chain: Chain, local: Local, turn: Turn) -> Sums:
        task = Task(chain, self.fed.network, local, self.autocast)
        total = _Total(state, self.device, self.dtype)
        shared = chain.broadcast(state.slots)
        self._check_lanes(plan, chain)
        with arithmetic(self.device, self.precision):
            for lanes in self._blocks(plan, local):
                self._train_lanes(task, state, plan[:, lanes], shared, total, turn)
        return total.close(self.fed, state.round)

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
        sizes = self.sizes(ids)
        by_size = sizes.argsort(descending=True, stable=True)
        kept: list[Tree] = []
        total: Tree = {}
        for part in _chunks(by_size, sizes, most=8192 if self.device.type == "cpu" else 1 << 17):
            answers, memory = self._answer(question, params, buffers, ids[part], owner, msg or {})
            self.memory.put(ids[part], memory)
            if rows:
                kept.append(answers)
            else:
                some = tree.map(lambda leaf: leaf.sum(0), answers)
                total = tree.add(total, some) if total else some
        if not rows:
            return total
        back = by_size.argsort().to(self.device)
        return tree.map(lambda *parts: torch.cat(parts)[back], *kept)

    # -- for subclasses ----------------------------------------------------------------------------------------------
    def visit(self, task: Task, visit: Visit, buffers: Tree, ids: Tensor, shared_start: bool) -> Result:
        raise NotImplementedError

    def sizes(self, ids: Tensor) -> Tensor:
        return self.offsets[ids + 1] - self.offsets[ids]

    def samples(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Row numbers in the data set of the given positions within each client's own data."""
        first = self.offsets[ids].to(positions.device)
        return first.view(-1, *[1] * (positions.dim() - 1)) + positions

    def look_up(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Raw samples, labels and copy numbers of rows of the partition."""
        rows = rows.to(self.device)
        where = self.indices[rows].long()
        copies = torch.zeros_like(where) if self.copies is None else self.copies[rows]
        return self.x[where], self.y[where], copies

    def all_data(self, first: Tensor, n: Tensor, most: int) -> Data:
        """All samples of some clients, padded to `most` with each client's first; `first` is where its rows begin."""
        place = torch.arange(most, device=self.device)
        mask = place < n[:, None]
        x, y, _ = self.look_up(first[:, None] + torch.where(mask, place, 0))
        return Data(x, y, mask, self.features)

    # -- how it is done ----------------------------------------------------------------------------------------------
    def _check_lanes(self, plan: Tensor, chain: Chain) -> None:
        """Lanes train beside each other: of one client's memory in two of them, one change would be lost."""
        keeping = [m.name for m in chain if m.name in self.memory.methods and not self.memory.methods[m.name].empty]
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
        """Lanes that train together: alike in batch size and in steps, so that the short do not wait for the long."""
        seen = plan >= 0
        n = torch.where(seen, self.sizes(plan.clamp(min=0)), 0)
        batch, steps = local.batches(n)
        size: list[int] = torch.where(seen, torch.minimum(batch, n), 0).amax(0).tolist()
        work: list[int] = torch.where(seen, steps, 0).sum(0).tolist()
        lanes = [lane for lane, used in enumerate(seen.any(0).tolist()) if used]
        block: list[int] = []
        for lane in sorted(lanes, key=lambda lane: (-size[lane], -work[lane], lane)):
            if block and (len(block) == self.width or 2 * size[lane] < size[block[0]]):
                yield torch.tensor(block)
                block = []
            block.append(lane)
        if block:
            yield torch.tensor(block)

    def prepare(self, task: Task, state: State, shared: Tree, ids: Tensor, wave: int, start: Tree) -> Visit:
        """What each of these clients is given at the beginning of its visit."""
        n, device = self.sizes(ids), self.device
        return Visit(
            start=start,
            shared=shared,
            own=tree.to(task.chain.address(state.slots, ids), device),
            memory=self.memory.get(ids, (m.name for m in task.chain)),
            note={},
            n=n.to(device),
            steps=task.local.batches(n)[1].to(device),
            weight=torch.ones(len(ids), dtype=self.dtype, device=device),
            key=random.bits(self.fed.seed, random.TRAIN, state.round, wave, ids).to(device),
            lr=torch.tensor(task.local.rate(state.round), dtype=self.dtype, device=device),
        )

    def _train_lanes(self, task: Task, state: State, plan: Tensor, shared: Tree, total: _Total, turn: Turn) -> None:
        lanes, single = plan.shape[1], len(plan) == 1  # a single wave starts from one model, which is not copied
        moved = {} if single else tree.zeros(tree.repeat(state.params, lanes))
        buffers = tree.repeat(state.buffers, lanes)
        weight = torch.zeros(lanes, dtype=self.dtype, device=self.device)
        plain = torch.zeros_like(weight)
        for wave, clients in enumerate(plan):
            here = (clients >= 0).nonzero()[:, 0]
            if len(here) == 0:
                continue
            ids, at = clients[here], here.to(self.device)
            start = state.params if single else tree.add(state.params, tree.rows(moved, at))
            visit = self.prepare(task, state, shared, ids, wave, start)
            result = self.visit(task, visit, tree.rows(buffers, at), ids, shared_start=single)
            self.memory.put(ids, result.memory)
            first = ~(plan[:wave, here] == ids).any(0).to(self.device)
            weight = weight.index_add(0, at, torch.where(first, result.weight, 0))
            plain = plain.index_add(0, at, torch.where(first, result.plain_weight, 0))
            moved = result.delta if single else tree.add_rows(moved, at, result.delta)
            buffers = result.buffers if single else tree.set_rows(buffers, at, result.buffers)
            total.visits(result, ids, visit, task.chain, turn)
        total.lanes(moved, weight, plain, buffers)

    def _answer(
        self, question: Question, params: Tree, buffers: Tree, ids: Tensor, owner: str, msg: Tree
    ) -> tuple[Tree, Tree]:
        """The answers of some clients, one row each, and the new memories of the asking method."""
        n = self.sizes(ids)
        totals: Tree = {}
        if question.needs_data:
            first = self.offsets[ids].to(self.device)
            x, y, mask, _ = self.all_data(first, n.to(self.device), int(n.max()))
            outputs = self.outputs(params, buffers, x.flatten(0, 1)) if question.needs_model else y.flatten()[:, None]
            totals = torch.vmap(question.measure)(outputs.view(*y.shape, -1), y, mask)
        own = self.memory.methods[owner].get(ids) if owner else {}
        answers, new = torch.vmap(question.answer, in_dims=(0, 0, None, 0))(totals, n.to(self.device), msg, own)
        return answers, {owner: new} if owner else {}

    @torch.no_grad()
    def outputs(self, params: Tree, buffers: Tree, x: Tensor, chunk: int = 4096) -> Tensor:
        """The model's outputs for raw samples, in evaluation mode."""
        parts = []
        key = torch.zeros((), dtype=torch.int64, device=self.device)
        for low in range(0, len(x), chunk):
            some = x[low : low + chunk]
            mask = torch.ones(len(some), dtype=torch.bool, device=self.device)
            fast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast is not None)
            with fast, arithmetic(self.device, self.precision):
                out, _ = self.fed.network(
                    params, buffers, self.features(some.to(self.device)), Context(mask, key, False)
                )
            parts.append(out.to(self.dtype))
        return torch.cat(parts)


def _chunks(by_size: Tensor, sizes: Tensor, most: int) -> Iterator[Tensor]:
    """Clients in falling order of size, as many at a time as make at most `most` padded samples."""
    at = 0
    while at < len(by_size):
        step = max(1, most // max(1, int(sizes[by_size[at]])))
        yield by_size[at : at + step]
        at += step


def _weigh(weights: Tensor, rows: Tensor) -> Tensor:
    """The weighted sum of rows, of whatever shape they are."""
    total: Tensor = torch.tensordot(weights, rows, 1)
    return total


class _Total:
    """The sums of a round while they are added up."""

    def __init__(self, state: State, device: torch.device, dtype: torch.dtype) -> None:
        self.state = state
        self.delta = tree.zeros(state.params)
        self.buffers = tree.map(lambda b: torch.zeros_like(b) if b.is_floating_point() else b, state.buffers)
        self.weight = torch.zeros((), dtype=dtype, device=device)
        self.plain = torch.zeros_like(self.weight)
        self.uploads: Tree = {}
        self.clients = self.samples = self.down = self.up = 0
        self.finite: list[tuple[Tensor, Tensor]] = []
        self.rows: list[tuple[Tensor, Tree]] = []

    def visits(self, result: Result, ids: Tensor, visit: Visit, chain: Chain, turn: Turn) -> None:
        some = tree.map(lambda leaf: leaf.sum(0), result.upload)
        self.uploads = tree.add(self.uploads, some) if self.uploads else some
        if chain.having("rows"):

            def rows(delta: Tree, upload: Tree, buffers: Tree) -> Tree:
                return chain.rows(delta, upload, turn._replace(buffers=buffers))

            self.rows.append((ids, torch.vmap(rows)(result.delta, result.upload, result.buffers)))
        self.clients += len(ids)
        self.samples += int(visit.n.sum())
        self.finite.append((ids, result.finite))
        model = tree.nbytes(self.state.params) + tree.nbytes(self.state.buffers)
        self.down += len(ids) * (model + tree.nbytes(visit.shared)) + tree.nbytes(visit.own)
        self.up += len(ids) * (model + 8) + tree.nbytes(result.upload)

    def lanes(self, delta: Tree, weight: Tensor, plain: Tensor, buffers: Tree) -> None:
        self.delta = tree.map(lambda s, d: s + _weigh(weight, d), self.delta, delta)
        self.weight = self.weight + weight.sum()
        self.plain = self.plain + plain.sum()

        def merge(total: Tensor, old: Tensor, values: Tensor) -> Tensor:
            if not values.is_floating_point():
                return torch.maximum(total, values.amax(0))
            # A buffer that no client changes stays what it is, to the bit, also where it is infinite.
            change = torch.where(values == old, 0, values - old)
            return total + _weigh(plain.to(values.dtype), change)

        self.buffers = tree.map(merge, self.buffers, self.state.buffers, buffers)

    def close(self, fed: Federation, round: int) -> Sums:
        for ids, finite in self.finite:
            if not bool(finite.all()):
                who = fed.client_name(int(ids[(~finite).nonzero()[0, 0].cpu()]))
                raise TrainingError(
                    f"round {round + 1}: the training of client {who} turned into not-a-number; the last good"
                    " checkpoint is kept; try a smaller local.lr, or local.clip"
                )
        rows: Tree = {}
        for name in self.rows[0][1] if self.rows else ():
            values = tree.map(lambda *parts: torch.cat(parts), *(part[name] for _, part in self.rows))
            rows[name] = {"ids": torch.cat([ids for ids, _ in self.rows]), "values": values}
        return Sums(
            self.delta, self.weight, self.buffers, self.plain, self.uploads, self.clients, self.samples, rows,
            self.down, self.up,
        )  # fmt: skip
