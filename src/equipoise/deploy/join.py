"""One site: this process holds the data and answers requests; its child, Flower's SuperNode, fetches the requests."""

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

from equipoise.core.errors import CheckpointError, ConfigError, EquipoiseError
from equipoise.deploy.transport import carrier, starter, wire
from equipoise.deploy.transport.processes import Child, environment, free_port, listen, listens
from equipoise.deploy.transport.wire import Packet

Say = Callable[[str], None]

PAUSE = (1.0, 30.0)  # seconds until a SuperNode that ended is started again: the first time, and the longest
# Flower checks for new requests after this number of seconds; its default is one second.
POLLING = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
LINGER = 60.0  # seconds that a site stays after its last answer, unless the server ends earlier

# What Flower's SuperNode writes when the server refuses it for good, and what to tell the user then.
REFUSALS = {
    "[code: 2004]": "the server does not know the key of this site: its operator needs key.pub as sites/{name}.pub",
    "[code: 2001]": "the server accepts only sites with a key: expected --certs",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not signed by the authority in {ca}",
}


@dataclass(frozen=True)
class Way:
    """How a site reaches the server: its address, and the folder `certs` with ca.crt and key. Without `certs` there
    is neither TLS nor a key."""

    server: str
    certs: Path | None

    def __post_init__(self) -> None:
        if self.certs is not None:
            for file in ("ca.crt", "key"):
                if not (self.certs / file).is_file():
                    raise ConfigError(f"--certs {self.certs}: there is no file {file}; `equipoise certs` makes it")

    @property
    def address(self) -> tuple[str, int]:
        host, colon, port = self.server.rpartition(":")
        if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"--server {self.server!r}: expected HOST:PORT such as fl.example.org:9092")
        return host.strip("[]"), int(port)

    def wait(self, say: Say) -> None:
        """Return when the server can be reached. Raise an error if waiting cannot help."""
        told = False
        while True:
            try:
                return self._try()
            except ssl.SSLCertVerificationError as error:
                raise ConfigError(
                    f"--server {self.server}: the server's certificate is not valid ({error.verify_message})"
                ) from error
            except OSError as error:
                if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                    raise ConfigError(
                        f"--server {self.server}: the server does not use TLS ({error.reason}); if it runs with"
                        " --insecure, join with --insecure too"
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
                raise ConfigError(
                    f"--server {self.server}: the server uses TLS; expected --certs instead of --insecure"
                )

    def words(self) -> list[str]:
        words = ["flower-supernode", "--superlink", self.server, "--host", "127.0.0.1", "--port", str(free_port())]
        if self.certs is None:
            return [*words, "--insecure"]
        certs = self.certs.absolute()
        return [*words, "--root-certificates", f"{certs}/ca.crt", "--auth-supernode-private-key", f"{certs}/key"]


class AnsweringSite(Protocol):
    """The part of a `Site` that `join` uses."""

    name: str
    folder: Path
    finished: Path | None  # the file of the final model, once the site has it

    def answer(self, request: Packet, limit: int = wire.LIMIT) -> Packet: ...


def join(site: AnsweringSite, way: Way, say: Say, limit: int = wire.LIMIT) -> Path:
    """Take part in a run until the server has sent the final model; return the path of the model."""
    way.address  # noqa: B018  raises an error for a wrong address before anything is started
    with _locked(site.folder), tempfile.TemporaryDirectory(prefix="equipoise-") as temporary:
        folder = Path(temporary)
        with listen(folder / "socket") as listener:
            extra = {"EQUIPOISE_SOCKET": str(folder / "socket"), "EQUIPOISE_LIMIT": str(limit)}
            env = environment(folder / "flower", {**extra, **POLLING})
            app_starter = _starter(folder, site.folder, env)
            node = _Node(site, way, folder, env | {"PATH": f"{folder / 'bin'}{os.pathsep}{env['PATH']}"}, say)
            try:
                while site.finished is None:
                    node.keep_running()
                    _serve(listener, site, limit)
                node.linger()
            finally:
                node.stop()
                app_starter.stop()
        return site.finished


def _starter(folder: Path, logs: Path, env: dict[str, str]) -> Child:
    """Start the process that runs Flower's client app for each message."""
    path = folder / "starter"
    starter.install(folder / "bin", path, shutil.which(starter.COMMAND, path=env["PATH"]) or starter.COMMAND)
    words = [sys.executable, "-m", starter.__name__, str(path)]
    return Child("the starter", words, folder, logs / "clientapp.log", env)


class _Node:
    """The SuperNode. It is started again when it ends, unless the server refused it for good."""

    def __init__(self, site: AnsweringSite, way: Way, folder: Path, env: dict[str, str], say: Say) -> None:
        self._site, self._way, self._folder, self._env, self._say = site, way, folder, env, say
        self._child: Child | None = None
        self._pause, self._began = PAUSE[0], 0.0

    def keep_running(self) -> None:
        if self._child is not None:
            how = self._child.ended()
            if how is None:
                return
            for sign, meaning in REFUSALS.items():
                if sign in self._child.output():
                    ca = None if self._way.certs is None else self._way.certs / "ca.crt"
                    raise ConfigError(f"{self._way.server}: {meaning.format(name=self._site.name, ca=ca)}")
            self._say(f"the connection is lost ({how}); trying again")
            # After a SuperNode that ran for long, the pauses begin with the shortest again.
            long = time.monotonic() - self._began > PAUSE[1]
            self._pause = PAUSE[0] if long else min(2 * self._pause, PAUSE[1])
            time.sleep(self._pause)
            self._child.stop()
        self._way.wait(self._say)
        self._began = time.monotonic()
        log = self._site.folder / "supernode.log"
        self._child = Child("the SuperNode", self._way.words(), self._folder, log, self._env)

    def linger(self) -> None:
        """Wait until the server has ended: Flower discards the answer of a node that has left."""
        until = time.monotonic() + LINGER
        while time.monotonic() < until and listens(*self._way.address):
            time.sleep(0.5)

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()


def _serve(listener: socket.socket, site: AnsweringSite, limit: int) -> None:
    """Answer one request, if one arrives within half a second."""
    if not select.select([listener], [], [], 0.5)[0]:
        return
    connection, _ = listener.accept()
    # If the relay process dies before it has the answer, the request is lost; the server sends it again if needed.
    with connection, contextlib.suppress(OSError, EquipoiseError):
        carrier.send(connection, site.answer(carrier.receive(connection), limit))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder of a site, so that only one process at a time answers for this site."""
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
