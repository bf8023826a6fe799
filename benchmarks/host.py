"""A process of its own for every run: its memory and torch's settings are its own, and when it dies the others go on.

The process carries out a real `equipoise run`, which stands still between turns. While it stands still, other ways to
do the same work may have theirs in the same process.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.plain import Rounds
from benchmarks.work import Work
from equipoise import runs
from equipoise.errors import EquipoiseError

RUN = "run"
ALL = 0  # rounds that are left
Maker = Callable[[Work, str], Rounds]
# Processes are forked from one that has imported torch and computed nothing.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


class HostError(EquipoiseError):
    """What was measured has failed."""


class Host:
    """Seen from outside. `facts` are what the run has told of itself: its plan, and the most memory it has held."""

    def __init__(self, work: Work, device: str, others: Mapping[str, Maker] | None = None, **settings: Any) -> None:
        """`settings` are of the config's table `train`."""
        self.pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=_serve, args=(theirs, work, others or {}, device, settings))
        self.process.start()
        theirs.close()
        self.facts: dict[str, Any] = {}

    def timed(self, name: str, rounds: int) -> float:
        """Seconds that so many rounds of a contestant take."""
        try:
            self.pipe.send((name, rounds))
            answer: dict[str, Any] = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            raise HostError(f"the process ended with exit code {self.process.exitcode}") from None
        if "failed" in answer:
            raise HostError(answer["failed"])
        seconds: float = answer.pop("seconds")
        self.facts |= answer
        return seconds

    def close(self) -> None:
        self.pipe.close()  # which it notices
        self.process.join()
        self.process.close()


def one_line(error: BaseException) -> str:
    name = "" if isinstance(error, HostError) else f"{type(error).__name__}: "
    return name + (str(error).strip().splitlines() or [""])[0]


class _Served:
    """Seen from inside."""

    def __init__(self, pipe: Connection, work: Work, others: Mapping[str, Maker], device: str) -> None:
        self.pipe, self.work, self.others, self.device = pipe, work, others, device
        self.made: dict[str, Rounds] = {}
        self.left, self.began = 0, 0.0

    def carry_out(self, folder: Path, settings: Mapping[str, Any]) -> None:
        config = self.work.config(folder, self.device, **settings)
        self._listen()
        runs.run(config, folder / "run", runs.Watch(step=lambda step: self._step(folder / "run" / "plan.json")))
        self._report(peak_mib=machine.peak_mib(self.device))

    def _step(self, plan: Path) -> None:
        self.left -= 1
        if self.left == 0:
            compiled_from = json.loads(plan.read_bytes())["compile_from"]
            self._report(peak_mib=machine.peak_mib(self.device), compiled_from=compiled_from)
            self._listen()

    def _listen(self) -> None:
        """Until the run has its turn again."""
        while True:
            name, rounds = self.pipe.recv()
            if name == RUN:
                self.left = rounds
                self._begin()
                return
            try:
                if name not in self.made:
                    self.made[name] = self.others[name](self.work, self.device)
                self._begin()
                self.made[name](rounds)
                self._report()
            except Exception as error:  # the run can go on without it
                self.pipe.send({"failed": one_line(error)})

    def _begin(self) -> None:
        machine.wait(self.device)
        self.began = time.perf_counter()

    def _report(self, **facts: Any) -> None:
        machine.wait(self.device)
        self.pipe.send({"seconds": time.perf_counter() - self.began, **facts})


def _serve(
    pipe: Connection, work: Work, others: Mapping[str, Maker], device: str, settings: Mapping[str, Any]
) -> None:
    with tempfile.TemporaryDirectory(prefix="equipoise-") as folder:
        try:
            _Served(pipe, work, others, device).carry_out(Path(folder), settings)
        except EOFError:  # nobody asks any more
            pass
        except Exception as error:
            pipe.send({"failed": one_line(error)})
