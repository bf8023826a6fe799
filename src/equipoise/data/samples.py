"""Samples in one file or folder, with their labels or without. Labels stay names: others may have further classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors import DataError, nearest
from .dataset import check_part, check_samples
from .draw import Array
from .folders import read_images
from .npz import as_labels, as_samples, read_npz
from .tables import read_table

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


@dataclass(frozen=True, eq=False)
class Samples:
    x: Array = field(repr=False)
    labels: Array | None = field(repr=False)  # names; none where they are not known
    features: tuple[str, ...] = ()  # of a table: the columns, in the order of x
    files: tuple[str, ...] = ()  # of images: where each lies in its folder

    def __len__(self) -> int:
        return len(self.x)


def read_samples(
    path: Path,
    *,
    label: str | None = None,
    drop: tuple[str, ...] = (),
    delimiter: str = ",",
    features: tuple[str, ...] | None = None,
    labelled: bool = True,
    grey: bool = False,
) -> Samples:
    """A table with a column of labels, an .npz with x and y, or a folder with a folder of images for each class.

    With `features`, a table gives just these columns in this order; without `label`, its labels are not read.
    Unless `labelled`, an .npz needs no y, and a folder of images no folders. `grey` images have one channel.
    """
    if path.is_dir():
        return _folder(path, labelled, grey)
    if not path.exists():
        raise DataError(f"{path} does not exist")
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".parquet", ".npz"):
        raise DataError(f"{path}: expected a .csv, .parquet or .npz file, or a folder of images")
    if suffix == ".npz":
        return _arrays(path, labelled)
    table = read_table(path, label, drop, delimiter, features)
    return Samples(table.x, None if label is None else _spelled(table.text[label]), table.features)


def _spelled(labels: Array) -> Array:
    """Whole numbers alike at every site: "1.0" and "1" are one class."""
    try:
        numbers = labels.astype(np.float64)
    except ValueError:
        return labels
    whole = np.isfinite(numbers) & (numbers == np.floor(numbers))
    return np.array([str(int(n)) for n in numbers]) if whole.all() else labels


def _arrays(path: Path, labelled: bool) -> Samples:
    arrays = read_npz(path, ("x", "y") if labelled else ("x",))
    x = as_samples(arrays["x"], path)
    if not labelled:
        check_samples(str(path), x)
        return Samples(x, None)
    names = arrays.get("classes")
    known = None if names is None else tuple(str(name) for name in names.ravel())
    (y,), known = as_labels([arrays["y"]], known, path)
    check_part(str(path), x, y, len(known))
    return Samples(x, np.array(known)[y])


def _folder(path: Path, labelled: bool, grey: bool) -> Samples:
    patterns = ("*/*",) if labelled else ("*", "*/*")
    files = sorted(f for pattern in patterns for f in path.glob(pattern) if f.suffix.lower() in IMAGES)
    if not files:
        where = f"in folders named by class, such as {path / 'CLASS' / 'picture.png'}" if labelled else "in it"
        raise DataError(f"{path} has no images ({', '.join(IMAGES)}) {where}")
    names = tuple(f.relative_to(path).as_posix() for f in files)
    labels = np.array([f.parent.name for f in files]) if labelled else None
    return Samples(read_images(files, grey), labels, files=names)


def positions(labels: Array, classes: tuple[str, ...], of: str) -> Array:
    """Names of classes as numbers; `of` says whose classes they are."""
    place = {name: number for number, name in enumerate(classes)}
    for name in np.unique(labels).tolist():
        if name not in place:
            raise DataError(f"label {name!r} is not among the classes of {of}; {nearest(name, classes)}")
    return np.array([place[name] for name in labels.tolist()], dtype=np.int64)


def in_order(classes: set[str]) -> tuple[str, ...]:
    """Names of classes as every site lists them: numbers by their value, names by the alphabet.

    >>> in_order({"10", "9", "2"}), in_order({"b", "a"})
    (('2', '9', '10'), ('a', 'b'))
    """
    try:
        return tuple(sorted(classes, key=int))
    except ValueError:
        return tuple(sorted(classes))
