"""Reads the samples of one file or folder, with or without labels.

Labels stay class names, because other files may have classes that this one has not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from equipoise.core.errors import DataError, nearest

from .dataset import check_part, check_samples
from .draw import Array
from .folders import read_images
from .npz import as_labels, as_samples, read_npz
from .tables import read_table

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


@dataclass(frozen=True, eq=False)
class Samples:
    x: Array = field(repr=False)
    labels: Array | None = field(repr=False)  # class names; None if they are not known
    columns: tuple[str, ...] = ()  # for a table: names of the columns of x, in their order
    files: tuple[str, ...] = ()  # for images: the path of each, relative to the folder

    def __len__(self) -> int:
        return len(self.x)


def read_samples(
    path: Path,
    *,
    label: str | None = None,
    drop: tuple[str, ...] = (),
    delimiter: str = ",",
    columns: tuple[str, ...] | None = None,
    labelled: bool = True,
    grey: bool = False,
) -> Samples:
    """Read a table, an .npz file with x and y, or a folder that has one folder of images for each class.

    For a table, `label` names the column of labels (None: labels are not read), and `columns` the columns to read, in
    this order (None: all except the label and those in `drop`). With `labelled = False`, an .npz file needs no y, and
    images may lie directly in the folder. With `grey`, images are read with one channel.
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
    table = read_table(path, label, drop, delimiter, columns)
    return Samples(table.x, None if label is None else _canonical(table.text[label]), table.columns)


def _canonical(labels: Array) -> Array:
    """Write labels that are whole numbers in one way, so that "1.0" at one site and "1" at another are one class."""
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
        where = f" in folders named by class, such as {path / 'CLASS' / 'picture.png'}" if labelled else ""
        raise DataError(f"{path} has no images ({', '.join(IMAGES)}){where}")
    names = tuple(f.relative_to(path).as_posix() for f in files)
    labels = np.array([f.parent.name for f in files]) if labelled else None
    return Samples(read_images(files, grey), labels, files=names)


def positions(labels: Array, classes: tuple[str, ...], of: str) -> Array:
    """Turn class names into class numbers; `of` says in the error whose classes they are, such as "this run"."""
    place = {name: number for number, name in enumerate(classes)}
    for name in np.unique(labels).tolist():
        if name not in place:
            raise DataError(f"label {name!r} is not among the classes of {of}; {nearest(name, classes)}")
    return np.array([place[name] for name in labels.tolist()], dtype=np.int64)


def in_order(classes: set[str]) -> tuple[str, ...]:
    """Sort class names: by value if all of them are whole numbers, else alphabetically.

    >>> in_order({"10", "9", "2"}), in_order({"b", "a"})
    (('2', '9', '10'), ('a', 'b'))
    """
    try:
        return tuple(sorted(classes, key=int))
    except ValueError:
        return tuple(sorted(classes))
