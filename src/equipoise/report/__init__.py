"""Writes runs as one self-contained HTML page: curves, recall by class, confusion matrices."""

from equipoise.report.page import write
from equipoise.report.reading import Run

__all__ = ["Run", "write"]
