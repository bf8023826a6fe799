"""Image data sets of the Hugging Face hub, through the `datasets` library."""

from __future__ import annotations

from typing import Any

import numpy as np

from equipoise.core.errors import ConfigError, DataError, nearest

from .dataset import Dataset, assemble
from .draw import Array
from .files import require
from .npz import by_name
from .tables import encode


def load_hub(
    name: str,
    *,
    image: str | None = None,
    label: str | None = None,
    client: str | None = None,
    config: str | None = None,
    train: str = "train",
    test: str | float | None = None,
    seed: int = 0,
    normalise: str = "pool",
) -> Dataset:
    """Load `hub:owner/name`. The image and label columns need not be named if only one column has the right type.

    `test` is the name of a split, or the fraction of each class to hold out. By default it is the split "test",
    else the split "validation", else 0.2.
    """
    library = require("datasets", f"hub:{name}", "hub")
    try:
        splits = library.load_dataset(name, config)
    except Exception as error:  # the library has no common base class for errors of network, name, access and disk
        raise DataError(f"hub:{name} cannot be loaded: {' '.join(str(error).split())}") from error
    pool = splits[_known(name, "train split", train, splits)]
    if test is None:
        test = next((split for split in ("test", "validation") if split in splits and split != train), 0.2)
    image = _column(name, pool, "image", image, "Image")
    label = _column(name, pool, "label", label, "ClassLabel")
    held = splits[_known(name, "test split", test, splits)] if isinstance(test, str) else None
    labels, classes = _labels(name, pool, held, label)
    clients = None
    if client is not None:
        owners = pool[_known(name, "client column", client, pool.features)]
        clients = by_name(np.array([str(owner) for owner in owners]))
    pair = (_images(name, pool, image), labels[0])
    if isinstance(test, str):
        return assemble(
            f"hub:{name}", pair, (_images(name, held, image), labels[1]), classes, normalise, seed, clients
        )
    return assemble(f"hub:{name}", pair, test, classes, normalise, seed, clients)


def _known(name: str, option: str, value: str, choices: Any) -> str:
    if value not in choices:
        raise ConfigError(f"hub:{name} has no {option} {value!r}: {nearest(value, list(choices))}")
    return value


def _column(name: str, pool: Any, option: str, given: str | None, kind: str) -> str:
    if given is not None:
        return _known(name, f"{option} column", given, pool.features)
    fitting = [column for column, feature in pool.features.items() if type(feature).__name__ == kind]
    if len(fitting) != 1:
        raise ConfigError(
            f"hub:{name} has {len(fitting)} columns that may be the {option}: "
            f"choose one of {', '.join(pool.features)} with {option} = ..."
        )
    return str(fitting[0])


def _labels(name: str, pool: Any, held: Any, label: str) -> tuple[list[Array], tuple[str, ...]]:
    parts = [part[label] for part in (pool, held) if part is not None]
    known = getattr(pool.features[label], "names", None)
    if known is None:
        return encode([(f"hub:{name}", np.array([str(value) for value in part])) for part in parts], label)
    return [np.array(part, dtype=np.int64) for part in parts], tuple(known)


def _images(name: str, part: Any, column: str) -> Array:
    """Return all images of a split as uint8 [N, C, H, W]: one channel for grey images, else RGB."""
    images: list[Array] = []
    for row, picture in enumerate(part[column]):
        pixels = np.asarray(picture if picture.mode in ("L", "RGB") else picture.convert("RGB"))
        images.append(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))
        if images[row].shape != images[0].shape:
            raise DataError(
                f"hub:{name}: image {row + 1} has shape {list(images[row].shape)}, and the first "
                f"{list(images[0].shape)}"
            )
    if not images:
        raise DataError(f"hub:{name}: a split has no images")
    return np.stack(images)
