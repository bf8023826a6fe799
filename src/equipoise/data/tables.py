"""Reads a user's own table, CSV or Parquet: numeric columns, a column of labels and optionally a column of clients.

Errors count rows from 1 and do not count the header of a CSV file.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.errors import ConfigError, DataError, nearest

from .dataset import Dataset, assemble
from .draw import Array
from .files import reading, require
from .npz import by_name

BLOCK = 8192  # rows of a CSV file that are held in memory as text at one time
ABSENT = ("", "nan", "na", "null")


@dataclass(frozen=True, eq=False)
class Table:
    columns: tuple[str, ...]  # names of the columns of x, in their order
    x: Array
    text: dict[str, Array]  # the columns of labels and clients by name, each cell as the file has it


def load_csv(
    path: Path,
    *,
    label: str | None = None,
    client: str | None = None,
    test: str | float = 0.2,
    drop: tuple[str, ...] = (),
    seed: int = 0,
    delimiter: str = ",",
    normalise: str = "pool",
) -> Dataset:
    """Read a CSV file with a header.

    Labels are whole numbers or names; the classes are all labels that occur, in sorted order. `test` is either a
    second file with the same columns, or the fraction of each class to hold out as a test set, drawn by `seed`
    (0: no test set). Columns named in `drop` are not read.
    """
    if not isinstance(delimiter, str) or len(delimiter) != 1:
        raise ConfigError(f"delimiter must be a single character, not {delimiter!r}")

    def read(file: Path, text: tuple[str, ...]) -> Table:
        return _read_csv(file, text, drop, delimiter)

    return _load(read, path, label, client, test, seed, normalise)


def load_parquet(
    path: Path,
    *,
    label: str | None = None,
    client: str | None = None,
    test: str | float = 0.2,
    drop: tuple[str, ...] = (),
    seed: int = 0,
    normalise: str = "pool",
) -> Dataset:
    """Read a Parquet file; the options are those of `load_csv`."""

    def read(file: Path, text: tuple[str, ...]) -> Table:
        return _read_parquet(file, text, drop)

    return _load(read, path, label, client, test, seed, normalise)


def read_table(
    path: Path, label: str | None, drop: Any, delimiter: str = ",", columns: tuple[str, ...] | None = None
) -> Table:
    """Read one table without making a data set of it.

    `x` holds the given `columns` in the given order or, without them, every column except the label and those in
    `drop`. Without `label`, no labels are read.
    """
    text = () if label is None else (label,)
    if path.suffix.lower() == ".parquet":
        table = _read_parquet(path, text, drop, columns)
    else:
        table = _read_csv(path, text, drop, delimiter, columns)
    for name in text:
        _require_complete(table.text[name], path, name)
    return table


def _load(
    read: Callable[[Path, tuple[str, ...]], Table],
    path: Path,
    label: str | None,
    client: str | None,
    test: str | float,
    seed: int,
    normalise: str,
) -> Dataset:
    if label is None:
        raise ConfigError(f'{path.name} needs the name of its label column, for example label = "class"')
    text = (label, client) if client else (label,)
    pool = read(path, text)
    clients = by_name(_require_complete(pool.text[client], path, client)) if client else None
    labels = [(str(path), _require_complete(pool.text[label], path, label))]
    if not isinstance(test, str):
        (y,), classes = encode(labels, label)
        return assemble(path.name, (pool.x, y), test, classes, normalise, seed, clients, pool.columns)
    other = _find_test_file(path, test)
    held = _in_column_order(read(other, text), other, pool, path)
    labels.append((str(other), _require_complete(held.text[label], other, label)))
    (y, test_y), classes = encode(labels, label)
    return assemble(path.name, (pool.x, y), (held.x, test_y), classes, normalise, seed, clients, pool.columns)


def encode(parts: list[tuple[str, Array]], column: str) -> tuple[list[Array], tuple[str, ...]]:
    """Turn labels into class numbers, and return these (one array per part) and the names of the classes.

    Each part is a file name and the labels in it. The classes are all labels that occur in any part, sorted by value
    if all of them are numbers, else by name.
    """
    names, position = np.unique(np.concatenate([values for _, values in parts]), return_inverse=True)
    try:
        numbers = np.array([float(name) for name in names.tolist()])
    except ValueError:
        classes = tuple(names.tolist())
        codes = np.arange(len(names))
    else:
        wrong = ~np.isfinite(numbers) | (numbers != np.floor(numbers))
        for where, values in parts:
            rows = np.flatnonzero(np.isin(values, names[wrong]))
            if rows.size:
                raise DataError(
                    f"{where}: column {column!r}, row {rows[0] + 1}: label {values[rows[0]]} is not a whole "
                    "number; labels are whole numbers or names"
                )
        ordered, codes = np.unique(numbers, return_inverse=True)  # "1" and "1.0" are one class
        classes = tuple(str(int(value)) for value in ordered)
    if len(classes) == len(position) > 2:
        raise DataError(f"{parts[0][0]}: column {column!r} has a different label in every row")
    bounds = np.cumsum([len(values) for _, values in parts])[:-1]
    return np.split(codes[position].astype(np.int64), bounds), classes


def _require_complete(values: Array, path: Path, column: str) -> Array:
    """Return the values unchanged, or raise DataError if one of them is missing."""
    names, first = np.unique(values, return_index=True)
    rows = [int(row) for name, row in zip(names.tolist(), first, strict=True) if name.lower() in ABSENT]
    if rows:
        raise DataError(f"{path}: column {column!r}, row {min(rows) + 1}: the value is missing")
    return values


def _find_test_file(path: Path, test: str) -> Path:
    """Find the test file, relative to the working directory or to the folder of the training file."""
    for candidate in (Path(test).expanduser(), path.parent / test):
        if candidate.is_file():
            return candidate
    raise DataError(f"test file {test} does not exist, neither in {Path.cwd()} nor in {path.parent}")


def _in_column_order(test: Table, test_path: Path, train: Table, train_path: Path) -> Table:
    """Put the columns of the test table in the order of the training table; both must have the same columns."""
    missing = [name for name in train.columns if name not in test.columns]
    extra = [name for name in test.columns if name not in train.columns]
    if missing:
        raise DataError(f"{test_path} has no column {missing[0]!r}, which {train_path} has")
    if extra:
        raise DataError(f"{train_path} has no column {extra[0]!r}, which {test_path} has")
    order = [test.columns.index(name) for name in train.columns]
    return Table(train.columns, test.x[:, order], test.text)


def _input_columns(
    path: Path, header: list[str], text: tuple[str, ...], drop: Any, wanted: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """Choose the columns of x: the `wanted` ones, or all except those of labels, of clients and in `drop`."""
    if not isinstance(drop, list | tuple) or not all(isinstance(name, str) for name in drop):
        raise ConfigError(f"drop must be a list of column names, not {drop!r}")
    for name in (*text, *(wanted if wanted is not None else drop)):
        if name not in header:
            raise ConfigError(f"{path} has no column {name!r}: {nearest(name, header)}")
    used = header if wanted is None else (*text, *wanted)  # columns that are not read may share a name
    doubled = [name for name in used if header.count(name) > 1]
    if doubled:
        raise DataError(f"{path} has two columns called {doubled[0]!r}")
    if wanted is not None:
        return wanted
    columns = tuple(name for name in header if name not in text and name not in drop)
    if not columns:
        raise DataError(f"{path} has no feature columns besides {', '.join((*text, *drop))}")
    return columns


def _read_csv(
    path: Path, text: tuple[str, ...], drop: Any, delimiter: str, wanted: tuple[str, ...] | None = None
) -> Table:
    with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        rows = (row for row in csv.reader(file, delimiter=delimiter, strict=True) if row)
        header = [name.strip() for name in next(rows, [])]
        if not header:
            raise DataError(f"{path} is empty")
        columns = _input_columns(path, header, text, drop, wanted)
        blocks = [
            (
                np.stack([_numbers(cells[header.index(name)], path, name, start) for name in columns], axis=1),
                {name: np.array([cell.strip() for cell in cells[header.index(name)]]) for name in text},
            )
            for start, cells in _blocks(rows, path, len(header))
        ]
    if not blocks:
        raise DataError(f"{path} has a header and no rows")
    return Table(
        columns,
        np.concatenate([x for x, _ in blocks]),
        {name: np.concatenate([values[name] for _, values in blocks]) for name in text},
    )


def _blocks(rows: Iterator[list[str]], path: Path, width: int) -> Iterator[tuple[int, list[tuple[str, ...]]]]:
    """Yield at most `BLOCK` rows at a time: the number of rows before them, and their cells column by column."""
    start = 0
    while block := list(islice(rows, BLOCK)):
        for i, row in enumerate(block):
            if len(row) != width:
                raise DataError(f"{path}, row {start + i + 1} has {len(row)} cells, and the header has {width}")
        yield start, list(zip(*block, strict=True))
        start += len(block)


def _read_parquet(path: Path, text: tuple[str, ...], drop: Any, wanted: tuple[str, ...] | None = None) -> Table:
    parquet = require("pyarrow.parquet", "reading Parquet", "tables")
    with reading(path):
        table = parquet.read_table(path)
    columns = _input_columns(path, table.column_names, text, drop, wanted)
    if table.num_rows == 0:
        raise DataError(f"{path} has no rows")
    x = np.stack([_numbers(_parquet_column(table[name]), path, name, 0) for name in columns], axis=1)
    as_text = {
        name: np.array(["" if value is None else str(value).strip() for value in table[name].to_pylist()])
        for name in text
    }
    return Table(columns, x, as_text)


def _parquet_column(column: Any) -> Array:
    """Return a numeric column as numbers (null becomes NaN), any other as text, which the error can then quote."""
    kind = str(column.type)
    if kind == "bool" or kind.startswith(("int", "uint", "float", "double", "halffloat", "decimal")):
        return np.array(
            [np.nan if value is None else float(value) for value in column.to_pylist()]
            if column.null_count or kind.startswith("decimal")
            else column.to_numpy(),
        )
    return np.array(["" if value is None else str(value) for value in column.to_pylist()])


def _numbers(column: Array | tuple[str, ...], path: Path, name: str, start: int) -> Array:
    """Return one column as float32; the error names the row of the first cell that is not a finite number.

    `start` is the number of rows before these.
    """
    try:
        with np.errstate(over="ignore"):
            values = np.fromiter(map(float, column), np.float64, len(column)).astype(np.float32)
    except ValueError:
        values = np.array([np.nan])
    if np.isfinite(values).all():
        return values
    faults = ((i, _fault(str(value).strip())) for i, value in enumerate(column))
    row, fault = next((i, fault) for i, fault in faults if fault)
    raise DataError(f"{path}: column {name!r}, row {start + row + 1}: {fault}")


def _fault(cell: str) -> str | None:
    """Say why a cell cannot be used as a number; None if it can."""
    if cell.lower() in ABSENT:
        return "the value is missing (NaN); fill it in, or leave the column out with drop"
    try:
        number = float(cell)
    except ValueError:
        return f"{cell!r} is not a number; encode it, or leave the column out with drop"
    fits = abs(number) <= float(np.finfo(np.float32).max)
    return None if fits else f"{cell} is not a finite number of single precision"
