"""Results as tables in a terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def table(case: str, result: dict[str, Any]) -> Table:
    shown = Table(title=f"{case}: {result.get('what', '')}", title_justify="left", title_style="bold")
    if "failed" in result:
        shown.add_column("failed")
        shown.add_row(result["failed"])
    elif "series" in result:
        shown.add_column(result["axis"])
        series = result["series"]
        for name in series:
            shown.add_column(f"{name}, ms a round", justify="right")
        for points in zip(*series.values(), strict=True):
            shown.add_row(f"{points[0][0]:g}", *(milliseconds(seconds) for _, seconds in points))
    elif "rows" in result:
        for name in ("", "ms a round", "samples/s", "times", "start-up, s", "ready, s", "peak MiB"):
            shown.add_column(name, justify="right" if name else "left")
        for name, row in result["rows"].items():
            if "failed" in row:
                shown.add_row(name, f"failed: {row['failed']}")
                continue
            shown.add_row(
                name,
                milliseconds(row["seconds"]),
                f"{row['samples_per_second']:,.0f}",
                f"{row['times']:.2f}",
                *(f"{row[key]:,.{digits}f}" if key in row else "" for key, digits in AT_START.items()),
            )
    else:
        for name in ("rounds", "seconds", "peak MiB"):
            shown.add_column(name, justify="right")
        shown.add_row(f"{result['rounds']:,}", f"{result['seconds']:.1f}", f"{result['peak_mib']:,.0f}")
    return shown


AT_START = {"start_up": 1, "ready": 1, "peak_mib": 0}


def milliseconds(seconds: float) -> str:
    """
    >>> milliseconds(1.23456), milliseconds(0.0123456)
    ('1,235', '12.3')
    """
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
