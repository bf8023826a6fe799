"""Convolutions of many clients at once, each with its own weights, as Triton kernels for CUDA.

Every kernel is an implicit GEMM: the patches that are multiplied with the weights are read from the images directly,
and never copied into a matrix. All tensors are contiguous with the client first and the channels last,
x[client, image, row, column, channel] and weight[client, filter, row, column, channel]; sums are kept in float32. The
tiles follow from the shapes alone, never from measured times, so that every process computes the same bits. Where a
shape suits them, the kernels of `conv_kernels_tma` are used instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.fast import conv_kernels_tma as tma

Shape = tuple[int, ...]
Sizes = Sequence[int]


class Tile(NamedTuple):
    """How a matrix product is cut: rows and columns of an output tile, and how many terms of the sum a step adds."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3


# Arguments on whose values Triton should not specialise a kernel. Channels and filters are not among them: a kernel
# for multiples of 16 differs from the others.
NOT_SPECIALISED = ["tiles", "parts", "length", "batch", "height", "width"]
OUTPUT_SIZE = ["out_height", "out_width"]
ENOUGH_PROGRAMS = 512  # that fill a large GPU: about four for each of its multiprocessors


def forward_tile(channels: int, filters: int, size: int) -> Tile:
    """The tile of a forward convolution: pixels times filters, summed over the patch. `size`: bytes of a number."""
    columns = _covering_power(filters, most=128)
    if depth := _even_depth(channels, size):
        return Tile(128, columns, depth, 8 if columns == 128 else 4)
    return Tile(128, columns, 16, 4, 2)


def input_tile(channels: int, filters: int, size: int) -> Tile:
    """The tile of a gradient of the input: pixels times channels, summed over the window and the filters."""
    depth = _even_depth(filters, size) or _covering_power(filters, most=128 // size)
    columns = _covering_power(channels, most=128)
    return Tile(128, columns, depth, 8 if columns == 128 else 4)


def weight_tile(channels: int, filters: int, size: int, patch: int, clients: int) -> Tile:
    """The tile of a gradient of the weights: filters times the numbers of a patch, summed over pixels."""
    rows, columns = _covering_power(filters, most=128), _covering_power(patch, most=128)
    if not _even_depth(channels, size):
        return Tile(rows, columns, 128 // size, 8)
    if clients * triton.cdiv(filters, rows) * triton.cdiv(patch, columns) < ENOUGH_PROGRAMS:
        columns = min(columns, 64)  # to fill the GPU, smaller tiles cost less than more parts of the sum
    return Tile(rows, columns, 128 // size, 8 if rows == columns == 128 else 4)


def sum_parts(programs: int, pixels: int, depth: int) -> int:
    """Into how many parts the sum over pixels is cut: enough to fill the GPU, but none too short to be worth it."""
    return max(1, min(-(-ENOUGH_PROGRAMS // programs), pixels // (8 * depth)))


def _even_depth(length: int, size: int) -> int:
    """The largest power of two that divides `length`, up to 128 bytes of numbers; 0 where it is below 16."""
    depth = min(length & -length, 128 // size)
    return depth if depth >= 16 else 0


def _covering_power(length: int, most: int) -> int:
    """The smallest power of two not below `length`, from 16 (the least that tensor cores take) up to `most`."""
    return min(most, max(16, 1 << (length - 1).bit_length()))


def forward(
    x: Tensor, weight: Tensor, shape: Shape, stride: Sizes, padding: Sizes, tile: Tile | None = None
) -> Tensor:
    _, batch, height, width, channels = x.shape
    clients, _, out_height, out_width, filters = shape
    if tile is None and tma.supported((height, width), shape[2:4], batch, (channels, filters), stride, x, weight):
        return tma.forward(x, weight, shape, stride, padding)
    tile = tile or forward_tile(channels, filters, x.element_size())
    tiles = triton.cdiv(batch * out_height * out_width, tile.rows) * triton.cdiv(filters, tile.columns)
    y = x.new_empty(shape)
    _forward[(tiles * clients,)](
        x, weight, y, tiles, batch, height, width, channels, out_height, out_width, filters,
        *weight.shape[2:4], *stride, *padding, *tile[:3], channels % tile.depth == 0, _precision(x),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def input_gradient(
    g: Tensor, weight: Tensor, shape: Shape, stride: Sizes, padding: Sizes, tile: Tile | None = None
) -> Tensor:
    _, _, out_height, out_width, filters = g.shape
    clients, batch, height, width, channels = shape
    plane = height // stride[0], width // stride[1]
    if tile is None and tma.supported((height, width), plane, batch, (channels, filters), stride, g, weight):
        return tma.input_gradient(g, weight, shape, stride, padding)
    tile = tile or input_tile(channels, filters, g.element_size())
    places = batch * triton.cdiv(height, stride[0]) * triton.cdiv(width, stride[1])
    tiles = triton.cdiv(places, tile.rows) * triton.cdiv(channels, tile.columns)
    gx = g.new_empty(shape)
    _input_gradient[(tiles * stride[0] * stride[1] * clients,)](
        g, weight, gx, tiles, batch, height, width, channels, out_height, out_width, filters,
        *weight.shape[2:4], *stride, *padding, *tile[:3], filters % tile.depth == 0, _precision(g),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return gx


def weight_gradient(
    g: Tensor, x: Tensor, shape: Shape, stride: Sizes, padding: Sizes, tile: Tile | None = None
) -> Tensor:
    _, batch, height, width, channels = x.shape
    clients, filters, window_height, window_width, _ = shape
    out_height, out_width = g.shape[2:4]
    patch, pixels = window_height * window_width * channels, batch * out_height * out_width
    if tile is None and tma.supported((height, width), g.shape[2:4], batch, (channels, filters), stride, g, x):
        return _added_up(tma.weight_gradient(g, x, shape, stride, padding), g.dtype)
    tile = tile or weight_tile(channels, filters, g.element_size(), patch, clients)
    tiles = triton.cdiv(filters, tile.rows) * triton.cdiv(patch, tile.columns)
    parts = sum_parts(tiles * clients, pixels, tile.depth)
    length = triton.cdiv(triton.cdiv(pixels, parts), tile.depth) * tile.depth
    sums = g.new_empty(parts, *shape, dtype=g.dtype if parts == 1 else torch.float32)
    run = min(channels & -channels, tile.columns)
    _weight_gradient[(tiles * parts * clients,)](
        g, x, sums, tiles, parts, length, batch, height, width, channels, filters, out_height, out_width,
        window_height, window_width, *stride, *padding, *tile[:3], run, channels % tile.columns == 0, _precision(g),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return _added_up(sums, g.dtype)


def _added_up(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The total of partial sums, which lie along the first axis."""
    if len(sums) == 1:
        return sums[0]
    whole = torch.empty_like(sums[0], dtype=dtype)
    numbers, block = whole.numel(), 1024
    _add_parts[(triton.cdiv(numbers, block),)](sums, whole, len(sums), numbers, block)
    return whole


def _precision(values: Tensor) -> str:
    return "tf32" if values.is_cuda else "ieee"


# -- kernels. A program computes one tile of one client's output. `down` and `across` are the stride. The masks are
# `real` for pixels that exist, `used` and `known` for filters, channels or numbers of a patch that exist, and `seen`
# for pixels that also lie inside the image and not in its padding. `client` has 64 bits, since only offsets within a
# client are sure to fit 32.


@triton.jit(do_not_specialize=["parts"])
def _add_parts(sums, whole, parts, numbers, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    for part in range(parts):
        total += tl.load(sums + part * numbers + place, mask=place < numbers, other=0.0)
    tl.store(whole + place, total.to(whole.dtype.element_ty), mask=place < numbers)


@triton.jit
def _inside(row, column, height, width):
    return (row >= 0) & (row < height) & (column >= 0) & (column < width)


@triton.jit(do_not_specialize=NOT_SPECIALISED + OUTPUT_SIZE)
def _forward(
    x, weight, y, tiles, batch, height, width, channels, out_height, out_width, filters,
    window_height: tl.constexpr, window_width: tl.constexpr, down: tl.constexpr, across: tl.constexpr,
    pad_height: tl.constexpr, pad_width: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, even: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    client = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    tiles_across = tl.cdiv(filters, columns)
    pixel = (tile // tiles_across) * rows + tl.arange(0, rows)
    filter = (tile % tiles_across) * columns + tl.arange(0, columns)
    pixels = batch * out_height * out_width
    patch = window_height * window_width * channels
    x += client * batch * height * width * channels
    weight += client * filters * patch
    y += client * pixels * filters
    image, place = pixel // (out_height * out_width), pixel % (out_height * out_width)
    top = (place // out_width) * down - pad_height
    left = (place % out_width) * across - pad_width
    corner = ((image * height + top) * width + left) * channels
    real, used = pixel < pixels, filter < filters
    padded: tl.constexpr = pad_height + pad_width > 0
    total = tl.zeros((rows, columns), tl.float32)
    if even:  # `depth` divides the channels: a step of the sum stays within one tap of the window, and is contiguous
        per_tap = channels // depth
        for step in range(window_height * window_width * per_tap):
            tap = step // per_tap
            channel = (step % per_tap) * depth + tl.arange(0, depth)
            i, j = tap // window_width, tap % window_width
            seen = real
            if padded:
                seen = seen & _inside(top + i, left + j, height, width)
            start = corner + (i * width + j) * channels
            a = tl.load(x + start[:, None] + channel[None, :], mask=seen[:, None], other=0.0)
            b = tl.load(
                weight + filter[:, None] * patch + (tap * channels + channel)[None, :], mask=used[:, None], other=0.0
            )
            total = tl.dot(a, b.T, total, input_precision=precision)
    else:
        for first in range(0, patch, depth):
            k = first + tl.arange(0, depth)
            tap, channel = k // channels, k % channels
            i, j = tap // window_width, tap % window_width
            seen = real[:, None] & (k < patch)[None, :]
            if padded:
                seen = seen & _inside(top[:, None] + i[None, :], left[:, None] + j[None, :], height, width)
            offset = (i * width + j) * channels + channel
            a = tl.load(x + corner[:, None] + offset[None, :], mask=seen, other=0.0)
            b = tl.load(
                weight + filter[:, None] * patch + k[None, :], mask=used[:, None] & (k < patch)[None, :], other=0.0
            )
            total = tl.dot(a, b.T, total, input_precision=precision)
    tl.store(
        y + pixel[:, None] * filters + filter[None, :],
        total.to(y.dtype.element_ty),
        mask=real[:, None] & used[None, :],
    )


@triton.jit(do_not_specialize=NOT_SPECIALISED + OUTPUT_SIZE)
def _input_gradient(
    g, weight, gx, tiles, batch, height, width, channels, out_height, out_width, filters,
    window_height: tl.constexpr, window_width: tl.constexpr, down: tl.constexpr, across: tl.constexpr,
    pad_height: tl.constexpr, pad_width: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, even: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    # Pixels whose distance is a multiple of the stride (a phase) meet the same taps of the window, so that each phase
    # has its own tiles.
    tile = tl.program_id(0) % tiles
    phase = (tl.program_id(0) // tiles) % (down * across)
    client = (tl.program_id(0) // (tiles * down * across)).to(tl.int64)
    tiles_across = tl.cdiv(channels, columns)
    place = (tile // tiles_across) * rows + tl.arange(0, rows)
    channel = (tile % tiles_across) * columns + tl.arange(0, columns)
    patch = window_height * window_width * channels
    g += client * batch * out_height * out_width * filters
    weight += client * filters * patch
    gx += client * batch * height * width * channels
    phase_row, phase_column = phase // across, phase % across
    phase_height, phase_width = tl.cdiv(height, down), tl.cdiv(width, across)
    image, rest = place // (phase_height * phase_width), place % (phase_height * phase_width)
    row = (rest // phase_width) * down + phase_row
    column = (rest % phase_width) * across + phase_column
    real = (image < batch) & (row < height) & (column < width)
    used = channel < channels
    first_i, first_j = (phase_row + pad_height) % down, (phase_column + pad_width) % across
    taps_down = (window_height - first_i + down - 1) // down
    taps_across = (window_width - first_j + across - 1) // across
    bottom = (row + pad_height - first_i) // down
    right = (column + pad_width - first_j) // across
    corner = ((image * out_height + bottom) * out_width + right) * filters
    per_tap = tl.cdiv(filters, depth)
    total = tl.zeros((rows, columns), tl.float32)
    for step in range(taps_down * taps_across * per_tap):
        tap = step // per_tap
        filter = (step % per_tap) * depth + tl.arange(0, depth)
        up, back = tap // taps_across, tap % taps_across
        seen = real & _inside(bottom - up, right - back, out_height, out_width)
        start = corner - (up * out_width + back) * filters
        within = ((first_i + up * down) * window_width + first_j + back * across) * channels
        if even:
            a = tl.load(g + start[:, None] + filter[None, :], mask=seen[:, None], other=0.0)
            b = tl.load(weight + filter[:, None] * patch + (within + channel)[None, :], mask=used[None, :], other=0.0)
        else:
            known = filter < filters
            a = tl.load(g + start[:, None] + filter[None, :], mask=seen[:, None] & known[None, :], other=0.0)
            b = tl.load(
                weight + filter[:, None] * patch + (within + channel)[None, :],
                mask=known[:, None] & used[None, :],
                other=0.0,
            )
        total = tl.dot(a, b, total, input_precision=precision)
    tl.store(
        gx + ((image * height + row) * width + column)[:, None] * channels + channel[None, :],
        total.to(gx.dtype.element_ty),
        mask=real[:, None] & used[None, :],
    )


@triton.jit(do_not_specialize=NOT_SPECIALISED)
def _weight_gradient(
    g, x, sums, tiles, parts, length, batch, height, width, channels, filters,
    out_height: tl.constexpr, out_width: tl.constexpr,
    window_height: tl.constexpr, window_width: tl.constexpr, down: tl.constexpr, across: tl.constexpr,
    pad_height: tl.constexpr, pad_width: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, run: tl.constexpr, even: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % tiles
    part = (tl.program_id(0) // tiles) % parts
    client = (tl.program_id(0) // (tiles * parts)).to(tl.int64)
    clients = tl.num_programs(0) // (tiles * parts)
    pixels = batch * out_height * out_width
    patch = window_height * window_width * channels
    tiles_across = tl.cdiv(patch, columns)
    filter = (tile // tiles_across) * rows + tl.arange(0, rows)
    first = (tile % tiles_across) * columns
    k = first + tl.arange(0, columns)
    # If `even`, all columns of a tile belong to one tap of the window.
    tap = first // channels if even else k // channels
    i, j = tap // window_width, tap % window_width
    offset = (i * width + j) * channels + k % channels
    # The divisions hide from the compiler that runs of channels are contiguous in memory.
    offset = tl.max_contiguous(tl.multiple_of(offset, run), run)
    g += client * pixels * filters
    x += client * batch * height * width * channels
    sums += (part * clients + client) * filters * patch
    used, known = filter < filters, k < patch
    padded: tl.constexpr = pad_height + pad_width > 0
    last = tl.minimum((part + 1) * length, pixels)
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(part * length, last, depth):
        pixel = start + tl.arange(0, depth)
        real = pixel < last
        image, place = pixel // (out_height * out_width), pixel % (out_height * out_width)
        top = (place // out_width) * down - pad_height
        left = (place % out_width) * across - pad_width
        corner = ((image * height + top) * width + left) * channels
        seen = real[:, None] & known[None, :]
        if padded and even:
            seen = seen & _inside(top + i, left + j, height, width)[:, None]
        elif padded:
            seen = seen & _inside(top[:, None] + i[None, :], left[:, None] + j[None, :], height, width)
        a = tl.load(g + pixel[:, None] * filters + filter[None, :], mask=real[:, None] & used[None, :], other=0.0)
        b = tl.load(x + corner[:, None] + offset[None, :], mask=seen, other=0.0)
        total = tl.dot(a.T, b, total, input_precision=precision)
    tl.store(
        sums + filter[:, None] * patch + k[None, :],
        total.to(sums.dtype.element_ty),
        mask=used[:, None] & known[None, :],
    )
