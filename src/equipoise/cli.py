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
from rich.markup import escape
from rich.table import Table

from equipoise import __version__, compare, data, predict, report, runs, show
from equipoise.config import grid as grid_points
from equipoise.config import load_config
from equipoise.deploy.cli import app as deploy_app
from equipoise.errors import ConfigError, EquipoiseError
from equipoise.expression import split
from equipoise.folder import finite
from equipoise.ledger import ledger
from equipoise.methods import METHODS
from equipoise.papers.command import Request
from equipoise.papers.command import carry_out as reproduce_papers
from equipoise.progress import bar

app = typer.Typer(
    name="equipoise",
    help="Federated learning when the classes are not balanced.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(deploy_app)
out_console, err_console = Console(), Console(stderr=True)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The run's configuration.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c", help="Change a setting; may be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Where data sets are; else EQUIPOISE_DATA.")]


def _with_data_dir(sets: list[str] | None, data_dir: Path | None) -> list[str]:
    return [*(sets or ()), *([f"data.dir={json.dumps(str(data_dir))}"] if data_dir else [])]


def _print(value: Any) -> None:
    sys.stdout.write(json.dumps(finite(value)) + "\n")


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for the runs and the report.")] = Path("runs/demo"),
    rounds: Annotated[int, typer.Option("--rounds", min=1)] = 60,
    as_json: Json = False,
) -> None:
    """Train on imbalanced handwritten digits with a few methods, and show how the minority fares."""
    config = show.demo_config(rounds)
    changes = {name: [f"method={json.dumps(method)}"] for name, method in show.DEMO_METHODS.items()}
    made = compare.cells(config, changes, seeds=1)
    if not as_json:
        out_console.print(show.DEMO)
    _compare(made, out, as_json, per_class=True)


@app.command()
def run(
    config: ConfigFile,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; default runs/NAME.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Carry out one run."""
    folder = out or free_folder(Path("runs") / config.stem)
    loaded = load_config(config, _with_data_dir(sets, data_dir))
    with bar(err_console) as watch:
        result = runs.run(loaded, folder, watch)
    show_run(folder, result, as_json)


@app.command()
def resume(folder: Annotated[Path, typer.Argument(metavar="FOLDER")], as_json: Json = False) -> None:
    """Go on with a run that was cut off."""
    with bar(err_console) as watch:
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
    """Run several methods on the same data; `centralised` and `local` are baselines. Run again to go on."""
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
    """Run every combination of some settings. Run again to go on."""
    loaded = load_config(config, _with_data_dir(sets, data_dir))
    made = compare.cells(loaded, {" ".join(point): point for point in grid_points(grid)}, seeds)
    _compare(made, out or Path("runs") / f"{config.stem}-sweep", as_json)


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(metavar="EXPERIMENT", help="Such as climb-table2; none: all.")] = None,
    cells: Annotated[
        list[str] | None, typer.Option("--cells", metavar="a=1,b=2", help="Only these; may be repeated.")
    ] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="The paper's, if not given; or any.")] = None,
    extra: Annotated[bool, typer.Option("--extra", help="Also the methods beyond the paper.")] = False,
    seeds: Annotated[int, typer.Option("--seeds", help="How many, from 0 on.")] = 1,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Instead of as many as in the paper.")] = None,
    budget: Annotated[str | None, typer.Option("--budget", metavar="10m", help="Stop then, to go on later.")] = None,
    sets: Sets = None,
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the runs.")] = Path("runs/reproduce"),
    results: Annotated[Path, typer.Option("--results", help="Folder for what is kept of them.")] = Path("results"),
    show_only: Annotated[bool, typer.Option("--show", help="Run nothing, show what there is.")] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write a page of Markdown.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page of HTML.")] = None,
    as_json: Json = False,
) -> None:
    """Rerun a table or figure of a paper and compare; without a name, list them. Run again to go on."""
    request = Request(
        name, tuple(cells or ()), methods, extra, seeds, rounds, budget, tuple(sets or ()), data_dir, out, results,
        show_only, markdown, html,
    )  # fmt: skip
    found = reproduce_papers(request, Console(quiet=True) if as_json else out_console, err_console)
    if as_json:
        _print(found)


@app.command(name="predict")
def predict_(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The folder of a run or a site, or a .safetensors.")],
    samples: Annotated[Path, typer.Argument(metavar="DATA", help="A .csv, .parquet, .npz or a folder of images.")],
    out: Annotated[Path | None, typer.Option("--out", help="Write a CSV file; else it is printed.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace --out if it exists.")] = False,
    score: Annotated[
        bool, typer.Option("--score", help="DATA has the true classes: say how the model fares.")
    ] = False,
    label: Annotated[str | None, typer.Option("--label", help="The same, with the column that has them.")] = None,
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
        _print({"classes": trained.card.classes, "predicted": predictions.counts(), "scores": scores, **given})
        return
    if out is None:
        sys.stdout.write(predictions.csv())
    if out is not None or scores is not None:
        console = err_console if out is None else out_console  # what is printed as CSV must stay CSV
        console.print(show.predictions_table(predictions.counts(), scores))
    if out is not None:
        out_console.print(f"wrote {out}", soft_wrap=True)


@app.command()
def describe(method: Annotated[str, typer.Argument(metavar="METHOD")], as_json: Json = False) -> None:
    """Say what a method sends, receives, keeps and reveals, read off a real round."""
    chain = runs.parse_method(method)
    entries = ledger(chain)
    if as_json:
        _print({"method": str(chain), "entries": [entry._asdict() for entry in entries]})
    else:
        out_console.print(show.ledger_table(chain, entries))


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods."""
    if as_json:
        _print([{"name": name, "about": kind.about, "example": str(kind())} for name, kind in METHODS.items()])
        return
    out_console.print(show.methods_table(METHODS))


@app.command()
def datasets(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets, and which of them are at hand."""
    found = data.available(data_dir)
    if as_json:
        _print([{"name": d.name, "about": d.description, "files": d.files, "found": d.found} for d in found])
        return
    table = Table("data set", "what it is", "looked for", "found", box=None)
    for d in found:
        table.add_row(d.name, d.description, str(d.files), "yes" if d.found else "no")
    out_console.print(table)


@app.command(name="report")
def report_(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...")],
    out: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page about one or several runs."""
    found = [run for folder in folders for run in _runs_below(folder)]
    out_console.print(f"wrote {report.write([report.Run.read(run) for run in found], out)}", soft_wrap=True)


def _resumer(folder: Path) -> Callable[[Path, runs.Watch], dict[str, Any]]:
    """A run with real sites is served again; any other is carried out here."""
    if not (folder / "door.json").is_file():
        return runs.resume
    from equipoise.deploy.serve import resume

    return resume


def _runs_below(folder: Path) -> list[Path]:
    """The folder itself, or the run folders in it."""
    if not (folder / "config.json").exists() and folder.is_dir():
        below = sorted(path.parent for path in folder.glob("**/config.json"))
        if below:
            return below
    return [folder]


def free_folder(folder: Path) -> Path:
    """A folder that is not taken: NAME, NAME-2, NAME-3, ..."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def show_run(folder: Path, result: dict[str, Any], as_json: bool) -> None:
    page = report.write([report.Run.read(folder)], folder / "report.html")
    if as_json:
        _print({"folder": str(folder), **result})
        return
    federation = json.loads((folder / "federation.json").read_text())
    out_console.print(show.run_table(result, federation))
    out_console.print(f"run folder {folder}, report {page}", soft_wrap=True)


def _compare(made: list[compare.Cell], out: Path, as_json: bool, per_class: bool = False) -> None:
    total = sum(len(cell.configs) for cell in made)
    with bar(err_console, total_runs=total) as watch:
        results = list(compare.carry_out(made, out, watch))
    rows = compare.summary(results)
    compare.write(rows, out / "compare.json")
    found = [replace(report.Run.read(cell.folder(out, cell.configs[0])), name=cell.name) for cell in made]
    page = report.write(found, out / "report.html")
    if as_json:
        _print({"folder": str(out), "rows": rows})
        return
    if per_class:
        out_console.print(show.per_class_table([(cell.name, result) for cell, _, result in results], found[0]))
    out_console.print(show.comparison_table(rows))
    out_console.print(f"runs in {out}, report {page}", soft_wrap=True)


def _version(value: bool) -> None:
    if value:
        out_console.print(__version__)
        raise typer.Exit


@app.callback()
def _main(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    pass


def main() -> None:
    """The console script: a user's mistake is one sentence and exit code 2."""
    try:
        app()
    except EquipoiseError as error:
        err_console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        err_console.print("stopped; `equipoise resume FOLDER` goes on from the last checkpoint")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
