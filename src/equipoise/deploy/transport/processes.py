"""The processes that Flower needs: start them, wait until they are ready, find out why they ended, and stop them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.core.errors import EquipoiseError
from equipoise.deploy.transport import guard

SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}
CONNECTION = "equipoise"  # the name of the SuperLink in Flower's config file
START = 120.0  # seconds within which a process must be ready


class ProcessError(EquipoiseError):
    """A process that did not start, or that ended too early."""


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of Flower's processes: they send no telemetry, download nothing, and write nothing to the
    user's home folder."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **SETTINGS, "PATH": path, "FLWR_HOME": str(home), **(extra or {})}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Child:
    """A command that runs under the guard: it and all processes that it starts end when `stop` is called or when
    this process dies.

    The guard removes `folder` if this process dies. The output of the command goes to the file `log`. The command
    runs in the current directory of this process, so that a site of a try-out finds the user's own modules.
    """

    def __init__(self, name: str, words: Sequence[str], folder: Path, log: Path, env: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(folder), *words],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=dict(env),
                start_new_session=True,  # Ctrl-C reaches this process alone, which stops its children in order
            )

    @property
    def code(self) -> int | None:
        """The exit code of the command, 128 + n for signal n; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def ended(self) -> str | None:
        """How the command ended; None while it runs."""
        code = self.code
        if code is None:
            return None
        return f"{self.name} ended ({f'killed by signal {code - 128}' if code > 128 else f'exit code {code}'})"

    def output(self) -> str:
        """What the command has written so far."""
        with self.log.open("rb") as file:
            file.seek(self._start)
            return file.read().decode(errors="replace")

    def wait_until(self, ready: Callable[[], bool], limit: float = START) -> None:
        deadline = time.monotonic() + limit
        while not ready():
            if (how := self.ended()) is not None:
                raise ProcessError(f"{how} before it was ready; see {self.log}")
            if time.monotonic() > deadline:
                raise ProcessError(f"{self.name} was not ready after {limit:.0f} seconds; see {self.log}")
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def listen(path: Path) -> socket.socket:
    """A unix socket that listens at `path`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError as error:  # for example if the path is longer than about a hundred characters
        listener.close()
        raise ProcessError(
            f"cannot make the socket {path}: {error}; a TMPDIR with a shorter path may help"
        ) from error
    listener.listen()
    return listener


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def flower(words: Sequence[str], env: Mapping[str, str], limit: float = START) -> dict[str, Any]:
    """Run a command of Flower's command line, and return its answer, which is JSON."""
    program = shutil.which("flwr", path=env["PATH"]) or "flwr"
    try:
        done = subprocess.run(
            [program, *words, "--format", "json"], env=dict(env), capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise ProcessError(f"flwr {words[0]} did not answer within {limit:g} seconds") from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise ProcessError(f"flwr {words[0]} failed: {(done.stderr or done.stdout).strip()[-500:]}") from None
    if not answer.get("success"):
        raise ProcessError(f"flwr {words[0]} failed: {answer.get('error-message', answer)}")
    return answer
