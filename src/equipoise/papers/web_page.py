"""Writes the results as one self-contained HTML page, with a table and the drawings of each cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from equipoise.papers.comparison import Block, blocks
from equipoise.papers.experiment import Experiment
from equipoise.papers.figures import drawings
from equipoise.papers.measures import MEASURES
from equipoise.report.markup import tag, text


def write(experiments: Iterable[Experiment], root: Path, path: Path) -> Path:
    """Write the page. Experiments without results are left out, unless there is only one experiment."""
    chosen = list(experiments)
    sections = []
    for experiment in chosen:
        made = blocks(experiment, root)
        if len(chosen) == 1 or any(one.has_runs for one in made):
            sections.append(_section(experiment, made))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_page(sections), encoding="utf-8")
    return path


def _page(sections: Sequence[str]) -> str:
    style = files("equipoise.report").joinpath("page.css").read_text(encoding="utf-8")
    title = "The papers' tables, rerun"
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">' + tag("title", text(title)) + tag("style", style)
    )
    note = "Percent, except rounds, megabytes and divergences. Rank: in the paper → here. +: not in the paper."
    body = tag("main", tag("header", tag("h1", text(title)), tag("p", text(note), class_="subject")), *sections)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _section(experiment: Experiment, made: Sequence[Block]) -> str:
    left = [one.title for one in made if not one.has_runs]
    notes = [*experiment.departures, *experiment.remarks, *([f"Not run: {'; '.join(left)}."] if left else [])]
    guesses = [f"{guess.what}: {guess.value} ({guess.evidence})" for guess in experiment.guesses]
    return tag(
        "section",
        tag("h2", text(f"{experiment.name}: {experiment.title}")),
        tag("p", text(experiment.paper), class_="note"),
        *(_cell(experiment, one) for one in made if one.has_runs),
        *(tag("p", text(note), class_="note") for note in notes),
        tag(
            "details",
            tag("summary", "What the paper leaves out"),
            tag("ul", *(tag("li", text(guess)) for guess in guesses)),
        )
        if guesses
        else "",
    )


def _cell(experiment: Experiment, one: Block) -> str:
    heads = ["method", "expression", "rounds", "seeds"]
    for name in experiment.measures:
        heads += [f"{MEASURES[name].title}: paper", "ours", "diff.", "rank"]
    rows = []
    for row in one.rows:
        cells = [
            tag("th", text(row.name), scope="row"),
            tag("td", tag("code", text(row.expression))),
            tag("td", text(one.length(row)), class_="number"),
            tag("td", str(len(row.runs) or ""), class_="number"),
        ]
        for name, value in row.values.items():
            paper, ours, span, gap, ranks = (text(word) for word in value.words(name))
            words = (paper, ours + (" " + tag("small", span) if span else ""), gap, ranks)
            cells += [tag("td", word, class_="number") for word in words]
        rows.append(tag("tr", *cells))
    head = tag("thead", tag("tr", *(tag("th", text(name), scope="col") for name in heads)))
    figures = [tag("figure", tag("figcaption", text(what)), drawing) for what, drawing in drawings(experiment, one)]
    return tag(
        "div",
        tag("h3", text(one.title)),
        tag("div", tag("table", head, tag("tbody", *rows)), class_="scroll"),
        tag("div", *figures, class_="pair"),
    )
