"""Convolutions whose window moves by one pixel, for GPUs that copy boxes of a tensor by themselves (Hopper's TMA).

They do what the kernels of `equipoise.kernels` do. There every thread works out where its part of a patch lies; here
one instruction brings a box of pixels, moved by a tap of the window, with zeros where it sticks out of the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

Shape = tuple[int, ...]
Sizes = Sequence[int]
DEPTH = 64  # numbers of 16 bits in the 128 bytes that are copied best


class Box(NamedTuple):
    """Pixels that are copied at once."""

    images: int
    rows: int
    columns: int


class Tile(NamedTuple):
    """The cut of one matrix product: channels (of a weight's gradient: filters and channels), pixels of a box."""

    deep: int
    broad: int
    pixels: int
    warps: int
    stages: int


def box(size: Sizes, pixels: int) -> Box:
    """Of an image of this size, or of several small ones: 4 x 32 pixels of 32 x 32, or eight images of 4 x 4."""
    height, width = size
    columns = min(width & -width, pixels)
    rows = min(height & -height, pixels // columns)
    return Box(pixels // (rows * columns), rows, columns)


def suits(channels: int, filters: int, batch: int, out: Sizes, stride: Sizes, *given: Tensor) -> bool:
    """Is this a convolution for these kernels?"""
    one = box(out, pixels=128)
    return (
        tuple(stride) == (1, 1)
        and channels % DEPTH == filters % DEPTH == 0
        and (one.columns, batch % one.images) == (out[1], 0)
        and all(part.element_size() == 2 and part.data_ptr() % 16 == 0 for part in given)
        and _copies_boxes(given[0].device)
    )


@cache
def _copies_boxes(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def slide(
    x: Tensor, weight: Tensor, shape: Shape, padding: Sizes, back: bool = False, tile: Tile | None = None
) -> Tensor:
    """The convolution; `back`: the gradient with respect to its input, of which `x` is then that of its output."""
    channels, filters = x.shape[-1], shape[-1]
    window = weight.shape[2:4]
    tile = tile or slide_tile(filters)
    part = box(shape[2:4], tile.pixels)
    y = x.new_empty(shape)
    across = filters // tile.deep
    tiles = across * triton.cdiv(shape[1], part.images) * (shape[2] // part.rows) * (shape[3] // part.columns)
    weights = weight.view(-1, window[0] * window[1] * weight.shape[-1])
    _slide[(tiles * shape[0],)](
        _boxes(x, (1, *part, DEPTH)), _boxes(weights, (DEPTH, tile.deep) if back else (tile.deep, DEPTH)),
        _boxes(y, (1, *part, tile.deep)), tiles, across, shape[2] // part.rows, shape[3] // part.columns,
        channels, filters, *window, *padding, back, *part, tile.deep, DEPTH,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def slide_weights(g: Tensor, x: Tensor, shape: Shape, padding: Sizes, tile: Tile | None = None) -> Tensor:
    """The gradient with respect to the weights, in parts that are still to be added."""
    clients, filters, *window, channels = shape
    tile = tile or weight_tile(filters, channels)
    part = box(g.shape[2:4], tile.pixels)
    across, blocks = channels // tile.broad, g[0, ..., 0].numel() // tile.pixels
    tiles = window[0] * window[1] * (filters // tile.deep) * across
    parts = max(1, min(-(-ENOUGH // (tiles * clients)), blocks // 8))
    sums = g.new_empty(parts, *shape, dtype=g.dtype if parts == 1 else torch.float32)
    _slide_weights[(tiles * parts * clients,)](
        _boxes(g.view(-1, filters), (tile.pixels, tile.deep)), _boxes(x, (1, *part, tile.broad)), sums,
        tiles, across, parts, triton.cdiv(blocks, parts), blocks, g.shape[2] // part.rows, filters, channels,
        *window, *padding, *part, tile.deep, tile.broad, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return sums


ENOUGH = 264  # programs: two for each processor


# Tiles as they were fastest on an H200, of those that were tried on ResNet-18's layers (10 clients, 40 images each).


def slide_tile(filters: int) -> Tile:
    return Tile(64 if filters % 128 else 128, 0, 128, 4, 3)


def weight_tile(filters: int, channels: int) -> Tile:
    if filters % 256 or channels % 256:
        return Tile(64, 64, 64, 4, 4)
    return Tile(128, 128, 64, 8, 3)


def _boxes(values: Tensor, size: Sizes) -> TensorDescriptor:
    return TensorDescriptor(values, list(values.shape), list(values.stride()), list(size))


@triton.jit
def _slide(
    x, weight, y, tiles, across, boxes_down, boxes_across, channels, filters,
    window_height: tl.constexpr, window_width: tl.constexpr, pad_height: tl.constexpr, pad_width: tl.constexpr,
    back: tl.constexpr, images: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, deep: tl.constexpr,
    depth: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    filter = (tile % across) * deep
    place = tile // across
    left = (place % boxes_across) * columns
    top = (place // boxes_across % boxes_down) * rows
    image = place // (boxes_across * boxes_down) * images
    pixels: tl.constexpr = images * rows * columns
    # Filters times pixels, and not the other way round: only of the second factor does the compiler know that a box
    # of several axes can be multiplied where it lies.
    total = tl.zeros((deep, pixels), tl.float32)
    per_tap = channels // depth
    for step in range(window_height * window_width * per_tap):
        tap, channel = step // per_tap, step % per_tap * depth
        i, j = tap // window_width, tap % window_width
        if back:
            a = weight.load([client * channels + channel, tap * filters + filter]).T
            b = x.load([client, image, top + pad_height - i, left + pad_width - j, channel])
        else:
            a = weight.load([client * filters + filter, tap * channels + channel])
            b = x.load([client, image, top + i - pad_height, left + j - pad_width, channel])
        total = tl.dot(a, b.reshape(pixels, depth).T, total)
    y.store([client, image, top, left, filter], total.to(y.dtype).T.reshape(1, images, rows, columns, deep))


@triton.jit
def _slide_weights(
    g, x, sums, tiles, across, parts, length, blocks, boxes_down, filters, channels,
    window_height: tl.constexpr, window_width: tl.constexpr, pad_height: tl.constexpr, pad_width: tl.constexpr,
    images: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, deep: tl.constexpr, broad: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % tiles
    part = (tl.program_id(0) // tiles) % parts
    client = tl.program_id(0) // (tiles * parts)
    clients = tl.num_programs(0) // (tiles * parts)
    channel = tile % across * broad
    filter = tile // across % (filters // deep) * deep
    tap = tile // (across * (filters // deep))
    i, j = tap // window_width, tap % window_width
    pixels: tl.constexpr = images * rows * columns
    total = tl.zeros((deep, broad), tl.float32)
    for block in range(part * length, tl.minimum((part + 1) * length, blocks)):
        top, image = block % boxes_down * rows, block // boxes_down * images
        a = g.load([(client * blocks + block) * pixels, filter])
        b = x.load([client, image, top + i - pad_height, j - pad_width, channel])
        total = tl.dot(a.T, b.reshape(pixels, broad), total)
    row = filter + tl.arange(0, deep).to(tl.int64)
    column = tap * channels + channel + tl.arange(0, broad)
    taps: tl.constexpr = window_height * window_width
    start = ((part * clients + client) * filters + row) * taps * channels
    tl.store(sums + start[:, None] + column[None, :], total.to(sums.dtype.element_ty))
