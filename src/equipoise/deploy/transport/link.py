"""Flower's SuperLink, the gate in front of it, and the server's relay: they run as long as the `with` block lasts."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.core.errors import ConfigError
from equipoise.deploy.transport import certs, wire
from equipoise.deploy.transport.carrier import Carrier, SocketCarrier
from equipoise.deploy.transport.processes import CONNECTION, Child, environment, flower, free_port, listen, listens

Say = Callable[[str], None]

CHECK = 1.0  # seconds between two checks for new output of the gate

# The whole Flower app: it names modules that are installed at the server and at every site.
APP = """\
[project]
name = "equipoise-relay"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "equipoise"
[tool.flwr.app.components]
serverapp = "equipoise.deploy.transport.apps:server"
clientapp = "equipoise.deploy.transport.apps:client"
[tool.flwr.app.config]
"""


@dataclass(frozen=True)
class Door:
    """Where sites connect: an address, and the folder `certs` with server.crt, server.key and sites/. Without `certs`
    there are neither TLS nor keys."""

    host: str
    port: int
    certs: Path | None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "port": self.port,
            "certs": None if self.certs is None else str(self.certs.absolute()),
        }

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> Door:
        return Door(raw["host"], raw["port"], None if raw["certs"] is None else Path(raw["certs"]))

    def key(self, name: str) -> Path:
        assert self.certs is not None
        return self.certs / "sites" / f"{name}.pub"

    def check(self, roster: Sequence[str]) -> None:
        """Refuse missing certificates and keys, and an address in use, before anything is started."""
        if self.certs is not None:
            for file in ("server.crt", "server.key"):
                if not (self.certs / file).is_file():
                    raise ConfigError(f"--certs {self.certs}: there is no file {file}; `equipoise certs` makes it")
            if missing := [name for name in roster if not self.key(name).is_file()]:
                raise ConfigError(
                    f"--certs {self.certs}: there is no file sites/{missing[0]}.pub;"
                    f" `equipoise certs --sites {','.join(missing)}` makes it"
                )
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            socket.create_server((self.host, self.port), family=family).close()
        except OSError as error:
            raise ConfigError(
                f"--host {self.host} --port {self.port}: cannot listen there ({error.strerror})"
            ) from error


@contextlib.contextmanager
def link(
    door: Door,
    roster: Sequence[str],
    logs: Path,
    limit: int = wire.LIMIT,
    say: Say = lambda sentence: None,
    lost: Callable[[], str | None] = lambda: None,
) -> Iterator[tuple[Carrier, dict[int, str] | None]]:
    """Start the processes, and give the carrier and the name of each node as its key proves it (None without keys).

    `limit` is the most bytes that an answer of a site may have. `say` gets a sentence for each connection that the
    gate refuses. `lost` returns a further reason why the carrier cannot go on, or None.
    """
    with tempfile.TemporaryDirectory(prefix="equipoise-") as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        (folder / "flower").mkdir()
        (folder / "app").mkdir()
        (folder / "app" / "pyproject.toml").write_text(APP)
        secure = door.certs is not None
        if secure:
            certs.loopback(folder / "tls")
        upstream = f"127.0.0.1:{free_port()}"
        extra = {"EQUIPOISE_SOCKET": str(folder / "socket"), "EQUIPOISE_LIMIT": str(limit)}
        env = environment(folder / "flower", extra)
        superlink = _superlink(upstream, folder, logs, env, secure, stack)
        names = _register({name: door.key(name) for name in roster}, env) if secure else None
        carrier = _relay(folder, superlink, env)
        stack.callback(carrier.close)
        gate = _gate(door, upstream, folder, logs, env, stack)
        carrier.watch(lambda: superlink.ended() or gate.ended() or lost())
        stack.enter_context(_forward_output(gate, say))
        yield carrier, names


def _superlink(
    address: str, folder: Path, logs: Path, env: Mapping[str, str], secure: bool, stack: contextlib.ExitStack
) -> Child:
    host, _, port = address.partition(":")
    words = ["flower-superlink", "--host", host, "--port", port]
    lines = ["[superlink]", f'default = "{CONNECTION}"', f"[superlink.{CONNECTION}]", f'address = "{address}"']
    if secure:
        tls = folder / "tls"
        words += ["--ssl-ca-certfile", f"{tls}/ca.crt", "--ssl-certfile", f"{tls}/server.crt"]
        words += ["--ssl-keyfile", f"{tls}/server.key", "--enable-supernode-auth"]
        lines += [f"root-certificates = {json.dumps(f'{tls}/ca.crt')}"]
    else:
        words += ["--insecure"]
        lines += ["insecure = true"]
    (folder / "flower" / "config.toml").write_text("\n".join([*lines, ""]))
    child = Child("the SuperLink", words, folder, logs / "superlink.log", env)
    stack.callback(child.stop)
    child.wait_until(lambda: listens(host, int(port)))
    return child


def _register(keys: Mapping[str, Path], env: Mapping[str, str]) -> dict[int, str]:
    """Register the keys of the sites with the SuperLink; return the name of each node. A key belongs to one node."""

    def register(key: Path) -> int:
        return int(flower(["supernode", "register", str(key.absolute()), CONNECTION], env)["node-id"])

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(pool.map(register, keys.values()), keys, strict=True))


def _relay(folder: Path, superlink: Child, env: Mapping[str, str]) -> SocketCarrier:
    """Start the server's relay, and wait until it connects to our socket."""
    with listen(folder / "socket") as listener:
        flower(["run", str(folder / "app"), CONNECTION], env)
        superlink.wait_until(lambda: bool(select.select([listener], [], [], 0)[0]))
        return SocketCarrier(listener.accept()[0])


def _gate(
    door: Door, upstream: str, folder: Path, logs: Path, env: Mapping[str, str], stack: contextlib.ExitStack
) -> Child:
    tls = ["-", "-", "-"]
    if door.certs is not None:
        own = door.certs.absolute()
        tls = [f"{folder}/tls/ca.crt", f"{own}/server.crt", f"{own}/server.key"]
    words = [sys.executable, "-m", "equipoise.deploy.transport.gate", door.host, str(door.port), upstream, *tls]
    child = Child("the gate", words, folder, logs / "gate.log", env)
    stack.callback(child.stop)
    reach = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(door.host, door.host)
    child.wait_until(lambda: listens(reach, door.port))
    return child


@contextlib.contextmanager
def _forward_output(child: Child, say: Say) -> Iterator[None]:
    """Pass each line that a process writes to `say`."""
    over = threading.Event()

    def tell() -> None:
        told = 0
        while not over.wait(CHECK):
            lines = child.output().split("\n")[:-1]  # the last line may be incomplete
            for line in lines[told:]:
                say(line)
            told = len(lines)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
