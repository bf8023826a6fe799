from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from equipoise.deploy.transport.processes import Child, ProcessError, environment, flower, free_port, listen, listens


@contextmanager
def child(code: str, tmp_path: Path) -> Iterator[Child]:
    made = Child(
        "the child", [sys.executable, "-c", code], tmp_path / "folder", tmp_path / "logs/child.log", os.environ
    )
    try:
        yield made
    finally:
        made.stop()


def test_a_child_runs_until_it_is_stopped(tmp_path: Path) -> None:
    code = "import time; print('ready', flush=True); time.sleep(600)"
    with child(code, tmp_path) as made:
        made.wait_until(lambda: "ready" in made.output())
        assert made.ended() is None
    assert made.code is not None


def test_a_child_that_ends_too_soon_is_an_error_with_its_log(tmp_path: Path) -> None:
    with child("print('no room'); raise SystemExit(5)", tmp_path) as made:
        with pytest.raises(
            ProcessError, match=r"the child ended \(exit code 5\) before it was ready; see .*child.log"
        ):
            made.wait_until(lambda: False)
        assert "no room" in made.output()


def test_a_child_that_takes_too_long_is_an_error(tmp_path: Path) -> None:
    with (
        child("import time; time.sleep(600)", tmp_path) as made,
        pytest.raises(ProcessError, match="not ready after"),
    ):
        made.wait_until(lambda: False, limit=0.1)


def test_the_signal_that_killed_a_child_is_named(tmp_path: Path) -> None:
    with child("import os; os.kill(os.getpid(), 9)", tmp_path) as made:
        made.wait_until(lambda: made.code is not None)
        assert made.ended() == "the child ended (killed by signal 9)"


def test_a_second_child_does_not_read_what_the_first_wrote(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with child(f"print({text!r})", tmp_path) as made:
            made.wait_until(lambda made=made: made.code is not None)
            assert made.output() == f"{text}\n"


def test_flower_sends_no_telemetry_and_writes_nothing_to_the_home_folder(tmp_path: Path) -> None:
    env = environment(tmp_path / "flower", {"EQUIPOISE_SOCKET": "x"})
    assert env["FLWR_HOME"] == str(tmp_path / "flower")
    assert env["FLWR_TELEMETRY_ENABLED"] == "0"
    assert env["FLWR_DISABLE_UPDATE_CHECK"] == env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert env["EQUIPOISE_SOCKET"] == "x"
    first = Path(env["PATH"].split(os.pathsep)[0])
    assert (first / "flower-superlink").exists()


def test_a_port_is_free_until_it_is_taken() -> None:
    port = free_port()
    assert not listens("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert listens("127.0.0.1", port)


def test_a_socket_whose_path_is_too_long_is_an_error(tmp_path: Path) -> None:
    listen(tmp_path / "socket").close()
    with pytest.raises(ProcessError, match="a TMPDIR with a shorter path may help"):
        listen(tmp_path / ("x" * 200))


def script(folder: Path, code: str) -> dict[str, str]:
    """An environment in which `flwr` is a program with the given code."""
    program = folder / "flwr"
    program.write_text(f"#!{sys.executable}\nimport sys\n{code}\n")
    program.chmod(0o755)
    return {"PATH": str(folder)}


def test_flowers_own_command_line_answers_in_json(tmp_path: Path) -> None:
    env = script(
        tmp_path, 'print(\'{"success": true, "node-id": 12}\'); assert sys.argv[-2:] == ["--format", "json"]'
    )
    assert flower(["supernode", "register"], env)["node-id"] == 12


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ('print(\'{"success": false, "error-message": "key in use"}\')', "flwr supernode failed: key in use"),
        ("sys.exit('no route to host')", "flwr supernode failed: no route to host"),
        ("import time; time.sleep(60)", "flwr supernode did not answer within 0.2 seconds"),
    ],
)
def test_errors_of_flowers_command_line_are_one_sentence(code: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match=sentence):
        flower(["supernode", "register"], script(tmp_path, code), limit=0.2 if "sleep" in code else 30)
