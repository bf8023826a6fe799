"""Runs the commands of a user as processes on this machine, and checks that they leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from equipoise.deploy.transport.processes import free_port

SITES = ("site_a", "site_b", "site_c")
MARK = "EQUIPOISE_STAGE"  # an environment variable of all processes that a test starts, directly or indirectly

CONFIG = """
method = "fedavg"
[data]
source = "sites"
options = { label = "digit" }
[model]
name = "logistic"
[local]
lr = 0.05
batch = 32
[train]
rounds = 3
precision = "float64"
threads = 1
[deploy]
wait = 120
deadline = 60
"""


class Running:
    """A command that was started. Its output goes to a file."""

    def __init__(self, words: Sequence[str], folder: Path, env: dict[str, str]) -> None:
        self.words = list(words)
        self.output = folder / f"output-{uuid.uuid4().hex[:8]}"
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(words, cwd=folder, env=env, stdout=file, stderr=file)

    def text(self) -> str:
        """The output of the command as one line, because rich may break lines anywhere."""
        return re.sub(r"\s+", " ", self.output.read_text(errors="replace"))

    def ends(self, limit: float = 240.0) -> int:
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.words} still runs after {limit} s:\n{self.output.read_text()}") from None

    def says(self, sentence: str, limit: float = 240.0) -> None:
        until(lambda: sentence in self.text() or self.process.poll() is not None, limit)
        assert sentence in self.text(), self.output.read_text()


def until(condition: Callable[[], Any], limit: float = 240.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


class Stage:
    """The surroundings of one test: an empty home folder, a folder for temporary files, certificates and data."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder, self.home, self.temporary = folder, folder / "home", temporary
        self.home.mkdir()
        self.mark = uuid.uuid4().hex
        self.port = free_port()
        self.env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HOME": str(self.home),
            "TMPDIR": str(temporary),
            MARK: self.mark,
        }
        self.started: list[Running] = []
        (folder / "run.toml").write_text(CONFIG)

    # -- commands ----------------------------------------------------------------------------------------------------
    def start(self, *words: object) -> Running:
        return self.run([sys.executable, "-m", "equipoise.cli", *map(str, words)])

    def run(self, words: Sequence[str]) -> Running:
        self.started.append(Running(words, self.folder, self.env))
        return self.started[-1]

    def certs(self, sites: Sequence[str] = SITES, out: str = "certs") -> None:
        assert self.start("certs", "--sites", ",".join(sites), "--host", "localhost", "--out", out).ends() == 0

    def serve(self, *words: object, out: str = "run") -> Running:
        return self.start("serve", "run.toml", "--host", "127.0.0.1", "--port", self.port, "--out", out, *words)

    def join(self, name: str, *words: object) -> Running:
        server = f"localhost:{self.port}"
        return self.start("join", "--server", server, "--name", name, "--data", f"{name}.csv", *words)

    # -- files -------------------------------------------------------------------------------------------------------
    def tables(self, sites: Sequence[str] = SITES, samples: int = 600) -> None:
        """Write handwritten digits as one table for each site; the sites have different shares of the classes."""
        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))[:samples]
        owner = (digits.target[order] + np.arange(samples) % 2) % len(sites)
        header = ",".join([*(f"p{i}" for i in range(64)), "digit"])
        for number, name in enumerate(sites):
            mine = order[owner == number]
            rows = np.column_stack([digits.data[mine], digits.target[mine]]).astype(int)
            np.savetxt(self.folder / f"{name}.csv", rows, fmt="%d", delimiter=",", header=header, comments="")

    def set(self, *changes: tuple[str, str]) -> None:
        file = self.folder / "run.toml"
        text = file.read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        file.write_text(text)

    # -- results and processes ---------------------------------------------------------------------------------------
    def records(self, run: str = "run") -> list[dict[str, Any]]:
        file = self.folder / run / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def processes(self, *words: str) -> list[int]:
        """The processes of this test whose command line contains all the words, without the guards."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                mine = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if mine and command and "guard.py" not in command and all(word in command for word in words):
                found.append(int(folder.name))
        return found

    def everything(self) -> list[str]:
        """All processes of this test, with the guards: their numbers and command lines."""
        return [
            folder.name + " " + (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            for folder in Path("/proc").glob("[0-9]*")
            if _marked(folder, self.mark)
        ]

    def close(self) -> None:
        for line in self.everything():
            with suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
        for running in self.started:
            running.process.wait()


def _marked(folder: Path, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


@contextmanager
def clean_stage(folder: Path) -> Iterator[Stage]:
    """A stage that checks at the end that no process, no file in the home folder and no temporary file is left."""
    with tempfile.TemporaryDirectory(prefix="eq-") as temporary:  # the path of a socket must be short
        stage = Stage(folder, Path(temporary))
        try:
            yield stage
            until(lambda: not stage.everything(), 15)
            for place in (stage.home, stage.temporary):
                found = sorted(str(path.relative_to(place)) for path in place.rglob("*"))
                found = [
                    name for name in found if not name.startswith("torchinductor_")
                ]  # torch makes this folder, which stays empty
                assert found == [], f"left in {place}: {found}"
        finally:
            left = stage.everything()
            stage.close()
            assert left == [], "left running:\n" + "\n".join(left)
