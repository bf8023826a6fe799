"""Reads arrays from a .npz file: `x` and `y`, and optionally a test set, class names and clients."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from equipoise.core.errors import DataError

from .dataset import Dataset, assemble
from .draw import Array
from .files import reading

ALIASES = {
    "x": ("train_x", "x_train", "x", "X"),
    "y": ("train_y", "y_train", "y"),
    "test_x": ("test_x", "x_test"),
    "test_y": ("test_y", "y_test"),
    "client": ("client", "train_client"),
    "roster": ("roster",),
    "classes": ("classes",),
}


def read_npz(path: Path, needed: tuple[str, ...] = ("x", "y")) -> dict[str, Array]:
    """Read the arrays of the file, under the names that are the keys of `ALIASES`; pickled objects are refused."""
    with reading(path), path.open("rb") as stream:
        if not zipfile.is_zipfile(stream):
            raise DataError(f"{path} is truncated, or not made by numpy.savez")
        with np.load(path, allow_pickle=False) as file:
            present = {
                name: next((alias for alias in aliases if alias in file.files), None)
                for name, aliases in ALIASES.items()
            }
            arrays = {name: file[alias] for name, alias in present.items() if alias}
    for name in needed:
        if name not in arrays:
            raise DataError(f"{path} has no array called {' or '.join(ALIASES[name])}")
    if ("test_x" in arrays) != ("test_y" in arrays):
        raise DataError(f"{path} has only one of test_x and test_y: a test set needs both")
    return arrays


def load_npz(path: Path, *, test: float = 0.2, seed: int = 0, normalise: str = "pool") -> Dataset:
    """Load a .npz file. Labels are class names, or numbers from 0 to K - 1.

    K is the length of the array `classes` if the file has one, else the largest label plus one. If the file has no
    test set, the fraction `test` of each class is held out as one, drawn by `seed` (0: no test set).
    """
    arrays = read_npz(path)
    x, names = as_samples(arrays["x"], path), arrays.get("classes")
    known = None if names is None else tuple(str(name) for name in names.ravel())
    labels, known = as_labels([arrays[name] for name in ("y", "test_y") if name in arrays], known, path)
    y = labels[0]
    clients = _clients(arrays, path)
    if len(y) != len(x) or (clients is not None and len(clients[0]) != len(x)):
        lengths = {name: len(arrays[name]) for name in ("x", "y", "client") if name in arrays}
        raise DataError(f"{path} has arrays of different lengths: {lengths}")
    test_part = (as_samples(arrays["test_x"], path), labels[1]) if "test_x" in arrays else test
    return assemble(path.name, (x, y), test_part, known, normalise, seed, clients)


def as_samples(x: Array, path: Path) -> Array:
    """Return images as [N, C, H, W], with the channels moved to the front, and any other numbers as float32."""
    if x.dtype.kind not in "buif" or x.ndim < 2:
        raise DataError(f"{path}: samples must be numbers in two dimensions or more, not {x.dtype} {list(x.shape)}")
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    if x.dtype == np.uint8 and x.ndim == 4:
        return x
    with np.errstate(over="ignore"):  # an overflow becomes inf, and the check of the data set then names the row
        return x.astype(np.float32, copy=False)


def as_labels(parts: list[Array], known: tuple[str, ...] | None, path: Path) -> tuple[list[Array], tuple[str, ...]]:
    """Return the labels of each part as int64 class numbers, and the names of all classes."""
    if all(part.dtype.kind == "U" and part.ndim == 1 for part in parts):
        known = known or tuple(np.unique(np.concatenate(parts)).tolist())
        position = {name: c for c, name in enumerate(known)}
        for part in parts:
            for row, label in enumerate(part.tolist()):
                if label not in position:
                    raise DataError(f"{path}: label {label!r} in row {row + 1} is not among its classes")
        return [np.array([position[label] for label in part.tolist()], dtype=np.int64) for part in parts], known
    numbers = [_whole_labels(part, path) for part in parts]
    if known is None:
        largest = max((int(part.max()) for part in numbers if part.size), default=0)
        if largest >= max(10_000, sum(part.size for part in numbers)):
            raise DataError(
                f"{path}: label {largest} would mean more classes than samples; expected labels from 0 to K - 1"
            )
        known = tuple(str(c) for c in range(largest + 1))
    return numbers, known


def _whole_labels(y: Array, path: Path) -> Array:
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.dtype.kind not in "buif" or y.ndim != 1:
        raise DataError(f"{path}: labels must be whole numbers in one dimension, not {y.dtype} {list(y.shape)}")
    wrong = (y != np.floor(y)) | ~np.isfinite(y)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DataError(f"{path}: label {y[row]} in row {row + 1} is not a whole number")
    return y.astype(np.int64)


def _clients(arrays: dict[str, Array], path: Path) -> tuple[Array, tuple[str, ...]] | None:
    if "client" not in arrays:
        return None
    client = arrays["client"]
    if client.ndim != 1 or client.dtype.kind not in "iuU":
        raise DataError(
            f"{path}: clients must be whole numbers or names in one dimension, not {client.dtype} "
            f"{list(client.shape)}"
        )
    if "roster" in arrays and client.dtype.kind in "iu":
        return client.astype(np.int64), tuple(str(name) for name in arrays["roster"].ravel())
    return by_name(client.astype(str))


def by_name(client: Array) -> tuple[Array, tuple[str, ...]]:
    """Return each sample's position in the sorted roster of client names, and the roster."""
    roster, position = np.unique(client, return_inverse=True)
    return position.astype(np.int64), tuple(roster.tolist())
