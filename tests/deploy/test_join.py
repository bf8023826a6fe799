from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from equipoise.core.errors import CheckpointError, ConfigError
from equipoise.deploy import join
from equipoise.deploy.join import Way
from equipoise.deploy.transport import carrier, certs
from equipoise.deploy.transport.processes import free_port, listen
from equipoise.deploy.transport.wire import Packet


@pytest.fixture
def made(tmp_path: Path) -> Path:
    certs.make(tmp_path / "certs", ["site_a"], ["localhost"])
    return tmp_path / "certs"


@contextmanager
def server(folder: Path | None, reply: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> Iterator[str]:
    """A server for one connection, with the certificate in `folder`, or without TLS."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            if folder is None:
                connection.recv(65536)  # closing with unread data would reset the connection
                connection.sendall(reply)
                return
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / "server.crt", folder / "server.key")
            with suppress(OSError):
                context.wrap_socket(connection, server_side=True).close()

    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        yield f"localhost:{listener.getsockname()[1]}"
        thread.join(10)


def quiet(sentence: str) -> None:
    pass


@pytest.mark.parametrize("text", ["localhost", "localhost:", ":9092", "localhost:port", "localhost:70000"])
def test_an_address_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        _ = Way(text, None).address


def test_an_ipv6_address_is_accepted() -> None:
    assert Way("[::1]:9092", None).address == ("::1", 9092)


def test_a_folder_without_a_key_is_refused(made: Path) -> None:
    (made / "site_a/key").unlink()
    with pytest.raises(ConfigError, match="there is no file key; `equipoise certs` makes it"):
        Way("localhost:1", made / "site_a")


def test_a_server_with_our_certificate_is_accepted(made: Path) -> None:
    with server(made / "server") as address:
        Way(address, made / "site_a").wait(quiet)
    with server(None) as address:
        Way(address, None).wait(quiet)


def test_a_server_of_another_authority_is_refused(made: Path, tmp_path: Path) -> None:
    certs.make(tmp_path / "other", ["site_a"], ["localhost"])
    with server(tmp_path / "other/server") as address, pytest.raises(ConfigError, match="certificate is not valid"):
        Way(address, made / "site_a").wait(quiet)


def test_tls_on_one_side_only_is_an_error_on_either_side(made: Path) -> None:
    with (
        server(None) as address,
        pytest.raises(ConfigError, match=r"the server does not use TLS .* join with --insecure"),
    ):
        Way(address, made / "site_a").wait(quiet)
    with (
        server(made / "server") as address,
        pytest.raises(ConfigError, match="the server uses TLS; expected --certs"),
    ):
        Way(address, None).wait(quiet)


def test_a_site_waits_for_a_server_that_does_not_run_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    port = free_port()
    slept: list[float] = []
    with socket.socket() as late:

        def greet() -> None:
            with late.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200")

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 3:
                late.bind(("127.0.0.1", port))
                late.listen()
                threading.Thread(target=greet).start()

        monkeypatch.setattr(join.time, "sleep", sleep)
        Way(f"127.0.0.1:{port}", None).wait(said.append)
    assert len(slept) == 3
    assert said == [f"waiting for the server at 127.0.0.1:{port} (Connection refused)"]


def test_only_one_process_can_use_the_folder_of_a_site(tmp_path: Path) -> None:
    code = f"""
from equipoise.deploy.join import _locked
from pathlib import Path
with _locked(Path({str(tmp_path)!r})):
    pass
"""
    with join._locked(tmp_path):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "is in use by another `equipoise join`" in done.stderr
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot use the folder"), join._locked(tmp_path / "file" / "below"):
        pass


class Site:
    def __init__(self, folder: Path, last: str = "deliver") -> None:
        self.name, self.folder, self.last = "site_a", folder, last
        self.finished: Path | None = None

    def answer(self, request: Packet, limit: int = 0) -> Packet:
        if request.kind == self.last:
            self.finished = self.folder / "model"
        return Packet("reply", {"of": request.kind}, {})


class Scripted:
    """A SuperNode that is not started. Each entry of `lives` is one start: how it ends (None: never), its output."""

    lives: list[tuple[str | None, str]]
    started: int
    stopped: int

    def __init__(self, *words: object) -> None:
        self.how, self.text = Scripted.lives[min(Scripted.started, len(Scripted.lives) - 1)]
        Scripted.started += 1

    def ended(self) -> str | None:
        return self.how

    def output(self) -> str:
        return self.text

    def stop(self) -> None:
        Scripted.stopped += 1


class Idle:
    """A starter that does nothing."""

    def stop(self) -> None:
        pass


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    Scripted.started = Scripted.stopped = 0
    monkeypatch.setattr(join, "Child", Scripted)
    monkeypatch.setattr(join, "_starter", lambda folder, logs, env: Idle())
    monkeypatch.setattr(join, "PAUSE", (0.0, 0.0))
    monkeypatch.setattr(Way, "wait", lambda self, say: None)
    monkeypatch.setattr(join, "listens", lambda host, port: False)
    return Scripted


def asked(path: Path, kind: str) -> Packet:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        carrier.send(connection, Packet(kind, {}, {}))
        return carrier.receive(connection)


def test_a_site_answers_until_it_has_the_model(
    scripted: type[Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.lives = [(None, "")]
    where: list[Path] = []
    monkeypatch.setattr(join, "listen", lambda path: (where.append(path), listen(path))[1])
    site = Site(tmp_path / "site")
    done: list[Path] = []
    thread = threading.Thread(target=lambda: done.append(join.join(site, Way("localhost:1", None), quiet)))
    thread.start()
    while not where or not where[0].exists():
        pass
    assert asked(where[0], "train").header == {"of": "train"}
    assert asked(where[0], "deliver").header == {"of": "deliver"}
    thread.join(10)
    assert done == [tmp_path / "site" / "model"]
    assert (scripted.started, scripted.stopped) == (1, 1)
    assert not where[0].parent.exists(), "the folder with the socket must be gone"


def test_a_supernode_that_ends_is_started_again(
    scripted: type[Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.lives = [
        ("the SuperNode ended (killed by signal 9)", ""),
        ("the SuperNode ended (exit code 0)", ""),
        (None, ""),
    ]
    site, said = Site(tmp_path), []

    def serve(listener: object, site: Site, limit: int) -> None:
        if scripted.started == 3:
            site.finished = tmp_path / "model"

    monkeypatch.setattr(join, "_serve", serve)
    join.join(site, Way("localhost:1", None), said.append)
    assert said == [
        "the connection is lost (the SuperNode ended (killed by signal 9)); trying again",
        "the connection is lost (the SuperNode ended (exit code 0)); trying again",
    ]


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (
            "Exit Code: 305\n[code: 2004] Failed to activate SuperNode.",
            "its operator needs key.pub as sites/site_a.pub",
        ),
        ("[code: 2001] SuperNode authentication is enabled.", "accepts only sites with a key"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", "is not signed by the authority in None"),
    ],
)
def test_a_refusal_is_final(scripted: type[Scripted], tmp_path: Path, written: str, sentence: str) -> None:
    scripted.lives = [("the SuperNode ended (exit code 1)", written)]
    with pytest.raises(ConfigError, match=sentence):
        join.join(Site(tmp_path), Way("localhost:1", None), quiet)
    assert scripted.started == 1


def test_a_site_stays_until_the_server_has_ended(
    scripted: type[Scripted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.lives = [(None, "")]
    there = iter([True, True, False])
    slept: list[float] = []
    monkeypatch.setattr(join, "listens", lambda host, port: next(there))
    monkeypatch.setattr(join.time, "sleep", slept.append)
    site = Site(tmp_path)
    monkeypatch.setattr(join, "_serve", lambda listener, site, limit: setattr(site, "finished", tmp_path / "model"))
    join.join(site, Way("localhost:1", None), quiet)
    assert len(slept) == 2
