"""The operators of `dense_pass` as Triton kernels for CUDA.

In `descend`, a program computes a tile of the weights of one layer of one client: it reads the other terms of the
update, sums the gradient over the batch, and writes the new weights. The tiles of the first column write the biases.
All layers are one launch. The tiles follow from the shapes alone, so that every process computes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Tensors = Sequence[Tensor]
Numbers = Sequence[float]

ROWS, COLUMNS = 32, 128  # of a tile of `descend`: outputs and inputs of a layer
MOST_SAMPLES = 64  # the most samples that a step of the sum of `descend` adds
PRODUCT_COLUMNS = 16  # of a tile of `product`
PRODUCT_DEPTH = 128  # the most terms that a step of the sum of `product` adds


def descend(
    new: Tensors, g: Tensors, x: Tensors, biased: Sequence[int], terms: Tensors, rate: Tensor, step: Tensor | None,
    steps: Tensor | None, plain: Numbers, rated: Numbers,
) -> None:  # fmt: skip
    """Write into `new` what `dense_pass.descend_by_torch` returns."""
    g, x, terms = ([tensor.contiguous() for tensor in some] for some in (g, x, terms))
    rate, steps = rate.contiguous(), None if steps is None else steps.contiguous()
    (clients, batch, _), each = g[0].shape, len(plain) - 1
    leaves = [_leaf(leaf, terms[number * each : (number + 1) * each]) for number, leaf in enumerate(new)]
    biases = dict(zip(biased, leaves[len(g) :], strict=True))
    layers, tiles = [], 0
    for number, (its_g, its_x) in enumerate(zip(g, x, strict=True)):
        outputs, inputs = its_g.shape[2], its_x.shape[2]
        layers.append((its_g, its_x, outputs, inputs, tiles, leaves[number], biases.get(number, ())))
        tiles += triton.cdiv(outputs, ROWS) * triton.cdiv(inputs, COLUMNS)
    deep = max(16, min(MOST_SAMPLES, triton.next_power_of_2(batch)))
    factors = tuple(float(factor) for factor in (*plain, *rated))
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    _descend[tiles, clients](
        tuple(layers), rate, step, steps, rate.numel() > 1, factors, precision, batch, deep, ROWS, COLUMNS,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def _leaf(new: Tensor, terms: Tensors) -> Any:
    """A weight or a bias as the kernel takes it: the new values, the terms, and the client stride of each term, which
    is 0 where all clients share the term."""
    return new, tuple(terms), tuple(new[0].numel() * (term.dim() == new.dim()) for term in terms)


@triton.jit
def _descend(
    layers, rate, step, steps, own_rates: tl.constexpr, factors: tl.constexpr, precision: tl.constexpr,
    batch: tl.constexpr, deep: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    client = tl.program_id(1).to(tl.int64)
    lr = tl.load(rate + (client if own_rates else 0))
    moves = True if steps is None else tl.load(step) < tl.load(steps + client)
    for number in tl.static_range(len(layers)):
        g, x, outputs, inputs, first, weight, bias = layers[number]
        across = tl.cdiv(inputs, columns)
        tile = place - first
        if (tile >= 0) & (tile < across * tl.cdiv(outputs, rows)):
            row = tile // across * rows + tl.arange(0, rows)
            column = tile % across * columns + tl.arange(0, columns)
            below, right = row < outputs, column < inputs
            at, inside = row[:, None] * inputs + column[None, :], below[:, None] & right[None, :]
            # The terms are loaded first, before anything waits for a load.
            changed = _terms(weight, client, at, inside, lr, moves, factors)
            total = tl.zeros((rows, columns), tl.float32)
            sums = tl.zeros((rows,), tl.float32)
            for low in range(0, batch, deep):
                sample = low + tl.arange(0, deep)
                there = (sample[:, None] < batch) & moves
                at_g = g + client * batch * outputs + sample[:, None] * outputs + row[None, :]
                at_x = x + client * batch * inputs + sample[:, None] * inputs + column[None, :]
                mine = tl.load(at_g, mask=there & below[None, :], other=0.0)
                its = tl.load(at_x, mask=there & right[None, :], other=0.0)
                total = tl.dot(tl.trans(mine), its, total, input_precision=precision)
                sums += tl.sum(mine, 0)
            _write(weight, client * outputs * inputs + at, inside, changed, total, lr, moves, factors)
            if len(bias) > 0:  # noqa: SIM102 (known at compile time; the next condition is not)
                if tile % across == 0:
                    shifted = _terms(bias, client, row, below, lr, moves, factors)
                    _write(bias, client * outputs + row, below, shifted, sums, lr, moves, factors)


@triton.jit
def _terms(leaf, client, at, inside, lr, moves, factors: tl.constexpr):
    """The weighted sum of the terms; for a client that has finished, the first term. A single term comes without its
    factor, which `_write` applies: multiplying it here would wait for its load."""
    _, terms, strides = leaf
    rated: tl.constexpr = len(factors) // 2
    total = tl.load(terms[0] + client * strides[0] + at, mask=inside, other=0.0)
    if len(terms) > 1:
        total *= tl.where(moves, factors[1] + factors[rated + 1] * lr, 1.0)
    for number in tl.static_range(1, len(terms)):
        term = tl.load(terms[number] + client * strides[number] + at, mask=inside & moves, other=0.0)
        total += (factors[number + 1] + factors[rated + number + 1] * lr) * term
    return total


@triton.jit
def _write(leaf, at, inside, terms, gradient, lr, moves, factors: tl.constexpr):
    """Write the new values of a leaf. The gradient of a client that has finished is zero."""
    rated: tl.constexpr = len(factors) // 2
    if rated == 2:
        terms *= tl.where(moves, factors[1] + factors[rated + 1] * lr, 1.0)
    tl.store(leaf[0] + at, terms + (factors[0] + factors[rated] * lr) * gradient, mask=inside)


def product(a: Tensor, b: Tensor, transposed: bool) -> Tensor:
    """a[client, row, place] times b[client, place, column], in small tiles; if `transposed`, b is given as
    b[client, column, place]."""
    a, b = a.contiguous(), b.contiguous()
    (clients, height, length), width = a.shape, b.shape[1 if transposed else 2]
    y = a.new_empty(clients, height, width)
    rows, deep = (
        max(16, min(most, triton.next_power_of_2(size))) for most, size in ((32, height), (PRODUCT_DEPTH, length))
    )
    grid = triton.cdiv(height, rows) * triton.cdiv(width, PRODUCT_COLUMNS), clients
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    _product[grid](
        a, b, y, height, length, width, transposed, precision, rows, PRODUCT_COLUMNS, deep, num_warps=4, num_stages=3
    )
    return y


@triton.jit
def _product(
    a, b, y, height, length, width, transposed: tl.constexpr, precision: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, deep: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(width, columns)
    row = tl.program_id(0) // across * rows + tl.arange(0, rows)
    column = tl.program_id(0) % across * columns + tl.arange(0, columns)
    a += client * height * length
    b += client * length * width
    total = tl.zeros((rows, columns), tl.float32)
    for low in range(0, length, deep):
        place = low + tl.arange(0, deep)
        mine = tl.load(
            a + row[:, None] * length + place[None, :],
            mask=(row < height)[:, None] & (place < length)[None, :],
            other=0.0,
        )
        if transposed:
            inside = (column < width)[:, None] & (place < length)[None, :]
            its = tl.trans(tl.load(b + column[:, None] * length + place[None, :], mask=inside, other=0.0))
        else:
            inside = (place < length)[:, None] & (column < width)[None, :]
            its = tl.load(b + place[:, None] * width + column[None, :], mask=inside, other=0.0)
        total = tl.dot(mine, its, total, input_precision=precision)
    inside = (row < height)[:, None] & (column < width)[None, :]
    tl.store(y + client * height * width + row[:, None] * width + column[None, :], total, mask=inside)
