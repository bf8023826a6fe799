"""The data of a run that the report needs, read from a run folder."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equipoise.core.errors import CheckpointError
from equipoise.runs.baselines import CENTRALISED, LOCAL
from equipoise.runs.folder import read_config, read_metrics


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
        """Read the run in `folder`, finished or not; raise `CheckpointError` if a file is missing or broken."""
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
        """Whether the run is a baseline (centralised or local training), which is shown but not ranked."""
        return self.method in (CENTRALISED, LOCAL)

    @property
    def rounds(self) -> int:
        return max((int(at) for record in self.records if (at := number(record.get("round")))), default=0)

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return (round, value) for every record in which `key` has a value."""
        pairs = ((number(record.get("round")), number(record.get(key))) for record in self.records)
        return [(int(at), value) for at, value in pairs if at is not None and value is not None]

    def last(self, key: str) -> dict[str, Any] | None:
        """Return the last record that has `key`."""
        return next((record for record in reversed(self.records) if record.get(key) is not None), None)

    def final(self, key: str) -> float | None:
        """Return the value of `key` in the last record that has an accuracy."""
        return number((self.last("accuracy") or {}).get(key))


def _name(folder: Path) -> str:
    """Return the folder's name; a folder such as seed-0 also gets the name of its parent."""
    return f"{folder.parent.name}, {folder.name}" if folder.name.startswith("seed-") else folder.name


def _federation(folder: Path) -> tuple[list[str], list[int], list[int]]:
    """Read the class names, the minority classes, and the training counts (empty if unknown)."""
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
    """Whether the recall is a list, and the confusion matrix a square of counts, if the record has them."""
    recall, confusion = record.get("recall") or [], record.get("confusion") or []
    if not isinstance(recall, list) or not isinstance(confusion, list):
        return False
    rows = all(isinstance(row, list) and len(row) == classes for row in confusion)
    return rows and len(confusion) in (0, classes) and all(isinstance(n, int) for row in confusion for n in row)


def number(value: object) -> float | None:
    """Return `value` if it is a finite number, else None."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None  # type: ignore[arg-type]
