"""Finds methods by name: a built-in name such as `climb`, a name that an installed package registers, or
`package.module:Class`.

A package registers names through the entry point group `equipoise.methods`. Any other class is written
`package.module:Class`, with settings in brackets: `mylab.ntd:FedNTD(beta=0.5) + climb`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from equipoise.core import expression, references
from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError, NotAllowed
from equipoise.core.method import SHORT_NAMES, Method, reference
from equipoise.methods import METHODS

GROUP = "equipoise.methods"


def parse(text: str, allow: Collection[str] | None = None) -> Chain:
    """Return the chain that an expression describes. With `allow`, code from outside Equipoise must be named there.

    >>> parse("fedprox(mu=0.5) + focal")
    Chain(FedProx(mu=0.5), Focal(gamma=2.0))
    """
    if allow is not None:
        for name in expression.names(text, "method"):
            _check_allowed(name, allow)
    return Chain(*expression.parse(text, Known(), "method", load))


def load(name: str) -> type[Method]:
    """Import the class that `package.module:Class` names."""
    return _checked(references.load("method", name), f"method '{name}'")


def _check_allowed(name: str, allow: Collection[str]) -> None:
    """Refuse a name whose code is neither part of Equipoise nor allowed.

    Allowing one class allows its whole module, since importing the module runs all of it.
    """
    module, colon, _ = name.partition(":")
    ours = module.split(".")[0] == "equipoise" if colon else name.lower() not in _entry_points()
    if (
        not ours
        and name not in allow
        and not (colon and module in {one.partition(":")[0] for one in allow if ":" in one})
    ):
        raise NotAllowed(
            f"method {name!r} is code from outside Equipoise, which has not been allowed here; if you trust it,"
            f" allow it with --allow-method {name}"
        )


class Known(Mapping[str, type[Method]]):
    """Method classes by name: built-in ones, and those of installed packages, which are imported on first use."""

    def __getitem__(self, name: str) -> type[Method]:
        if name in METHODS:
            return METHODS[name]
        entry = _entry_points()[name]
        try:
            found = entry.load()
        except Exception as error:
            raise ConfigError(
                f"method '{name}' of the installed package {_package(entry)}: loading {entry.value} failed with"
                f" {type(error).__name__}: {error}"
            ) from error
        kind = _checked(found, f"method '{name}' of the installed package {_package(entry)}")
        SHORT_NAMES[kind] = name
        return kind

    def __iter__(self) -> Iterator[str]:
        yield from METHODS
        yield from _entry_points()

    def __len__(self) -> int:
        return len(list(iter(self)))


def _checked(found: object, what: str) -> type[Method]:
    if isinstance(found, type) and issubclass(found, Method) and found.name:
        return found
    given = reference(found) if isinstance(found, type) else type(found).__name__
    raise ConfigError(f"{what}: {given} is no method; expected a class that inherits from equipoise.Method")


@cache
def _entry_points() -> dict[str, EntryPoint]:
    """Return the methods that installed packages register. They cannot replace a built-in name."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        name = entry.name.lower()
        if name in METHODS or name in found:
            owner = "Equipoise itself" if name in METHODS else f"the package {_package(found[name])}"
            warnings.warn(
                f"the package {_package(entry)} registers the method '{name}', which is a method of {owner}; write"
                f" {entry.value} for the package's own",
                stacklevel=2,
            )
            continue
        found[name] = entry
    return found


def _package(entry: EntryPoint) -> str:
    return "(unknown)" if entry.dist is None else entry.dist.name
