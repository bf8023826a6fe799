"""Data files: where they are looked for, and the errors for files that are missing or broken."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from equipoise.core.errors import ConfigError, DataError, EquipoiseError


def data_root(data_dir: str | Path | None = None) -> Path:
    """Return the folder of data sets: `data_dir`, else the environment variable EQUIPOISE_DATA, else ./data."""
    return Path(data_dir or os.environ.get("EQUIPOISE_DATA") or "data").expanduser()


def find(root: Path, folders: Sequence[str], names: Sequence[str]) -> Path | None:
    """Return the first of `names` (glob patterns are allowed) in the first of `folders` that has one of them."""
    for folder in folders:
        for name in names:
            for path in sorted((root / folder).glob(name)):
                return path
    return None


def missing(source: str, wanted: str, root: Path, folders: Sequence[str], origin: str) -> DataError:
    """Make the error for a missing data set: what was looked for, where, and how to get it."""
    inside = [folder for folder in folders if folder]
    where = f"{root}" + (f" or its folders {', '.join(inside)}" if inside else "")
    return DataError(
        f"{source}: found no {wanted} in {where}; {origin}, then put the files there, or set --data-dir "
        "or the environment variable EQUIPOISE_DATA to the folder that holds them"
    )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error that is raised inside while reading a file into a DataError that names the file."""
    try:
        yield
    except (EquipoiseError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except PermissionError as error:
        raise DataError(f"{path} cannot be read: permission denied") from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} is truncated or corrupt: {reason}") from error


def require(module: str, purpose: str, extra: str) -> Any:
    """Import an optional library, or say in the error how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f'{purpose} needs {module.partition(".")[0]}: pip install "equipoise[{extra}]"') from error
