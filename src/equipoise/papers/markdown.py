"""Writes the results as a Markdown page with one drawing per experiment, from the JSON files alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from equipoise.papers.comparison import COLUMNS, Block, blocks, progress
from equipoise.papers.experiment import Experiment
from equipoise.papers.figures import sheet
from equipoise.papers.measures import MEASURES, shown
from equipoise.papers.results import Run
from equipoise.papers.standing import standings

INTRODUCTION = """# The papers' tables, rerun

Made by `equipoise reproduce --markdown docs/results.md` from the files under `results/`; do not edit it.
[How experiments are described, run and added](reproduce.md).

Accuracies are in percent. *Ours* is the mean over seeds, and *range* goes from the lowest seed to the highest. *Rank*
is the place of a method among the paper's methods, in the paper → here. A method marked + is not in the paper; its
rank is the one that it would have. "30 of 1,000" rounds means that 30 were run here and 1,000 in the paper. A dash is
a number that is not published, or not measured. *Mean difference* is the mean absolute difference from the paper, and
*first* the number of cells in which a method ranks first among the paper's methods. *Best or tied* compares all
methods: a method is tied if its best seed reaches the worst seed of the best method, or, where each has one seed, if
it is within half a point of the best.
"""


def pages(experiments: Iterable[Experiment], root: Path, stem: str) -> dict[str, str]:
    """Make the page and the drawings in it; return their contents by file name, relative to the page's folder."""
    written, sections = {}, []
    listed = ["| experiment | what | cells | run as in the paper | in part |", "|---|---|---|---|---|"]
    for experiment in experiments:
        total, done, begun = progress(experiment, root)
        name = f"[{experiment.name}](#{experiment.name})" if done + begun else experiment.name
        listed.append(f"| {name} | {experiment.title} | {total} | {done} | {begun} |")
        made = blocks(experiment, root)
        if any(one.has_runs for one in made):
            drawing = sheet(experiment, made)
            if drawing is not None:
                written[f"{stem}/{experiment.name}.svg"] = drawing + "\n"
            sections.append("\n".join(_section(experiment, made, root, stem if drawing else None)))
    written[f"{stem}.md"] = "\n".join([INTRODUCTION, *listed, "", *sections])
    return written


def write(experiments: Iterable[Experiment], root: Path, path: Path) -> list[Path]:
    """Write the page to `path`, and its drawings into a folder of the same name beside it."""
    files = []
    for name, content in pages(experiments, root, path.stem).items():
        file = path.with_name(path.name) if name == f"{path.stem}.md" else path.parent / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
        files.append(file)
    return files


def _section(experiment: Experiment, made: Sequence[Block], root: Path, drawings: str | None) -> Iterator[str]:
    yield f"## {experiment.name}\n"
    yield f"{experiment.title}. {experiment.paper}.\n"
    yield from _table(experiment, [one for one in made if one.has_runs])
    yield ""
    yield from _standings(experiment, made)
    for one in made:
        for row in one.rows:
            if row.failed:
                yield f"- Failed: {one.title}, {row.method}: {row.failed}\n"
    left = [str(one.cell) for one in made if not one.has_runs and not one.variant]
    if left:
        yield f"Not run: {'; '.join(left)}.\n"
    if drawings:
        yield f"![{experiment.title}]({drawings}/{experiment.name}.svg)\n"
    yield from _notes(experiment, root)
    yield from _origin(made)


def _table(experiment: Experiment, made: Sequence[Block]) -> Iterator[str]:
    heads = ["cell", "method", "rounds", "seeds"]
    for name in experiment.measures:
        first, *others = COLUMNS
        heads += [f"{MEASURES[name].title}: {first}", *others]
    yield _line(heads)
    yield "|" + "---|" * 4 + "---:|" * (len(heads) - 4)
    for one in made:
        best = {name: _best(one, name) for name in experiment.measures}
        for number, row in enumerate(one.rows):
            cells = [one.title if number == 0 else "", row.name]
            cells += [one.length(row), str(len(row.runs) or "")]
            for name, value in row.values.items():
                words = value.words(name)
                if value.mean is not None and value.mean == best[name]:
                    words[1] = f"**{words[1]}**"
                cells += words
            yield _line(cells)


def _best(one: Block, measure: str) -> float | None:
    """Return the best mean of a measure in a cell; None if fewer than two methods have one."""
    means = [row.values[measure].mean for row in one.rows if row.values[measure].mean is not None]
    return (min if MEASURES[measure].lower else max)(means) if len(means) > 1 else None  # type: ignore[type-var]


def _standings(experiment: Experiment, made: Sequence[Block]) -> Iterator[str]:
    """For each data set, tell how far the methods are from the paper, and how often each is the best."""
    for data, group in _by_dataset(made):
        for name in experiment.measures:
            entries = standings(group, name)
            if not any(entry.contests or entry.compared for entry in entries):
                continue
            yield f"{MEASURES[name].title.capitalize()}{f' on {data}' if data else ''}, over cells with all rounds:\n"
            yield _line(["method", "mean difference from the paper", "first: paper → here", "best or tied"])
            yield "|---|---:|---:|---:|"
            for entry in entries:
                gap = f"{shown(name, entry.difference)} ({_cells(entry.compared)})" if entry.compared else ""
                first = f"{entry.first_in_paper} → {entry.first}" if entry.compared else ""
                yield _line([entry.method, gap, first, f"{entry.best} of {_cells(entry.contests)}"])
            yield ""


def _by_dataset(made: Sequence[Block]) -> Iterator[tuple[str, list[Block]]]:
    names = dict.fromkeys(dict(one.cell.values).get("dataset", "") for one in made)
    for name in names:
        yield name, [one for one in made if dict(one.cell.values).get("dataset", "") == name]


def _notes(experiment: Experiment, root: Path) -> Iterator[str]:
    if experiment.guesses:
        yield "What the paper leaves out:\n"
        yield "| what | taken | evidence |\n|---|---|---|"
        yield from (_line([guess.what, guess.value, guess.evidence]) for guess in experiment.guesses)
        yield ""
    if experiment.departures:
        yield "Different from the paper: " + "; ".join(experiment.departures) + ".\n"
    if experiment.remarks:
        yield "\n".join(f"- {remark}" for remark in experiment.remarks) + "\n"
    discussion = root / experiment.name / "notes.md"
    if discussion.exists():
        yield discussion.read_text(encoding="utf-8")


def _origin(made: Sequence[Block]) -> Iterator[str]:
    """Tell with which hardware, software and commands the runs were made."""
    runs = [run for one in made for row in one.rows for run in row.runs]
    ways = dict.fromkeys(_way(run) for run in runs)
    commands = dict.fromkeys(run["made"]["command"] for run in runs if "made" in run)
    yield f"{len(runs)} runs, {sum(run['seconds'] for run in runs) / 60:.0f} minutes: {'; '.join(ways)}.\n"
    yield "Commands: " + ", ".join(f"`{command}`" for command in commands) + "\n"


def _way(run: Run) -> str:
    execution, made = run.get("execution", {}), run.get("made", {})
    how = [
        execution.get("machine"),
        execution.get("precision"),
        "compiled" if execution.get("compile_from") is not None else None,
    ]
    what = [f"torch {execution.get('torch')}", f"equipoise {made.get('equipoise')}", made.get("commit")]
    return ", ".join(str(part) for part in (*how, *what, made.get("date")) if part)


def _cells(number: int) -> str:
    return f"{number} cell" if number == 1 else f"{number} cells"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
