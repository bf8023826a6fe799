"""Arithmetic on trees: nested dicts of tensors, and nothing else.

Parameters, messages, memories and sums are all trees, so that they stack, vmap, save to safetensors
and travel over a wire by the same few functions. Keys must not contain "/", which joins them when a tree
is flattened to a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Any]  # str -> Tensor | Tree; mypy cannot follow a recursive dict through `map`


def map(fn: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """`fn` applied leaf by leaf to trees of the same structure."""
    return {
        key: map(fn, value, *(other[key] for other in others))
        if isinstance(value, dict)
        else fn(value, *(other[key] for other in others))
        for key, value in tree.items()
    }


def leaves(tree: Tree) -> Iterator[Tensor]:
    found: list[Tensor] = []  # several times as fast as generators in one another
    _collect(tree, found)
    return iter(found)


def _collect(tree: Tree, found: list[Tensor]) -> None:
    for value in tree.values():
        if isinstance(value, dict):
            _collect(value, found)
        else:
            found.append(value)


def add(a: Tree, b: Tree) -> Tree:
    return map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    return map(torch.sub, a, b)


def scale(a: Tree, by: Tensor | float) -> Tree:
    return map(lambda leaf: leaf * by, a)


def axpy(alpha: Tensor | float, a: Tree, b: Tree) -> Tree:
    """alpha * a + b"""
    return map(lambda x, y: alpha * x + y, a, b)


def zeros(like: Tree) -> Tree:
    return map(torch.zeros_like, like)


def where(condition: Tensor, a: Tree, b: Tree) -> Tree:
    return map(lambda x, y: torch.where(condition, x, y), a, b)


def dot(a: Tree, b: Tree) -> Tensor:
    products = [(x * y).sum() for x, y in zip(leaves(a), leaves(b), strict=True)]
    return sum(products[1:], products[0])


def norm(a: Tree) -> Tensor:
    return dot(a, a).sqrt()


def finite(a: Tree) -> Tensor:
    """One boolean: is every number of the tree finite?"""
    # By the extremes, which not-a-number passes through: `isfinite` of every number takes several times as long.
    ends = [end for leaf in leaves(a) if leaf.numel() for end in (leaf.amax().double(), leaf.amin().double())]
    return torch.stack(ends).isfinite().all() if ends else torch.tensor(True)


def rows(tree: Tree, index: Tensor | slice | int) -> Tree:
    """The given rows of every leaf: of a stack of trees, some of the trees."""
    return map(lambda leaf: leaf[index], tree)


def add_rows(tree: Tree, index: Tensor, values: Tree) -> Tree:
    return map(lambda leaf, new: leaf.index_add(0, index, new), tree, values)


def set_rows(tree: Tree, index: Tensor, values: Tree) -> Tree:
    return map(lambda leaf, new: leaf.index_copy(0, index, new), tree, values)


def stack(trees: list[Tree]) -> Tree:
    return map(lambda *parts: torch.stack(parts), *trees) if trees else {}


def repeat(tree: Tree, times: int) -> Tree:
    """A stack of `times` equal trees, as views of one."""
    return map(lambda leaf: leaf.expand(times, *leaf.shape), tree)


def to(tree: Tree, *args: Any, **kwargs: Any) -> Tree:
    return map(lambda leaf: leaf.to(*args, **kwargs), tree)


def count(tree: Tree) -> int:
    """How many numbers the tree holds."""
    return sum(leaf.numel() for leaf in leaves(tree))


def nbytes(tree: Tree) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def flatten(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """Nested keys joined by "/": the form that files and wires take."""
    flat: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat


def unflatten(flat: dict[str, Tensor]) -> Tree:
    tree: Tree = {}
    for name, leaf in flat.items():
        *path, last = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree
