"""Dense layers of many clients on a GPU: the gradient of the weights and the step down it, in one kernel.

Compiled by itself, a step of SGD computes the gradient of every layer, writes it down, and reads it again to change
the weights: a chain of small kernels, for which few clients wait, and twice the traffic for many. A pass over the
compiled graph looks for weights, and biases of the same layers, that are changed by a weighted sum of their gradient
and of tensors at hand (decay, control variates, a pull to the start), and has one operator do them all. Other
products of few clients it cuts more finely than the vendor's library does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

Shape = tuple[int, ...]
Tensors = Sequence[Tensor]
Numbers = Sequence[float]

LAYERS = 8  # of one kernel
DEEPEST = 128  # samples of a batch: with more, it is the sums that take time, and the vendor's products are better
TILE, FEW = 64, 64  # the vendor's tiles: rows and columns of each; and so many leave a GPU idle

_NAME = "equipoise::descend"
torch.library.define(
    _NAME,
    "(Tensor[] g, Tensor[] x, int[] biased, Tensor[] terms, Tensor rate, Tensor? step, Tensor? steps,"
    " float[] plain, float[] rated) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)


def by_torch(
    g: Tensors, x: Tensors, biased: Sequence[int], terms: Tensors, rate: Tensor, step: Tensor | None,
    steps: Tensor | None, plain: Numbers, rated: Numbers,
) -> list[Tensor]:  # fmt: skip
    """The changed weights of each layer, with gradient g' x, then the changed biases of those that are `biased`.

    Each is a sum of its gradient and of its `terms`, which are as many for all, one tensor after another. The factors
    of that sum, first the gradient's, are `plain + rated * rate`. Clients that have taken all their `steps` keep what
    their first term is.
    """
    gradients = [mine.mT @ its for mine, its in zip(g, x, strict=True)] + [g[layer].sum(1) for layer in biased]
    changed, each = [], len(plain) - 1
    for number, gradient in enumerate(gradients):
        own = terms[number * each : (number + 1) * each]

        def by_client(values: Tensor, like: Tensor = gradient) -> Tensor:
            return values.view(-1, *[1] * (like.dim() - 1))

        parts = zip(plain, rated, [gradient, *own], strict=True)
        new = sum(((a + b * by_client(rate)) * part for a, b, part in parts), torch.zeros_like(gradient))
        changed.append(new if step is None or steps is None else torch.where(by_client(step < steps), new, own[0]))
    return changed


def _by_kernel(*given: Any) -> list[Tensor]:
    from equipoise import dense_kernels  # Triton is there where CUDA is

    new = _shapes(*given)
    dense_kernels.descend(new, *given)
    return new


def _shapes(g: Tensors, x: Tensors, biased: Sequence[int], *_: Any) -> list[Tensor]:
    weights = [mine.new_empty(len(mine), mine.shape[2], its.shape[2]) for mine, its in zip(g, x, strict=True)]
    return weights + [g[layer].new_empty(len(g[layer]), g[layer].shape[2]) for layer in biased]


torch.library.impl(_NAME, "cpu", by_torch)
torch.library.impl(_NAME, "cuda", _by_kernel)
torch.library.register_fake(_NAME, _shapes)

_PRODUCT = "equipoise::product"
torch.library.define(_PRODUCT, "(Tensor a, Tensor b, bool turned) -> Tensor", tags=(torch.Tag.needs_exact_strides,))


def _product(a: Tensor, b: Tensor, turned: bool) -> Tensor:
    """Of matrices, one pair for each client; the second may have to be turned over."""
    return a @ (b.mT if turned else b)


def _product_by_kernel(a: Tensor, b: Tensor, turned: bool) -> Tensor:
    from equipoise import dense_kernels

    return dense_kernels.product(a, b, turned)


torch.library.impl(_PRODUCT, "cpu", _product)
torch.library.impl(_PRODUCT, "cuda", _product_by_kernel)
torch.library.register_fake(_PRODUCT, lambda a, b, turned: a.new_empty(*a.shape[:2], b.shape[1 if turned else 2]))


# -- the pass: from each leaf that the program gives back to the gradient that it was made from

_aten = torch.ops.aten
_VIEWS = {_aten.reshape.default, _aten.view.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.expand.default}


class _Sum(NamedTuple):
    """A sum of tensors, each times `plain + rated * rate`."""

    factors: dict[Node, tuple[float, float]]
    rate: Node | None = None  # a number, or one for each client

    def times(self, factor: float) -> _Sum:
        return _Sum(
            {node: (plain * factor, rated * factor) for node, (plain, rated) in self.factors.items()}, self.rate
        )

    def times_rate(self, rate: Node) -> _Sum | None:
        if self.rate is not None:
            return None
        return _Sum({node: (0.0, plain) for node, (plain, _) in self.factors.items()}, rate)

    def plus(self, other: _Sum) -> _Sum | None:
        if self.rate is not None and other.rate not in (None, self.rate):
            return None
        factors = dict(self.factors)
        for node, (plain, rated) in other.factors.items():
            before = factors.get(node, (0.0, 0.0))
            factors[node] = before[0] + plain, before[1] + rated
        return _Sum(factors, self.rate or other.rate)


class _Leaf(NamedTuple):
    """A weight or a bias, and how it is changed."""

    node: Node
    g: Node  # the gradient of the layer's outputs
    x: Node | None  # the layer's inputs; a bias has none
    terms: list[Node]
    factors: tuple[tuple[float, float], ...]  # of the gradient, then of the terms
    rate: Node
    time: tuple[Any, ...]  # which step it is, and how many each client takes; nothing where nobody has finished

    @property
    def kind(self) -> Any:
        """Leaves of one kind can be changed together."""
        return self.factors, self.rate, self.time, _shape(self.g)[:2]


def fuse(graph: Graph, everywhere: bool = False) -> int:
    """Put the operator in the place of what it can do, and tell how many leaves it changes; if not `everywhere`, only
    where there is a kernel for it."""
    _cut_finely(graph, everywhere)
    (output,) = graph.find_nodes(op="output")
    given = [node for node in tree_leaves(output.args) if isinstance(node, Node)]
    kinds: dict[Any, list[_Leaf]] = {}
    for node in dict.fromkeys(given):
        if _suits(node, everywhere) and (leaf := _leaf(node)):
            kinds.setdefault(leaf.kind, []).append(leaf)
    fused = 0
    for alike in kinds.values():
        weights = [leaf for leaf in alike if leaf.x is not None]
        for low in range(0, len(weights), LAYERS):
            layers = {leaf.g: leaf for leaf in weights[low : low + LAYERS]}
            biases = [leaf for leaf in alike if leaf.x is None and leaf.g in layers]
            fused += _replace(graph, output, list(layers.values()), biases)
    if fused:
        graph.eliminate_dead_code()
    return fused


def _replace(graph: Graph, output: Node, weights: list[_Leaf], biases: list[_Leaf]) -> int:
    leaves = [*weights, *biases]
    g = [leaf.g for leaf in weights]
    plain, rated = map(list, zip(*leaves[0].factors, strict=True))
    terms = [term for leaf in leaves for term in leaf.terms]
    biased = [g.index(leaf.g) for leaf in biases]
    given: Any = (g, [leaf.x for leaf in weights], biased, terms, leaves[0].rate, *leaves[0].time, plain, rated)
    with graph.inserting_before(output):
        made = graph.call_function(torch.ops.equipoise.descend.default, given)
        made.meta["val"] = _shapes(*map_arg(given, lambda node: node.meta["val"]))
        for number, leaf in enumerate(leaves):
            new = graph.call_function(getitem, (made, number))
            new.meta["val"] = made.meta["val"][number]
            leaf.node.replace_all_uses_with(new)
    return len(leaves)


def _cut_finely(graph: Graph, everywhere: bool) -> None:
    """Products of few clients, into tiles smaller than the vendor's: those are so few that most of a GPU is idle, and
    each takes its time."""
    for node in graph.find_nodes(op="call_function", target=_aten.bmm.default):
        a, b = (_bare(part, _shape(part)) for part in _given(node))
        clients, height, width = _shape(node)
        many = clients * -(-height // TILE) * -(-width // TILE) > FEW
        if many or a is None or b is None or _turned(a) or not _suits(node, everywhere):
            continue
        turned = _turned(b)
        with graph.inserting_before(node):
            made = graph.call_function(torch.ops.equipoise.product.default, (a, turned or b, turned is not None))
        made.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _suits(node: Node, everywhere: bool) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() not in (2, 3) or not value.is_floating_point():
        return False
    fast = value.device.type == "cuda" and value.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return fast or everywhere


def _leaf(node: Node) -> _Leaf | None:
    shape, new, first, time = _shape(node), node, [], (None, None)
    if node.target is _aten.where.self:  # clients that have finished stand still
        condition, new, old = _given(node)
        goes, kept = _bare(condition, shape[:1]), _bare(old, shape)
        if kept is None or goes is None or goes.target is not _aten.lt.Tensor:
            return None
        first, time = [kept], _given(goes)
        if _shape(time[0]) != () or _shape(time[1]) != shape[:1]:
            return None
    changed = _sum(new, shape)
    if changed is None or changed.rate is None:
        return None
    made = {term: found for term in changed.factors if (found := _gradient(term))}
    if len(made) != 1:
        return None
    ((gradient, (g, x)),) = made.items()
    if not _leads_to(gradient, node) or _shape(g)[1] > DEEPEST:
        return None
    terms = [term for term in dict.fromkeys([*first, *changed.factors]) if term is not gradient]
    factors = tuple(changed.factors.get(term, (0.0, 0.0)) for term in [gradient, *terms])
    return _Leaf(node, g, x, terms, factors, changed.rate, time) if terms else None


def _sum(node: Any, shape: Shape) -> _Sum | None:
    """What makes a tensor of this shape, as a sum; the tensor itself where it is nothing simpler."""
    if not isinstance(node, Node):
        return None
    return _taken_apart(node, shape) or (_Sum({bare: (1.0, 0.0)}) if (bare := _whole(node, shape)) else None)


def _taken_apart(node: Node, shape: Shape) -> _Sum | None:
    given = _given(node)
    if node.target is _aten.neg.default:
        return one.times(-1.0) if (one := _sum(given[0], shape)) else None
    if node.target in (_aten.add.Tensor, _aten.sub.Tensor):
        alpha: Any = node.kwargs.get("alpha", 1)
        one, other = (_sum(part, shape) for part in given)
        return one.plus(other.times(alpha if node.target is _aten.add.Tensor else -alpha)) if one and other else None
    if node.target in (_aten.mul.Tensor, _aten.mul.Scalar):
        for values, factor in (given, given[::-1]):
            if isinstance(factor, int | float):
                return one.times(factor) if (one := _sum(values, shape)) else None
            if rate := _bare(factor, shape[:1]) or _bare(factor, ()):
                return one.times_rate(rate) if (one := _sum(values, shape)) else None
    return None


def _gradient(node: Node) -> tuple[Node, Node | None] | None:
    """Of weights: the product of a layer's gradient, turned over, and its inputs; of biases: its sum over samples."""
    if node.target is _aten.bmm.default:
        turned, x = (_bare(part, _shape(part)) for part in _given(node))
        return (g, x) if (g := _turned(turned)) else None
    while node.target in _VIEWS:
        node = _given(node)[0]
    if node.target is _aten.sum.dim_IntList and len(_shape(_given(node)[0])) == 3 and list(_given(node)[1]) == [1]:
        return _given(node)[0], None
    return None


def _turned(node: Node | None) -> Node | None:
    """What it is, turned over for every client."""
    if node is None or node.target is not _aten.permute.default or list(_given(node)[1]) != [0, 2, 1]:
        return None
    below: Node = _given(node)[0]
    return below


def _leads_to(node: Node, end: Node) -> bool:
    """And to nothing else?"""
    while node is not end:
        if len(node.users) != 1:
            return False
        (node,) = node.users
    return True


def _whole(node: Node, shape: Shape) -> Node | None:
    """The tensor that it is a view of, with one row for all clients or a row for each."""
    return _bare(node, shape[1:]) or _bare(node, shape)


def _bare(node: Any, shape: Shape) -> Node | None:
    """The tensor of this shape that it is a view of, with other axes of length one or rows that repeat."""
    found, long = None, [size for size in shape if size != 1]
    while isinstance(node, Node) and "val" in node.meta:
        found = node if _shape(node) == shape else found
        below = _given(node)[0] if node.target in _VIEWS else None
        if not isinstance(below, Node) or [size for size in _shape(below) if size != 1] != long:
            break
        node = below
    return found


def _given(node: Node) -> tuple[Any, ...]:
    return node.args


def _shape(node: Any) -> Shape:
    return tuple(node.meta["val"].shape)


@cache
def the_pass() -> Any:
    """For inductor, which may keep what it compiled as long as these files stay the same."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Fuse(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            fuse(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return Fuse()
