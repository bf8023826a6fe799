"""The folder of a run: everything needed to resume it, report it, or see what it did.

config.json       the resolved config, with a schema version
federation.json   who holds what
plan.json         how it is executed, written before it takes effect
metrics.jsonl     one line for each evaluated round
checkpoints/      the last two good checkpoints
lock              held by the process that uses the folder, with its id
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

from equipoise import checkpoint
from equipoise.errors import CheckpointError
from equipoise.tree import Tree

FORMAT = "equipoise run"
VERSION = 1


@dataclass(frozen=True)
class RunFolder:
    """A locked run folder; leave the `with` block, or call `close`, to give the lock back."""

    path: Path
    config: dict[str, Any]
    lock: int

    @classmethod
    def create(cls, path: Path, config: dict[str, Any]) -> RunFolder:
        """Make a folder for a new run; one that holds a run already is refused."""
        with _sentence(f"cannot make the run folder {path}"):
            path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        with _released_on_error(lock):
            if (path / "config.json").exists():
                raise CheckpointError(
                    f"{path} holds a run already: resume it with `equipoise resume {path}` or choose another --out"
                )
            for name in ("metrics.jsonl", "checkpoints"):
                if (path / name).exists():
                    raise CheckpointError(f"{path} holds {name} but no config.json: choose another --out")
            run = cls(path, config, lock)
            run.write("config", {"format": FORMAT, "version": VERSION, "config": config})
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Take over the folder of a run that has ended or died."""
        config = read_config(path)
        return cls(path, config, _lock(path))

    def close(self) -> None:
        # The file stays: were it removed, two processes could hold locks on two files of one name.
        os.close(self.lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def write(self, name: str, document: dict[str, Any]) -> None:
        """Replace `<name>.json`, atomically."""
        file = self.path / f"{name}.json"
        with _sentence(f"cannot write {file}"):
            checkpoint.write_atomically(file, json.dumps(finite(document), indent=1).encode())

    def read(self, name: str) -> dict[str, Any] | None:
        """The content of `<name>.json`, or None where the run never wrote it."""
        file = self.path / f"{name}.json"
        return _read_json(file) if file.exists() else None

    def append(self, record: dict[str, Any]) -> None:
        """Add one line to metrics.jsonl; a number that is not finite is written as null."""
        line = json.dumps(finite(record), separators=(",", ":")).encode() + b"\n"
        with _sentence(f"cannot write {self._metrics}"), self._metrics.open("ab", buffering=0) as file:
            start = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError:
                file.truncate(start)  # the room on a full disk ended inside the line
                raise

    def records(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)

    def rewind(self, round: int) -> None:
        """Drop the lines after `round`, and a torn last line, so that a resumed run adds them anew."""
        kept = [record for record in self.records() if record.get("round", round) <= round]
        lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in kept)
        with _sentence(f"cannot write {self._metrics}"):
            checkpoint.write_atomically(self._metrics, lines.encode())

    def save(self, trees: dict[str, Tree], meta: dict[str, Any]) -> Path:
        """Write a checkpoint; the lines of metrics before it are made to last first."""
        if self._metrics.exists():
            with _sentence(f"cannot write {self._metrics}"):
                checkpoint.sync(self._metrics)
        return checkpoint.save(self._checkpoints, trees, meta)

    def load(self) -> tuple[dict[str, Tree], dict[str, Any]] | None:
        """The last good checkpoint, or None where the run died before its first."""
        return checkpoint.load(self._checkpoints) if checkpoint.exists(self._checkpoints) else None

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"


def read_config(path: Path) -> dict[str, Any]:
    """The config of the run in `path`; needs no lock, so that a running run can be looked at."""
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path} is not a run folder: it has no config.json")
    document = _read_json(file)
    if document.get("format") != FORMAT or not isinstance(document.get("config"), dict):
        raise CheckpointError(f"{file} was not written by Equipoise")
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"{file} has schema version {document.get('version')} and this Equipoise reads version {VERSION}"
            ": use the release that wrote it, or a newer one"
        )
    config: dict[str, Any] = document["config"]
    return config


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records in metrics.jsonl of the run in `path`, less a last line that was torn; needs no lock."""
    file = path / "metrics.jsonl"
    if not file.exists():
        return []
    with _sentence(f"cannot read {file}"):
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
    """The value as JSON takes it: arrays as lists, and null for a number that is not finite.

    >>> finite({"loss": float("nan"), "recall": (0.5, float("inf"))})
    {'loss': None, 'recall': [0.5, None]}
    """
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if hasattr(value, "tolist"):  # of torch and numpy, scalars included
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
    """Lock the folder for this process. The system frees it however the process ends, kill -9 included."""
    file = path / "lock"
    with _sentence(f"cannot write {file}"):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    with _released_on_error(descriptor):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 20).decode(errors="replace").strip() or "(unknown)"
            raise CheckpointError(
                f"{path} is in use by process {holder}: wait until it ends, or stop it first"
            ) from error
        with _sentence(f"cannot write {file}"):
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
def _sentence(doing: str) -> Iterator[None]:
    """Turn a fault of the system (a full disk, no permission) into one sentence."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{doing}: {error.strerror or error}") from error
