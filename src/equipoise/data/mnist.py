"""Grey images of single characters: digits, MNIST, Fashion-MNIST and EMNIST."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from equipoise.core.errors import ConfigError, DataError

from .dataset import Dataset, assemble
from .draw import Array
from .fields import choice
from .files import find, missing, reading
from .imbalance import DIGITS, EMNIST_CLASSES
from .npz import as_labels, as_samples, read_npz

FASHION = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
EMNIST_SPLITS = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}
FOLDERS = {
    "mnist": ("mnist", "MNIST", "mnist/raw", "MNIST/raw"),
    "fashion_mnist": tuple(
        f"{name}{raw}"
        for name in ("fashion_mnist", "fashion-mnist", "FashionMNIST", "fashion")
        for raw in ("", "/raw")
    ),
    "emnist": ("", "gzip", *(f"{n}{raw}" for n in ("emnist", "EMNIST") for raw in ("", "/raw", "/gzip"))),
}
IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def load_digits(root: Path, *, normalise: str = "pool") -> Dataset:
    """Load the 1,797 images of 8 x 8 pixels that come with scikit-learn; a fifth of each digit is the test set.

    Grey levels 0 to 16 are scaled to 0 to 255 and rounded, so that they are treated like any other image.
    """
    from sklearn import datasets

    bunch = datasets.load_digits()
    x = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    return assemble("digits", (x, bunch.target.astype(np.int64)), 0.2, tuple(DIGITS), normalise)


def load_mnist(root: Path, *, normalise: str = "mnist") -> Dataset:
    return _load("mnist", root, tuple(DIGITS), normalise)


def load_fashion_mnist(root: Path, *, normalise: str = "fashion_mnist") -> Dataset:
    return _load("fashion_mnist", root, FASHION, normalise)


def find_mnist(root: Path, source: str = "mnist") -> list[Path] | None:
    """Find the .npz file, or the four idx files.

    MNIST and Fashion-MNIST use the same names for their idx files. Files directly in `root` count as Fashion-MNIST
    if the name of `root` contains "fashion", else as MNIST.
    """
    archive = find(root, ("", *FOLDERS[source]), [f"{source}.npz"])
    if archive:
        return [archive]
    root_fits = ("fashion" in root.resolve().name.lower()) == (source == "fashion_mnist")
    return _find_idx(root, (*FOLDERS[source], *([""] if root_fits else [])), IDX)


def find_emnist(root: Path, split: str) -> list[Path] | None:
    names = [f"emnist-{split}-{name.replace('t10k', 'test')}" for name in IDX]
    archive = find(root, FOLDERS["emnist"], [f"emnist_{split}*.npz"])
    return [archive] if archive else _find_idx(root, FOLDERS["emnist"], names)


def load_emnist(
    root: Path, *, split: str = "byclass", classes: int | None = None, normalise: str = "emnist"
) -> Dataset:
    """Load a split of EMNIST; `classes = 47` merges the look-alike letters of "byclass", as "bymerge" does."""
    choice("emnist: split", split, tuple(EMNIST_SPLITS))
    if classes not in (None, EMNIST_SPLITS[split]) and (split, classes) != ("byclass", 47):
        raise ConfigError(
            f"emnist: classes is {classes!r}, expected {EMNIST_SPLITS[split]} for the split {split!r}"
            + (" (or 47, with look-alike letters merged)" if split == "byclass" else "")
        )
    files = find_emnist(root, split)
    if files is None:
        wanted = f"emnist_{split}*.npz or emnist-{split}-train-images-idx3-ubyte(.gz) and its three companions"
        origin = "unpack the gzip.zip of EMNIST's home page, or let torchvision.datasets.EMNIST fetch it"
        raise missing("emnist", wanted, root, FOLDERS["emnist"], origin)
    x, y, test_x, test_y = _read(files)
    if len(files) == 4:  # the idx files of EMNIST hold every image transposed
        x, test_x = (np.ascontiguousarray(part.transpose(0, 1, 3, 2)) for part in (x, test_x))
        if split == "letters":  # the labels of this split start at 1
            y, test_y = y - 1, test_y - 1
    names = EMNIST_CLASSES.get(EMNIST_SPLITS[split], DIGITS)
    if split == "byclass" and classes == 47:
        merged = EMNIST_CLASSES[47]
        to_merged = np.array([merged.index(c if c in merged else c.upper()) for c in names])
        _in_range("emnist", (y, test_y), len(names))
        y, test_y, names = to_merged[y], to_merged[test_y], merged
    return assemble(f"emnist_{split}", (x, y), (test_x, test_y), tuple(names), normalise)


def read_idx(path: Path) -> Array:
    """Read an idx file of bytes, gzipped or not, and check its length against the shape in its header."""
    with reading(path):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise DataError(f"{path} is not an idx file of bytes: it begins with {data[:4].hex(' ') or 'nothing'}")
    start = 4 + 4 * data[3]
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4)]
    needed = start + int(np.prod(shape, dtype=object))
    if len(data) != needed:
        size = " x ".join(str(length) for length in shape)
        raise DataError(f"{path} is truncated or corrupt: {size} needs {needed} bytes, and the file has {len(data)}")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape).copy()  # frombuffer is read-only


def _load(source: str, root: Path, classes: tuple[str, ...], normalise: str) -> Dataset:
    files = find_mnist(root, source)
    if files is None:
        wanted = f"{source}.npz or {', '.join(IDX)} (each plain or .gz)"
        torchvision = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}[source]
        origin = f"torchvision.datasets.{torchvision}(folder, download=True) fetches them"
        raise missing(source, wanted, root, FOLDERS[source], origin)
    x, y, test_x, test_y = _read(files)
    return assemble(source, (x, y), (test_x, test_y), classes, normalise)


def _find_idx(root: Path, folders: tuple[str, ...], names: list[str] | tuple[str, ...]) -> list[Path] | None:
    """Find the first folder that has all files of these names, plain or gzipped, and return their paths."""
    for folder in folders:
        files = [find(root, [folder], [name, f"{name}.gz"]) for name in names]
        if all(files):
            return [path for path in files if path]
    return None


def _read(files: list[Path]) -> tuple[Array, Array, Array, Array]:
    if len(files) == 1:
        (path,) = files
        arrays = read_npz(path)
        if "test_x" not in arrays:
            raise DataError(f"{path} has no test set: test_x and test_y are missing")
        x, test_x = (as_samples(arrays[name], path) for name in ("x", "test_x"))
        (y, test_y), _ = as_labels([arrays["y"], arrays["test_y"]], None, path)
        return x, y, test_x, test_y
    images, labels, test_images, test_labels = (read_idx(path) for path in files)
    for path, x, y in ((files[0], images, labels), (files[2], test_images, test_labels)):
        if x.ndim != 3 or y.shape != x.shape[:1]:
            raise DataError(f"{path} has shape {list(x.shape)}, and its label file has shape {list(y.shape)}")
    return images[:, None], labels.astype(np.int64), test_images[:, None], test_labels.astype(np.int64)


def _in_range(source: str, parts: tuple[Array, ...], num_classes: int) -> None:
    for y in parts:
        if y.size and y.max() >= num_classes:
            raise DataError(f"{source} has label {y.max()}, outside 0 to {num_classes - 1}")
