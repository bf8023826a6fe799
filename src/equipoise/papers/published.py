"""The numbers that a paper printed, one row for each cell and method of a table."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

NEVER = "never"  # printed where a method does not get there


@dataclass(frozen=True)
class Published:
    rows: tuple[Mapping[str, str], ...]
    columns: Mapping[str, str]  # the column of each axis that the table has
    same: Mapping[str, str]  # values of an axis that stand for another in the table

    @classmethod
    def read(cls, table: Mapping[str, Any], axes: Iterable[str]) -> Published:
        source = files("equipoise.papers").joinpath(f"tables/{table['file']}")
        rows = tuple(csv.DictReader(source.read_text(encoding="utf-8").splitlines()))
        columns = {axis: table.get("columns", {}).get(axis, axis) for axis in axes}
        present = {axis: column for axis, column in columns.items() if column in rows[0]}
        return cls(rows, present, table.get("same", {}))

    def value(self, cell: Iterable[tuple[str, str]], method: str, column: str) -> float | None:
        """The number of a cell and method, None where the paper has none, infinite where it says never."""
        wanted = {self.columns[axis]: self.same.get(value, value) for axis, value in cell if axis in self.columns}
        for row in self.rows:
            if row["method"] == method and all(text(row[name]) == value for name, value in wanted.items()):
                return math.inf if row[column] == NEVER else float(row[column])
        return None


def text(value: object) -> str:
    """A value of an axis as text, whichever way it is written.

    >>> text(0.0), text("0.10"), text("mnist")
    ('0', '0.1', 'mnist')
    """
    try:
        return f"{float(str(value)):g}"
    except ValueError:
        return str(value)
