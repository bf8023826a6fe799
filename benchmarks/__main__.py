"""How fast Equipoise is on this machine, against plain PyTorch and, with --peers, against other libraries.

The results are printed, and written to --out: a job replaces the job of the same name in that file, and others stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import machine, show
from benchmarks.cases import Result
from benchmarks.host import one_line
from benchmarks.jobs import JOBS, Case
from equipoise.core.errors import ConfigError, EquipoiseError, nearest

PEERS = "peers"  # the job that only --peers asks for


def main(words: Sequence[str]) -> int:
    given = _parse(words)
    console = Console()
    try:
        names = chosen(given.jobs, given.peers)
        kept = read(given.out)
    except EquipoiseError as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False)
        return 2
    device = machine.resolved(given.device)
    for name in names:
        job = {"command": _command(given), **machine.describe(device), "cases": {}}
        for case in JOBS[name](device):
            job["cases"][case.name] = result = measured(case, device)
            console.print(show.table(case.name, result))
            kept[name] = job  # written after every case, so that a later failure loses nothing
            if given.out:
                given.out.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


def _command(given: argparse.Namespace) -> str:
    """The command that measures the same again, without --out."""
    jobs = f" --jobs {given.jobs}" if given.jobs else ""
    return f"python -m benchmarks --device {given.device}{jobs}{' --peers' if given.peers else ''}"


def measured(case: Case, device: str) -> Result:
    try:
        return case.measure(device)
    except Exception as error:  # whatever fails, the other cases are still measured
        return {"failed": one_line(error)}


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--jobs", metavar="A,B", help=f"some of {', '.join(JOBS)}; all but {PEERS} when not given")
    parser.add_argument("--peers", action="store_true", help="other libraries too, each in an environment of its own")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to keep what was measured")
    return parser.parse_args(words)


def chosen(jobs: str | None, peers: bool) -> list[str]:
    names = [name for name in JOBS if name != PEERS] if jobs is None else [name.strip() for name in jobs.split(",")]
    for name in names:
        if name not in JOBS:
            raise ConfigError(f"--jobs: there is no job {name!r}; {nearest(name, JOBS)}")
    return [*names, PEERS] if peers and PEERS not in names else names


def read(out: Path | None) -> dict[str, Any]:
    """The jobs that were measured before and written to the file."""
    if out is None or not out.exists():
        return {}
    try:
        jobs: dict[str, Any] = json.loads(out.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--out {out}: it cannot be read ({error}); expected a file that this command wrote"
        ) from error
    return jobs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
