"""Turns pydantic's errors about a config into sentences that name the key, its value and what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from equipoise.core import expression
from equipoise.core.errors import nearest

Model = type[BaseModel]


def sentences(errors: Iterable[Any], raw: Mapping[str, Any], root: Model) -> str:
    """Describe the first mistake and count the others. `errors` are those of a ValidationError for `raw`."""
    # For a value that fits no member of a union, pydantic reports an error per member; all get the same sentence.
    found = list(dict.fromkeys(_sentence(error, raw, root) for error in errors))
    return found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")


def misplaced(key: str, table: Mapping[str, Any], open_table: str, path: str = "") -> Iterator[str]:
    """Yield the paths at which a top-level key is found inside a table. `open_table` may have a key of that name."""
    for name, value in table.items():
        if isinstance(value, Mapping) and path + name != open_table:
            if key in value:
                yield f"{path}{name}.{key}"
            yield from misplaced(key, value, open_table, f"{path}{name}.")


def belongs_on_top(path: str) -> str:
    """Explain a top-level key that stands inside a table."""
    table, _, key = path.rpartition(".")
    return f"{path}: {key} belongs at the top of the file; below [{table}] it is read as a key of that table"


def _sentence(error: Any, raw: Mapping[str, Any], root: Model) -> str:
    if error["type"] == "value_error":  # raised by one of our own checks, with a complete sentence
        return str(error["ctx"]["error"])
    table: Model | None = root
    value: Any = raw
    path, expected = "", ""
    for part in error["loc"]:
        if table is None:
            break  # the rest of the path leads into a value: an entry of a list, or a member of a union
        path = f"{path}.{part}" if path else str(part)
        field = table.model_fields.get(part)
        if field is None and error["type"] == "extra_forbidden":
            return _unknown(path, table, root)
        expected = _expected(field)
        if part not in value:
            return f"{path} is missing: expected {expected}"
        value, table = value[part], _table(field)
    return f"{path} = {value!r}: expected {expected}"


def _unknown(path: str, table: Model, root: Model) -> str:
    key = path.rpartition(".")[2]
    for name, field in root.model_fields.items():
        other = _table(field)
        if other is None and name == key:
            return belongs_on_top(path)
        if other is not None and key in other.model_fields:
            return f"unknown key {path}; did you mean '{name}.{key}'?"
    return f"unknown key {path}; {nearest(key, table.model_fields)}"


def _table(field: FieldInfo | None) -> Model | None:
    """Return the model of a field that holds a table, else None."""
    kind = None if field is None else field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _expected(field: FieldInfo | None) -> str:
    """Say what a field accepts."""
    if field is None:
        return "a number, a text, true, false, or a list or table of these"
    if table := _table(field):
        required = [name for name, each in table.model_fields.items() if each.is_required()]
        return "a table" + (f" with {' and '.join(required)}" if required else "")
    return field.description or _in_words(field.annotation)


def _in_words(hint: Any) -> str:
    """Describe a type annotation in words. None is left out, since TOML has no such value."""
    args = get_args(hint)
    if get_origin(hint) is Annotated:
        described = [each.description for each in args[1:] if isinstance(each, FieldInfo) and each.description]
        return described[0] if described else _in_words(args[0])
    if get_origin(hint) in (Union, UnionType):
        return ", or ".join(_in_words(arg) for arg in args if arg is not NoneType)
    return expression.expected(hint)
