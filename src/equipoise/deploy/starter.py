"""Starts Flower's client app without the wait: one process loads it once, and a copy of that handles each message.

Flower runs the command `flwr-clientapp` for every message, and loading it takes longer than all the rest. So a site
puts a command of that name first on the PATH, which hands its words to a process that has everything loaded and
divides itself. What then runs is the entry point of Flower's own command. If there is nobody to hand them to, that
command is run as ever.

    python -m equipoise.deploy.starter SOCKET               the process that divides itself
    python starter.py SOCKET COMMAND WORDS...               hands the words over, or runs the command
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
    """Put a command of Flower's name into `folder`, which hands over to the starter at `path`."""
    folder.mkdir()
    words = shlex.join([sys.executable, "-I", "-S", __file__, str(path), command])
    file = folder / COMMAND
    file.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    file.chmod(0o700)


def hand_over(path: str, command: str, words: list[str]) -> None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(path)
            connection.sendall(json.dumps(words).encode())
    except OSError:
        os.execv(command, [command, *words])


def start(path: Path) -> None:
    """Wait for words, and have a copy of this process run Flower's client app with each."""
    from importlib.metadata import entry_points

    from equipoise.deploy import apps  # noqa: F401  loaded here, and so in every copy
    from equipoise.deploy.processes import listen

    (entry,) = entry_points(group="console_scripts", name=COMMAND)
    run = entry.load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a copy
    listener = listen(path)
    while True:
        connection, _ = listener.accept()
        with connection:
            words = _words(connection)
        if words is not None and os.fork() == 0:
            listener.close()
            _become(run, words)


def _words(connection: socket.socket) -> list[str] | None:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    with contextlib.suppress(ValueError, TypeError):
        return [str(word) for word in json.loads(b"".join(parts))]
    return None


def _become(run: Callable[[], Any], words: list[str]) -> None:
    """Run the app in this copy, which ends with it."""
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
