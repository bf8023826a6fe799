"""Every run that is measured has a process of its own, with its own memory and settings of torch; if it dies, the
others go on.

The process executes a real `equipoise run`, which pauses between its turns. While it pauses, other programs that do
the same work can have their turns in the same process.
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
from equipoise.core.errors import EquipoiseError
from equipoise.runs import run as runs

RUN = "run"
ALL = 0  # as a number of rounds: all that are left
Maker = Callable[[Work, str], Rounds]
# Processes are forked from a server process that has imported torch and computed nothing.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


class HostError(EquipoiseError):
    """A contestant failed while it was measured."""


class Host:
    """A handle on the process of a run. `facts` are what the run has reported: the round from which on it compiles,
    and its peak memory."""

    def __init__(self, work: Work, device: str, others: Mapping[str, Maker] | None = None, **settings: Any) -> None:
        """`others`: other programs that do the same work. `settings`: of the config's table `train`."""
        self.pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=_serve, args=(theirs, work, others or {}, device, settings))
        self.process.start()
        theirs.close()
        self.facts: dict[str, Any] = {}

    def timed(self, name: str, rounds: int) -> float:
        """How many seconds the next rounds of a contestant take."""
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
        self.pipe.close()  # the process ends when its pipe is closed
        self.process.join()
        self.process.close()


def one_line(error: BaseException) -> str:
    name = "" if isinstance(error, HostError) else f"{type(error).__name__}: "
    return name + (str(error).strip().splitlines() or [""])[0]


class _Served:
    """The side of the process: carries out the run and the other contestants as it is told."""

    def __init__(self, pipe: Connection, work: Work, others: Mapping[str, Maker], device: str) -> None:
        self.pipe, self.work, self.others, self.device = pipe, work, others, device
        self.made: dict[str, Rounds] = {}
        self.left, self.began = 0, 0.0

    def run(self, folder: Path, settings: Mapping[str, Any]) -> None:
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
        """Give other contestants their turns, until it is the run's turn again."""
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
            except Exception as error:  # the run itself can go on
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
            _Served(pipe, work, others, device).run(Path(folder), settings)
        except EOFError:  # the handle was closed
            pass
        except Exception as error:
            pipe.send({"failed": one_line(error)})
