"""Makes docs/speed.md and its drawings from the files in benchmarks/results: `python -m benchmarks.page`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.drawing import sheet
from benchmarks.machine import ROOT
from benchmarks.show import milliseconds

RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
INTRODUCTION = Path(__file__).with_name("introduction.md")
MACHINES = {"cpu": "Two CPU cores", "h200": "One H200"}
CONTESTS = ("mlp", "drawn", "cnn", "resnet", "pfl")
MISSING = "not measured yet"

Case = Mapping[str, Any]
Jobs = Mapping[str, Mapping[str, Any]]
Row = Sequence[str]


def pages(results: Path) -> dict[str, str]:
    """The page and its drawings, by their paths relative to docs."""
    written, parts = {}, [INTRODUCTION.read_text(encoding="utf-8")]
    for stem, title in MACHINES.items():
        file = results / f"{stem}.json"
        jobs: Jobs = json.loads(file.read_bytes()) if file.exists() else {}
        grown = {name: case for name, case in _cases(jobs, "growth").items() if "series" in case}
        if grown:
            written[f"speed/{stem}.svg"] = sheet(f"{title}: how the cost of a round grows", grown) + "\n"
        parts.append("\n".join(_machine(title, jobs, f"speed/{stem}.svg" if grown else None)))
    written["speed.md"] = "\n".join(parts)
    return written


def write(results: Path, docs: Path) -> None:
    for name, content in pages(results).items():
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(content, encoding="utf-8")


def _machine(title: str, jobs: Jobs, drawing: str | None) -> Iterator[str]:
    yield f"## {title}\n"
    yield from (f"Measured on {where}.\n" for where in _where(jobs))
    contests = {name: case for job in CONTESTS for name, case in (_cases(jobs, job) or {job: {}}).items()}
    whole = {name: contests.pop(name) for name in list(contests) if "rounds" in contests[name]}
    yield from _contests(contests)
    yield "### From end to end\n"
    yield from _table(("run", "rounds", "seconds"), [_whole(name, case) for name, case in whole.items()])
    yield "### Ragged clients\n"
    columns: Row = ("network", "ragged, samples/s", "equal sizes, samples/s", "share of their speed")
    ragged = _cases(jobs, "ragged") | _cases(jobs, "ragged_cnn")
    yield from _table(columns, [_ragged(name, case) for name, case in ragged.items()])
    yield "### Methods\n"
    chains = _cases(jobs, "chains").items()
    yield from _table(
        ("method", "ms a round", "times FedAvg"), [row for name, case in chains for row in _chain(name, case)]
    )
    yield "### Peers\n"
    columns = ("peer", "version", "ms a round", "times", "equipoise beside it, ms", "centralised beside it, times")
    yield from _table(columns, [_peer(name, case) for name, case in _cases(jobs, "peers").items()])
    yield "### How cost grows\n"
    failed = {name: case for name, case in _cases(jobs, "growth").items() if "failed" in case}
    yield from (f"{name}: {_excuse(case)}.\n" for name, case in failed.items())
    if drawing:
        yield f"![Milliseconds of a round along four axes]({drawing})\n"
    elif not failed:
        yield f"{MISSING.capitalize()}.\n"


def _cases(jobs: Jobs, name: str) -> dict[str, Case]:
    cases: dict[str, Case] = jobs.get(name, {}).get("cases", {})
    return cases


def _where(jobs: Jobs) -> list[str]:
    """The machines and versions with which the jobs were measured: one line, or several with the jobs of each."""
    found: dict[str, list[str]] = {}
    for name, job in jobs.items():
        versions = ", ".join(f"{what} {number}" for what, number in job["versions"].items())
        where = (
            f"{job['device']}, {job['cores']} cores, {versions}, {job['date']}, commit {job['commit'] or 'unknown'}"
        )
        found.setdefault(where, []).append(name)
    return list(found) if len(found) == 1 else [f"{where} ({', '.join(names)})" for where, names in found.items()]


def _contests(cases: Mapping[str, Case]) -> Iterator[str]:
    """A table of Equipoise against other programs, with a column for each of them."""
    others = dict.fromkeys(name for case in cases.values() for name in list(case.get("rows", {}))[1:])
    rows: list[Row] = []
    for name, case in cases.items():
        if "rows" not in case:
            rows.append((name, _excuse(case)))
            continue
        ours = next(iter(case["rows"].values()))
        times = (_times(case["rows"].get(other)) for other in others)
        at_start = (f"{ours['start_up']:.1f}", f"{ours['ready']:.1f}", f"{ours['peak_mib']:,.0f}")
        rows.append((name, milliseconds(ours["seconds"]), _speed(ours), *times, *at_start))
    columns = ("job", "ms a round", "samples/s", *(f"{other}, times" for other in others))
    yield from _table((*columns, "start-up, s", "ready, s", "peak, MiB"), rows)


def _whole(name: str, case: Case) -> Row:
    return f"{name}: {case['what']}", f"{case['rounds']:,}", f"{case['seconds']:.1f}"


def _ragged(name: str, case: Case) -> Row:
    if "rows" not in case:
        return name, _excuse(case)
    ragged, equal = case["rows"].values()
    return name.removeprefix("ragged, "), _speed(ragged), _speed(equal), f"{equal['times']:.2f}"


def _chain(name: str, case: Case) -> list[Row]:
    if "rows" not in case:
        return [(name, _excuse(case))]
    return [(method, milliseconds(row["seconds"]), f"{row['times']:.2f}") for method, row in case["rows"].items()]


def _peer(name: str, case: Case) -> Row:
    if "rows" not in case:
        return name, _excuse(case)
    ours, bound, theirs = case["rows"].values()
    beside = milliseconds(ours["seconds"]), _times(bound)
    return name, case["version"], milliseconds(theirs["seconds"]), _times(theirs), *beside


def _times(row: Case | None) -> str:
    if row is None:
        return ""
    return "failed" if "failed" in row else f"{row['times']:.2f}"


def _speed(row: Case) -> str:
    return f"{row['samples_per_second']:,.0f}"


def _excuse(case: Case) -> str:
    return f"failed: {case['failed']}" if "failed" in case else MISSING


def _table(columns: Row, rows: Sequence[Row]) -> Iterator[str]:
    """A table in Markdown. A row that is too short gets empty cells at its end."""
    if not rows:
        yield f"{MISSING.capitalize()}.\n"
        return
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row] + [""] * (len(columns) - len(row))
        yield f"| {' | '.join(cells)} |"
    yield ""


if __name__ == "__main__":
    write(RESULTS, DOCS)
