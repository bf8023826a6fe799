"""The training loop: rounds, evaluation, the best round, early stopping, and snapshots to resume from."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from equipoise.core.chain import Chain
from equipoise.core.engine import Engine
from equipoise.core.errors import ConfigError, nearest
from equipoise.core.federation import Federation
from equipoise.core.method import Method
from equipoise.core.round import one_round, reopen, start
from equipoise.core.sums import Sums
from equipoise.core.tree import Tree
from equipoise.core.turn import State
from equipoise.engines import stacked_engine
from equipoise.runs import evaluation

Record = dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """All that is needed to resume a training: the server's state, the clients' memories, the best round so far."""

    state: State
    memory: Tree
    best: Tree  # {"params", "buffers"} of the best round
    notes: dict[str, Any]  # record of the best round, rounds since, bytes sent, the round that reached the target

    def trees(self) -> dict[str, Tree]:
        """Return the tensors, as a checkpoint holds them."""
        state = {"params": self.state.params, "buffers": self.state.buffers, "slots": self.state.slots}
        return {"state": state, "memory": self.memory, "best": self.best}

    @staticmethod
    def of(trees: dict[str, Tree], round: int, notes: dict[str, Any]) -> Snapshot:
        """Build a snapshot from the content of a checkpoint."""
        saved = trees["state"]
        state = State(round, saved["params"], saved["buffers"], saved["slots"])
        return Snapshot(state, trees["memory"], trees["best"], notes)


MEASURES = ("balanced_accuracy", "accuracy", "macro_f1", "minority_accuracy", "worst_class_accuracy")


@dataclass(frozen=True)
class Settings:
    rounds: int = 100
    evaluate_every: int = 1
    select: str = MEASURES[0]  # chooses the best round: on validation data, or on the test set if there are none
    patience: int | None = None  # stop after this many rounds without a better one on validation data
    target: float | None = None  # report the first round that reaches this accuracy

    def __post_init__(self) -> None:
        def need(ok: bool, field: str, expected: str) -> None:
            if not ok:
                raise ConfigError(f"train.{field} = {getattr(self, field)!r}: expected {expected}")

        def whole(value: object) -> bool:
            return isinstance(value, int) and value > 0

        need(whole(self.rounds), "rounds", "a whole number, 1 or above")
        need(whole(self.evaluate_every), "evaluate_every", "a whole number, 1 or above")
        need(self.patience is None or whole(self.patience), "patience", "a whole number, 1 or above, or nothing")
        need(self.target is None or 0 < self.target <= 1, "target", "a share above 0 and at most 1, or nothing")
        need(self.select in MEASURES, "select", f"one of {', '.join(MEASURES)}; {nearest(self.select, MEASURES)}")


@dataclass(frozen=True)
class Step:
    """The outcome of a round. Only calling `snapshot` takes a snapshot."""

    round: int
    record: Record | None  # None if the round was not evaluated
    last: bool
    training: Training

    def snapshot(self) -> Snapshot:
        return self.training.snapshot()


class Training:
    """Iterating over a training carries out its rounds and yields a `Step` for each."""

    def __init__(
        self,
        fed: Federation,
        method: Method,
        engine: Engine,
        settings: Settings,
        resume: Snapshot | None = None,
    ) -> None:
        self.fed, self.chain, self.engine, self.settings = fed, Chain(method), engine, settings
        if settings.patience is not None and fed.validation is None and not engine.holds_out:
            raise ConfigError(
                f"train.patience = {settings.patience}: early stopping needs validation samples;"
                " expected data.validation above 0"
            )
        if settings.select == "minority_accuracy" and not fed.minority:
            raise ConfigError(
                "train.select = 'minority_accuracy': there is no minority class; name one in data.minority"
            )
        self.best: Tree = {}
        self.notes: dict[str, Any] = {"best": None, "waited": 0, "up": 0, "down": 0, "reached": None}
        if resume is None:
            self.state = start(fed, self.chain, engine)
        else:
            place, state = engine.place, resume.state
            self.state = State(state.round, place(state.params), place(state.buffers), place(state.slots))
            reopen(self.state, fed, self.chain, engine)
            engine.memory.load(resume.memory)
            self.best, self.notes = place(resume.best), dict(resume.notes)

    def snapshot(self) -> Snapshot:
        self.engine.settle()
        return Snapshot(self.state, self.engine.memory.save(), self.best, dict(self.notes))

    def __iter__(self) -> Iterator[Step]:
        rounds, every = self.settings.rounds, self.settings.evaluate_every
        while not self._finished():
            began = time.perf_counter()
            self.state, sums = one_round(self.state, self.fed, self.chain, self.engine)
            done = self.state.round
            down, up = self.engine.moved()
            self.notes["down"] += down
            self.notes["up"] += up
            record = None
            if done % every == 0 or done >= rounds:
                record = self._record(sums, began)
            yield Step(done, record, self._finished(), self)

    def _finished(self) -> bool:
        patience = self.settings.patience
        return self.state.round >= self.settings.rounds or (patience is not None and self.notes["waited"] >= patience)

    def _record(self, sums: Sums, began: float) -> Record:
        self.engine.settle()
        fed, state = self.fed, self.state
        split = fed.test or fed.validation
        patience, waited = self.settings.patience, self.notes["waited"] + self.settings.evaluate_every
        # Whether the training ends here, should this round not be a new best one. The last record has all scores.
        last = state.round >= self.settings.rounds or (patience is not None and waited >= patience)
        record: Record = {"round": state.round, "clients": sums.clients, "samples": sums.samples}
        if split is not None or self.engine.holds_out:
            record |= evaluation.evaluate(self.engine, state.params, state.buffers, split, scores=last)
        judge = record
        if fed.validation is not None:
            judge = evaluation.evaluate(self.engine, state.params, state.buffers, fed.validation, scores=False)
            record |= {
                f"validation_{k}": judge[k] for k in ("loss", "accuracy", "balanced_accuracy", "minority_accuracy")
            }
        record |= self.chain.metrics(state.slots)
        seen = self.engine.memory.seen(m.name for m in self.chain.having("observe"))
        record |= self.chain.observe(state.slots, seen)
        record |= {"bytes_up": self.notes["up"], "bytes_down": self.notes["down"]}
        record |= self.engine.metrics()
        self._update_best(record, judge)
        return record | {"seconds": time.perf_counter() - began}

    def _update_best(self, record: Record, judge: Record) -> None:
        """Note the best round so far, the rounds since then, and the first round that reaches the target."""
        value, best = judge.get(self.settings.select), self.notes["best"]
        if value is not None and (best is None or value > best["value"]):
            on = (
                "validation"
                if self.fed.validation is not None
                else "test"
                if self.fed.test is not None
                else "held out"
            )
            self.notes["best"] = {"value": value, "on": on, "record": record}
            self.notes["waited"] = 0
            self.best = {"params": self.state.params, "buffers": self.state.buffers}
        else:
            self.notes["waited"] += self.settings.evaluate_every
        target = self.settings.target
        if target is not None and self.notes["reached"] is None and (record.get("accuracy") or 0) >= target:
            self.notes["reached"] = self.state.round


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training: the last round's state, all records, and the best round."""

    state: State
    records: list[Record]
    best: Record | None  # {"value", "on", "record"}; "on" names the data on which it was chosen
    method: str

    @property
    def last(self) -> Record:
        return self.records[-1]


def fit(
    fed: Federation, method: Method, rounds: int = 100, *, engine: Engine | None = None, **settings: Any
) -> Outcome:
    """Train a method and return the model and its records.

    For a training that must survive a crash, use a run folder: `equipoise run`.
    """
    training = Training(fed, method, engine or stacked_engine()(fed), Settings(rounds=rounds, **settings))
    records = [step.record for step in training if step.record is not None]
    return Outcome(training.state, records, training.notes["best"], str(training.chain))
