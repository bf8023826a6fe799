"""Convolutions for GPUs with a tensor memory accelerator (the TMA of Hopper), which copies boxes of a tensor.

They compute the same as the kernels of `conv_kernels`. There every thread computes the addresses of its part of a
patch; here one instruction copies a box of pixels, shifted by a tap of the window, with zeros where the box reaches
beyond the image. A stride costs nothing: in the view [image, row / stride, row % stride, column / stride,
(column % stride, channel)] of an image, pixels that lie a stride apart are neighbours.
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
DEPTH = 64  # terms of the sum in a step: as 16-bit numbers they are 128 bytes, which TMA copies best
PIXELS = 128  # the most pixels of a box
ENOUGH_PROGRAMS = 264  # two for each multiprocessor of an H200


class Box(NamedTuple):
    """Pixels that one TMA instruction copies."""

    images: int
    rows: int
    columns: int


class Tile(NamedTuple):
    """How a matrix product is cut."""

    rows: int  # of an output tile: filters; in a gradient of the input, channels
    columns: int  # in a gradient of the weights, channels; elsewhere the columns are the pixels
    pixels: int  # of a box
    warps: int
    stages: int


def box(size: Sizes, pixels: int) -> Box:
    """The box of `pixels` pixels for images of this size: rows of one image, such as 4 x 32 of 32 x 32 pixels, or
    several small images as a whole, such as eight of 4 x 4."""
    height, width = size
    columns = min(width & -width, pixels)
    rows = min(height & -height, pixels // columns)
    return Box(pixels // (rows * columns), rows, columns)


def supported(image: Sizes, plane: Sizes, batch: int, features: Sizes, stride: Sizes, *given: Tensor) -> bool:
    """Can these kernels compute this convolution? `plane`: rows and columns of the pixels that are cut into boxes,
    without a rest; `features`: numbers of channels and filters; `given`: the tensors that are read."""
    part = box(plane, PIXELS)
    return (
        image[0] % stride[0] == image[1] % stride[1] == batch % part.images == 0
        and part.columns == plane[1]
        and (part.images == 1 or part.rows == plane[0])
        and all(size % DEPTH == 0 for size in features)
        and all(values.element_size() == 2 and values.data_ptr() % 16 == 0 for values in given)
        and _has_tma(given[0].device)
    )


@cache
def _has_tma(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


# The tiles that were fastest on an H200, among those tried on ResNet-18's layers (10 clients, 40 images each).


def pixel_tile(filters: int) -> Tile:
    """The tile of a forward convolution; of a gradient of the input, if `filters` are its channels."""
    return Tile(64 if filters % 128 else 128, 0, PIXELS, 4, 3)


def weight_tile(filters: int, channels: int) -> Tile:
    if filters % 256 or channels % 256:
        return Tile(64, 64, 64, 4, 4)
    return Tile(128, 128, 64, 8, 3)


def forward(
    x: Tensor, weight: Tensor, shape: Shape, stride: Sizes, padding: Sizes, tile: Tile | None = None
) -> Tensor:
    batch, filters = shape[1], shape[-1]
    tile = tile or pixel_tile(filters)
    part = box(shape[2:4], tile.pixels)
    y = x.new_empty(shape)
    down, across, tiles = shape[2] // part.rows, shape[3] // part.columns, filters // tile.rows
    _forward[(shape[0] * (batch // part.images) * down * across * tiles,)](
        _boxes(x, part, DEPTH, stride), _matrix(weight, (tile.rows, DEPTH)), _boxes(y, part, tile.rows),
        tiles, down, across, batch, x.shape[-1], filters,
        *weight.shape[2:4], *stride, *padding, *part, tile.rows, DEPTH, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def input_gradient(
    g: Tensor, weight: Tensor, shape: Shape, stride: Sizes, padding: Sizes, tile: Tile | None = None
) -> Tensor:
    batch, channels = shape[1], shape[-1]
    tile = tile or pixel_tile(channels)
    plane = shape[2] // stride[0], shape[3] // stride[1]
    part = box(plane, tile.pixels)
    gx = g.new_empty(shape)
    down, across, tiles = plane[0] // part.rows, plane[1] // part.columns, channels // tile.rows
    boxes = shape[0] * (batch // part.images) * down * across
    _input_gradient[(boxes * stride[0] * stride[1] * tiles,)](
        _boxes(g, part, DEPTH), _matrix(weight, (DEPTH, tile.rows)), _boxes(gx, part, tile.rows, stride),
        tiles, boxes, down, across, batch, channels, g.shape[-1],
        *weight.shape[2:4], *stride, *padding, *part, tile.rows, DEPTH, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return gx


def weight_gradient(
    g: Tensor, x: Tensor, shape: Shape, stride: Sizes, padding: Sizes, tile: Tile | None = None
) -> Tensor:
    """Partial sums along the first axis, which are still to be added up."""
    clients, filters, *window, channels = shape
    tile = tile or weight_tile(filters, channels)
    part = box(g.shape[2:4], tile.pixels)
    across, blocks = channels // tile.columns, g[0, ..., 0].numel() // tile.pixels
    tiles = window[0] * window[1] * (filters // tile.rows) * across
    parts = max(1, min(-(-ENOUGH_PROGRAMS // (tiles * clients)), blocks // 8))
    sums = g.new_empty(parts, *shape, dtype=g.dtype if parts == 1 else torch.float32)
    _weight_gradient[(tiles * parts * clients,)](
        _matrix(g, (tile.pixels, tile.rows), columns=filters), _boxes(x, part, tile.columns, stride), sums,
        tiles, across, parts, triton.cdiv(blocks, parts), blocks, g.shape[2] // part.rows, x.shape[1],
        filters, channels, *window, *stride, *padding, *part, tile.rows, tile.columns,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return sums


def _boxes(images: Tensor, part: Box, depth: int, stride: Sizes = (1, 1)) -> TensorDescriptor:
    """A TMA descriptor of all clients' images, for boxes of pixels that lie a stride apart."""
    clients, batch, height, width, channels = images.shape
    down, across = stride
    shape = [clients * batch, height // down, down, width // across, across * channels]
    row = width * channels
    strides = [height * row, down * row, row, across * channels, 1]
    return TensorDescriptor(images, shape, strides, [part.images, part.rows, 1, part.columns, depth])


def _matrix(values: Tensor, size: Sizes, columns: int | None = None) -> TensorDescriptor:
    """A TMA descriptor of all clients' values as one matrix, for blocks of the given size: a row for each filter, or
    rows of `columns` numbers."""
    matrix = values.flatten(2).flatten(0, 1) if columns is None else values.view(-1, columns)
    return TensorDescriptor(values, list(matrix.shape), list(matrix.stride()), list(size))


@triton.jit
def _load_tap(x, image, top, left, i, j, channel, channels, down, across, pad_height, pad_width):
    """The input pixels that the tap (i, j) of the window meets, for the output pixels of a box.

    A multiple of the stride is added before the divisions, so that nothing negative is divided: that would round up.
    """
    i += (down - 1) * pad_height
    j += (across - 1) * pad_width
    return x.load([
        image, top + i // down - pad_height, i % down, left + j // across - pad_width, j % across * channels + channel
    ])  # fmt: skip


@triton.jit
def _forward(
    x, weight, y, tiles, boxes_down, boxes_across, batch, channels, filters,
    window_height: tl.constexpr, window_width: tl.constexpr, down: tl.constexpr, across: tl.constexpr,
    pad_height: tl.constexpr, pad_width: tl.constexpr,
    images: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, tile_rows: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    filter = tl.program_id(0) % tiles * tile_rows
    place = tl.program_id(0) // tiles
    left = place % boxes_across * columns
    top = place // boxes_across % boxes_down * rows
    image = place // (boxes_across * boxes_down) * images
    weights = image // batch * filters + filter
    pixels: tl.constexpr = images * rows * columns
    # Filters times pixels, and not the other way round: a box has several axes, and the compiler can multiply it
    # without a copy only if it is the second factor.
    total = tl.zeros((tile_rows, pixels), tl.float32)
    per_tap = channels // depth
    for step in range(window_height * window_width * per_tap):
        tap, channel = step // per_tap, step % per_tap * depth
        i, j = tap // window_width, tap % window_width
        a = weight.load([weights, tap * channels + channel])
        b = _load_tap(x, image, top, left, i, j, channel, channels, down, across, pad_height, pad_width)
        total = tl.dot(a, b.reshape(pixels, depth).T, total)
    y.store([image, top, 0, left, filter], total.to(y.dtype).T.reshape(images, rows, 1, columns, tile_rows))


@triton.jit
def _input_gradient(
    g, weight, gx, tiles, boxes, boxes_down, boxes_across, batch, channels, filters,
    window_height: tl.constexpr, window_width: tl.constexpr, down: tl.constexpr, across: tl.constexpr,
    pad_height: tl.constexpr, pad_width: tl.constexpr,
    images: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr, tile_rows: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    # Pixels whose distance is a multiple of the stride (a phase) meet the same taps of the window, so that each phase
    # has its own boxes.
    channel = tl.program_id(0) % tiles * tile_rows
    place = tl.program_id(0) // tiles % boxes
    phase = tl.program_id(0) // (tiles * boxes)
    left = place % boxes_across * columns
    top = place // boxes_across % boxes_down * rows
    image = place // (boxes_across * boxes_down) * images
    weights = image // batch * filters
    phase_row, phase_column = phase // across, phase % across
    first_i, first_j = (phase_row + pad_height) % down, (phase_column + pad_width) % across
    taps_down = (window_height - first_i + down - 1) // down
    taps_across = (window_width - first_j + across - 1) // across
    bottom = top + (phase_row + pad_height) // down
    right = left + (phase_column + pad_width) // across
    pixels: tl.constexpr = images * rows * columns
    total = tl.zeros((tile_rows, pixels), tl.float32)
    per_tap = filters // depth
    for step in range(taps_down * taps_across * per_tap):
        tap, filter = step // per_tap, step % per_tap * depth
        up, back = tap // taps_across, tap % taps_across
        within = (first_i + up * down) * window_width + first_j + back * across
        a = weight.load([weights + filter, within * channels + channel])
        b = g.load([image, bottom - up, 0, right - back, filter])
        total = tl.dot(a.T, b.reshape(pixels, depth).T, total)
    total = total.to(gx.dtype).T.reshape(images, rows, 1, columns, tile_rows)
    gx.store([image, top, phase_row, left, phase_column * channels + channel], total)


@triton.jit
def _weight_gradient(
    g, x, sums, tiles, across_tiles, parts, length, blocks, boxes_down, batch, filters, channels,
    window_height: tl.constexpr, window_width: tl.constexpr, down: tl.constexpr, across: tl.constexpr,
    pad_height: tl.constexpr, pad_width: tl.constexpr,
    images: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % tiles
    part = tl.program_id(0) // tiles % parts
    client = tl.program_id(0) // (tiles * parts)
    clients = tl.num_programs(0) // (tiles * parts)
    channel = tile % across_tiles * tile_columns
    filter = tile // across_tiles % (filters // tile_rows) * tile_rows
    tap = tile // (across_tiles * (filters // tile_rows))
    i, j = tap // window_width, tap % window_width
    pixels: tl.constexpr = images * rows * columns
    total = tl.zeros((tile_rows, tile_columns), tl.float32)
    for block in range(part * length, tl.minimum((part + 1) * length, blocks)):
        top, image = block % boxes_down * rows, client * batch + block // boxes_down * images
        a = g.load([(client * blocks + block) * pixels, filter])
        b = _load_tap(x, image, top, 0, i, j, channel, channels, down, across, pad_height, pad_width)
        total = tl.dot(a.T, b.reshape(pixels, tile_columns), total)
    row = filter + tl.arange(0, tile_rows).to(tl.int64)
    column = tap * channels + channel + tl.arange(0, tile_columns)
    taps: tl.constexpr = window_height * window_width
    start = ((part * clients + client) * filters + row) * taps * channels
    tl.store(sums + start[:, None] + column[None, :], total.to(sums.dtype.element_ty))
