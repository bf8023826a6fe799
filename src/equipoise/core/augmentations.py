"""Images changed at random, by draws from a key.

`AUGMENTATIONS` are what `local.augment` may name: each changes every image of a batch, anew in every step. To add
one, put a function of (images, key) into it.

`warp` makes augmented copies: shifted, turned, sheared and zoomed. A copy is not stored. It is an image and the key
that names it, and is rendered when a batch is made: the same picture every time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise.core import random


def warp(x: Tensor, keys: Tensor, *, shift: float, rotation: float, shear: float, zoom: float) -> Tensor:
    """Images [B, C, H, W], each under its own affine map, by bilinear sampling; past the edge the edge goes on.

    The draws are uniform: a shift of at most so much of the side, along both axes; a turn and a slant of at most so
    many degrees; each axis stretched by a factor in [1 - zoom, 1 + zoom].
    """
    height, width = x.shape[-2:]
    draw = 2 * random.uniform(random.fold(keys, random.AUGMENT), 6, x.dtype) - 1
    right, down, turn, slant, wide, high = draw[..., None, None].unbind(1)  # each [B, 1, 1]
    turn, slant = turn * math.radians(rotation), (slant * math.radians(shear)).tan()
    cos, sin = turn.cos(), turn.sin()
    across = (torch.arange(width, device=x.device, dtype=x.dtype) - (width - 1) / 2) * (1 + zoom * wide)
    along = (torch.arange(height, device=x.device, dtype=x.dtype)[:, None] - (height - 1) / 2) * (1 + zoom * high)
    # Where each pixel comes from, in pixels from the centre: zoom, then shear, then turn, then shift.
    slanted = across + slant * along
    from_x = cos * slanted - sin * along + shift * width * right
    from_y = sin * slanted + cos * along + shift * height * down
    grid = torch.stack([from_x * (2 / width), from_y * (2 / height)], -1)  # the edges of the image are at -1 and 1
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def flip_crop(x: Tensor, key: Tensor, most: int = 4) -> Tensor:
    """Images [B, C, H, W], one in two mirrored, and moved by up to `most` pixels along both axes; what comes in from
    outside is 0, the mean of the data where they are normalised."""
    count, _, height, width = x.shape
    draw = random.draws(key, 3 * count).view(count, 3)  # an image's draws do not depend on how many there are
    mirrored = draw[:, :1] < 0
    moves = ((draw[:, 1:] >> 33) & 0x7FFFFFFF) % (2 * most + 1) - most
    down, right = moves[:, :1], moves[:, 1:]
    row = torch.arange(height, device=x.device) + down
    column = torch.arange(width, device=x.device) + right
    column = torch.where(mirrored, width - 1 - column, column)
    inside = ((row >= 0) & (row < height))[:, :, None] & ((column >= 0) & (column < width))[:, None, :]
    flat = row.clamp(0, height - 1)[:, :, None] * width + column.clamp(0, width - 1)[:, None, :]
    moved = x.flatten(2).gather(2, flat.flatten(1)[:, None].expand(-1, x.shape[1], -1)).view_as(x)
    return torch.where(inside[:, None], moved, 0)


Augmentation = Callable[[Tensor, Tensor], Tensor]
AUGMENTATIONS: dict[str, Augmentation | None] = {"none": None, "flip_crop": flip_crop}
