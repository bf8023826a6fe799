"""Arithmetic on nested dicts of tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from equipoise.core import tree
from equipoise.core.tree import Tree


def make(scale: float = 1.0) -> Tree:
    return {"a": scale * torch.tensor([1.0, 2.0]), "b": {"c": scale * torch.tensor([[3.0], [4.0]]), "none": {}}}


def same(a: Tree, b: Tree) -> bool:
    return a.keys() == b.keys() and all(
        same(a[k], b[k]) if isinstance(a[k], dict) else torch.equal(a[k], b[k]) for k in a
    )


def test_map_keeps_the_structure_and_the_order() -> None:
    mapped = tree.map(lambda x, y, z: x + y * z, make(), make(2), make(3))
    assert same(mapped, {"a": torch.tensor([7.0, 26.0]), "b": {"c": torch.tensor([[57.0], [100.0]]), "none": {}}})
    assert list(mapped) == ["a", "b"]


def test_map_wants_every_leaf_in_every_tree() -> None:
    with pytest.raises(KeyError):
        tree.map(torch.add, make(), {"a": torch.zeros(2)})


def test_leaves_come_in_the_order_written() -> None:
    assert [leaf.flatten().tolist() for leaf in tree.leaves(make())] == [[1, 2], [3, 4]]


def test_arithmetic() -> None:
    assert same(tree.add(make(), make(2)), make(3))
    assert same(tree.sub(make(3), make(2)), make())
    assert same(tree.scale(make(), 3), make(3))
    assert same(tree.axpy(2.0, make(), make(3)), make(5))
    assert same(tree.zeros(make()), make(0))


def test_dot_norm_and_counts() -> None:
    assert float(tree.dot(make(), make(2))) == 2 * (1 + 4 + 9 + 16)
    assert math.isclose(float(tree.norm(make())), math.sqrt(30), rel_tol=1e-6)
    assert tree.count(make()) == 4
    assert tree.nbytes({**make(), "d": torch.zeros(3, dtype=torch.int64)}) == 4 * 4 + 3 * 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_finite_sees_one_bad_number(bad: float) -> None:
    broken = make()
    broken["b"]["c"][1, 0] = bad
    assert tree.finite(make()).item() is True
    assert tree.finite(broken).item() is False


def test_large_numbers_and_counters_are_finite() -> None:
    assert tree.finite({"a": torch.tensor([1e30, -3e38]), "n": torch.tensor(2**62)}).item() is True


@pytest.mark.parametrize("nothing", [{}, {"m": {}}])
def test_nothing_is_finite(nothing: Tree) -> None:
    assert tree.finite(nothing).item() is True


def test_where_picks_a_whole_tree() -> None:
    assert same(tree.where(torch.tensor(True), make(), make(2)), make())
    assert same(tree.where(torch.tensor(False), make(), make(2)), make(2))


def test_stack_and_rows_are_inverse() -> None:
    stack = tree.stack([make(), make(2), make(3)])
    assert stack["b"]["c"].shape == (3, 2, 1)
    assert same(tree.rows(stack, 1), make(2))
    assert same(tree.rows(stack, torch.tensor([2, 0])), tree.stack([make(3), make()]))
    assert same(tree.rows(stack, slice(0, 2)), tree.stack([make(), make(2)]))
    assert tree.stack([]) == {}


def test_rows_are_added_and_replaced_without_touching_the_stack() -> None:
    stack, index = tree.stack([make(), make(2), make(3)]), torch.tensor([2, 0])
    new = tree.stack([make(10), make(20)])
    assert same(tree.add_rows(stack, index, new), tree.stack([make(21), make(2), make(13)]))
    assert same(tree.set_rows(stack, index, new), tree.stack([make(20), make(2), make(10)]))
    assert same(stack, tree.stack([make(), make(2), make(3)]))


def test_repeat_makes_views() -> None:
    one = make()
    many = tree.repeat(one, 4)
    assert same(tree.rows(many, 3), one)
    assert many["a"].shape == (4, 2)
    assert many["a"].data_ptr() == one["a"].data_ptr()


def test_to_converts_every_leaf() -> None:
    assert all(leaf.dtype == torch.float64 for leaf in tree.leaves(tree.to(make(), torch.float64)))


def test_flatten_and_unflatten_are_inverse() -> None:
    full = {"a": torch.ones(1), "b": {"c": torch.zeros(2), "d": {"e": torch.ones(3)}}}
    flat = tree.flatten(full)
    assert list(flat) == ["a", "b/c", "b/d/e"]
    assert same(tree.unflatten(flat), full)


def test_everything_runs_under_vmap() -> None:
    stack = tree.stack([make(), make(2)])

    def both(one: Tree) -> tuple[Tensor, Tensor, Tree]:
        return tree.norm(one), tree.finite(one), tree.axpy(2.0, one, tree.zeros(one))

    norm, finite, twice = torch.vmap(both)(stack)
    assert torch.allclose(norm, torch.tensor([30.0, 120.0]).sqrt())
    assert finite.tolist() == [True, True]
    assert same(twice, tree.stack([make(2), make(4)]))
