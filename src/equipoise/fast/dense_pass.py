"""Dense layers of many clients on a GPU: the gradient of the weights and the SGD step in one kernel.

Inductor alone computes the gradient of every layer, writes it to memory, and reads it again to update the weights.
With few clients the chain of small launches takes the time, with many the doubled memory traffic. A pass over the
compiled graph looks for weights, and biases of the same layers, whose update is a weighted sum of their gradient and
of other tensors (weight decay, control variates, a proximal pull), and replaces all of them by one operator. It also
replaces other matrix products of few clients by a kernel with smaller tiles than cuBLAS has.
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

LAYERS = 8  # the most layers of one launch
MOST_SAMPLES = 128  # of a batch: with more, the products take the time, and cuBLAS computes them faster
CUBLAS_TILE = 64  # rows and columns of a tile of cuBLAS
FEW_TILES = 64  # a product of at most this many tiles of cuBLAS leaves most of a GPU idle

_DESCEND = "equipoise::descend"
torch.library.define(
    _DESCEND,
    "(Tensor[] g, Tensor[] x, int[] biased, Tensor[] terms, Tensor rate, Tensor? step, Tensor? steps,"
    " float[] plain, float[] rated) -> Tensor[]",
    tags=(torch.Tag.needs_exact_strides,),
)


def descend_by_torch(
    g: Tensors, x: Tensors, biased: Sequence[int], terms: Tensors, rate: Tensor, step: Tensor | None,
    steps: Tensor | None, plain: Numbers, rated: Numbers,
) -> list[Tensor]:  # fmt: skip
    """The operator `descend`: the new weights of every layer, then the new biases of the layers `biased`.

    `g` and `x` are, for every layer, the gradient of its outputs and its inputs, so that the gradient of its weights
    is g' x. A new weight or bias is a weighted sum of its gradient and of its terms. All have the same number of
    terms; `terms` lists those of the first, then those of the second, and so on. The factors of the sum are
    `plain + rated * rate`, that of the gradient first. A client that has taken all its `steps` gets its first term
    unchanged.
    """
    gradients = [its_g.mT @ its_x for its_g, its_x in zip(g, x, strict=True)] + [g[layer].sum(1) for layer in biased]
    updated, each = [], len(plain) - 1
    for number, gradient in enumerate(gradients):
        own = terms[number * each : (number + 1) * each]

        def by_client(values: Tensor, like: Tensor = gradient) -> Tensor:
            return values.view(-1, *[1] * (like.dim() - 1))

        parts = zip(plain, rated, [gradient, *own], strict=True)
        new = sum(((a + b * by_client(rate)) * part for a, b, part in parts), torch.zeros_like(gradient))
        updated.append(new if step is None or steps is None else torch.where(by_client(step < steps), new, own[0]))
    return updated


def _descend_by_kernel(*given: Any) -> list[Tensor]:
    from equipoise.fast import dense_kernels  # imported here: Triton is only installed where CUDA is

    new = _empty_outputs(*given)
    dense_kernels.descend(new, *given)
    return new


def _empty_outputs(g: Tensors, x: Tensors, biased: Sequence[int], *_: Any) -> list[Tensor]:
    weights = [its_g.new_empty(len(its_g), its_g.shape[2], its_x.shape[2]) for its_g, its_x in zip(g, x, strict=True)]
    return weights + [g[layer].new_empty(len(g[layer]), g[layer].shape[2]) for layer in biased]


torch.library.impl(_DESCEND, "cpu", descend_by_torch)
torch.library.impl(_DESCEND, "cuda", _descend_by_kernel)
torch.library.register_fake(_DESCEND, _empty_outputs)

_PRODUCT = "equipoise::product"
torch.library.define(
    _PRODUCT, "(Tensor a, Tensor b, bool transposed) -> Tensor", tags=(torch.Tag.needs_exact_strides,)
)


def _product_by_torch(a: Tensor, b: Tensor, transposed: bool) -> Tensor:
    """The operator `product`: a matrix product for each client; `b` may be given transposed."""
    return a @ (b.mT if transposed else b)


def _product_by_kernel(a: Tensor, b: Tensor, transposed: bool) -> Tensor:
    from equipoise.fast import dense_kernels

    return dense_kernels.product(a, b, transposed)


torch.library.impl(_PRODUCT, "cpu", _product_by_torch)
torch.library.impl(_PRODUCT, "cuda", _product_by_kernel)
torch.library.register_fake(
    _PRODUCT, lambda a, b, transposed: a.new_empty(*a.shape[:2], b.shape[1 if transposed else 2])
)


# -- the pass: it looks at each output of the program, and follows the graph back to the gradient in its update

_aten = torch.ops.aten
_VIEW_OPERATORS = {
    _aten.reshape.default,
    _aten.view.default,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.expand.default,
}


class _Sum(NamedTuple):
    """A sum of tensors, each times its factor `plain + rated * rate`."""

    factors: dict[Node, tuple[float, float]]
    rate: Node | None = None  # the learning rate: one number, or one for each client

    def times(self, factor: float) -> _Sum:
        return _Sum(
            {node: (plain * factor, rated * factor) for node, (plain, rated) in self.factors.items()}, self.rate
        )

    def times_rate(self, rate: Node) -> _Sum | None:
        """None where the factors contain a rate already."""
        if self.rate is not None:
            return None
        return _Sum({node: (0.0, plain) for node, (plain, _) in self.factors.items()}, rate)

    def plus(self, other: _Sum) -> _Sum | None:
        """None where the two sums have different rates."""
        if self.rate is not None and other.rate not in (None, self.rate):
            return None
        factors = dict(self.factors)
        for node, (plain, rated) in other.factors.items():
            before = factors.get(node, (0.0, 0.0))
            factors[node] = before[0] + plain, before[1] + rated
        return _Sum(factors, self.rate or other.rate)


class _Leaf(NamedTuple):
    """A weight or a bias of all clients, and how it is updated."""

    node: Node  # the updated values
    g: Node  # the gradient of the layer's outputs
    x: Node | None  # the layer's inputs; None for a bias
    terms: list[Node]
    factors: tuple[tuple[float, float], ...]  # (plain, rated) of the gradient, then of each term
    rate: Node
    progress: tuple[Any, ...]  # the step's number and each client's steps; (None, None) if none has finished

    @property
    def kind(self) -> Any:
        """Leaves of the same kind can be updated by one operator."""
        return self.factors, self.rate, self.progress, _shape(self.g)[:2]


def fuse(graph: Graph, everywhere: bool = False) -> int:
    """Replace products and updates of the graph by our operators, and return how many leaves `descend` updates. Only
    where there is a kernel for them, unless `everywhere`."""
    _use_small_tiles(graph, everywhere)
    (output,) = graph.find_nodes(op="output")
    outputs = [node for node in tree_leaves(output.args) if isinstance(node, Node)]
    kinds: dict[Any, list[_Leaf]] = {}
    for node in dict.fromkeys(outputs):
        if _supported(node, everywhere) and (leaf := _match_leaf(node)):
            kinds.setdefault(leaf.kind, []).append(leaf)
    fused = 0
    for alike in kinds.values():
        weights = [leaf for leaf in alike if leaf.x is not None]
        for low in range(0, len(weights), LAYERS):
            layers = {leaf.g: leaf for leaf in weights[low : low + LAYERS]}
            biases = [leaf for leaf in alike if leaf.x is None and leaf.g in layers]
            fused += _insert_descend(graph, output, list(layers.values()), biases)
    if fused:
        graph.eliminate_dead_code()
    return fused


def _insert_descend(graph: Graph, output: Node, weights: list[_Leaf], biases: list[_Leaf]) -> int:
    """Update these weights and biases by one operator, and return how many they are."""
    leaves = [*weights, *biases]
    g = [leaf.g for leaf in weights]
    plain, rated = map(list, zip(*leaves[0].factors, strict=True))
    terms = [term for leaf in leaves for term in leaf.terms]
    biased = [g.index(leaf.g) for leaf in biases]
    given: Any = (g, [leaf.x for leaf in weights], biased, terms, leaves[0].rate, *leaves[0].progress, plain, rated)
    with graph.inserting_before(output):
        made = graph.call_function(torch.ops.equipoise.descend.default, given)
        made.meta["val"] = _empty_outputs(*map_arg(given, lambda node: node.meta["val"]))
        for number, leaf in enumerate(leaves):
            new = graph.call_function(getitem, (made, number))
            new.meta["val"] = made.meta["val"][number]
            leaf.node.replace_all_uses_with(new)
    return len(leaves)


def _use_small_tiles(graph: Graph, everywhere: bool) -> None:
    """Replace products that have few tiles of cuBLAS, which leave most of a GPU idle, by our kernel with smaller
    ones."""
    for node in graph.find_nodes(op="call_function", target=_aten.bmm.default):
        a, b = (_view_source(part, _shape(part)) for part in _args(node))
        clients, height, width = _shape(node)
        many = clients * -(-height // CUBLAS_TILE) * -(-width // CUBLAS_TILE) > FEW_TILES
        if many or a is None or b is None or _transpose_source(a) or not _supported(node, everywhere):
            continue
        source = _transpose_source(b)
        with graph.inserting_before(node):
            made = graph.call_function(torch.ops.equipoise.product.default, (a, source or b, source is not None))
        made.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _supported(node: Node, everywhere: bool) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() not in (2, 3) or not value.is_floating_point():
        return False
    fast = value.device.type == "cuda" and value.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return fast or everywhere


def _match_leaf(node: Node) -> _Leaf | None:
    """The update that makes this node, if `descend` can compute it."""
    shape, new, first, progress = _shape(node), node, [], (None, None)
    if node.target is _aten.where.self:  # clients that have finished keep their old values
        condition, new, old = _args(node)
        active, kept = _view_source(condition, shape[:1]), _view_source(old, shape)
        if kept is None or active is None or active.target is not _aten.lt.Tensor:
            return None
        first, progress = [kept], _args(active)
        if _shape(progress[0]) != () or _shape(progress[1]) != shape[:1]:
            return None
    update = _as_sum(new, shape)
    if update is None or update.rate is None:
        return None
    gradients = {term: found for term in update.factors if (found := _match_gradient(term))}
    if len(gradients) != 1:
        return None
    ((gradient, (g, x)),) = gradients.items()
    if not _only_leads_to(gradient, node) or _shape(g)[1] > MOST_SAMPLES:
        return None
    terms = [term for term in dict.fromkeys([*first, *update.factors]) if term is not gradient]
    factors = tuple(update.factors.get(term, (0.0, 0.0)) for term in [gradient, *terms])
    return _Leaf(node, g, x, terms, factors, update.rate, progress) if terms else None


def _as_sum(node: Any, shape: Shape) -> _Sum | None:
    """A node of this shape as a sum; as a sum of one term, the node itself, where it cannot be split."""
    if not isinstance(node, Node):
        return None
    return _split_sum(node, shape) or (_Sum({source: (1.0, 0.0)}) if (source := _term_source(node, shape)) else None)


def _split_sum(node: Node, shape: Shape) -> _Sum | None:
    """The node as a sum, if it is a negation, a sum, a difference, or a product with a number or a rate."""
    given = _args(node)
    if node.target is _aten.neg.default:
        return one.times(-1.0) if (one := _as_sum(given[0], shape)) else None
    if node.target in (_aten.add.Tensor, _aten.sub.Tensor):
        alpha: Any = node.kwargs.get("alpha", 1)
        one, other = (_as_sum(part, shape) for part in given)
        return one.plus(other.times(alpha if node.target is _aten.add.Tensor else -alpha)) if one and other else None
    if node.target in (_aten.mul.Tensor, _aten.mul.Scalar):
        for values, factor in (given, given[::-1]):
            if isinstance(factor, int | float):
                return one.times(factor) if (one := _as_sum(values, shape)) else None
            if rate := _view_source(factor, shape[:1]) or _view_source(factor, ()):
                return one.times_rate(rate) if (one := _as_sum(values, shape)) else None
    return None


def _match_gradient(node: Node) -> tuple[Node, Node | None] | None:
    """The `g` and `x` of a node that is the gradient of a layer's weights, g' x. For the gradient of a bias, which is
    the sum of g over the samples, `x` is None."""
    if node.target is _aten.bmm.default:
        left, x = (_view_source(part, _shape(part)) for part in _args(node))
        return (g, x) if (g := _transpose_source(left)) else None
    while node.target in _VIEW_OPERATORS:
        node = _args(node)[0]
    if node.target is _aten.sum.dim_IntList and len(_shape(_args(node)[0])) == 3 and list(_args(node)[1]) == [1]:
        return _args(node)[0], None
    return None


def _transpose_source(node: Node | None) -> Node | None:
    """The node whose matrices, transposed for every client, are this node; None if it is no transpose."""
    if node is None or node.target is not _aten.permute.default or list(_args(node)[1]) != [0, 2, 1]:
        return None
    source: Node = _args(node)[0]
    return source


def _only_leads_to(node: Node, end: Node) -> bool:
    """Is the node used for `end` alone, by a chain of nodes that have one user each?"""
    while node is not end:
        if len(node.users) != 1:
            return False
        (node,) = node.users
    return True


def _term_source(node: Node, shape: Shape) -> Node | None:
    """The tensor that the node is a view of: one that all clients share, or one with a row for each client."""
    return _view_source(node, shape[1:]) or _view_source(node, shape)


def _view_source(node: Any, shape: Shape) -> Node | None:
    """The tensor of this shape that the node is a view of, if the views between them only add or remove axes of
    length one, or repeat values along them."""
    found, long = None, [size for size in shape if size != 1]
    while isinstance(node, Node) and "val" in node.meta:
        found = node if _shape(node) == shape else found
        source = _args(node)[0] if node.target in _VIEW_OPERATORS else None
        if not isinstance(source, Node) or [size for size in _shape(source) if size != 1] != long:
            break
        node = source
    return found


def _args(node: Node) -> tuple[Any, ...]:
    return node.args


def _shape(node: Any) -> Shape:
    return tuple(node.meta["val"].shape)


@cache
def inductor_pass() -> Any:
    """The pass as inductor takes it. Its `uuid` says how long inductor may cache compiled programs: as long as this
    file stays the same."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class Fuse(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            fuse(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return Fuse()
