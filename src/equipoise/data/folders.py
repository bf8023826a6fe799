"""Data sets stored as folders of images: CINIC-10 and Tiny-ImageNet."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.errors import DataError

from .cifar import CLASSES
from .dataset import Dataset, assemble
from .draw import Array
from .fields import flag
from .files import missing, reading, require

CINIC = ("", "cinic10", "cinic-10", "CINIC-10", "CINIC10")
TINY = ("", "tiny-imagenet-200", "tiny_imagenet", "tiny-imagenet", "TinyImageNet")


def find_cinic10(root: Path) -> Path | None:
    """Find the folder whose train and test parts have folders for all ten classes."""
    folders = (root / folder for folder in CINIC)
    return next(
        (f for f in folders if all((f / part / c).is_dir() for part in ("train", "test") for c in CLASSES)),
        None,
    )


def load_cinic10(root: Path, *, merge_valid: bool = False, normalise: str = "cinic10") -> Dataset:
    """Load 90,000 training and 90,000 test images; `merge_valid` adds the 90,000 of the valid part to training."""
    flag("cinic10: merge_valid", merge_valid)
    folder = find_cinic10(root)
    if folder is None:
        wanted = f"train/CLASS/*.png and test/CLASS/*.png for the classes {', '.join(CLASSES)}"
        raise missing("cinic10", wanted, root, CINIC, "unpack CINIC-10.tar.gz of the CINIC-10 repository")
    pool = _read_classes(folder, ("train", "valid") if merge_valid else ("train",), CLASSES, "*.png")
    test = _read_classes(folder, ("test",), CLASSES, "*.png")
    return assemble("cinic10", pool, test, CLASSES, normalise)


def find_tiny_imagenet(root: Path) -> Path | None:
    folders = (root / folder for folder in TINY)
    annotated = (f for f in folders if (f / "val" / "val_annotations.txt").is_file())
    return next((f for f in annotated if any((f / "train").glob("*/images"))), None)


def load_tiny_imagenet(root: Path, *, normalise: str = "imagenet") -> Dataset:
    """Load 100,000 training images; the 10,000 of the val part are the test set, as the test labels are secret."""
    folder = find_tiny_imagenet(root)
    if folder is None:
        wanted = "train/WNID/images/*.JPEG and val/val_annotations.txt"
        raise missing("tiny_imagenet", wanted, root, TINY, "unpack tiny-imagenet-200.zip")
    classes = tuple(sorted(path.parent.name for path in (folder / "train").glob("*/images")))
    pool = _read_classes(folder, ("train",), classes, "images/*.JPEG")
    return assemble("tiny_imagenet", pool, _read_annotated(folder / "val", classes), classes, normalise)


def _read_classes(folder: Path, parts: tuple[str, ...], classes: tuple[str, ...], names: str) -> tuple[Array, Array]:
    """Read all images of the parts: class by class, and within a class in the order of the file names."""
    paths, labels = [], []
    for part in parts:
        for c, name in enumerate(classes):
            found = sorted((folder / part / name).glob(names))
            if not found:
                raise DataError(f"{folder / part / name} has no {names}")
            paths += found
            labels += [c] * len(found)
    return read_images(paths), np.array(labels, dtype=np.int64)


def _read_annotated(folder: Path, classes: tuple[str, ...]) -> tuple[Array, Array]:
    path = folder / "val_annotations.txt"
    with reading(path):
        rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line]
    position = {name: c for c, name in enumerate(classes)}
    for number, row in enumerate(rows, 1):
        if len(row) < 2 or row[1] not in position:
            raise DataError(f"{path}, line {number}: expected a file name and one of {len(classes)} classes")
    labels = np.array([position[row[1]] for row in rows], dtype=np.int64)
    return read_images([folder / "images" / row[0] for row in rows]), labels


def read_images(paths: list[Path], grey: bool = False) -> Array:
    """Read images of one size as uint8 [N, 3, H, W]; grey images are repeated in all three channels.

    With `grey`, images are read as [N, 1, H, W], and colours are converted to grey.
    """
    if not paths:
        raise DataError("there are no images to read")
    image = require("PIL.Image", "reading images", "images")
    first = _read_image(image, paths[0], grey)
    x = np.empty((len(paths), *first.shape), dtype=np.uint8)

    def fill(i: int) -> None:
        pixels = _read_image(image, paths[i], grey)
        if pixels.shape != first.shape:
            raise DataError(
                f"{paths[i]} is {pixels.shape[2]} x {pixels.shape[1]} pixels, "
                f"and {paths[0]} is {first.shape[2]} x {first.shape[1]}; expected images of one size"
            )
        x[i] = pixels

    with ThreadPoolExecutor() as pool:  # decoding releases the interpreter lock
        for _ in pool.map(fill, range(len(paths))):
            pass
    return x


def _read_image(image: Any, path: Path, grey: bool) -> Array:
    with reading(path), image.open(path) as picture:
        pixels = np.asarray(picture.convert("L" if grey else "RGB"))
    return pixels[None] if grey else pixels.transpose(2, 0, 1)
