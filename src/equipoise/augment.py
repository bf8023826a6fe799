"""Augmented copies of images: shifted, turned, sheared and zoomed, each by draws from the key that names the copy.

A copy is not stored. It is an image and a key, and is rendered when a batch is made: the same picture every time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from equipoise import random


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
