"""FedRE's synthetic experiments: the estimate is right if all classes have one mean, wrong for separated blobs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from equipoise.papers import synthetic

COUNTS = (100, 50, 250)


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "fedre_figures.py"
    spec = importlib.util.spec_from_file_location("fedre_figures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", [0, 5])
def test_the_estimate_is_right_for_rings_over_the_whole_plateau(figures: ModuleType, seed: int) -> None:
    fed = figures.one_client(figures.rings, COUNTS, [4], every=100, seed=seed)
    flat = figures.plateau(figures.trace(fed, 1000))
    assert len(flat) >= 4  # several hundred iterations
    assert flat[0].iteration <= 400
    for point in flat:
        assert float(figures.errors(point, COUNTS).max()) < 0.10, point


def test_the_estimate_is_wrong_for_separated_blobs(figures: ModuleType) -> None:
    fed = figures.one_client(figures.blobs, COUNTS, [4], every=100, seed=0)
    points = figures.trace(fed, 600)
    assert figures.plateau(points) == []
    assert float(figures.errors(points[-1], COUNTS).max()) > 0.5


def test_with_more_layers_the_estimate_is_right_for_blobs_too(figures: ModuleType) -> None:
    def worst(depth: int) -> float:
        fed = figures.one_client(figures.blobs, (50, 100, 150, 200), [4] * depth, every=300, seed=0)
        return float(figures.errors(figures.trace(fed, 300)[-1], (50, 100, 150, 200)).max())

    assert worst(1) > 0.3
    assert worst(3) < 0.05


def test_the_plateau_is_the_first_flat_part_of_the_curve(figures: ModuleType) -> None:
    losses = [2.0, 1.0, 0.999, 0.998, 0.5, 0.4999, 0.4999]
    points = [synthetic.Point(200 * i, loss, torch.ones(2)) for i, loss in enumerate(losses)]
    assert [point.iteration for point in figures.plateau(points)] == [400, 600]
    assert figures.plateau(points[:2]) == []


def test_the_page_holds_every_figure(figures: ModuleType) -> None:
    shown = figures.experiment("Three rings", figures.rings, COUNTS, 400, 0)
    page = figures.page(shown, figures.layers((5, 10), (1, 2), 10, 0))
    assert page.count("<svg") == 5
    assert "Plateau (shaded)" in page
