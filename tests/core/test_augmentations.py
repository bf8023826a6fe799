from __future__ import annotations

import pytest
import torch

from equipoise.core import random
from equipoise.core.augmentations import flip_crop, warp
from tests.reference.astraea import Warp, rendered
from tests.reference.loop import flipped


def names(count: int) -> torch.Tensor:
    return random.draws(random.bits(5, random.RESAMPLE, 0), count) & ((1 << 63) - 1) | 1


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "how",
    [
        Warp(),
        Warp(shift=0.3, rotation=0, shear=0, zoom=0),
        Warp(shift=0, rotation=170, shear=0, zoom=0),
        Warp(shift=0, rotation=0, shear=60, zoom=0),
        Warp(shift=0, rotation=0, shear=0, zoom=0.9),
    ],
    ids=["all", "shift", "rotation", "shear", "zoom"],
)
def test_a_copy_is_the_one_rendered_pixel_by_pixel(how: Warp) -> None:
    x, keys = images(4, 2, 5, 8), names(4)
    got = warp(x, keys, **vars(how))
    want = torch.stack([rendered(image, int(name), how) for image, name in zip(x, keys, strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert (got - x).abs().max() > 0.1


def test_no_magnitude_is_no_change() -> None:
    x = images(3, 1, 6, 6)
    torch.testing.assert_close(warp(x, names(3), shift=0, rotation=0, shear=0, zoom=0), x)


def test_copies_of_an_image_differ_and_each_stays_the_same() -> None:
    x, keys = images(1, 1, 6, 6).expand(8, 1, 6, 6), names(8)
    one, again = (warp(x, keys, shift=0.1, rotation=10, shear=10, zoom=0.1) for _ in range(2))
    assert torch.equal(one, again)
    assert all(not torch.allclose(one[i], one[j], atol=1e-3) for i in range(8) for j in range(i))


def test_a_warp_is_the_same_under_vmap() -> None:
    x, keys = images(3, 4, 1, 6, 6), names(12).view(3, 4)
    how = vars(Warp())
    stacked = torch.vmap(lambda x, k: warp(x, k, **how))(x, keys)
    torch.testing.assert_close(stacked, torch.stack([warp(x[i], keys[i], **how) for i in range(3)]))


def test_the_edge_goes_on_past_the_image() -> None:
    x = torch.full((6, 1, 5, 5), 3.0, dtype=torch.float64)  # a plain image stays plain, whatever is done to it
    torch.testing.assert_close(warp(x, names(6), shift=0.9, rotation=90, shear=30, zoom=0.5), x)


def test_flipped_and_cropped_images_are_those_made_pixel_by_pixel() -> None:
    x, key = images(40, 3, 12, 12), random.bits(8)
    got = flip_crop(x, key)
    torch.testing.assert_close(got, torch.stack([flipped(image, key, i) for i, image in enumerate(x)]))
    torch.testing.assert_close(flip_crop(x[:7], key), got[:7])  # padding a batch changes nothing


def test_images_are_mirrored_and_moved_evenly() -> None:
    marked = torch.zeros(4000, 1, 11, 11)
    marked[:, 0, 5, 4] = 1
    places = flip_crop(marked, random.bits(2)).flatten(1).argmax(1)
    rows, columns = places // 11, places % 11
    assert rows.bincount(minlength=11)[1:10].min() > 350  # of some 444
    assert set(columns.tolist()) == set(range(11))
    ends = (columns < 2).double().mean(), (columns > 8).double().mean()  # only as it was, and only mirrored
    assert ends == pytest.approx((1 / 9, 1 / 9), abs=0.02)
