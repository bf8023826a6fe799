from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from equipoise.deploy.transport import guard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

# A command that starts a child in another session, as Flower's SuperLink does; the child starts a grandchild.
FAMILY = """
import os, subprocess, sys, time
from pathlib import Path
below = "import subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
below += "open(sys.argv[1], 'w').write(str(c.pid)); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", below, sys.argv[1] + ".grandchild"], start_new_session=True)
Path(sys.argv[1] + ".child").write_text(str(child.pid))
Path(sys.argv[1] + ".self").write_text(str(os.getpid()))
time.sleep(600)
"""
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN);"
)


def lives(process: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: object, limit: float = 10.0) -> bool:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return False


class Guarded:
    def __init__(self, tmp_path: Path, code: str) -> None:
        # A command that ignores SIGTERM gets less time here than in real use.
        hasty = (
            f"import sys; sys.path.insert(0, {str(Path(guard.__file__).parent)!r}); import guard; guard.GRACE = 0.3;"
        )
        hasty += "sys.exit(guard.guard(sys.argv[1], sys.argv[2:]))"
        run = ["-c", hasty] if code.startswith(STUBBORN) else [guard.__file__]
        self.folder = tmp_path / "folder"
        self.folder.mkdir()
        self.note = tmp_path / "note"
        words = [sys.executable, "-I", "-S", *run, str(self.folder), sys.executable, "-c", code]
        self.process = subprocess.Popen([*words, str(self.note)], stdin=subprocess.PIPE)
        assert self.process.stdin is not None
        self.stdin = self.process.stdin
        files = [self.note.with_name(f"note.{who}") for who in ("self", "child", "grandchild")]
        assert until(lambda: all(file.exists() and file.read_text() for file in files))
        self.family = [int(file.read_text()) for file in files]

    def gone(self) -> bool:
        return until(lambda: not any(lives(process) for process in self.family))


@pytest.fixture
def guarded(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Guarded]:
    made = Guarded(tmp_path, getattr(request, "param", "") + FAMILY)
    yield made
    made.stdin.close()
    for process in (made.process.pid, *made.family):
        if lives(process):
            os.kill(process, signal.SIGKILL)
    made.process.wait()


def test_sigterm_ends_all_processes_of_the_command(guarded: Guarded) -> None:
    guarded.process.send_signal(signal.SIGTERM)
    guarded.process.wait(10)
    assert guarded.gone()
    assert guarded.folder.exists()


def test_all_processes_and_the_folder_are_gone_when_the_parent_dies(guarded: Guarded) -> None:
    guarded.stdin.close()
    guarded.process.wait(10)
    assert guarded.gone()
    assert not guarded.folder.exists()


def test_the_other_processes_end_when_the_command_is_killed(guarded: Guarded) -> None:
    os.kill(guarded.family[0], signal.SIGKILL)
    assert guarded.process.wait(10) == 128 + signal.SIGKILL
    assert guarded.gone()
    assert guarded.folder.exists()


def test_the_command_ends_when_the_guard_is_killed(guarded: Guarded) -> None:
    guarded.process.kill()
    guarded.process.wait()
    assert until(lambda: not lives(guarded.family[0]))


@pytest.mark.parametrize("guarded", [STUBBORN], indirect=True)
def test_a_command_that_ignores_sigterm_is_killed(guarded: Guarded) -> None:
    guarded.process.send_signal(signal.SIGTERM)
    guarded.process.wait(guard.GRACE + 10)
    assert guarded.gone()


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_passed_on(code: int, tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-I",
        "-S",
        guard.__file__,
        str(tmp_path),
        sys.executable,
        "-c",
        f"raise SystemExit({code})",
    ]
    process = subprocess.Popen(words, stdin=subprocess.PIPE)
    assert process.wait(10) == code
    assert process.stdin is not None
    process.stdin.close()


def test_nested_guards_all_remove_their_folders(tmp_path: Path) -> None:
    """When the outermost parent dies, SIGTERM may reach an inner guard before it notices that its parent has died."""
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    code = f"""
import subprocess, sys, time
from pathlib import Path
Path({str(inner)!r}).mkdir()
below = [sys.executable, "-I", "-S", {guard.__file__!r}, {str(inner)!r}, "sleep", "600"]
child = subprocess.Popen(below, stdin=subprocess.PIPE, start_new_session=True)
Path({str(tmp_path / "ready")!r}).write_text(str(child.pid))
time.sleep(600)
"""
    outer.mkdir()
    words = [sys.executable, "-I", "-S", guard.__file__, str(outer), sys.executable, "-c", code]
    process = subprocess.Popen(words, stdin=subprocess.PIPE)
    assert until(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text())
    assert until(lambda: guard.descendants(int((tmp_path / "ready").read_text())))
    assert process.stdin is not None
    process.stdin.close()
    process.wait(10)
    assert until(lambda: not lives(int((tmp_path / "ready").read_text())))
    assert not outer.exists()
    assert not inner.exists()
