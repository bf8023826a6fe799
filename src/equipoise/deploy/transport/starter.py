"""Starts Flower's client app fast: one process imports it once, and forks for each message.

Flower runs the command `flwr-clientapp` for every message, and its imports take longer than all the rest. So a site
puts a command of that name first on the PATH. That command sends its arguments to the starter, a process that has
imported everything; the starter forks, and the fork runs the entry point of Flower's own command. If the starter
cannot be reached, Flower's own command runs as usual.

    python -m equipoise.deploy.transport.starter SOCKET     the starter
    python starter.py SOCKET COMMAND WORDS...               sends the words to the starter, or runs the command
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMAND = "flwr-clientapp"


def install(folder: Path, path: Path, command: str) -> None:
    """Write a command with the name of Flower's into `folder`; it sends its arguments to the starter at `path`."""
    folder.mkdir()
    words = shlex.join([sys.executable, "-I", "-S", __file__, str(path), command])
    file = folder / COMMAND
    file.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    file.chmod(0o700)


def hand_over(path: str, command: str, words: list[str]) -> None:
    """Send the arguments to the starter; if it cannot be reached, become Flower's own command."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(path)
            connection.sendall(json.dumps(words).encode())
    except OSError:
        os.execv(command, [command, *words])


def start(path: Path) -> None:
    """Wait for arguments, and fork a process that runs Flower's client app with them."""
    from importlib.metadata import entry_points

    from equipoise.deploy.transport import apps  # noqa: F401  imported here, so that every fork has it
    from equipoise.deploy.transport.processes import listen

    (entry,) = entry_points(group="console_scripts", name=COMMAND)
    run = entry.load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    listener = listen(path)
    while True:
        connection, _ = listener.accept()
        with connection:
            words = _words(connection)
        if words is not None and os.fork() == 0:
            listener.close()
            _run_app(run, words)


def _words(connection: socket.socket) -> list[str] | None:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    with contextlib.suppress(ValueError, TypeError):
        return [str(word) for word in json.loads(b"".join(parts))]
    return None


def _run_app(run: Callable[[], Any], words: list[str]) -> None:
    """Run the app in this fork, and exit."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.argv = [COMMAND, *words]
        run()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        start(Path(sys.argv[1]))
    else:
        hand_over(sys.argv[1], sys.argv[2], sys.argv[3:])
