"""Code of the user's own, named `package.module:Name` in a configuration."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from equipoise.core.errors import ConfigError, nearest


def load(what: str, reference: str) -> Any:
    """The callable that `package.module:Name` names, looked for in the current directory too.

    `what` it is ("model", "method") is for the errors.
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{what} '{reference}' is incomplete; expected 'package.module:Name'")
    here = os.getcwd()
    sys.path.insert(0, here)  # a console script, unlike `python -m`, does not look in the current directory
    try:
        importlib.invalidate_caches()
        module = importlib.import_module(module_name)
    except ConfigError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{what} '{reference}' names the module '{error.name}', which is neither in {here} nor installed"
            ) from error
        raise ConfigError(
            f"{what} '{reference}': importing '{module_name}' failed with {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(here)
    found = getattr(module, attribute, None)
    if not callable(found):
        choices = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = nearest(attribute, choices) if choices else "the module defines none"
        raise ConfigError(f"{what} '{reference}': '{module_name}' has no '{attribute}'; {hint}")
    return found
