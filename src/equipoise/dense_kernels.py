"""The operators of `dense.py` as Triton kernels for CUDA.

In `descend`, a program takes a tile of the weights of one layer of one client: it sums the gradient over the batch,
reads what else the change is made of, and writes the new weights; the tiles of the first column write the biases too.
All layers are one launch. How the work is cut follows from the shapes alone, so that every process computes the same.
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

ROWS, COLUMNS = 32, 128  # of a tile: outputs and inputs of a layer
DEEP = 64  # samples at a time, at most
NARROW, LONG = 16, 128  # of a product: columns of a tile, and how much of the sum at a time


def descend(
    new: Tensors, g: Tensors, x: Tensors, biased: Sequence[int], terms: Tensors, rate: Tensor, step: Tensor | None,
    steps: Tensor | None, plain: Numbers, rated: Numbers,
) -> None:  # fmt: skip
    """What `dense.by_torch` gives, written into `new`."""
    g, x, terms = ([tensor.contiguous() for tensor in some] for some in (g, x, terms))
    rate, steps = rate.contiguous(), None if steps is None else steps.contiguous()
    (clients, batch, _), each = g[0].shape, len(plain) - 1
    leaves = [_leaf(leaf, terms[number * each : (number + 1) * each]) for number, leaf in enumerate(new)]
    biases = dict(zip(biased, leaves[len(g) :], strict=True))
    layers, tiles = [], 0
    for number, (mine, its) in enumerate(zip(g, x, strict=True)):
        outputs, inputs = mine.shape[2], its.shape[2]
        layers.append((mine, its, outputs, inputs, tiles, leaves[number], biases.get(number, ())))
        tiles += triton.cdiv(outputs, ROWS) * triton.cdiv(inputs, COLUMNS)
    deep = max(16, min(DEEP, triton.next_power_of_2(batch)))
    factors = tuple(float(factor) for factor in (*plain, *rated))
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    _descend[tiles, clients](
        tuple(layers), rate, step, steps, rate.numel() > 1, factors, precision, batch, deep, ROWS, COLUMNS,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def _leaf(new: Tensor, terms: Tensors) -> Any:
    """And how far it is from one client to the next, in each of its terms: nowhere if they have one row for all."""
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
            changed = _terms(weight, client, at, inside, lr, moves, factors)  # read before anything waits
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
            if len(bias) > 0:  # noqa: SIM102 (this is known to the compiler, what follows is not)
                if tile % across == 0:
                    shifted = _terms(bias, client, row, below, lr, moves, factors)
                    _write(bias, client * outputs + row, below, shifted, sums, lr, moves, factors)


@triton.jit
def _terms(leaf, client, at, inside, lr, moves, factors: tl.constexpr):
    """Their sum; of a client that does not move, and whose gradient is zero, the first. A single one comes as it is:
    to multiply it would be to wait for it."""
    _, terms, apart = leaf
    rated: tl.constexpr = len(factors) // 2
    total = tl.load(terms[0] + client * apart[0] + at, mask=inside, other=0.0)
    if len(terms) > 1:
        total *= tl.where(moves, factors[1] + factors[rated + 1] * lr, 1.0)
    for number in tl.static_range(1, len(terms)):
        term = tl.load(terms[number] + client * apart[number] + at, mask=inside & moves, other=0.0)
        total += (factors[number + 1] + factors[rated + number + 1] * lr) * term
    return total


@triton.jit
def _write(leaf, at, inside, terms, gradient, lr, moves, factors: tl.constexpr):
    """The new values of a leaf."""
    rated: tl.constexpr = len(factors) // 2
    if rated == 2:
        terms *= tl.where(moves, factors[1] + factors[rated + 1] * lr, 1.0)
    tl.store(leaf[0] + at, terms + (factors[0] + factors[rated] * lr) * gradient, mask=inside)


def product(a: Tensor, b: Tensor, turned: bool) -> Tensor:
    """a[client, row, place] times b[client, place, column], which may be turned over, in small tiles."""
    a, b = a.contiguous(), b.contiguous()
    (clients, height, length), width = a.shape, b.shape[1 if turned else 2]
    y = a.new_empty(clients, height, width)
    rows, deep = (max(16, min(most, triton.next_power_of_2(size))) for most, size in ((32, height), (LONG, length)))
    grid = triton.cdiv(height, rows) * triton.cdiv(width, NARROW), clients
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    _product[grid](a, b, y, height, length, width, turned, precision, rows, NARROW, deep, num_warps=4, num_stages=3)
    return y


@triton.jit
def _product(
    a, b, y, height, length, width, turned: tl.constexpr, precision: tl.constexpr,
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
        if turned:
            inside = (column < width)[:, None] & (place < length)[None, :]
            its = tl.trans(tl.load(b + column[:, None] * length + place[None, :], mask=inside, other=0.0))
        else:
            inside = (place < length)[:, None] & (column < width)[None, :]
            its = tl.load(b + place[:, None] * width + column[None, :], mask=inside, other=0.0)
        total = tl.dot(mine, its, total, input_precision=precision)
    inside = (row < height)[:, None] & (column < width)[None, :]
    tl.store(y + client * height * width + row[:, None] * width + column[None, :], total, mask=inside)
