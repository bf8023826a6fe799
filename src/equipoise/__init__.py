"""Equipoise: federated learning when the classes are not balanced.

What it offers is listed in `__init__.pyi`, and the methods in `methods/__init__.py`. Everything is loaded when it is
first used: a process that only hands messages over must not wait for torch.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _listed() -> dict[str, tuple[str, str]]:
    """Where each name of the list is defined: its module, and what it is called there."""
    listed = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {
        alias.asname: (line.module or "", alias.name)
        for line in listed.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
        if alias.asname is not None
    }


_HOMES = _listed()


def __getattr__(name: str) -> Any:
    if name == "Stacked":  # in its faster form, where that is to be had
        return import_module("equipoise.engines").stacked_engine()
    if name == "__all__":
        return __dir__()
    if name in _HOMES:
        module, original = _HOMES[name]
        if module == __name__:
            return import_module(f"{__name__}.{original}")
        return getattr(import_module(module), original)
    if name[:1].isupper() and name in _methods():
        return _methods()[name]
    raise AttributeError(f"module 'equipoise' has no attribute {name!r}")


def _methods() -> dict[str, Any]:
    return {kind.__name__: kind for kind in import_module("equipoise.methods").METHODS.values()}


def __dir__() -> list[str]:
    return sorted({*_HOMES, *_methods(), "__version__"})
