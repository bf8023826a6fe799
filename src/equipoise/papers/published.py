"""The numbers that a paper printed, in CSV files with one row per cell and method."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

NEVER = "never"  # stands for a number of rounds if a method does not reach the target


@dataclass(frozen=True)
class Published:
    rows: tuple[Mapping[str, str], ...]
    columns: Mapping[str, str]  # axis of the experiment -> column of the CSV file
    same: Mapping[str, str]  # value of an axis -> the value in the CSV file whose numbers it uses

    @classmethod
    def read(cls, table: Mapping[str, Any], axes: Iterable[str]) -> Published:
        source = files("equipoise.papers").joinpath(f"tables/{table['file']}")
        rows = tuple(csv.DictReader(source.read_text(encoding="utf-8").splitlines()))
        columns = {axis: table.get("columns", {}).get(axis, axis) for axis in axes}
        present = {axis: column for axis, column in columns.items() if column in rows[0]}
        return cls(rows, present, table.get("same", {}))

    def value(self, cell: Iterable[tuple[str, str]], method: str, column: str) -> float | None:
        """Return the number of a cell and method: None if the paper has none, infinity for "never"."""
        wanted = {self.columns[axis]: self.same.get(value, value) for axis, value in cell if axis in self.columns}
        for row in self.rows:
            if row["method"] == method and all(text(row[name]) == value for name, value in wanted.items()):
                return math.inf if row[column] == NEVER else float(row[column])
        return None


def text(value: object) -> str:
    """Write a value of an axis in one way, so that "0.10" and 0.1 are equal.

    >>> text(0.0), text("0.10"), text("mnist")
    ('0', '0.1', 'mnist')
    """
    try:
        return f"{float(str(value)):g}"
    except ValueError:
        return str(value)
