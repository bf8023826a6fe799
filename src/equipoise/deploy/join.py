"""One site: a process that holds its data and answers requests, and below it the SuperNode that fetches them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from equipoise.deploy import carrier, starter, wire
from equipoise.deploy.processes import Child, environment, free_port, listen, listens
from equipoise.deploy.wire import Packet
from equipoise.errors import CheckpointError, ConfigError, EquipoiseError

Say = Callable[[str], None]

PAUSE = (1.0, 30.0)  # seconds before a SuperNode that ended is started again: at first, at most
EAGER = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}  # seconds until a request is taken up, instead of one
LINGER = 60.0  # seconds that a site stays after its last answer, unless the server goes first

# What Flower's SuperNode writes when it is refused for good, and what that means here.
REFUSALS = {
    "[code: 2004]": "the server does not know the key of this site: its operator needs key.pub as sites/{name}.pub",
    "[code: 2001]": "the server takes only sites with a key: expected --certs",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not one that {ca} vouches for",
}


@dataclass(frozen=True)
class Way:
    """How a site reaches the server. `certs` has ca.crt and key; None stands for neither TLS nor keys."""

    server: str
    certs: Path | None

    def __post_init__(self) -> None:
        if self.certs is not None:
            for file in ("ca.crt", "key"):
                if not (self.certs / file).is_file():
                    raise ConfigError(f"--certs {self.certs}: there is no {file}; `equipoise certs` makes it")

    @property
    def address(self) -> tuple[str, int]:
        host, colon, port = self.server.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"--server {self.server!r}: expected HOST:PORT such as fl.example.org:9092")
        return host.strip("[]"), int(port)

    def wait(self, say: Say) -> None:
        """Come back when the server is there; what will not change by waiting is an error."""
        told = False
        while True:
            try:
                return self._try()
            except ssl.SSLCertVerificationError as error:
                raise ConfigError(
                    f"--server {self.server}: its certificate is refused ({error.verify_message})"
                ) from error
            except OSError as error:
                if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                    raise ConfigError(
                        f"--server {self.server}: no TLS there ({error.reason}); is it meant for --insecure?"
                    ) from error
                if not told:
                    say(f"waiting for the server at {self.server} ({error.strerror or error})")
                    told = True
                time.sleep(1)

    def _try(self) -> None:
        host, port = self.address
        with socket.create_connection((host, port), timeout=10) as connection:
            if self.certs is not None:
                context = ssl.create_default_context(cafile=str(self.certs / "ca.crt"))
                context.wrap_socket(connection, server_hostname=host).close()
                return
            connection.sendall(b"GET / HTTP/1.1\r\nHost: equipoise\r\nConnection: close\r\n\r\n")
            reply = b""
            with contextlib.suppress(ConnectionResetError):
                reply = connection.recv(16)
            if not reply.startswith(b"HTTP/"):
                raise ConfigError(f"--server {self.server}: it wants TLS; expected --certs instead of --insecure")

    def words(self) -> list[str]:
        words = ["flower-supernode", "--superlink", self.server, "--host", "127.0.0.1", "--port", str(free_port())]
        if self.certs is None:
            return [*words, "--insecure"]
        certs = self.certs.absolute()
        return [*words, "--root-certificates", f"{certs}/ca.crt", "--auth-supernode-private-key", f"{certs}/key"]


class Resident(Protocol):
    """What `join` needs of a site."""

    name: str
    folder: Path
    finished: Path | None  # the final model, once it is there

    def answer(self, request: Packet, limit: int = wire.LIMIT) -> Packet: ...


def join(site: Resident, way: Way, say: Say, limit: int = wire.LIMIT) -> Path:
    """Take part until the server has sent the final model; gives its path."""
    way.address  # noqa: B018  a mistake in it is told before anything else is done
    with _held(site.folder), tempfile.TemporaryDirectory(prefix="equipoise-") as temporary:
        folder = Path(temporary)
        with listen(folder / "socket") as listener:
            extra = {"EQUIPOISE_SOCKET": str(folder / "socket"), "EQUIPOISE_LIMIT": str(limit)}
            env = environment(folder / "flower", {**extra, **EAGER})
            first = _starter(folder, site.folder, env)
            node = _Node(site, way, folder, env | {"PATH": f"{folder / 'bin'}{os.pathsep}{env['PATH']}"}, say)
            try:
                while site.finished is None:
                    node.keep()
                    _serve(listener, site, limit)
                node.linger()
            finally:
                node.stop()
                first.stop()
        return site.finished


def _starter(folder: Path, logs: Path, env: dict[str, str]) -> Child:
    """The process that starts Flower's client app for each message."""
    path = folder / "starter"
    starter.install(folder / "bin", path, shutil.which(starter.COMMAND, path=env["PATH"]) or starter.COMMAND)
    words = [sys.executable, "-m", starter.__name__, str(path)]
    return Child("the starter", words, folder, logs / "clientapp.log", env)


class _Node:
    """The SuperNode, started again whenever it ends for a reason that may pass."""

    def __init__(self, site: Resident, way: Way, folder: Path, env: dict[str, str], say: Say) -> None:
        self._site, self._way, self._folder, self._env, self._say = site, way, folder, env, say
        self._child: Child | None = None
        self._pause, self._began = PAUSE[0], 0.0

    def keep(self) -> None:
        if self._child is not None:
            how = self._child.ended()
            if how is None:
                return
            for sign, meaning in REFUSALS.items():
                if sign in self._child.said():
                    ca = None if self._way.certs is None else self._way.certs / "ca.crt"
                    raise ConfigError(f"{self._way.server}: {meaning.format(name=self._site.name, ca=ca)}")
            self._say(f"the connection is lost ({how}); trying again")
            # One that has served for a while gets another chance at once.
            long = time.monotonic() - self._began > PAUSE[1]
            self._pause = PAUSE[0] if long else min(2 * self._pause, PAUSE[1])
            time.sleep(self._pause)
            self._child.stop()
        self._way.wait(self._say)
        self._began = time.monotonic()
        log = self._site.folder / "supernode.log"
        self._child = Child("the SuperNode", self._way.words(), self._folder, log, self._env)

    def linger(self) -> None:
        """Stay until the server is done: Flower throws away the answer of a node that has left meanwhile."""
        until = time.monotonic() + LINGER
        while time.monotonic() < until and listens(*self._way.address):
            time.sleep(0.5)

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()


def _serve(listener: socket.socket, site: Resident, limit: int) -> None:
    """Answer the next request, should one come within a moment."""
    if not select.select([listener], [], [], 0.5)[0]:
        return
    connection, _ = listener.accept()
    # A relay that dies meanwhile takes its request with it; the server asks again if it still wants to know.
    with connection, contextlib.suppress(OSError, EquipoiseError):
        carrier.send(connection, site.answer(carrier.receive(connection), limit))


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """A site's folder is for one process: two of one name would answer for each other."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise CheckpointError(f"cannot use the folder {folder}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{folder} is in use by another `equipoise join`: stop it first") from None
        yield
    finally:
        os.close(descriptor)
