"""CIFAR-10 (python batches, binary batches or sheets of lossless WebP) and CIFAR-100 (python batches)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.errors import DataError

from .dataset import Dataset, assemble
from .draw import Array
from .files import missing, reading, require

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
FOLDERS = tuple(
    f"{outer}{inner}"
    for outer in ("", "cifar10/", "cifar-10/", "CIFAR10/")
    for inner in ("", "cifar-10-batches-py", "cifar-10-batches-bin")
)
HUNDRED = ("cifar-100-python", "cifar100", "cifar-100", "CIFAR100", "cifar100/cifar-100-python", "")
PIXELS = 3 * 32 * 32


def find_cifar10(root: Path) -> tuple[Path, str] | None:
    """Find the folder that holds all six batches; return it and the suffix of the batches."""
    for folder in FOLDERS:
        for suffix in ("", ".bin", ".webp"):
            if all((root / folder / f"{batch}{suffix}").is_file() for batch in BATCHES):
                return root / folder, suffix
    return None


def load_cifar10(root: Path, *, normalise: str = "cifar10") -> Dataset:
    """Load 50,000 training and 10,000 test images; CLIMB's experiments used `normalise = "imagenet"`."""
    found = find_cifar10(root)
    if found is None:
        wanted = f"{BATCHES[0]} to {BATCHES[4]} and {BATCHES[5]} (python batches, .bin or .webp)"
        origin = "torchvision.datasets.CIFAR10(folder, download=True) fetches them"
        raise missing("cifar10", wanted, root, FOLDERS, origin)
    folder, suffix = found
    if suffix == ".webp":
        parts = _read_sheets(folder)
    elif suffix == ".bin":
        parts = [_read_binary(folder / f"{batch}.bin") for batch in BATCHES]
    else:
        parts = [_read_python(folder / batch, b"labels") for batch in BATCHES]
    x, y = (np.concatenate([part[i] for part in parts[:-1]]) for i in (0, 1))
    return assemble("cifar10", (x, y), parts[-1], CLASSES, normalise)


def find_cifar100(root: Path) -> Path | None:
    folders = (root / folder for folder in HUNDRED)
    return next((f for f in folders if all((f / name).is_file() for name in ("train", "test", "meta"))), None)


def load_cifar100(root: Path, *, normalise: str = "cifar100") -> Dataset:
    """Load 50,000 training and 10,000 test images of the 100 fine classes, from the python version."""
    folder = find_cifar100(root)
    if folder is None:
        origin = "torchvision.datasets.CIFAR100(folder, download=True) fetches them"
        raise missing("cifar100", "train, test and meta (the python version)", root, HUNDRED, origin)
    train, test = (_read_python(folder / part, b"fine_labels") for part in ("train", "test"))
    with reading(folder / "meta"):
        names = tuple(name.decode() for name in read_pickle(folder / "meta")[b"fine_label_names"])
    return assemble("cifar100", train, test, names, normalise)


def _latin1(text: str, encoding: str) -> bytes:
    """Stand in for `_codecs.encode`, through which version 2 of the pickle format writes bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}, expected latin1")
    return text.encode("latin-1")


class _DataUnpickler(pickle.Unpickler):
    """An unpickler that accepts only numpy arrays and built-in values, since any other pickle could run code."""

    # Two modules for one function, because numpy has renamed its module.
    _admitted = {  # noqa: RUF012 - a constant
        (module, name): value
        for modules, name, value in (
            (
                ("numpy.core.multiarray", "numpy._core.multiarray"),
                "_reconstruct",
                np.empty(0).__reduce__()[0],
            ),
            (("numpy",), "ndarray", np.ndarray),
            (("numpy",), "dtype", np.dtype),
            (("_codecs",), "encode", _latin1),
        )
        for module in modules
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._admitted:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is code and not data")
        return self._admitted[module, name]


def read_pickle(path: Path) -> Any:
    with reading(path), path.open("rb") as file:
        return _DataUnpickler(file, encoding="bytes").load()


def _read_python(path: Path, labels: bytes) -> tuple[Array, Array]:
    batch = read_pickle(path)
    with reading(path):
        data, y = batch[b"data"], np.array(batch[labels], dtype=np.int64)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape != (len(y), PIXELS):
            raise DataError(f"{path} is not a CIFAR batch: expected {len(y)} images of {PIXELS} bytes")
    return data.reshape(-1, 3, 32, 32), y


def _read_binary(path: Path) -> tuple[Array, Array]:
    with reading(path):
        data = np.fromfile(path, dtype=np.uint8)
    if data.size == 0 or data.size % (1 + PIXELS):
        raise DataError(f"{path} is truncated or corrupt: {data.size} bytes are not a multiple of {1 + PIXELS}")
    rows = data.reshape(-1, 1 + PIXELS)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)


def _read_sheets(folder: Path) -> list[tuple[Array, Array]]:
    """Read batches stored as sheets of 32 x 32 tiles, row by row; labels.npy holds the labels of all batches."""
    images = [_read_sheet(folder / f"{batch}.webp") for batch in BATCHES]
    path = folder / "labels.npy"
    with reading(path):
        labels = np.load(path, allow_pickle=False).astype(np.int64)
    total = sum(len(part) for part in images)
    if labels.shape != (total,):
        raise DataError(f"{path} has labels of shape {list(labels.shape)} for {total} images")
    bounds = np.cumsum([len(part) for part in images])[:-1]
    return list(zip(images, np.split(labels, bounds), strict=True))


def _read_sheet(path: Path) -> Array:
    image = require("PIL.Image", "reading WebP images", "images")
    with reading(path), image.open(path) as picture:
        sheet = np.asarray(picture.convert("RGB"))
    height, width, _ = sheet.shape
    if height % 32 or width % 32:
        raise DataError(f"{path} is {width} x {height} pixels, expected a sheet of 32 x 32 tiles")
    tiles = sheet.reshape(height // 32, 32, width // 32, 32, 3)
    return np.ascontiguousarray(tiles.transpose(0, 2, 4, 1, 3)).reshape(-1, 3, 32, 32)
