"""A user's own table, CSV or Parquet: numeric features, a column of labels and perhaps one of clients.

Rows are counted from 1, the header of a CSV file not included.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, DataError, nearest
from .dataset import Dataset, assemble
from .draw import Array
from .files import reading, require
from .npz import by_name

BLOCK = 8192  # rows of a CSV file in memory as text at a time
ABSENT = ("", "nan", "na", "null")


@dataclass(frozen=True, eq=False)
class Table:
    features: tuple[str, ...]
    x: Array
    text: dict[str, Array]  # columns of labels and clients, as written


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
    """A CSV file with a header.

    Labels may be whole numbers or names: classes are those that occur, in sorted order. `test` is another
    file with the same columns, or the fraction of each class that is drawn by `seed` (0: no test set).
    Columns in `drop` are left out.
    """
    if not isinstance(delimiter, str) or len(delimiter) != 1:
        raise ConfigError(f"delimiter must be a single character, not {delimiter!r}")

    def read(file: Path, columns: tuple[str, ...]) -> Table:
        return _read_csv(file, columns, drop, delimiter)

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
    """A Parquet file; options as for CSV."""

    def read(file: Path, columns: tuple[str, ...]) -> Table:
        return _read_parquet(file, columns, drop)

    return _load(read, path, label, client, test, seed, normalise)


def read_table(
    path: Path, label: str | None, drop: Any, delimiter: str = ",", features: tuple[str, ...] | None = None
) -> Table:
    """One site's table: every column but the label and what is dropped, or just the `features` in their order."""
    text = () if label is None else (label,)
    if path.suffix.lower() == ".parquet":
        table = _read_parquet(path, text, drop, features)
    else:
        table = _read_csv(path, text, drop, delimiter, features)
    for name in text:
        _complete(table.text[name], path, name)
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
    columns = (label, client) if client else (label,)
    pool = read(path, columns)
    clients = by_name(_complete(pool.text[client], path, client)) if client else None
    written = [(str(path), _complete(pool.text[label], path, label))]
    if not isinstance(test, str):
        (y,), classes = encode(written, label)
        return assemble(path.name, (pool.x, y), test, classes, normalise, seed, clients, pool.features)
    other = _beside(path, test)
    held = _same_features(read(other, columns), pool, other, path)
    written.append((str(other), _complete(held.text[label], other, label)))
    (y, test_y), classes = encode(written, label)
    return assemble(path.name, (pool.x, y), (held.x, test_y), classes, normalise, seed, clients, pool.features)


def encode(parts: list[tuple[str, Array]], column: str) -> tuple[list[Array], tuple[str, ...]]:
    """Labels of (file, values) as positions among all that occur: numbers in their order, names in theirs."""
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


def _complete(values: Array, path: Path, column: str) -> Array:
    """The column, if no value is missing."""
    names, first = np.unique(values, return_index=True)
    rows = [int(row) for name, row in zip(names.tolist(), first, strict=True) if name.lower() in ABSENT]
    if rows:
        raise DataError(f"{path}: column {column!r}, row {min(rows) + 1}: the value is missing")
    return values


def _beside(path: Path, test: str) -> Path:
    """The test file, relative to the working folder or to the folder of the training file."""
    for candidate in (Path(test).expanduser(), path.parent / test):
        if candidate.is_file():
            return candidate
    raise DataError(f"test file {test} does not exist, neither here nor in {path.parent}")


def _same_features(table: Table, pool: Table, path: Path, other: Path) -> Table:
    lacking = [name for name in pool.features if name not in table.features]
    extra = [name for name in table.features if name not in pool.features]
    if lacking or extra:
        (where, name), have = ((path, lacking[0]), other) if lacking else ((other, extra[0]), path)
        raise DataError(f"{where} has no column {name!r}, which {have} has")
    order = [table.features.index(name) for name in pool.features]
    return Table(pool.features, table.x[:, order], table.text)


def _columns(
    path: Path, header: list[str], text: tuple[str, ...], drop: Any, wanted: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """The feature columns: those that are wanted, or all but labels, clients and what is dropped."""
    if not isinstance(drop, list | tuple) or not all(isinstance(name, str) for name in drop):
        raise ConfigError(f"drop must be a list of column names, not {drop!r}")
    for name in (*text, *(wanted if wanted is not None else drop)):
        if name not in header:
            raise ConfigError(f"{path} has no column {name!r}: {nearest(name, header)}")
    used = header if wanted is None else (*text, *wanted)  # of columns that nobody reads, two may be alike
    doubled = [name for name in used if header.count(name) > 1]
    if doubled:
        raise DataError(f"{path} has two columns called {doubled[0]!r}")
    if wanted is not None:
        return wanted
    features = tuple(name for name in header if name not in text and name not in drop)
    if not features:
        raise DataError(f"{path} has no feature columns besides {', '.join((*text, *drop))}")
    return features


def _read_csv(
    path: Path, text: tuple[str, ...], drop: Any, delimiter: str, wanted: tuple[str, ...] | None = None
) -> Table:
    with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        rows = (row for row in csv.reader(file, delimiter=delimiter, strict=True) if row)
        header = [name.strip() for name in next(rows, [])]
        if not header:
            raise DataError(f"{path} is empty")
        features = _columns(path, header, text, drop, wanted)
        blocks = [
            (
                np.stack([_numbers(columns[header.index(name)], path, name, start) for name in features], axis=1),
                {name: np.array([cell.strip() for cell in columns[header.index(name)]]) for name in text},
            )
            for start, columns in _blocks(rows, path, len(header))
        ]
    if not blocks:
        raise DataError(f"{path} has a header and no rows")
    return Table(
        features,
        np.concatenate([x for x, _ in blocks]),
        {name: np.concatenate([values[name] for _, values in blocks]) for name in text},
    )


def _blocks(rows: Iterator[list[str]], path: Path, width: int) -> Iterator[tuple[int, list[tuple[str, ...]]]]:
    """Columns of text, some rows at a time, with the number of rows before them."""
    start = 0
    while block := list(islice(rows, BLOCK)):
        for i, row in enumerate(block):
            if len(row) != width:
                raise DataError(f"{path}, row {start + i + 1}: {len(row)} cells, and the header has {width}")
        yield start, list(zip(*block, strict=True))
        start += len(block)


def _read_parquet(path: Path, text: tuple[str, ...], drop: Any, wanted: tuple[str, ...] | None = None) -> Table:
    parquet = require("pyarrow.parquet", "reading Parquet", "tables")
    with reading(path):
        table = parquet.read_table(path)
    features = _columns(path, table.column_names, text, drop, wanted)
    if table.num_rows == 0:
        raise DataError(f"{path} has no rows")
    x = np.stack([_numbers(_parquet_column(table[name]), path, name, 0) for name in features], axis=1)
    written = {
        name: np.array(["" if value is None else str(value).strip() for value in table[name].to_pylist()])
        for name in text
    }
    return Table(features, x, written)


def _parquet_column(column: Any) -> Array:
    """Numbers as they are (null is NaN); anything else as text, so that the error can quote it."""
    kind = str(column.type)
    if kind == "bool" or kind.startswith(("int", "uint", "float", "double", "halffloat", "decimal")):
        return np.array(
            [np.nan if value is None else float(value) for value in column.to_pylist()]
            if column.null_count or kind.startswith("decimal")
            else column.to_numpy(),
        )
    return np.array(["" if value is None else str(value) for value in column.to_pylist()])


def _numbers(column: Array | tuple[str, ...], path: Path, name: str, start: int) -> Array:
    """One feature as float32; the first value that is not a finite number is named by row."""
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


def _fault(written: str) -> str | None:
    """Why a cell is no feature, if it is none."""
    if written.lower() in ABSENT:
        return "the value is missing (NaN); fill it in, or leave the column out with drop"
    try:
        number = float(written)
    except ValueError:
        return f"{written!r} is not a number; encode it, or leave the column out with drop"
    fits = abs(number) <= float(np.finfo(np.float32).max)
    return None if fits else f"{written} is not a finite number of single precision"
