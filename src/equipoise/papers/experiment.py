"""An experiment of a paper: its cells, its methods, and the config that each of them means.

Experiments are data, in `experiments/PAPER.toml`. A *fragment* is a part of a config, a nested table; the config of a
run is fragments put over one another: the paper's base, the experiment's own, those of the cell's values, and the
method's. Three keys of a fragment are not settings: `use` names fragments that come first, `when` has further ones
for cells with a certain value, and `let` has words that the method's expression may mention, as it may the values.
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

from equipoise.config import override
from equipoise.errors import ConfigError, nearest
from equipoise.papers.published import Published, text

PAPERS = ("climb", "fedshift", "fedre", "astraea")
CURVE = 50  # points of a curve; a shorter run than the paper's is evaluated more often, to have as many
LONGEST = 80  # letters of a file's name

Fragment = Mapping[str, Any]


@dataclass(frozen=True)
class Guess:
    """A value that the paper leaves out."""

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


@dataclass(frozen=True, eq=False)  # there is one of each
class Experiment:
    name: str
    title: str
    paper: str
    kind: str  # "training", or what is done in its place: see `carry`
    baseline: str  # the method that others are measured against
    fragments: Mapping[str, Fragment] = field(repr=False)
    base: tuple[Fragment, ...] = field(repr=False)
    axes: Mapping[str, Mapping[str, Fragment]] = field(repr=False)
    methods: Mapping[str, Fragment] = field(repr=False)  # of the paper, by the name in its table
    extra: Mapping[str, Fragment] = field(repr=False)  # beyond the paper
    measures: Mapping[str, str] = field(repr=False)  # ours, and the published column ("": not published)
    published: Published | None = field(repr=False)
    guesses: tuple[Guess, ...] = field(repr=False)
    departures: tuple[str, ...] = field(repr=False)
    remarks: tuple[str, ...] = field(repr=False)

    def cells(self) -> list[Cell]:
        """Every combination of values; the first axis changes last."""
        points = itertools.product(*self.axes.values())
        return [Cell(tuple(zip(self.axes, point, strict=True))) for point in points]

    def printed(self, cell: Cell, method: str, measure: str) -> float | None:
        """What the paper has in its table; infinite where it says never."""
        column = self.measures[measure]
        return self.published.value(cell.values, method, column) if self.published and column else None

    def method(self, name: str) -> Fragment:
        """One of the experiment's methods, or any other by its expression."""
        return self.methods.get(name) or self.extra.get(name) or {"method": name}

    def settings(self, cell: Cell, method: str | None = None, sets: Sequence[str] = ()) -> dict[str, Any]:
        """The raw config of a cell under a method, or of the cell alone, with `sets` such as "local.lr=1" over it."""
        raw = self._merged(cell, method)
        words = dict(cell.values) | raw.pop("let", {})
        if "method" in raw:
            raw["method"] = _filled(raw["method"], words, self.name)
        return _in_rounds(raw, sets)

    def changes(self, cell: Cell, method: str) -> dict[str, Any]:
        """The settings of the cell that the method changes, by their paths."""
        made = merge(*self._expanded(self.method(method), cell))
        return {path: value for path, value in flat(made) if path != "method"}

    def words(self, cell: Cell) -> dict[str, Any]:
        """What the fragments of a cell say in `let`."""
        let: dict[str, Any] = self._merged(cell).get("let", {})
        return let

    def rounds(self, cell: Cell) -> int:
        """As many as in the paper."""
        return int(self.settings(cell)["train"]["rounds"])

    def _merged(self, cell: Cell, method: str | None = None) -> dict[str, Any]:
        layers = [*self.base, *(self.axes[axis][value] for axis, value in cell.values)]
        layers += [self.method(method)] if method is not None else []
        return merge(*(part for layer in layers for part in self._expanded(layer, cell)))

    def _expanded(self, layer: Fragment, cell: Cell) -> Iterator[Fragment]:
        for name in layer.get("use", ()):
            yield from self._expanded(self.fragments[name], cell)
        yield {key: value for key, value in layer.items() if key not in ("use", "when")}
        for value, part in layer.get("when", {}).items():
            if value in dict(cell.values).values():
                yield from self._expanded(part, cell)


def merge(*fragments: Fragment) -> dict[str, Any]:
    """Fragments over one another; a table of another `kind` replaces the one below.

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
    """
    >>> dict(flat({"a": {"b": 1, "c": [2]}}))
    {'a.b': 1, 'a.c': [2]}
    """
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested(path: str, value: Any) -> dict[str, Any]:
    """
    >>> nested("a.b", 1)
    {'a': {'b': 1}}
    """
    for key in reversed(path.split(".")):
        value = {key: value}
    made: dict[str, Any] = value
    return made


def slug(name: str) -> str:
    """A name as a file may have it; a long one is cut and told from others by a few digits.

    >>> slug("dataset=mnist,rho=10"), slug("climb(eta=0.5) + scaffold")
    ('dataset=mnist_rho=10', 'climb_eta=0.5_scaffold')
    """
    plain = re.sub(r"[^A-Za-z0-9.=-]+", "_", name).strip("_")
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 9]}-{zlib.crc32(name.encode()):08x}"


def experiments() -> dict[str, Experiment]:
    """Every experiment by its name, such as climb-table2."""
    return {made.name: made for paper in PAPERS for made in _read(paper)}


def find(name: str) -> Experiment:
    known = experiments()
    if name not in known:
        raise ConfigError(f"there is no experiment {name!r}; {nearest(name, known)}")
    return known[name]


def choose(experiment: Experiment, wanted: Sequence[str]) -> list[Cell]:
    """The cells that fit at least one of the filters, such as "dataset=mnist,rho=10"; all when there are none."""
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
    """The experiments that a TOML document describes."""
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
    """Fragments by value; the short form has the path of a setting and the values that it takes."""
    if "path" not in values:
        return {text(value): fragment for value, fragment in values.items()}
    return {text(value): nested(values["path"], value) for value in values["values"]}


def _methods(table: dict[str, Any]) -> dict[str, Fragment]:
    return {name: {"method": entry} if isinstance(entry, str) else entry for name, entry in table.items()}


def _filled(expression: str, words: Mapping[str, Any], name: str) -> str:
    try:
        return expression.format_map(words)
    except (KeyError, IndexError, ValueError):
        raise ConfigError(f"method {expression!r}: {name} knows the words {', '.join(words)} only") from None


def _in_rounds(raw: dict[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """With `sets` over it; where they shorten a run it is evaluated often enough to have a curve."""
    changed = override(raw, sets)
    if not any(entry.partition("=")[0].strip() == "train.evaluate_every" for entry in sets):
        train = changed["train"]
        train["evaluate_every"] = min(train.get("evaluate_every", 1), max(1, _whole(train.get("rounds")) // CURVE))
    return changed


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 1  # what is no number is refused when the config is read
