"""The data sources by name, and the function that loads any of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from equipoise.core.errors import ConfigError, DataError, nearest

from .cifar import find_cifar10, find_cifar100, load_cifar10, load_cifar100
from .dataset import Dataset
from .files import data_root
from .folders import find_cinic10, find_tiny_imagenet, load_cinic10, load_tiny_imagenet
from .hub import load_hub
from .mnist import (
    EMNIST_SPLITS,
    find_emnist,
    find_mnist,
    load_digits,
    load_emnist,
    load_fashion_mnist,
    load_mnist,
)
from .npz import load_npz
from .tables import load_csv, load_parquet


@dataclass(frozen=True)
class Source:
    """A named data set: what it is, the files it needs, and the functions that find and load them."""

    description: str
    files: str
    load: Callable[..., Dataset]
    find: Callable[[Path], object]


class Available(NamedTuple):
    name: str
    description: str
    files: str
    found: bool


SOURCES: dict[str, Source] = {
    "digits": Source(
        "1,797 handwritten digits, 8 x 8, grey; 10 classes",
        "nothing: it comes with scikit-learn",
        load_digits,
        lambda root: True,
    ),
    "mnist": Source(
        "70,000 handwritten digits, 28 x 28, grey; 10 classes",
        "mnist.npz, or train-images-idx3-ubyte(.gz) and its three companions",
        load_mnist,
        find_mnist,
    ),
    "fashion_mnist": Source(
        "70,000 pieces of clothing, 28 x 28, grey; 10 classes",
        "fashion_mnist.npz, or FashionMNIST/raw/train-images-idx3-ubyte(.gz) and its three companions",
        load_fashion_mnist,
        lambda root: find_mnist(root, "fashion_mnist"),
    ),
    "emnist": Source(
        "handwritten digits and letters, 28 x 28, grey; 10 to 62 classes by split",
        "emnist_SPLIT*.npz, or emnist-SPLIT-train-images-idx3-ubyte(.gz) and its three companions",
        load_emnist,
        lambda root: any(find_emnist(root, split) for split in EMNIST_SPLITS),
    ),
    "cifar10": Source(
        "60,000 photographs, 32 x 32, colour; 10 classes",
        "data_batch_1 to 5 and test_batch: python batches, .bin, or .webp with labels.npy",
        load_cifar10,
        find_cifar10,
    ),
    "cifar100": Source(
        "60,000 photographs, 32 x 32, colour; 100 classes",
        "train, test and meta of the python version",
        load_cifar100,
        find_cifar100,
    ),
    "cinic10": Source(
        "270,000 photographs, 32 x 32, colour; 10 classes",
        "train/CLASS/*.png, valid/CLASS/*.png and test/CLASS/*.png",
        load_cinic10,
        find_cinic10,
    ),
    "tiny_imagenet": Source(
        "110,000 photographs, 64 x 64, colour; 200 classes",
        "train/WNID/images/*.JPEG and val/val_annotations.txt",
        load_tiny_imagenet,
        find_tiny_imagenet,
    ),
}

FILES: dict[str, tuple[str, Callable[..., Dataset]]] = {
    ".npz": ("your own arrays: x and y; optionally test_x, test_y, client, classes", load_npz),
    ".csv": ("your own table: numeric columns, a label column, optionally a client column", load_csv),
    ".parquet": ("your own table: numeric columns, a label column, optionally a client column", load_parquet),
}


def load(source: str, data_dir: str | Path | None = None, **options: Any) -> Dataset:
    """Load the data set `source`: a name in `SOURCES`, the path of a file, or "hub:owner/name".

    >>> load("digits").x.shape
    (1438, 1, 8, 8)
    """
    reader, where = _reader(source, data_root(data_dir))
    known = [name for name, p in inspect.signature(reader).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise ConfigError(f"source {source!r} has no option {option!r}: {nearest(option, known)}")
    return reader(where, **options)


def available(data_dir: str | Path | None = None) -> list[Available]:
    """List all sources; `found` says whether a source can be loaded now."""
    root = data_root(data_dir)
    named = [Available(name, s.description, s.files, bool(s.find(root))) for name, s in SOURCES.items()]
    needed = {".parquet": ("the file, and pyarrow", "pyarrow")}
    files = [
        Available(f"FILE{suffix}", description, words, find_spec(module) is not None)
        for suffix, (description, _) in FILES.items()
        for words, module in [needed.get(suffix, ("the file", "numpy"))]
    ]
    hub = Available(
        "hub:OWNER/NAME",
        "an image data set of the Hugging Face hub",
        "nothing: the datasets library fetches it",
        find_spec("datasets") is not None,
    )
    return [*named, *files, hub]


def _reader(source: str, root: Path) -> tuple[Callable[..., Dataset], Path | str]:
    suffix = Path(source).suffix.lower()
    if source.startswith("hub:"):
        return load_hub, source.removeprefix("hub:")
    if suffix in FILES:
        return FILES[suffix][1], _existing(source, root)
    if source in SOURCES:
        return SOURCES[source].load, root
    raise ConfigError(
        f"source is {source!r}, which is unknown: {nearest(source, SOURCES)} "
        "(or a path that ends in .npz, .csv or .parquet, or hub:owner/name)"
    )


def _existing(source: str, root: Path) -> Path:
    """Find a user's file, relative to the working directory or to the folder of data sets."""
    for candidate in (Path(source).expanduser(), root / source):
        if candidate.is_file():
            return candidate
    raise DataError(f"{source} does not exist, neither in {Path.cwd()} nor in {root.absolute()}")
