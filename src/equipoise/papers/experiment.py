"""Experiments of the papers: the cells and methods of each, and the config of every run.

Experiments are data, in `experiments/PAPER.toml`. A *fragment* is a part of a config, a nested table. The config of a
run is merged from fragments, each overriding those before it: the paper's base, the experiment's own, one for each
value of the cell, and the method's. Three keys of a fragment are not settings: `use` names fragments that are merged
first, `when` holds further fragments for cells with a certain value, and `let` defines words. An expression of a
method may contain these words and the axes of the cell in braces, such as `fedprox(mu={mu})`.
"""

from __future__ import annotations

import itertools
import re
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from equipoise.core.errors import ConfigError, nearest
from equipoise.papers.published import Published, text
from equipoise.runs.config import override

PAPERS = ("climb", "fedshift", "fedre", "astraea")
CURVE = 50  # points of a curve; a run with fewer rounds than in the paper is evaluated more often to have as many
LONGEST = 80  # characters of a file name

Fragment = Mapping[str, Any]


@dataclass(frozen=True)
class Guess:
    """A setting that the paper leaves out, the value taken here, and the evidence for it."""

    what: str
    value: str
    evidence: str


@dataclass(frozen=True)
class Cell:
    """One setting of an experiment: a value for each of its axes, as text."""

    values: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return ",".join(f"{axis}={value}" for axis, value in self.values)

    @property
    def slug(self) -> str:
        return slug(str(self))


@dataclass(frozen=True, eq=False)  # every experiment exists once, so that identity is equality
class Experiment:
    """A table or figure of a paper."""

    name: str
    title: str
    paper: str
    kind: str  # "training", "balance" or "estimate": see `KINDS` in runner.py
    baseline: str  # the method with which others are compared by some measures
    fragments: Mapping[str, Fragment] = field(repr=False)
    base: tuple[Fragment, ...] = field(repr=False)
    axes: Mapping[str, Mapping[str, Fragment]] = field(repr=False)
    methods: Mapping[str, Fragment] = field(repr=False)  # the paper's methods, by their names in its table
    extra: Mapping[str, Fragment] = field(repr=False)  # methods that are not in the paper
    measures: Mapping[str, str] = field(repr=False)  # our measure -> the published column ("": not published)
    published: Published | None = field(repr=False)
    guesses: tuple[Guess, ...] = field(repr=False)
    departures: tuple[str, ...] = field(repr=False)
    remarks: tuple[str, ...] = field(repr=False)

    def cells(self) -> list[Cell]:
        """List every combination of values; the last axis changes fastest."""
        points = itertools.product(*self.axes.values())
        return [Cell(tuple(zip(self.axes, point, strict=True))) for point in points]

    def printed(self, cell: Cell, method: str, measure: str) -> float | None:
        """Return the number that the paper printed, infinity for "never", None for nothing."""
        column = self.measures[measure]
        return self.published.value(cell.values, method, column) if self.published and column else None

    def method(self, name: str) -> Fragment:
        """Return the fragment of one of the experiment's methods, or of any other method by its expression."""
        return self.methods.get(name) or self.extra.get(name) or {"method": name}

    def settings(self, cell: Cell, method: str | None = None, sets: Sequence[str] = ()) -> dict[str, Any]:
        """Return the raw config of a cell and a method, or of the cell alone.

        `sets` are changes such as "local.lr=1", which override it.
        """
        raw = self._merged(cell, method)
        words = dict(cell.values) | raw.pop("let", {})
        if "method" in raw:
            raw["method"] = _filled(raw["method"], words, self.name)
        return _with_sets(raw, sets)

    def changes(self, cell: Cell, method: str) -> dict[str, Any]:
        """Return the settings that the method changes, by their paths, such as {"train.cohort": 20}."""
        made = merge(*self._expanded(self.method(method), cell))
        return {path: value for path, value in flat(made) if path != "method"}

    def words(self, cell: Cell) -> dict[str, Any]:
        """Return the words that the fragments of a cell define with `let`."""
        let: dict[str, Any] = self._merged(cell).get("let", {})
        return let

    def rounds(self, cell: Cell) -> int:
        """Return the number of rounds in the paper."""
        return int(self.settings(cell)["train"]["rounds"])

    def _merged(self, cell: Cell, method: str | None = None) -> dict[str, Any]:
        layers = [*self.base, *(self.axes[axis][value] for axis, value in cell.values)]
        layers += [self.method(method)] if method is not None else []
        return merge(*(part for layer in layers for part in self._expanded(layer, cell)))

    def _expanded(self, layer: Fragment, cell: Cell) -> Iterator[Fragment]:
        """Yield the fragments in `use`, then the fragment itself, then those in `when` that apply to the cell."""
        for name in layer.get("use", ()):
            yield from self._expanded(self.fragments[name], cell)
        yield {key: value for key, value in layer.items() if key not in ("use", "when")}
        for value, part in layer.get("when", {}).items():
            if value in dict(cell.values).values():
                yield from self._expanded(part, cell)


def merge(*fragments: Fragment) -> dict[str, Any]:
    """Merge fragments, later ones over earlier ones; a table of another `kind` replaces the earlier table.

    >>> merge({"a": {"kind": "x", "n": 1}}, {"a": {"n": 2}}, {"b": 3})
    {'a': {'kind': 'x', 'n': 2}, 'b': 3}
    >>> merge({"a": {"kind": "x", "n": 1}}, {"a": {"kind": "y"}})
    {'a': {'kind': 'y'}}
    """
    merged: dict[str, Any] = {}
    for fragment in fragments:
        for key, value in fragment.items():
            below: Any = merged.get(key)
            if not isinstance(value, Mapping):
                merged[key] = value
            elif isinstance(below, dict) and len({table["kind"] for table in (below, value) if "kind" in table}) < 2:
                merged[key] = merge(below, value)
            else:
                merged[key] = merge(value)
    return merged


def flat(table: Fragment, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables with their paths.

    >>> dict(flat({"a": {"b": 1, "c": [2]}}))
    {'a.b': 1, 'a.c': [2]}
    """
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested(path: str, value: Any) -> dict[str, Any]:
    """Make the nested tables that have one value at the path.

    >>> nested("a.b", 1)
    {'a': {'b': 1}}
    """
    for key in reversed(path.split(".")):
        value = {key: value}
    made: dict[str, Any] = value
    return made


def slug(name: str) -> str:
    """Turn a name into a file name; a long one is cut and gets a checksum, so that it stays unique.

    >>> slug("dataset=mnist,rho=10"), slug("climb(eta=0.5) + scaffold")
    ('dataset=mnist_rho=10', 'climb_eta=0.5_scaffold')
    """
    plain = re.sub(r"[^A-Za-z0-9.=-]+", "_", name).strip("_")
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 9]}-{zlib.crc32(name.encode()):08x}"


def experiments() -> dict[str, Experiment]:
    """Return every experiment by its name, such as climb-table2."""
    return {made.name: made for paper in PAPERS for made in _read(paper)}


def find(name: str) -> Experiment:
    known = experiments()
    if name not in known:
        raise ConfigError(f"there is no experiment {name!r}; {nearest(name, known)}")
    return known[name]


def choose(experiment: Experiment, wanted: Sequence[str]) -> list[Cell]:
    """Return the cells that match at least one filter such as "dataset=mnist,rho=10", or all without a filter."""
    filters = [_filter(experiment, entry) for entry in wanted]
    cells = [cell for cell in experiment.cells() if not filters or any(f <= set(cell.values) for f in filters)]
    if not cells:
        raise ConfigError(f"--cells {' '.join(wanted)}: {experiment.name} has no such cell")
    return cells


def _filter(experiment: Experiment, entry: str) -> set[tuple[str, str]]:
    pairs = set()
    for part in entry.split(","):
        axis, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ConfigError(f"--cells {entry!r}: expected axes and values such as {experiment.cells()[0]}")
        if axis not in experiment.axes:
            near = nearest(axis, experiment.axes)
            raise ConfigError(f"--cells {entry!r}: {experiment.name} has no axis {axis!r}; {near}")
        if text(value) not in experiment.axes[axis]:
            values = ", ".join(experiment.axes[axis])
            raise ConfigError(f"--cells {entry!r}: {axis} = {value!r}, expected one of {values}")
        pairs.add((axis, text(value)))
    return pairs


@cache
def _read(paper: str) -> tuple[Experiment, ...]:
    source = files("equipoise.papers").joinpath(f"experiments/{paper}.toml")
    return parse(paper, source.read_text(encoding="utf-8"))


def parse(paper: str, document: str) -> tuple[Experiment, ...]:
    """Read the experiments that a TOML document describes."""
    tables = tomllib.loads(document)
    return tuple(_experiment(paper, name, table, tables) for name, table in tables["experiments"].items())


def _experiment(paper: str, name: str, table: dict[str, Any], document: dict[str, Any]) -> Experiment:
    inherited = document if table.get("inherit", True) else {}
    published = table.get("published")
    return Experiment(
        name=f"{paper}-{name}",
        title=table["title"],
        paper=document["paper"],
        kind=table.get("kind", "training"),
        baseline=document["baseline"],
        fragments=document.get("fragments", {}),
        base=(inherited.get("base", {}), table.get("config", {}), {"let": table.get("let", {})}),
        axes={axis: _axis(values) for axis, values in table["axes"].items()},
        methods=_methods(inherited.get("methods", {}) | table.get("methods", {})),
        extra=_methods(inherited.get("extra", {}) | table.get("extra", {})),
        measures=table["measures"],
        published=Published.read(published, table["axes"]) if published else None,
        guesses=tuple(Guess(**guess) for guess in (*inherited.get("guesses", ()), *table.get("guesses", ()))),
        departures=tuple(d["what"] for d in inherited.get("departures", ()) if name in d.get("only", (name,))),
        remarks=tuple(table.get("remarks", ())),
    )


def _axis(values: dict[str, Any]) -> dict[str, Fragment]:
    """Return the fragment of each value; the short form gives the path of a setting and its values."""
    if "path" not in values:
        return {text(value): fragment for value, fragment in values.items()}
    return {text(value): nested(values["path"], value) for value in values["values"]}


def _methods(table: dict[str, Any]) -> dict[str, Fragment]:
    return {name: {"method": entry} if isinstance(entry, str) else entry for name, entry in table.items()}


def _filled(expression: str, words: Mapping[str, Any], name: str) -> str:
    try:
        return expression.format_map(words)
    except (KeyError, IndexError, ValueError):
        raise ConfigError(f"method {expression!r}: {name} knows only the words {', '.join(words)}") from None


def _with_sets(raw: dict[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """Apply `sets`; if they shorten the run, evaluate often enough that its curve has `CURVE` points."""
    changed = override(raw, sets)
    if not any(entry.partition("=")[0].strip() == "train.evaluate_every" for entry in sets):
        train = changed["train"]
        train["evaluate_every"] = min(train.get("evaluate_every", 1), max(1, _whole(train.get("rounds")) // CURVE))
    return changed


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 1  # reading the config refuses any other value
