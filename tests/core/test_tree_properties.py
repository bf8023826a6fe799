"""Laws of trees: their arithmetic is that of one long vector, and whatever takes a tree apart can be undone."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from equipoise.core import tree
from equipoise.core.tree import Tree
from tests.strategies import like, same, tensors, trees

FLOATS = (torch.float64,)
NUMBERS = st.integers(-4, 4).map(float)


def vector(a: Tree) -> Tensor:
    """Return all leaves as one vector of float64."""
    return torch.cat([leaf.double().flatten() for leaf in tree.leaves(a)])


def without_empty_branches(a: Tree) -> Tree:
    pruned = {key: without_empty_branches(value) if isinstance(value, dict) else value for key, value in a.items()}
    return {key: value for key, value in pruned.items() if not (isinstance(value, dict) and not value)}


@given(trees())
def test_flatten_and_unflatten_are_inverse_but_for_empty_branches(a: Tree) -> None:
    flat = tree.flatten(a)
    assert len(flat) == len(list(tree.leaves(a)))
    assert same(tree.unflatten(flat), without_empty_branches(a))
    assert all(one is other for one, other in zip(flat.values(), tree.leaves(a), strict=True))


@given(trees(), st.integers(0, 99))
def test_map_meets_each_leaf_once_beside_its_counterpart(a: Tree, seed: int) -> None:
    other, met = like(a, seed), []

    def fn(x: Tensor, y: Tensor) -> Tensor:
        met.append((x, y))
        return y

    assert same(tree.map(fn, a, other), other)
    pairs = zip(tree.leaves(a), tree.leaves(other), strict=True)
    assert all(x is u and y is v for (x, y), (u, v) in zip(met, pairs, strict=True))
    assert same(tree.map(lambda leaf: leaf, a), a)


@given(trees(), st.integers(0, 99), NUMBERS)
def test_arithmetic_is_that_of_one_vector(a: Tree, seed: int, alpha: float) -> None:
    b = like(a, seed)
    x, y = vector(a), vector(b)
    assert torch.equal(vector(tree.add(a, b)), x + y)
    assert torch.equal(vector(tree.sub(a, b)), x - y)
    assert torch.equal(vector(tree.scale(a, alpha)), alpha * x)
    assert torch.equal(vector(tree.scale(a, torch.tensor(alpha))), alpha * x)
    assert torch.equal(vector(tree.axpy(alpha, a, b)), alpha * x + y)
    assert not vector(tree.zeros(a)).any()
    assert float(tree.dot(a, b)) == float(x @ y)
    assert tree.count(a) == len(x)


@given(trees(FLOATS), st.integers(0, 99), NUMBERS)
def test_laws_of_a_vector_space(a: Tree, seed: int, alpha: float) -> None:
    """The numbers are small and whole, so that no sum is rounded."""
    b = like(a, seed)
    assert same(tree.add(a, b), tree.add(b, a))
    assert same(tree.sub(tree.add(a, b), b), a)
    assert same(tree.add(a, tree.zeros(a)), a)
    assert same(tree.scale(tree.add(a, b), alpha), tree.add(tree.scale(a, alpha), tree.scale(b, alpha)))
    assert same(tree.axpy(alpha, a, b), tree.add(tree.scale(a, alpha), b))
    assert float(tree.dot(a, b)) == float(tree.dot(b, a))
    assert float(tree.dot(tree.scale(a, alpha), b)) == alpha * float(tree.dot(a, b))
    assert math.isclose(float(tree.norm(a)), float(torch.linalg.vector_norm(vector(a))), rel_tol=1e-12)
    assert float(tree.norm(tree.add(a, b))) <= float(tree.norm(a)) + float(tree.norm(b)) + 1e-9


@given(trees((torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool)), st.integers(0, 99))
def test_types_and_sizes_are_kept(a: Tree, seed: int) -> None:
    assert tree.nbytes(a) == sum(leaf.numpy().nbytes for leaf in tree.leaves(a))
    assert tree.count(a) == sum(leaf.numpy().size for leaf in tree.leaves(a))
    assert [z.dtype for z in tree.leaves(tree.zeros(a))] == [leaf.dtype for leaf in tree.leaves(a)]
    b = like(a, seed)
    assert same(tree.where(torch.tensor(True), a, b), a)
    assert same(tree.where(torch.tensor(False), a, b), b)
    assert all(leaf.dtype == torch.float16 for leaf in tree.leaves(tree.to(a, torch.float16)))


@given(st.data(), trees((torch.float32, torch.float64, torch.int64)))
def test_finite_sees_one_bad_number_anywhere(data: st.DataObject, a: Tree) -> None:
    assert tree.finite(a).item() is True
    leaves = [leaf for leaf in tree.leaves(a) if leaf.is_floating_point() and leaf.numel()]
    if leaves:
        leaf = data.draw(st.sampled_from(leaves))
        place = data.draw(st.integers(0, leaf.numel() - 1))
        leaf.view(-1)[place] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
        assert tree.finite(a).item() is False


@given(trees(), st.integers(1, 4))
def test_stack_and_rows_are_inverse(a: Tree, count: int) -> None:
    parts = [like(a, seed) for seed in range(count)]
    stacked = tree.stack(parts)
    assert all(leaf.shape[0] == count for leaf in tree.leaves(stacked))
    assert all(same(tree.rows(stacked, i), part) for i, part in enumerate(parts))
    assert same(tree.rows(stacked, slice(1, None)), tree.map(lambda leaf: leaf[1:], stacked))
    assert same(tree.stack([a] * count), tree.repeat(a, count))


@given(st.data(), st.integers(1, 5))
def test_rows_are_read_replaced_and_added(data: st.DataObject, count: int) -> None:
    whole = data.draw(trees(rows=count))
    before = tree.map(torch.clone, whole)
    index = torch.tensor(data.draw(st.permutations(range(count)))[: data.draw(st.integers(0, count))]).long()
    new = like(tree.rows(whole, index), data.draw(st.integers(0, 99)))
    others = torch.tensor([i for i in range(count) if i not in index.tolist()]).long()

    assert same(tree.rows(whole, index), tree.map(lambda leaf: leaf.index_select(0, index), whole))
    replaced, added = tree.set_rows(whole, index, new), tree.add_rows(whole, index, new)
    assert same(tree.rows(replaced, index), new)
    assert same(tree.rows(added, index), tree.add(tree.rows(whole, index), new))
    for changed in (replaced, added):
        assert same(tree.rows(changed, others), tree.rows(whole, others))
    assert same(whole, before)


@given(st.data())
def test_rows_that_are_added_twice_count_twice(data: st.DataObject) -> None:
    whole = data.draw(trees(FLOATS, rows=3))
    index = torch.tensor(data.draw(st.lists(st.integers(0, 2), max_size=6))).long()
    new = like(tree.rows(whole, index), 5)
    expected = tree.map(torch.clone, whole)
    for place, row in enumerate(index.tolist()):
        for leaf, value in zip(tree.leaves(expected), tree.leaves(new), strict=True):
            leaf[row] += value[place]
    assert same(tree.add_rows(whole, index, new), expected)


@given(st.data(), trees(FLOATS, empty_branches=False))
def test_one_tree_of_a_stack_is_treated_as_it_would_be_alone(data: st.DataObject, a: Tree) -> None:
    parts = [a, like(a, data.draw(st.integers(0, 99)))]
    other = data.draw(tensors((2,), torch.float64))
    dots, finite, sums = torch.vmap(
        lambda one, by: (tree.dot(one, one), tree.finite(one), tree.axpy(by, one, one)), randomness="error"
    )(tree.stack(parts), other)
    for i, part in enumerate(parts):
        assert float(dots[i]) == float(tree.dot(part, part))
        assert bool(finite[i]) == bool(tree.finite(part))
        assert same(tree.rows(sums, i), tree.axpy(other[i], part, part))
