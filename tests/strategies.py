"""Random trees, pools of labels and settings, shared by the tests of properties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from equipoise.core.errors import ConfigError
from equipoise.core.tree import Tree

SEEDS = st.integers(-(2**64), 2**64)
KEYS = st.text(st.characters(blacklist_characters="/"), max_size=4)  # of a tree: anything without a slash
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


# -- trees ---------------------------------------------------------------------------------------------------------
@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of small whole numbers, on which the arithmetic of floats is exact."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    low = 0 if dtype == torch.uint8 else -8
    return torch.randint(low, 9, shape, generator=generator).to(dtype)


@st.composite
def trees(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.int64),
    empty_branches: bool = True,
    rows: int | None = None,
) -> Tree:
    """Return a tree with at least one leaf; with `rows`, every leaf has this many rows."""

    def leaf() -> Tensor:
        shape = draw(SHAPES) if rows is None else (rows, *draw(SHAPES))
        return draw(tensors(shape, draw(st.sampled_from(dtypes))))

    def branch(depth: int) -> Tree:
        keys = draw(st.lists(KEYS, min_size=0 if empty_branches else 1, max_size=3, unique=True))
        return {key: branch(depth - 1) if depth and draw(st.booleans()) else leaf() for key in keys}

    return {**branch(2), "leaf": leaf()}


def like(tree: Tree, seed: int) -> Tree:
    """Return a tree of the same structure, shapes and types, with other small whole numbers."""
    generator = torch.Generator().manual_seed(seed)

    def other(leaf: Tensor) -> Tensor:
        return torch.randint(0, 9, leaf.shape, generator=generator).to(leaf.dtype)

    return {key: like(value, seed) if isinstance(value, dict) else other(value) for key, value in tree.items()}


def same(a: Tree, b: Tree) -> bool:
    """Return whether two trees have the same keys in the same order, and equal leaves of the same types."""
    if list(a) != list(b):
        return False
    for x, y in zip(a.values(), b.values(), strict=True):
        if isinstance(x, dict) != isinstance(y, dict):
            return False
        if isinstance(x, dict):
            if not same(x, y):
                return False
        elif x.dtype != y.dtype or not torch.equal(x, y):
            return False
    return True


# -- labels --------------------------------------------------------------------------------------------------------
@st.composite
def pools(draw: st.DrawFn, most: int = 200, classes: int | None = None) -> tuple[np.ndarray, int]:
    """Return the labels of a pool, and the number of classes, some of which may have no sample."""
    num_classes = draw(st.integers(1, 12)) if classes is None else classes
    size = draw(st.integers(1, most))
    generator = np.random.default_rng(draw(st.integers(0, 2**16)))
    shares = generator.dirichlet(np.full(num_classes, draw(st.sampled_from([0.1, 1.0, 100.0]))))
    y = generator.choice(num_classes, size, p=shares)
    return y.astype(draw(st.sampled_from([np.int64, np.int32, np.uint8, np.uint64]))), num_classes


# -- settings ------------------------------------------------------------------------------------------------------
NUMBERS = st.floats(0, 1) | st.floats(allow_nan=False) | st.integers(1, 100).map(float)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return random values of an annotation."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return st.one_of([values(arg) for arg in args])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return (
            st.lists(values(args[0]), max_size=4).map(tuple)
            if args[-1] is ...
            else st.tuples(*[values(arg) for arg in args])
        )
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=4)
    plain = {
        float: NUMBERS,
        int: st.integers(0, 20) | st.integers(),
        bool: st.booleans(),
        str: st.text(max_size=8) | st.text("()[]{}'\"\\,:+a.b", max_size=8),
        NoneType: st.none(),
    }
    return plain[hint]


@st.composite
def instances(draw: st.DrawFn, kind: type, choices: Mapping[str, tuple[Any, ...]] | None = None) -> Any:
    """Return a valid instance of a dataclass. `choices` lists the values of fields that take few of their type."""
    hints = get_type_hints(kind)

    def value(name: str) -> Any:
        return draw(st.sampled_from(choices[name]) if choices and name in choices else values(hints[name]))

    required = [f.name for f in fields(kind) if f.init and f.default is MISSING and f.default_factory is MISSING]
    try:
        instance = kind(**{name: value(name) for name in required})
    except ConfigError:
        assume(False)
    for field in fields(kind):
        if field.init and field.name not in required and draw(st.booleans()):
            try:
                instance = replace(instance, **{field.name: value(field.name)})
            except ConfigError:
                continue  # the default stays where the value is refused
    return instance
