"""Expressions such as `scaffold + fedprox(mu=0.01)`: read with Python's grammar, never evaluated.

A registry maps names to frozen dataclasses; an expression is one or more of them joined by `+`, each with
literal settings. The same three functions serve methods, imbalances and partitions.
"""

from __future__ import annotations

import ast
import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from equipoise.errors import ConfigError, nearest

_WORDS = {"true": True, "false": False, "none": None}
_KINDS = {float: "a number", int: "a whole number", str: "a text", bool: "true or false", NoneType: "none"}


def parse(text: str, registry: Mapping[str, type], what: str = "method") -> list[Any]:
    """The instances that an expression names, in the order written; `what` they are is for the errors.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Prox:
    ...     mu: float = 0.0
    >>> parse("Prox + prox(mu=1)", {"prox": Prox})
    [Prox(mu=0.0), Prox(mu=1.0)]
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on odd but legal spellings, which are refused below anyway
            node = ast.parse(text.strip(), mode="eval").body
        return [_instance(term, registry, what) for term in _terms(node)]
    except SyntaxError as error:
        raise ConfigError(f"{what} {text!r}: expected names such as a + b(setting=1); {error.msg}") from error
    except (RecursionError, MemoryError) as error:
        raise ConfigError(f"{what}: an expression of {len(text)} characters is too deeply nested") from error


def split(text: str) -> list[str]:
    """The parts of a list, cut at the commas outside brackets and quotes.

    >>> split("fedavg, fedadam(lr=0.1, betas=(0.9, 0.99))")
    ['fedavg', 'fedadam(lr=0.1, betas=(0.9, 0.99))']
    """
    parts, depth, quote = [""], 0, ""
    for character in text:
        if character == "," and depth == 0 and not quote:
            parts.append("")
            continue
        parts[-1] += character
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
    parts = [part.strip() for part in parts]
    if parts[-1] == "" and len(parts) > 1:
        parts.pop()  # a trailing comma
    if "" in parts:
        raise ConfigError(f"{text!r} has an empty entry: expected entries with a comma between them")
    return parts


def render(instances: Iterable[Any], registry: Mapping[str, type]) -> str:
    """The shortest expression that `parse` turns back into equal instances: only settings off the default."""
    names = {kind: name for name, kind in registry.items()}
    terms = []
    for instance in instances:
        settings = ", ".join(f"{key}={_literal(value)}" for key, value in changed(instance).items())
        terms.append(names[type(instance)] + (f"({settings})" if settings else ""))
    return " + ".join(terms)


def build(kind: type, settings: Mapping[str, Any], name: str) -> Any:
    """An instance of a dataclass, its settings checked for names and types; `name` is its name in errors."""
    hints, known = get_type_hints(kind), _settings(kind)
    checked = {}
    for key, value in settings.items():
        if key not in known:
            choices = nearest(key, known) if known else "it has no settings"
            raise ConfigError(f"{name}: unknown setting {key!r}; {choices}")
        try:
            checked[key] = fit(value, hints[key])
        except TypeError as error:
            raise ConfigError(f"{name}: {key} must be {error}, not {value!r}") from error
    if missing := [key for key, required in known.items() if required and key not in settings]:
        raise ConfigError(f"{name}: {' and '.join(missing)} must be given, as in {name}({missing[0]}=...)")
    try:
        return kind(**checked)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from error


def changed(instance: Any) -> dict[str, Any]:
    """The settings of a dataclass instance that are not at their default."""
    settings = {}
    for field in fields(instance):
        value = getattr(instance, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.init and value != default:
            settings[field.name] = value
    return settings


def fit(value: Any, hint: Any) -> Any:
    """The value as its annotation wants it: an int as a float, a list as a tuple; a TypeError says what."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _fit_any(value, args)
    if origin is Literal:
        for choice in args:
            if value == choice and type(value) is type(choice):
                return value
        raise TypeError(expected(hint))
    if origin in (tuple, list, Sequence):
        return _fit_items(value, hint, origin, args)
    if isinstance(value, float) and math.isnan(value):
        raise TypeError("a number")
    if hint is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if hint in _KINDS and type(value) is not hint:
        raise TypeError(expected(hint))
    return value  # of any other annotation the dataclass itself is the judge


def _fit_any(value: Any, hints: tuple[Any, ...]) -> Any:
    if type(value) in hints:
        return fit(value, type(value))
    for hint in hints:
        try:
            return fit(value, hint)
        except TypeError:
            continue
    raise TypeError(" or ".join(expected(hint) for hint in hints))


def _fit_items(value: Any, hint: Any, origin: Any, args: tuple[Any, ...]) -> Any:
    fixed = origin is tuple and args[-1:] != (...,)
    if not isinstance(value, tuple | list) or (fixed and len(value) != len(args)):
        raise TypeError(expected(hint))
    hints = args if fixed else args[:1] * len(value)
    try:
        items = [fit(item, each) for item, each in zip(value, hints, strict=True)]
    except TypeError as error:
        raise TypeError(expected(hint)) from error
    return items if origin is list else tuple(items)


def expected(hint: Any) -> str:
    """An annotation in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(expected(arg) for arg in args)
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(repr(arg) for arg in args)
    if origin is tuple and args[-1:] != (...,):
        return f"({', '.join(expected(arg) for arg in args)})"
    if origin in (tuple, list, Sequence):
        return f"a list with each entry {expected(args[0])}"
    return _KINDS.get(hint, getattr(hint, "__name__", str(hint)))


def _terms(node: ast.expr) -> list[ast.expr]:
    """The terms of a sum, from left to right."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _terms(node.left) + _terms(node.right)
    return [node]


def _instance(node: ast.expr, registry: Mapping[str, type], what: str) -> Any:
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    if not isinstance(call.func, ast.Name):
        raise ConfigError(f"{what} {ast.unparse(node)!r}: expected a name, or one with settings such as a(b=1)")
    names = {name.lower(): name for name in registry}
    name = call.func.id.lower()
    if name not in names:
        raise ConfigError(f"unknown {what} {call.func.id!r}; {nearest(name, names)}")
    kind = registry[names[name]]
    given = [*zip(_settings(kind), call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
    if len(call.args) > len(_settings(kind)):
        raise ConfigError(f"{name} takes {len(_settings(kind))} settings, {len(call.args)} are given")
    settings: dict[str, Any] = {}
    for key, value in given:
        if key is None:
            raise ConfigError(f"{name}: '**' is not allowed, name each setting as in {name}(setting=1)")
        if key in settings:
            raise ConfigError(f"{name}: {key} is given twice")
        settings[key] = _value(value, f"{name}: {key}")
    return build(kind, settings, name)


def _value(node: ast.expr, where: str) -> Any:
    """A literal. Nothing is looked up and nothing is called."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.Name(id=word) if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            if not isinstance(number, bool):
                return -number if isinstance(sign, ast.USub) else number
        case ast.Tuple(elts=items):
            return tuple(_value(item, where) for item in items)
        case ast.List(elts=items):
            return [_value(item, where) for item in items]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            pairs = zip(keys, values, strict=True)
            return {key.value: _value(value, where) for key, value in pairs if isinstance(key, ast.Constant)}
    raise ConfigError(f"{where} must be a number, a text in quotes, true, false or a list, not {ast.unparse(node)!r}")


def _literal(value: Any) -> str:
    """`repr`, with infinity as a number that overflows to it, since a bare `inf` is a name."""
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    if isinstance(value, tuple):
        return f"({', '.join(_literal(item) for item in value)}{',' * (len(value) == 1)})"
    return repr(value)


def _settings(kind: type) -> dict[str, bool]:
    """The settings of a dataclass in order, and whether each must be given."""
    return {
        field.name: field.default is MISSING and field.default_factory is MISSING
        for field in fields(kind)
        if field.init
    }
