"""How a run looks while it goes: a bar with rounds, minority and overall accuracy, and the time left.

Quiet when the output is not a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from equipoise.config import Config
from equipoise.experiment import Step
from equipoise.federation import Federation
from equipoise.runs import Watch


def percent(value: Any) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


@contextmanager
def bar(console: Console, label: str = "", total_runs: int = 1) -> Iterator[Watch]:
    """A bar on the console for one run, or for several one after another."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("minority {task.fields[minority]}  overall {task.fields[overall]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(label, total=None, minority="-", overall="-")
        runs = 0

        def begin(config: Config, fed: Federation, done: int) -> None:
            nonlocal runs
            runs += 1
            place = f" ({runs} of {total_runs})" if total_runs > 1 else ""
            name = f"{config.method} seed {config.train.seed}{place}"
            progress.reset(task, description=name, total=config.train.rounds, completed=done)

        def step(step: Step) -> None:
            progress.update(task, completed=step.round)
            if step.record is not None:
                minority, overall = step.record.get("minority_accuracy"), step.record.get("accuracy")
                progress.update(task, minority=percent(minority), overall=percent(overall))

        yield Watch(begin, step, lambda sentence: progress.console.print(f"[yellow]note:[/] {sentence}"))
