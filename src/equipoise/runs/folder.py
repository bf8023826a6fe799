"""The folder of a run. It holds everything that is needed to resume the run or to report on it.

config.json       the resolved config, with a schema version
federation.json   classes, class counts, and sizes of clients
plan.json         how the run is executed, written before training starts
metrics.jsonl     one line for each evaluated round
checkpoints/      the last two good checkpoints
lock              locked by the process that uses the folder; contains its process id
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from equipoise.core.errors import CheckpointError
from equipoise.core.tree import Tree
from equipoise.runs import checkpoint

FORMAT = "equipoise run"
VERSION = 1


@dataclass(frozen=True)
class RunFolder:
    """A locked run folder. Leaving the `with` block, or calling `close`, releases the lock."""

    path: Path
    config: dict[str, Any]
    lock: int  # the file descriptor of the locked file

    @classmethod
    def create(cls, path: Path, config: dict[str, Any]) -> RunFolder:
        """Make a folder for a new run. A folder that already holds a run is refused."""
        with _as_checkpoint_error(f"cannot make the run folder {path}"):
            path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        with _released_on_error(lock):
            if (path / "config.json").exists():
                raise CheckpointError(
                    f"{path} already holds a run: resume it with `equipoise resume {path}` or choose another --out"
                )
            for name in ("metrics.jsonl", "checkpoints"):
                if (path / name).exists():
                    raise CheckpointError(f"{path} holds {name} but no config.json: choose another --out")
            run = cls(path, config, lock)
            run.write("config", {"format": FORMAT, "version": VERSION, "config": config})
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open and lock the folder of a run that was cut off or has ended."""
        config = read_config(path)
        return cls(path, config, _lock(path))

    def close(self) -> None:
        # The lock file is not removed: otherwise two processes could lock two different files of the same name.
        os.close(self.lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def write(self, name: str, document: dict[str, Any]) -> None:
        """Replace `<name>.json` atomically."""
        file = self.path / f"{name}.json"
        with _as_checkpoint_error(f"cannot write {file}"):
            checkpoint.write_atomically(file, json.dumps(finite(document), indent=1).encode())

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the content of `<name>.json`, or None if there is no such file."""
        file = self.path / f"{name}.json"
        return _read_json(file) if file.exists() else None

    def append(self, record: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl. A number that is not finite is written as null."""
        line = json.dumps(finite(record), separators=(",", ":")).encode() + b"\n"
        with _as_checkpoint_error(f"cannot write {self._metrics}"), self._metrics.open("ab", buffering=0) as file:
            start = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError:
                file.truncate(start)  # a full disk may have taken only a part of the line
                raise

    def records(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)

    def rewind(self, round: int) -> None:
        """Remove the records after `round` and an incomplete last line; a resumed run will write them again."""
        kept = [record for record in self.records() if record.get("round", round) <= round]
        lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in kept)
        with _as_checkpoint_error(f"cannot write {self._metrics}"):
            checkpoint.write_atomically(self._metrics, lines.encode())

    def save(self, trees: dict[str, Tree], meta: dict[str, Any]) -> Path:
        """Write a checkpoint, after syncing metrics.jsonl so that no record before the checkpoint can be lost."""
        if self._metrics.exists():
            with _as_checkpoint_error(f"cannot write {self._metrics}"):
                checkpoint.sync(self._metrics)
        return checkpoint.save(self._checkpoints, trees, meta)

    def load(self) -> tuple[dict[str, Tree], dict[str, Any]] | None:
        """Return the last good checkpoint, or None if the run was cut off before its first one."""
        return checkpoint.load(self._checkpoints) if checkpoint.exists(self._checkpoints) else None

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"


def read_config(path: Path) -> dict[str, Any]:
    """Return the config of the run in `path`. No lock is needed, so this works while the run is in progress."""
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} is not a run folder: it has no config.json")
    document = _read_json(file)
    if document.get("format") != FORMAT or not isinstance(document.get("config"), dict):
        raise CheckpointError(f"{file} was not written by Equipoise")
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"{file} has schema version {document.get('version')}, and this Equipoise reads version {VERSION}"
            ": use the release that wrote it, or a newer one"
        )
    config: dict[str, Any] = document["config"]
    return config


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records in metrics.jsonl, without an incomplete last line. No lock is needed."""
    file = path / "metrics.jsonl"
    if not file.exists():
        return []
    with _as_checkpoint_error(f"cannot read {file}"):
        lines = file.read_bytes().splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(lines):
                break
            raise CheckpointError(f"line {number} of {file} is not a JSON record ({error})") from error
        records.append(record)
    return records


def finite(value: Any) -> Any:
    """Return the value in a form that JSON can hold: arrays become lists, and numbers that are not finite None.

    >>> finite({"loss": float("nan"), "recall": (0.5, float("inf"))})
    {'loss': None, 'recall': [0.5, None]}
    """
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if hasattr(value, "tolist"):  # tensors and arrays, and scalars of torch and numpy
        return finite(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _read_json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{file} was not written by Equipoise")
    return document


def _lock(path: Path) -> int:
    """Lock the folder for this process. The system releases the lock when the process ends, also after kill -9."""
    file = path / "lock"
    with _as_checkpoint_error(f"cannot write {file}"):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    with _released_on_error(descriptor):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 20).decode(errors="replace").strip() or "(unknown)"
            raise CheckpointError(
                f"{path} is in use by process {holder}: wait until it ends, or stop it first"
            ) from error
        with _as_checkpoint_error(f"cannot write {file}"):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


@contextlib.contextmanager
def _released_on_error(descriptor: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(descriptor)
        raise


@contextlib.contextmanager
def _as_checkpoint_error(doing: str) -> Iterator[None]:
    """Turn an error of the system, such as a full disk, into one sentence that says what failed."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{doing}: {error.strerror or error}") from error
