"""The command line: one verb per function. Results go to standard output, progress and errors to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from equipoise import __version__, data, report
from equipoise.cli import console, display
from equipoise.cli.console import free_folder, print_json, show_run
from equipoise.cli.progress import bar
from equipoise.cli.reproduction import Request, reproduce_papers
from equipoise.cli.sites import app as sites_app
from equipoise.core.errors import ConfigError
from equipoise.core.expression import defaults, split
from equipoise.methods.registry import Known, parse
from equipoise.runs import compare, predict
from equipoise.runs import run as runs
from equipoise.runs.config import grid as grid_points
from equipoise.runs.config import load_config
from equipoise.runs.ledger import ledger
from equipoise.testing import examine

app = typer.Typer(
    name="equipoise",
    help="Federated learning when the classes are not balanced.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(sites_app)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The run's configuration.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c", help="Change a setting; may be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder of the data sets; default EQUIPOISE_DATA.")]


def _with_data_dir(sets: list[str] | None, data_dir: Path | None) -> list[str]:
    return [*(sets or ()), *([f"data.dir={json.dumps(str(data_dir))}"] if data_dir else [])]


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the runs and the report.")] = Path("runs/demo"),
    rounds: Annotated[int, typer.Option("--rounds", min=1)] = 60,
    as_json: Json = False,
) -> None:
    """Train a few methods on imbalanced handwritten digits and show the accuracy of the minority."""
    config = display.demo_config(rounds)
    changes = {name: [f"method={json.dumps(method)}"] for name, method in display.DEMO_METHODS.items()}
    made = compare.cells(config, changes, seeds=1)
    if not as_json:
        console.out.print(display.DEMO)
    _compare(made, out, as_json, per_class=True)


@app.command()
def run(
    config: ConfigFile,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; default runs/NAME.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Train one run."""
    folder = out or free_folder(Path("runs") / config.stem)
    loaded = load_config(config, _with_data_dir(sets, data_dir))
    with bar(console.err) as watch:
        result = runs.run(loaded, folder, watch)
    show_run(folder, result, as_json)


@app.command()
def resume(folder: Annotated[Path, typer.Argument(metavar="FOLDER")], as_json: Json = False) -> None:
    """Continue a run that was cut off."""
    with bar(console.err) as watch:
        result = _resumer(folder)(folder, watch)
    show_run(folder, result, as_json)


@app.command(name="compare")
def compare_(
    config: ConfigFile,
    methods: Annotated[str, typer.Option("--methods", help='Such as "fedavg, scaffold, fedprox(mu=0.01), local".')],
    seeds: Annotated[int, typer.Option("--seeds", help="How many seeds, from train.seed on.")] = 1,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for all runs; default runs/NAME-compare.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run several methods on the same data; `centralised` and `local` are baselines. Run again to continue."""
    loaded = load_config(config, _with_data_dir(sets, data_dir))
    names = split(methods)
    if not names:
        raise ConfigError("--methods: expected at least one method")
    made = compare.cells(loaded, {m: [f"method={json.dumps(m)}"] for m in names}, seeds)
    _compare(made, out or Path("runs") / f"{config.stem}-compare", as_json)


@app.command()
def sweep(
    config: ConfigFile,
    grid: Annotated[list[str], typer.Option("--grid", metavar="a.b=1,2", help="Values to try; may be repeated.")],
    seeds: Annotated[int, typer.Option("--seeds")] = 1,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for all runs; default runs/NAME-sweep.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run every combination of some settings. Run again to continue."""
    loaded = load_config(config, _with_data_dir(sets, data_dir))
    made = compare.cells(loaded, {" ".join(point): point for point in grid_points(grid)}, seeds)
    _compare(made, out or Path("runs") / f"{config.stem}-sweep", as_json)


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="EXPERIMENT", help="Such as climb-table2.")] = None,
    cells: Annotated[
        list[str] | None, typer.Option("--cells", metavar="a=1,b=2", help="Run only these cells; may be repeated.")
    ] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="Any methods; default those of the paper.")] = None,
    extra: Annotated[bool, typer.Option("--extra", help="Also run methods that are not in the paper.")] = False,
    seeds: Annotated[int, typer.Option("--seeds", help="How many seeds, from 0 on.")] = 1,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Default as many as in the paper.")] = None,
    budget: Annotated[str | None, typer.Option("--budget", metavar="10m", help="Stop after this time.")] = None,
    sets: Sets = None,
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the runs.")] = Path("runs/reproduce"),
    results: Annotated[Path, typer.Option("--results", help="Folder for their results.")] = Path("results"),
    show_only: Annotated[bool, typer.Option("--show", help="Run nothing; show the results.")] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write a page of Markdown.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page of HTML.")] = None,
    as_json: Json = False,
) -> None:
    """Rerun a table or figure of a paper and compare; without a name, list them. Run again to continue."""
    request = Request(
        name, tuple(cells or ()), methods, extra, seeds, rounds, budget, tuple(sets or ()), data_dir, out, results,
        show_only, markdown, html,
    )  # fmt: skip
    found = reproduce_papers(request, Console(quiet=True) if as_json else console.out, console.err)
    if as_json:
        print_json(found)


@app.command(name="predict")
def predict_(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of a run or a site, or a .safetensors.")],
    samples: Annotated[Path, typer.Argument(metavar="DATA", help="A .csv, .parquet, .npz or a folder of images.")],
    out: Annotated[Path | None, typer.Option("--out", help="Write a CSV file instead of printing it.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace --out if it exists.")] = False,
    score: Annotated[bool, typer.Option("--score", help="Score the model; DATA has the true classes.")] = False,
    label: Annotated[str | None, typer.Option("--label", help="Score, with the true classes in this column.")] = None,
    allow_model: Annotated[
        list[str] | None, typer.Option("--allow-model", metavar="NAME", help="Code that the model may import.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Json = False,
) -> None:
    """Predict the class of new samples with a trained model."""
    if out is not None and out.exists() and not force:
        raise ConfigError(f"--out {out} exists already: choose another name, or replace it with --force")
    place = predict.device_named(device)
    trained = predict.load(model, allow_model or ())
    found = trained.read(samples, score=score, label=label)
    predictions = predict.Predictions(trained.card.classes, trained.probabilities(found.x, place), found.files)
    scores = None if found.labels is None else predictions.scores(found.labels)
    if out is not None:
        predictions.write(out)
    if as_json:
        given = {"predictions": predictions.rows()} if out is None else {"out": str(out)}
        print_json({"classes": trained.card.classes, "predicted": predictions.counts(), "scores": scores, **given})
        return
    if out is None:
        sys.stdout.write(predictions.csv())
    if out is not None or scores is not None:
        page = console.err if out is None else console.out  # only CSV may be printed to the output
        page.print(display.predictions_table(predictions.counts(), scores))
    if out is not None:
        console.out.print(f"wrote {out}", soft_wrap=True)


@app.command()
def describe(method: Annotated[str, typer.Argument(metavar="METHOD")], as_json: Json = False) -> None:
    """Say what a method sends, receives, keeps and reveals, as observed in a real round."""
    chain = parse(method)
    entries = ledger(chain)
    if as_json:
        print_json({"method": str(chain), "entries": [entry._asdict() for entry in entries]})
    else:
        console.out.print(display.ledger_table(chain, entries))


@app.command()
def check(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="Such as mylab.ntd:FedNTD(beta=0.5), or a chain.")],
    neutral: Annotated[
        str | None, typer.Option("--neutral", help="The same with settings at which it does nothing.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that a method keeps the contract: engines agree, padding is masked, resume is bitwise, and more."""
    chain = parse(method)
    found = []
    for finding in examine(chain, neutral=None if neutral is None else parse(neutral)):
        found.append(finding)
        if not as_json:
            console.out.print(display.finding_line(finding), soft_wrap=True, highlight=False)
    broken = [finding for finding in found if finding.kept is False]
    if as_json:
        print_json({"method": str(chain), "kept": not broken, "findings": [finding._asdict() for finding in found]})
    elif broken:
        console.out.print(f"{chain} breaks {len(broken)} of {len(found)} rules", soft_wrap=True, highlight=False)
    else:
        console.out.print(f"{chain} keeps the contract", soft_wrap=True, highlight=False)
    if broken:
        raise typer.Exit(1)


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods."""
    if as_json:
        print_json(
            [{"name": name, "about": kind.about, "settings": defaults(kind)} for name, kind in Known().items()]
        )
        return
    console.out.print(display.methods_table(Known()))


@app.command()
def datasets(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets, and which of them are found here."""
    found = data.available(data_dir)
    if as_json:
        print_json([{"name": d.name, "about": d.description, "files": d.files, "found": d.found} for d in found])
        return
    table = Table("data set", "what it is", "looked for", "found", box=None)
    for d in found:
        table.add_row(d.name, d.description, str(d.files), "yes" if d.found else "no")
    console.out.print(table)


@app.command(name="report")
def report_(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...")],
    out: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page about one or several runs."""
    found = [run for folder in folders for run in _runs_below(folder)]
    console.out.print(f"wrote {report.write([report.Run.read(run) for run in found], out)}", soft_wrap=True)


def _resumer(folder: Path) -> Callable[[Path, runs.Watch], dict[str, Any]]:
    """Return the function that resumes a run: with real sites it is served again, otherwise simulated."""
    if not (folder / "door.json").is_file():
        return runs.resume
    from equipoise.deploy.serve import resume

    return resume


def _runs_below(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run folder, else the run folders below it."""
    if not (folder / "config.json").exists() and folder.is_dir():
        below = sorted(path.parent for path in folder.glob("**/config.json"))
        if below:
            return below
    return [folder]


def _compare(made: list[compare.Cell], out: Path, as_json: bool, per_class: bool = False) -> None:
    total = sum(len(cell.configs) for cell in made)
    with bar(console.err, total_runs=total) as watch:
        results = compare.run_all(made, out, watch)
    rows = compare.summary(results)
    compare.write(rows, out / "compare.json")
    found = [replace(report.Run.read(cell.folder(out, cell.configs[0])), name=cell.name) for cell in made]
    page = report.write(found, out / "report.html")
    if as_json:
        print_json({"folder": str(out), "rows": rows})
        return
    if per_class:
        console.out.print(display.per_class_table([(cell.name, result) for cell, _, result in results], found[0]))
    console.out.print(display.comparison_table(rows))
    console.out.print(f"runs in {out}, report {page}", soft_wrap=True)


def _version(value: bool) -> None:
    if value:
        console.out.print(__version__)
        raise typer.Exit


@app.callback()
def _main(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    pass
