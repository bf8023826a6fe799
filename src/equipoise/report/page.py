"""Puts the page together: the table of runs, the charts, and the configs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from equipoise.core.errors import CheckpointError, ConfigError
from equipoise.report.curves import curves
from equipoise.report.heatmap import ROOMY, heatmap, scale
from equipoise.report.markup import MISSING, percent, swatch, tag, text
from equipoise.report.reading import Run
from equipoise.report.recalls import recalls

MEASURES = {
    "accuracy": "Overall",
    "minority_accuracy": "Minority",
    "worst_class_accuracy": "Worst class",
    "balanced_accuracy": "Balanced",
    "macro_f1": "Macro F1",
}


def write(runs: Sequence[Run], path: Path, title: str = "Federated runs") -> Path:
    """Write the page about `runs` to `path` and return the path. The page needs no network and no script."""
    if not runs:
        raise ConfigError("a report needs at least one run")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(runs, title), encoding="utf-8", errors="replace")
    except OSError as error:
        raise CheckpointError(f"cannot write the report {path}: {error.strerror or error}") from error
    return path


def page(runs: Sequence[Run], title: str) -> str:
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        + tag("title", text(title))
        + tag("style", files("equipoise.report").joinpath("page.css").read_text(encoding="utf-8"))
    )
    body = tag(
        "main",
        tag("header", tag("h1", text(title)), tag("p", text(_subject(runs)), class_="subject")),
        _summary(runs),
        _curves(runs),
        _section(
            "Recall by class",
            "Classes by training count, largest first. ◆ marks the minority classes; their bars are solid.",
            recalls(runs),
        ),
        _confusions(runs),
        _configs(runs),
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _subject(runs: Sequence[Run]) -> str:
    first = runs[0]
    parts = ["1 run" if len(runs) == 1 else f"{len(runs)} runs"]
    if all(run.classes == first.classes for run in runs):
        parts.append(f"{len(first.classes)} classes")
        if first.minority and all(run.minority == first.minority for run in runs):
            names = ", ".join(first.classes[index] for index in first.minority)
            parts.append(f"minority {'class' if len(first.minority) == 1 else 'classes'}: {names}")
    return " · ".join(parts)


def _summary(runs: Sequence[Run]) -> str:
    finals = {key: [run.final(key) for run in runs] for key in MEASURES}
    ranked = [place for place, run in enumerate(runs) if not run.baseline]
    highest = {
        key: max((value for place in ranked if (value := values[place]) is not None), default=None)
        for key, values in finals.items()
    }
    heads = ["Run", "Method", "Rounds", *MEASURES.values(), "Best round"]
    rows = []
    for place, run in enumerate(runs):
        cells = [
            tag("th", swatch(place), text(run.name), scope="row"),
            tag("td", tag("code", text(run.method))),
            tag("td", text(f"{run.rounds:,}"), class_="number"),
        ]
        for key in MEASURES:
            value = finals[key][place]
            top = len(ranked) > 1 and not run.baseline and value is not None and value == highest[key]
            shown = text(percent(value)) + (_worst(run) if key == "worst_class_accuracy" else "")
            cells.append(tag("td", shown, class_="number top" if top else "number"))
        cells.append(tag("td", _best(run), class_="number"))
        rows.append(tag("tr", *cells))
    table = tag(
        "table",
        tag("thead", tag("tr", *(tag("th", text(name), scope="col") for name in heads))),
        tag("tbody", *rows),
    )
    note = (
        "Percent, at the last evaluated round. Minority is the recall of the worst minority class; balanced "
        "is the mean recall of all classes. Best round is the one most accurate overall on the test data, a "
        "choice that training could not have made."
    )
    bold = " Bold is the highest of a column, baselines left out." if len(ranked) > 1 else ""
    return tag("section", _lead(runs), tag("div", table, class_="scroll"), tag("p", note + bold, class_="note"))


def _lead(runs: Sequence[Run]) -> str:
    """Write one sentence that names the best runs, if there are at least two to compare."""
    ranked = [run for run in runs if not run.baseline]
    pairs = [(run, run.final("minority_accuracy"), run.final("accuracy")) for run in ranked]
    known = [(run, few, all_) for run, few, all_ in pairs if few is not None and all_ is not None]
    if len(known) < 2:
        return ""
    fair, few, overall = max(known, key=lambda entry: entry[1])
    sharp, few_there, most = max(known, key=lambda entry: entry[2])
    first = f"{_bold(fair)} serves the minority best, with {percent(few)}\u00a0%"
    if fair is sharp:
        return tag("p", f"{first}, and is the most accurate overall, with {percent(most)}\u00a0%.", class_="lead")
    rest = (
        f" at {percent(overall)}\u00a0% overall; {_bold(sharp)} is the most accurate overall, "
        f"with {percent(most)}\u00a0%, and {percent(few_there)}\u00a0% for the minority."
    )
    return tag("p", first + rest, class_="lead")


def _bold(run: Run) -> str:
    return tag("b", text(run.name))


def _worst(run: Run) -> str:
    index = (run.last("accuracy") or {}).get("worst_class")
    if not isinstance(index, int) or not 0 <= index < len(run.classes):
        return ""
    return " " + tag("small", text(run.classes[index]))


def _best(run: Run) -> str:
    series = run.series("accuracy")
    if not series:
        return MISSING
    at, value = max(series, key=lambda point: point[1])  # the first one, if several are equal
    return f"{percent(value)} " + tag("small", f"at {at:,}")


def _curves(runs: Sequence[Run]) -> str:
    keys = [key for key in ("minority_accuracy", "accuracy") if any(run.series(key) for run in runs)]
    names = {"minority_accuracy": "Minority accuracy", "accuracy": "Overall accuracy"}
    charts = [tag("figure", tag("figcaption", f"{names[key]}, %"), curves(runs, key, names[key])) for key in keys]
    legend = tag("ul", *(tag("li", swatch(i), text(run.name)) for i, run in enumerate(runs)), class_="legend")
    content = tag("div", *charts, class_="pair") if charts else tag("p", "No round was evaluated yet.")
    return _section("Accuracy over rounds", "", legend if len(runs) > 1 else "", content)


def _confusions(runs: Sequence[Run]) -> str:
    figures = []
    for place, run in enumerate(runs):
        record = run.last("confusion")
        when = f", round {record.get('round', MISSING)}" if record is not None else ""
        caption = tag("figcaption", swatch(place), text(run.name + when))
        figures.append(tag("figure", caption, heatmap(run)))
    many = any(len(run.classes) > ROOMY for run in runs)
    note = "Each row is one true class, in percent of its test samples."
    return _section("Confusion", note, scale(), tag("div", *figures, class_="column" if many else "pair"))


def _configs(runs: Sequence[Run]) -> str:
    entries = [
        tag(
            "details",
            tag("summary", swatch(place), text(run.name)),
            tag("pre", text(json.dumps(run.config, indent=2, ensure_ascii=False, default=str))),
        )
        for place, run in enumerate(runs)
    ]
    return _section("Configuration", "", *entries)


def _section(title: str, note: str, *content: str) -> str:
    return tag("section", tag("h2", text(title)), tag("p", text(note), class_="note") if note else "", *content)
