"""A run as the report sees it, and how it is read from a run folder."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.baselines import CENTRALISED, LOCAL
from equipoise.errors import CheckpointError
from equipoise.folder import read_config, read_metrics


@dataclass(frozen=True)
class Run:
    name: str
    method: str
    config: dict[str, Any]
    records: list[dict[str, Any]]  # the lines of metrics.jsonl, in order
    classes: list[str]
    minority: list[int]
    train_counts: list[int]  # empty when unknown

    @classmethod
    def read(cls, folder: Path) -> Run:
        """The run in `folder`, finished or not; what it lacks or has garbled is a `CheckpointError`."""
        config, records = read_config(folder), read_metrics(folder)
        classes, minority, counts = _federation(folder)
        for line, record in enumerate(records, start=1):
            if not _sound(record, len(classes)):
                where = f"line {line} of {folder / 'metrics.jsonl'}"
                raise CheckpointError(f"{where} does not hold metrics of {len(classes)} classes")
        return cls(
            _name(folder.resolve()), str(config.get("method") or "fedavg"), config, records, classes, minority, counts
        )

    @property
    def baseline(self) -> bool:
        """All data in one place, or each site alone: shown beside the methods, not ranked among them."""
        return self.method in (CENTRALISED, LOCAL)

    @property
    def rounds(self) -> int:
        return max((int(at) for record in self.records if (at := number(record.get("round")))), default=0)

    def series(self, key: str) -> list[tuple[int, float]]:
        """(round, value) wherever the value is known."""
        pairs = ((number(record.get("round")), number(record.get(key))) for record in self.records)
        return [(int(at), value) for at, value in pairs if at is not None and value is not None]

    def last(self, key: str) -> dict[str, Any] | None:
        """The last record that has `key`."""
        return next((record for record in reversed(self.records) if record.get(key) is not None), None)

    def final(self, key: str) -> float | None:
        """The value of `key` in the last record with an accuracy."""
        return number((self.last("accuracy") or {}).get(key))


def _name(folder: Path) -> str:
    """The folder's name; runs over seeds lie in the folder of what they have in common."""
    return f"{folder.parent.name}, {folder.name}" if folder.name.startswith("seed-") else folder.name


def _federation(folder: Path) -> tuple[list[str], list[int], list[int]]:
    """Names of the classes, the minority among them, and training counts, which may be missing."""
    file = folder / "federation.json"
    try:
        content = json.loads(file.read_bytes())
        classes = [str(name) for name in content["classes"]]
        minority = [int(index) for index in content.get("minority") or ()]
        counts = [int(count) for count in content.get("train_counts") or ()]
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not the folder of a run: it has no federation.json") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read ({type(error).__name__}: {error})") from error
    if any(not 0 <= index < len(classes) for index in minority):
        raise CheckpointError(f"{file} names the minority {minority}; expected 0 to {len(classes) - 1}")
    if len(counts) not in (0, len(classes)):
        raise CheckpointError(f"{file} has {len(counts)} train_counts for {len(classes)} classes")
    return classes, minority, counts


def _sound(record: dict[str, Any], classes: int) -> bool:
    """Is what should be a list or a square of counts one?"""
    recall, confusion = record.get("recall") or [], record.get("confusion") or []
    if not isinstance(recall, list) or not isinstance(confusion, list):
        return False
    rows = all(isinstance(row, list) and len(row) == classes for row in confusion)
    return rows and len(confusion) in (0, classes) and all(isinstance(n, int) for row in confusion for n in row)


def number(value: object) -> float | None:
    """A finite number, or None."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None  # type: ignore[arg-type]
