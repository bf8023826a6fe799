"""Tables for the terminal, and the settings of the demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from rich.markup import escape
from rich.table import Table

from equipoise.cli.progress import percent
from equipoise.core.chain import Chain
from equipoise.core.method import Method
from equipoise.report import Run
from equipoise.runs.baselines import CENTRALISED, LOCAL
from equipoise.runs.config import Config
from equipoise.runs.ledger import Entry
from equipoise.testing import Finding

DEMO = """[bold]Equipoise demo[/]: handwritten digits at 20 clients, most of which have only one
or two of the digits. The digits 0, 2 and 4 are ten times rarer than the others: they
are the minority. Overall accuracy hides how well they are recognised;
[bold]minority[/] is the recall of the worst of them.

fedavg only averages; fedshift corrects each client's logits; climb raises the weight
of clients with a high loss; local trains each client alone; centralised trains on
all data in one place.
"""

DEMO_METHODS = {
    "fedavg": "fedavg",
    "fedshift": "fedshift(prior='uniform')",
    "climb": "climb(eta=0.5)",
    "climb + fedshift": "climb(eta=0.5) + fedshift(prior='uniform')",
    LOCAL: LOCAL,
    CENTRALISED: CENTRALISED,
}


def demo_config(rounds: int) -> Config:
    """Return the config of `equipoise demo`."""
    return Config.from_dict({
        "data": {
            "source": "digits",
            "imbalance": {"kind": "step", "rho": 10, "minority": [0, 2, 4]},
            "partition": {"kind": "mix", "clients": 20, "alpha": 0.1},
        },
        "model": {"name": "mlp", "hidden": [64]},
        "local": {"lr": 0.1, "batch": 16, "epochs": 2},
        "train": {"rounds": rounds},
    })  # fmt: skip


MEASURES = {
    "overall accuracy": "accuracy",
    "worst of the minority": "minority_accuracy",
    "worst class": "worst_class_accuracy",
    "balanced accuracy": "balanced_accuracy",
    "macro F1": "macro_f1",
    "AUROC (mean of classes)": "auroc",
    "calibration error": "calibration_error",
}


def _colour(value: float | None) -> str:
    text = percent(value)
    if value is None:
        return text
    return f"[{'red' if value < 0.5 else 'yellow' if value < 0.8 else 'green'}]{text}[/]"


def run_table(result: Mapping[str, Any], federation: Mapping[str, Any]) -> Table:
    """The last round of a run: every class, the minority, and all classes together."""
    last, best = result["last"], result.get("best")
    table = Table(title=f"{result['method']}: round {last['round']}", title_justify="left", box=None)
    table.add_column("class")
    table.add_column("samples", justify="right")
    table.add_column("recall", justify="right")
    table.add_column("precision", justify="right")
    for label, name in enumerate(federation["classes"]):
        rare = label in federation["minority"]
        table.add_row(
            f"{name} [bold](minority)[/]" if rare else name,
            f"{federation['train_counts'][label]:,}",
            _colour(last["recall"][label]),
            percent(last["precision"][label]),
        )
    table.add_section()
    for name, key in MEASURES.items():
        if key in last:
            table.add_row(f"[bold]{name}[/]", "", percent(last[key]), "")
    if best:
        where = f"best round on {best['on']} data, {best['record']['round']}"
        table.add_row(f"minority, {where}", "", percent(best["record"].get("minority_accuracy")), "")
    across = result.get("across_clients") or {}
    accuracy, on = across.get("client_accuracy") or {}, across.get("client_samples", "training")
    if accuracy.get("mean") is not None:
        name = f"accuracy of a client on its {on.replace('held out', 'held-out')} samples, mean"
        table.add_row(name, "", f"{percent(accuracy['mean'])}", f"± {percent(accuracy['std'])}")
    if result.get("reached"):
        table.add_row("round that reached the target", "", str(result["reached"]), "")
    return table


def predictions_table(counts: Mapping[str, int], scores: Mapping[str, Any] | None) -> Table:
    """How many samples are predicted as each class; with `scores`, also the recall and precision of each class."""
    table = Table(title=f"{sum(counts.values()):,} samples", title_justify="left", box=None)
    table.add_column("class")
    for column in ("predicted", *(("samples", "recall", "precision") if scores else ())):
        table.add_column(column, justify="right")
    for label, (name, count) in enumerate(counts.items()):
        cells = [escape(name), f"{count:,}"]
        if scores:
            cells += [f"{scores['counts'][label]:,}", _colour(scores["recall"][label])]
            cells.append(percent(scores["precision"][label]))
        table.add_row(*cells)
    if scores:
        table.add_section()
        for name, key in MEASURES.items():
            if scores.get(key) is not None:
                table.add_row(f"[bold]{name}[/]", "", "", percent(scores[key]))
    return table


def per_class_table(results: Sequence[tuple[str, Mapping[str, Any]]], run: Run) -> Table:
    """The recall of every class with every method."""
    table = Table(title="recall by class, * minority", title_justify="left", box=None)
    table.add_column("class")
    table.add_column("samples", justify="right")
    for name, _ in results:
        table.add_column(name, justify="right")
    for label, name in enumerate(run.classes):
        title = f"[bold]{name} *[/]" if label in run.minority else name
        found = (_colour(result["last"]["recall"][label]) for _, result in results)
        table.add_row(title, f"{run.train_counts[label]:,}" if run.train_counts else "-", *found)
    return table


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The last round of every method, with intervals over seeds."""
    seeds = rows[0]["seeds"]
    over = f", mean and 95 % interval over {seeds} seeds" if seeds > 1 else ""
    table = Table(title=f"last round{over}", title_justify="left", box=None)
    columns = {
        "accuracy": "overall",
        "minority_accuracy": "minority",
        "worst_class_accuracy": "worst class",
        "balanced_accuracy": "balanced",
        "macro_f1": "macro F1",
    }
    table.add_column("method")
    for title in columns.values():
        table.add_column(title, justify="right")
    on = next((row["best_on"] for row in rows if row["best_on"]), "test")
    table.add_column(f"minority, best round on {on}", justify="right")
    for row in rows:
        cells = [_with_interval(row[key]) for key in columns]
        table.add_row(row["name"], *cells, percent(row["best_minority_accuracy"]["mean"]))
    return table


def _with_interval(value: Mapping[str, Any]) -> str:
    half = value["interval"]
    return percent(value["mean"]) + (f" ± {100 * half:.1f}" if half is not None else "")


def ledger_table(chain: Chain, entries: Sequence[Entry]) -> Table:
    """What a client receives, sends, keeps and reveals under a chain of methods."""
    table = Table(title=f"{chain}: what a client ...", title_justify="left", box=None)
    for column in ("", "what", "size", "meaning"):
        table.add_column(column)
    direction = ""
    for entry in entries:
        if entry.direction != direction and direction:
            table.add_section()
        table.add_row(f"[bold]{entry.direction}[/]" if entry.direction != direction else "", *entry[1:])
        direction = entry.direction
    return table


def finding_line(finding: Finding) -> str:
    """One rule of the contract: whether it is kept, and if not what to change."""
    mark = {True: "[green]kept[/]  ", False: "[red]BROKEN[/]", None: "[yellow]not checked[/]"}[finding.kept]
    return f"{mark} {escape(finding.rule)}" + (f": {escape(finding.sentence)}" if finding.sentence else "")


def methods_table(methods: Mapping[str, type[Method]]) -> Table:
    """All methods with their settings."""
    table = Table("method", "settings and defaults", "what it does", box=None)
    for name, kind in methods.items():
        settings = ", ".join(f.name if f.default is MISSING else f"{f.name}={f.default!r}" for f in fields(kind))
        table.add_row(f"[bold]{name}[/]", settings, kind.about)
    return table
