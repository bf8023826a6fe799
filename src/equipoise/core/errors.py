"""The errors a user can cause: each is one sentence, shown without a traceback.

The command line prints the sentence and exits with code 2; a library user catches `EquipoiseError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EquipoiseError(Exception):
    """A mistake in what the user gave, or a fault of the world outside (a full disk, a missing file)."""


class ConfigError(EquipoiseError):
    """A setting that is unknown, of the wrong type, out of range, or at odds with another."""


class NotAllowed(ConfigError):
    """A model or a method that would run code of others, which the user has not allowed."""


class DataError(EquipoiseError):
    """A data set that is missing, truncated, malformed, or cannot be divided as asked."""


class CheckpointError(EquipoiseError):
    """A run folder or checkpoint that is missing, corrupt, foreign, locked, or cannot be written."""


class TrainingError(EquipoiseError):
    """A training that cannot go on: not a number, too little memory, a client that failed."""


def nearest(word: object, choices: Iterable[str]) -> str:
    """Ending for an error about an unknown name: the nearest valid choice, or all of them.

    >>> nearest("scafold", ["scaffold", "fedprox"])
    "did you mean 'scaffold'?"
    >>> nearest("xyz", ["scaffold", "fedprox"])
    'the choices are fedprox, scaffold'
    """
    names = sorted(choices)
    close = difflib.get_close_matches(str(word).lower(), names, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else "the choices are " + ", ".join(names)
