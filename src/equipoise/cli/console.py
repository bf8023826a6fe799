"""The consoles that commands print to, and what they print about a finished run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from equipoise import report
from equipoise.cli.display import run_table
from equipoise.runs.folder import finite

out, err = Console(), Console(stderr=True)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON; numbers that are not finite become null."""
    sys.stdout.write(json.dumps(finite(value)) + "\n")


def free_folder(folder: Path) -> Path:
    """Return the first folder of NAME, NAME-2, NAME-3, ... that does not exist."""
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def show_run(folder: Path, result: dict[str, Any], as_json: bool) -> None:
    """Write the report of a finished run, and print its result as a table or as JSON."""
    page = report.write([report.Run.read(folder)], folder / "report.html")
    if as_json:
        print_json({"folder": str(folder), **result})
        return
    federation = json.loads((folder / "federation.json").read_text())
    out.print(run_table(result, federation))
    out.print(f"run folder {folder}, report {page}", soft_wrap=True)
