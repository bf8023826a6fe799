"""Kinds of measurements: contestants that take turns, whole runs, and how the time of a round grows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.host import ALL, RUN, Host, HostError, Maker
from benchmarks.pace import Timed, Turns, compete
from benchmarks.work import Work

OURS = "equipoise"
BOUND = "centralised"
TURNS, QUICK = Turns(), Turns(count=3, seconds=0.1, most=2.0)
Row = dict[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True)
class Contest:
    """Contestants that take turns: runs of Equipoise, and other programs that do the work of the first run."""

    name: str
    runs: Mapping[str, Work]
    others: Mapping[str, Maker] = field(default_factory=dict)
    turns: Turns = TURNS

    def measure(self, device: str, **outside: Timed) -> Result:
        """Seconds of a round for every contestant, and `times`: its time for a sample, as a multiple of the first
        run's.

        `outside`: contestants that do the same work and are running already.
        """
        first = next(iter(self.runs.values()))
        contestants: dict[str, Timed] = {}
        rows: dict[str, Row] = {}
        with ExitStack() as stack:
            for name, work in self.runs.items():
                host = Host(work, device, self.others if work is first else {})
                stack.callback(host.close)
                contestants[name], rows[name] = partial(host.timed, RUN), self._warm(host, device)
                for other in self.others if work is first else ():
                    try:
                        host.timed(other, 1)
                        contestants[other] = partial(host.timed, other)
                    except HostError as error:
                        rows[other] = {"failed": str(error)}
            measured = compete(contestants | outside, self.turns)
        cost = {name: row["seconds"] / self.runs.get(name, first).cohort_samples for name, row in measured.items()}
        reference = next(iter(cost.values()))
        for name, row in measured.items():
            derived = {"samples_per_second": 1 / cost[name], "times": cost[name] / reference}
            rows[name] = row | derived | rows.get(name, {})
        return {"what": first.describe(device), "rows": rows}

    def _warm(self, host: Host, device: str) -> Row:
        """Run rounds until every program that they need has been compiled, and on CUDA recorded and replayed."""
        start_up = host.timed(RUN, 1)
        again = 3 if device.startswith("cuda") else 1
        ready = host.timed(RUN, (host.facts["compiled_from"] or 0) + again * self.turns.multiple + 1)
        return {"start_up": start_up, "ready": start_up + ready, **host.facts}


@dataclass(frozen=True)
class Whole:
    """A run from its start to its result, evaluation included."""

    name: str
    work: Work
    rounds: int
    evaluate_every: int

    def measure(self, device: str) -> Result:
        host = Host(self.work, device, rounds=self.rounds, evaluate_every=self.evaluate_every)
        try:
            seconds = host.timed(RUN, ALL)
        finally:
            host.close()
        return {
            "what": f"{self.work.describe(device)}; evaluated on {self.work.test:,} samples every"
            f" {self.evaluate_every} rounds",
            "rounds": self.rounds,
            "seconds": seconds,
            "peak_mib": host.facts["peak_mib"],
        }


@dataclass(frozen=True)
class Growth:
    """How the time of a round grows as one property of the work grows."""

    name: str
    axis: str
    points: Mapping[float, Work]
    other: Maker
    turns: Turns = QUICK

    def measure(self, device: str) -> Result:
        rows: dict[str, list[tuple[float, float]]] = {OURS: [], BOUND: []}
        for at, work in self.points.items():
            contest = Contest(self.name, {OURS: work}, {BOUND: self.other}, self.turns)
            for name, row in contest.measure(device)["rows"].items():
                if "failed" in row:
                    raise HostError(f"{name}: {row['failed']}")
                rows[name].append((at, row["seconds"]))
        first = next(iter(self.points.values()))
        return {"what": f"from {first.describe(device)}", "axis": self.axis, "series": rows}
