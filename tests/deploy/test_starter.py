from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from equipoise.deploy.transport import starter
from equipoise.deploy.transport.processes import Child, environment, listen


def test_the_command_that_flower_runs_exists() -> None:
    (entry,) = entry_points(group="console_scripts", name=starter.COMMAND)
    assert callable(entry.load())


def test_the_arguments_are_sent_to_the_starter(tmp_path: Path) -> None:
    starter.install(tmp_path / "bin", tmp_path / "socket", "/nowhere")
    got: list[object] = []
    with listen(tmp_path / "socket") as listener:

        def take() -> None:
            with listener.accept()[0] as connection:
                got.append(starter._words(connection))

        thread = threading.Thread(target=take)
        thread.start()
        done = subprocess.run([tmp_path / "bin" / starter.COMMAND, "--token", "a 'b' \"c\" $d"], check=False)
        thread.join()
    assert done.returncode == 0
    assert got == [["--token", "a 'b' \"c\" $d"]]


def test_without_a_starter_flowers_command_is_run(tmp_path: Path) -> None:
    program = tmp_path / "original"
    program.write_text("#!/bin/sh\necho original $@\nexit 3\n")
    program.chmod(0o755)
    starter.install(tmp_path / "bin", tmp_path / "nobody", str(program))
    done = subprocess.run(
        [tmp_path / "bin" / starter.COMMAND, "one", "two"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "original one two\n"
    assert done.returncode == 3


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Child]:
    env = environment(tmp_path / "flower")
    child = Child(
        "the starter",
        [sys.executable, "-m", starter.__name__, str(tmp_path / "socket")],
        tmp_path / "folder",
        tmp_path / "log",
        env,
    )
    child.wait_until((tmp_path / "socket").exists)
    yield child
    child.stop()


def test_each_message_gets_a_fork_that_runs_flowers_app(running: Child, tmp_path: Path) -> None:
    """Flower's app answers to --help and to an unknown option as its command does, and the starter keeps running."""
    starter.install(tmp_path / "bin", tmp_path / "socket", "/nowhere")
    command = str(tmp_path / "bin" / starter.COMMAND)
    subprocess.run([command, "--help"], check=True)
    running.wait_until(lambda: "Run a Flower ClientApp" in running.output(), 10)
    subprocess.run([command, "--nonsense"], check=True)
    running.wait_until(lambda: "arguments" in running.output(), 10)
    assert running.ended() is None


def test_malformed_arguments_are_ignored(running: Child, tmp_path: Path) -> None:
    for content in (b"", b"{", b"12"):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(tmp_path / "socket"))
            connection.sendall(content)
    starter.install(tmp_path / "bin", tmp_path / "socket", "/nowhere")
    subprocess.run([tmp_path / "bin" / starter.COMMAND, "--help"], check=True)
    running.wait_until(lambda: "Run a Flower ClientApp" in running.output(), 10)


@pytest.mark.parametrize(
    ("code", "expected"),
    [("pass", 0), ("raise SystemExit(7)", 7), ("raise SystemExit('no')", 1), ("raise ValueError('x')", 1)],
)
def test_a_fork_has_the_exit_code_of_the_app(code: str, expected: int) -> None:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        starter._run_app(lambda: exec(code), [])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == expected
