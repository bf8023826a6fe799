"""The progress bar of a run: rounds, minority and overall accuracy, and the time left.

If the output is not a terminal, no bar is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from equipoise.core.federation import Federation
from equipoise.runs.config import Config
from equipoise.runs.run import Watch
from equipoise.runs.training import Step


def percent(value: Any) -> str:
    """
    >>> percent(0.8029), percent(None)
    ('80.3%', '-')
    """
    return "-" if value is None else f"{100 * value:.1f}%"


@contextmanager
def bar(console: Console, label: str = "", total_runs: int = 1) -> Iterator[Watch]:
    """Show a progress bar for one run, or for several one after another; yield the callbacks that move it."""
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
