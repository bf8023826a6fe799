"""Peers in environments and processes of their own. An environment is made when it is first needed, and kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Timer

from benchmarks.cases import BOUND, OURS, TURNS, Contest, Result
from benchmarks.pace import Turns
from benchmarks.peers.baton import MARK, TASK, Task
from benchmarks.plain import centralised
from benchmarks.work import CLASSES, Work
from equipoise.core.errors import ConfigError, EquipoiseError

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / ".peers"
WORK = Work()
LIMIT = 600.0  # seconds that a peer has for one turn
WARM = 2  # rounds that are not measured: programs are compiled, workers started


class PeerError(EquipoiseError):
    """A peer that does not install, or does not run."""


@dataclass(frozen=True)
class Peer:
    """A case: the peer, Equipoise and the centralised bound in turns."""

    name: str
    installs: tuple[tuple[str, ...], ...]  # what pip is given, one call after another
    work: Work = WORK
    launcher: tuple[str, ...] = ()  # between the interpreter and the program
    settings: Mapping[str, str] = field(default_factory=dict)  # environment variables
    turns: Turns = TURNS

    def measure(self, device: str) -> Result:
        if device != "cpu":
            raise ConfigError(f"--device {device}: peers are measured on a CPU; expected --device cpu")
        with self.started() as process:
            process.timed(WARM)
            contest = Contest(self.name, {OURS: self.work}, {BOUND: centralised}, self.turns)
            return contest.measure(device, **{self.name: process.timed}) | {"version": process.version}

    @contextmanager
    def started(self) -> Iterator[Process]:
        widths = (self.work.shape[1] * self.work.shape[2], 128, 128, CLASSES)
        task = Task(self.work.clients, self.work.samples, self.work.batch, self.work.lr, widths)
        python = self.interpreter()
        settings = dict(self.settings) | {TASK: json.dumps(asdict(task)), "PYTHONUNBUFFERED": "1"}
        process = Process([str(python), *self.launcher, str(HERE / f"with_{self.name}.py")], settings)
        try:
            yield process
        finally:
            process.close()

    def interpreter(self) -> Path:
        """Of the peer's environment, which is made anew when what it needs has changed."""
        folder = ENVIRONMENTS / self.name
        python, made = folder / "bin" / "python", folder / "installed.json"
        wanted = json.dumps(self.installs)
        if not made.exists() or made.read_text() != wanted:
            _run([sys.executable, "-m", "venv", "--clear", str(folder)])
            for words in self.installs:
                _run([str(python), "-m", "pip", "install", "--quiet", *words])
            made.write_text(wanted)
        return python


class Process:
    """The program of a peer."""

    def __init__(self, command: list[str], settings: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            env=os.environ | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            self.version = self._heard("ready")
        except PeerError:
            self.close()
            raise

    def timed(self, rounds: int) -> float:
        """Seconds that so many rounds take."""
        assert self.process.stdin is not None
        began = time.perf_counter()
        with suppress(BrokenPipeError):  # of one that has died: what it said last is what matters
            self.process.stdin.write(f"{rounds}\n")
            self.process.stdin.flush()
        self._heard("done")
        return time.perf_counter() - began

    def close(self) -> None:
        """Let it end, and end whatever it has left running."""
        with suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=30)
        self._kill()
        self.process.communicate()

    def _heard(self, word: str) -> str:
        """What follows the word; everything else that is printed on the way there is left out."""
        assert self.process.stdout is not None
        last = "it said nothing"
        guard = Timer(LIMIT, self._kill)
        guard.start()
        try:
            for line in self.process.stdout:
                if line.startswith(f"{MARK} {word}"):
                    return line.removeprefix(f"{MARK} {word}").strip()
                last = line.strip() or last
        finally:
            guard.cancel()
        raise PeerError(f"the program ended, or had not answered after {LIMIT:.0f} seconds; its last line: {last}")

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise PeerError(f"`{' '.join(command[1:])}` failed: {said[-1]}")
