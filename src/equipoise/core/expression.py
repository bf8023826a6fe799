"""Expressions such as `scaffold + fedprox(mu=0.01)`: read with Python's grammar, never evaluated.

A registry maps names to frozen dataclasses; an expression is one or more of them joined by `+`, each with
literal settings. A class that is in no registry is written `package.module:Class`, where that is allowed. The same
functions serve methods, imbalances and partitions.
"""

from __future__ import annotations

import ast
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from equipoise.core.errors import ConfigError, nearest

_WORDS = {"true": True, "false": False, "none": None}
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_KINDS = {float: "a number", int: "a whole number", str: "a text", bool: "true or false", NoneType: "none"}


def parse(
    text: str, registry: Mapping[str, type], what: str = "method", load: Callable[[str], type] | None = None
) -> list[Any]:
    """The instances that an expression names, in the order written; `what` they are is for the errors.

    `load` gives the class of a name such as `package.module:Class`; without it such names are refused.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Prox:
    ...     mu: float = 0.0
    >>> parse("Prox + prox(mu=1)", {"prox": Prox})
    [Prox(mu=0.0), Prox(mu=1.0)]
    """
    with _explained(text, what):
        terms, own = _terms(text)
        return [_instance(term, registry, what, own, load) for term in terms]


def names(text: str, what: str = "method") -> list[str]:
    """The names in an expression, as they are written; nothing is looked up or imported.

    >>> names("mylab.ntd:FedNTD(beta=0.5) + climb")
    ['mylab.ntd:FedNTD', 'climb']
    """
    with _explained(text, what):
        terms, own = _terms(text)
        found = [_call(term, what).func for term in terms]
        return [own.get(func.id, func.id) for func in found if isinstance(func, ast.Name)]


@contextmanager
def _explained(text: str, what: str) -> Iterator[None]:
    try:
        yield
    except SyntaxError as error:
        raise ConfigError(f"{what} {text!r}: expected names such as a + b(setting=1); {error.msg}") from error
    except (RecursionError, MemoryError) as error:
        raise ConfigError(f"{what}: an expression of {len(text)} characters is too deeply nested") from error
    except ValueError as error:  # half of a surrogate pair, or an integer of more digits than Python writes
        raise ConfigError(f"{what}: an expression of {len(text)} characters cannot be read; {error}") from error


def _terms(text: str) -> tuple[list[ast.expr], dict[str, str]]:
    """The terms of a sum, from left to right, and the names `package.module:Class` by what stands for them there."""
    plain, own = _without_references(text.strip())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on odd but legal spellings, which are refused below anyway
        return _added(ast.parse(plain, mode="eval").body), own


def _without_references(text: str) -> tuple[str, dict[str, str]]:
    """The text with an identifier in the place of each `package.module:Class` outside brackets and quotes."""
    own: dict[str, str] = {}
    prefix = "_own"
    while prefix in text:  # no name in the text may be taken for a stand-in
        prefix += "_"
    parts, rest = [], text
    while rest:
        if match := _REFERENCE.match(rest):
            stand_in = f"{prefix}{len(own)}"
            own[stand_in] = match[0]
            parts.append(stand_in)
            rest = rest[match.end() :]
            continue
        size = _outermost(rest)
        parts.append(rest[:size])
        rest = rest[size:]
    return "".join(parts), own


def _outermost(text: str) -> int:
    """The length of what comes first: a bracket or a quote up to its end, a word, or one other character."""
    if text[0] not in "([{\"'":
        word = re.match(r"\w+", text)
        return word.end() if word else 1
    return next((place + 1 for place, depth in enumerate(_depths(text)) if depth == 0), len(text))


def _depths(text: str) -> Iterator[int]:
    """For each character, the number of brackets open after it; inside quotes always above 0."""
    depth, quote, escaped = 0, "", False
    for character in text:
        if escaped:
            escaped = False
        elif quote:
            escaped = character == "\\"
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        yield 1 if quote else depth


def split(text: str) -> list[str]:
    """The parts of a list, cut at the commas outside brackets and quotes.

    >>> split("fedavg, fedadam(lr=0.1, betas=(0.9, 0.99))")
    ['fedavg', 'fedadam(lr=0.1, betas=(0.9, 0.99))']
    """
    parts = [""]
    for character, depth in zip(text, _depths(text), strict=True):
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    parts = [part.strip() for part in parts]
    if parts[-1] == "" and len(parts) > 1:
        parts.pop()  # a trailing comma
    if "" in parts:
        raise ConfigError(f"{text!r} has an empty entry: expected entries with a comma between them")
    return parts


def render(instances: Iterable[Any], registry: Mapping[str, type]) -> str:
    """The shortest expression that `parse` turns back into equal instances: only settings off the default."""
    names = {kind: name for name, kind in registry.items()}
    return " + ".join(term(names[type(instance)], instance) for instance in instances)


def term(name: str, instance: Any) -> str:
    """One term of an expression: a name, and in brackets the settings that are not at their defaults."""
    settings = ", ".join(f"{key}={_literal(value)}" for key, value in changed(instance).items())
    return name + (f"({settings})" if settings else "")


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


def defaults(kind: type) -> dict[str, Any]:
    """The settings of a dataclass and their defaults; None where a setting must be given."""
    return {field.name: None if field.default is MISSING else field.default for field in fields(kind) if field.init}


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


def _added(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _added(node.left) + _added(node.right)
    return [node]


def _call(node: ast.expr, what: str) -> ast.Call:
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    if not isinstance(call.func, ast.Name):
        own = "; a class of your own is written package.module:Class" if isinstance(call.func, ast.Attribute) else ""
        raise ConfigError(f"{what} {ast.unparse(node)!r}: expected a name, or one with settings such as a(b=1){own}")
    return call


def _instance(
    node: ast.expr,
    registry: Mapping[str, type],
    what: str,
    own: Mapping[str, str],
    load: Callable[[str], type] | None,
) -> Any:
    call = _call(node, what)
    assert isinstance(call.func, ast.Name)
    if call.func.id in own:
        name = own[call.func.id]
        if load is None:
            raise ConfigError(f"unknown {what} {name!r}; {nearest(name, registry)}")
        kind = load(name)
    else:
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
