"""Runs a command, and ends all processes of the command when it exits or when the parent process dies.

    python guard.py FOLDER COMMAND...

The parent keeps its end of the guard's standard input open. When that end closes, because the parent has died in any
way, the guard ends the command and all processes that it started, and removes FOLDER. On SIGTERM the guard ends them
too, but keeps FOLDER. The guard uses only the standard library and is run as a file, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

GRACE = 5.0  # seconds between SIGTERM and SIGKILL
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    """Set a property of this process; does nothing outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(ancestor: int) -> list[int]:
    """The children of a process, their children, and so on. If `ancestor` is a subreaper, it becomes the parent of
    descendants whose own parents have ended, so that they are found too."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents.setdefault(int(parent), []).append(int(stat.parent.name))
    found, front = [], [ancestor]
    while front:
        front = [child for parent in front for child in parents.get(parent, [])]
        found += front
    return found


def _signal_all(number: int, group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
    for process in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _reap(codes: dict[int, int]) -> None:
    """Add the exit codes of children that have ended to `codes`, with -n for signal n.

    Only the guard can reap these processes, and Flower takes a process that was not reaped for a running one.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])


def _end(child: int, codes: dict[int, int]) -> None:
    """End the child first, so that it can stop its own children in order; then end all processes that are left."""

    def wait(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + GRACE
        while not done() and time.monotonic() < deadline:
            time.sleep(0.02)
            _reap(codes)

    if child not in codes:
        os.kill(child, signal.SIGTERM)
        wait(lambda: child in codes)
    _signal_all(signal.SIGTERM, child)
    wait(lambda: not descendants(os.getpid()))
    _signal_all(signal.SIGKILL, child)
    with contextlib.suppress(ChildProcessError):
        while True:
            process, status = os.wait()
            codes[process] = os.waitstatus_to_exitcode(status)


def guard(folder: str, command: list[str]) -> int:
    """Run a command as described above, and return its exit code, 128 + n for signal n."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    asked, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    ).pid
    codes: dict[int, int] = {}
    while child not in codes and not stopped and not _orphaned(0):
        if asked in select.select([0, asked], [], [])[0]:
            os.read(asked, 4096)
        _reap(codes)
    _end(child, codes)
    if _orphaned(0):
        shutil.rmtree(folder, ignore_errors=True)
    return codes[child] if codes[child] >= 0 else 128 - codes[child]


def _orphaned(stdin: int) -> bool:
    """Whether the parent's end of standard input is closed. The parent never writes to it."""
    return bool(select.select([stdin], [], [], 0)[0]) and not os.read(stdin, 4096)


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1], sys.argv[2:]))
