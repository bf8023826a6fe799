"""Files that others wrote: where they are looked for, and one sentence for each that is missing or broken."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError, EquipoiseError


def data_root(data_dir: str | Path | None = None) -> Path:
    """The folder of data sets: as given, else the variable EQUIPOISE_DATA, else ./data."""
    return Path(data_dir or os.environ.get("EQUIPOISE_DATA") or "data").expanduser()


def find(root: Path, folders: Sequence[str], names: Sequence[str]) -> Path | None:
    """The first of `names` (patterns are allowed) in the first of `folders` that has one."""
    for folder in folders:
        for name in names:
            for path in sorted((root / folder).glob(name)):
                return path
    return None


def missing(source: str, wanted: str, root: Path, folders: Sequence[str], origin: str) -> DataError:
    """The error for a data set that is not there: what was looked for, where, and what to do about it."""
    inside = [folder for folder in folders if folder]
    where = f"{root}" + (f" or its folders {', '.join(inside)}" if inside else "")
    return DataError(
        f"{source}: found no {wanted} in {where}; {origin}, then put the files there or point --data-dir "
        "or the variable EQUIPOISE_DATA to the folder that holds them"
    )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever a parser raises on a bad file becomes one sentence that names the file."""
    try:
        yield
    except (EquipoiseError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except PermissionError as error:
        raise DataError(f"{path} may not be read: permission denied") from error
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} is truncated or corrupt: {reason}") from error


def require(module: str, purpose: str, extra: str) -> Any:
    """A library that only some data sets need."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f'{purpose} needs {module.partition(".")[0]}: pip install "equipoise[{extra}]"') from error
