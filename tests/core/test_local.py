"""Local training: settings, schedules, the order of samples, clipping, and how far steps reach."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.core import client, random, tree
from equipoise.core import local as L
from equipoise.core.chain import Chain
from equipoise.core.client import Batch, Carry, Data, Env, Task, Visit
from equipoise.core.errors import ConfigError
from equipoise.core.local import Local
from equipoise.core.network import Network
from equipoise.core.tree import Tree
from tests.federations import linear
from tests.reference.fednova import normaliser

# -- settings

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"optimiser": "sdg"}, "local.optimiser = 'sdg': expected one of sgd, adam; did you mean 'sgd'?"),
    ({"schedule": "cosin"}, "local.schedule = 'cosin': expected one of .*; did you mean 'cosine'?"),
    ({"weighting": 3}, "local.weighting = 3: expected one of size, uniform"),
    ({"lr": 0.0}, "local.lr = 0.0: expected a number above 0"),
    ({"lr": -1}, "local.lr = -1: expected a number above 0"),
    ({"lr": math.nan}, "local.lr = nan: expected a number above 0"),
    ({"lr": math.inf}, "local.lr = inf: expected a number above 0"),
    ({"lr": "fast"}, "local.lr = 'fast': expected a number above 0"),
    ({"momentum": 1.0}, r"local.momentum = 1.0: expected a number in \[0, 1\)"),
    ({"momentum": math.nan}, r"local.momentum = nan: expected a number in \[0, 1\)"),
    ({"nesterov": True}, "local.nesterov = True: expected false, or momentum above 0"),
    ({"betas": (0.9, 1.0)}, r"local.betas = \(0.9, 1.0\): expected two numbers in \[0, 1\)"),
    ({"betas": (0.9,)}, r"local.betas = \(0.9,\): expected two numbers in \[0, 1\)"),
    ({"eps": 0.0}, "local.eps = 0.0: expected a number above 0"),
    ({"weight_decay": -0.1}, "local.weight_decay = -0.1: expected a number, 0 or above"),
    ({"clip": 0}, "local.clip = 0: expected a number above 0, or nothing"),
    ({"clip": math.nan}, "local.clip = nan: expected a number above 0, or nothing"),
    ({"batch": 0}, 'local.batch = 0: expected a count or "full"'),
    ({"batch": 2.5}, 'local.batch = 2.5: expected a count or "full"'),
    ({"batch": "all"}, "local.batch = 'all': expected a count or \"full\""),
    ({"steps_per_epoch": 0}, "local.steps_per_epoch = 0: expected a count, or nothing"),
    ({"steps_per_epoch": 1.5}, "local.steps_per_epoch = 1.5: expected a count, or nothing"),
    ({"epochs": 0}, "local.epochs = 0: expected a whole number, 1 or above"),
    ({"epochs": 1.5}, "local.epochs = 1.5: expected a whole number, 1 or above"),
    ({"every": 0}, "local.every = 0: expected a whole number, 1 or above"),
    ({"gamma": 0.0}, "local.gamma = 0.0: expected a number above 0"),
    ({"gamma": math.inf}, "local.gamma = inf: expected a number above 0"),
    ({"augment": "flip"}, "local.augment = 'flip': expected one of none, flip_crop; did you mean 'flip_crop'"),
    ({"schedule": "cosine"}, "local.horizon = None: expected a number of rounds"),
    ({"schedule": "linear", "horizon": 0}, "local.horizon = 0: expected a number of rounds"),
]


@pytest.mark.parametrize(("settings", "sentence"), WRONG, ids=[str(w[0]) for w in WRONG])
def test_wrong_settings_are_refused_in_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        Local(**settings)
    assert "\n" not in str(caught.value)


def test_every_setting_but_the_switches_is_checked() -> None:
    refused = {name for settings, _ in WRONG for name in settings} | {"horizon"}
    assert {f.name for f in fields(Local)} - refused == {"prox"}  # which only methods set


def test_the_extremes_are_accepted() -> None:
    Local(lr=1e-12, momentum=0, clip=1e9, batch="full", epochs=1, betas=(0, 0), weight_decay=0, steps_per_epoch=1)
    Local(lr=1, momentum=0.999, nesterov=True, batch=1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.1, 0.1, 0.1, 0.1, 0.1, 0.1]),
        ({"schedule": "step", "gamma": 0.5, "every": 2}, [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]),
        ({"schedule": "linear", "horizon": 4}, [0.1, 0.075, 0.05, 0.025, 0.0, 0.0]),
        ({"schedule": "cosine", "horizon": 4}, [0.1, 0.0853553, 0.05, 0.0146447, 0.0, 0.0]),
    ],
)
def test_rates_over_rounds(settings: dict[str, Any], expected: list[float]) -> None:
    local = Local(lr=0.1, **settings)
    assert [local.rate(r) for r in range(6)] == pytest.approx(expected, abs=1e-7)
    assert local.rate(-1) == expected[0]  # before the first round


# -- batches


@pytest.mark.parametrize(
    ("settings", "sizes", "steps"),
    [
        ({"batch": 4}, [4, 4, 4, 4], [1, 1, 2, 3]),
        ({"batch": 4, "epochs": 3}, [4, 4, 4, 4], [3, 3, 6, 9]),
        ({"batch": "full", "epochs": 2}, [1, 4, 5, 11], [2, 2, 2, 2]),
        ({"steps_per_epoch": 2}, [1, 2, 2, 5], [1, 2, 3, 3]),  # n // 2, and a short batch for what is left
        ({"steps_per_epoch": 20}, [1, 1, 1, 1], [1, 4, 5, 11]),
    ],
)
def test_batch_sizes_and_steps(settings: dict[str, Any], sizes: list[int], steps: list[int]) -> None:
    size, taken = Local(**settings).batches(torch.tensor([1, 4, 5, 11]))
    assert size.tolist() == sizes
    assert taken.tolist() == steps


SETTINGS = [
    {"batch": 4},
    {"batch": 4, "epochs": 3},
    {"batch": "full", "epochs": 2},
    {"steps_per_epoch": 3, "epochs": 2},
    {"batch": 100},
]
SIZES = torch.tensor([1, 4, 7, 20])


def schedule(local: Local, keys: Tensor, n: Tensor) -> L.Schedule:
    size, steps = local.batches(n)
    most = int(n.max())
    return L.schedule(local, keys, n, size, most, min(int(size.max()), most), int(steps.max()))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_epoch_covers_each_sample_once_in_a_fresh_order(settings: dict[str, Any]) -> None:
    local = Local(**settings)
    plan = schedule(local, random.bits(0, torch.arange(4)), SIZES)
    sizes, steps = local.batches(SIZES)
    for one, (n, size, taken) in enumerate(zip(SIZES.tolist(), sizes.tolist(), steps.tolist(), strict=True)):
        counts = plan.counts[one].tolist()
        batches = [plan.positions[one, t, : counts[t]].tolist() for t in range(taken)]
        per_epoch = taken // local.epochs
        epochs = [[*chain.from_iterable(batches[e * per_epoch : (e + 1) * per_epoch])] for e in range(local.epochs)]
        assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
        if n == 20 and local.epochs > 1:
            assert epochs[0] != epochs[1]
        short = n % size or min(size, n)
        assert counts[:taken] == ([min(size, n)] * (per_epoch - 1) + [short]) * local.epochs
        assert not any(counts[taken:])


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_padding_is_the_clients_own_first_sample(settings: dict[str, Any]) -> None:
    plan = schedule(Local(**settings), random.bits(0, torch.arange(4)), SIZES)
    padding = torch.arange(plan.positions.shape[-1]) >= plan.counts[..., None]
    assert padding.any()
    assert not plan.positions[padding].any()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_schedule_does_not_depend_on_who_is_stacked(settings: dict[str, Any]) -> None:
    local, keys = Local(**settings), random.bits(0, torch.arange(4))
    together = schedule(local, keys, SIZES)
    for one in range(4):
        alone = schedule(local, keys[one], SIZES[one])
        steps, width = alone.positions.shape
        assert torch.equal(together.positions[one, :steps, :width], alone.positions)
        assert torch.equal(together.counts[one, :steps], alone.counts)


# -- one step


def visit(params: Tree, steps: int = 1, lr: float = 0.1) -> Visit:
    one = torch.tensor(1.0, dtype=torch.float64)
    return Visit(params, {}, {}, {}, {}, torch.tensor(5), torch.tensor(steps), one, random.bits(1), lr * one)


def one_step(local: Local, padding: int, ragged: bool = False, index: int = 0) -> tuple[nn.Module, Carry]:
    torch.manual_seed(0)
    module = linear().double()
    network = Network(module)
    params = {name: p.detach().clone() for name, p in module.named_parameters()}
    x, y = torch.randn(5, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    padded = torch.cat([x, torch.full((padding, 5), 1e6, dtype=torch.float64)])
    batch = Batch(padded, torch.cat([y, y[:padding]]), torch.zeros(5 + padding, dtype=torch.int64), torch.tensor(5))
    carry = Carry(params, {}, L.optimiser_state(local, params))
    task = Task(Chain(), network, local)
    new = client.step(task, visit(params), carry, batch, torch.tensor(index), ragged)
    nn.functional.cross_entropy(module(x), y).backward()
    return module, new


@pytest.mark.parametrize("clip", [None, 0.05, 100.0])
def test_clipping_equals_torchs(clip: float | None) -> None:
    module, carry = one_step(Local(lr=0.1, clip=clip), padding=0)
    if clip is not None:
        nn.utils.clip_grad_norm_(module.parameters(), clip)
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    for name, p in module.named_parameters():
        torch.testing.assert_close(carry.params[name], p.detach(), rtol=1e-12, atol=1e-12)


def test_padding_changes_nothing() -> None:
    _, clean = one_step(Local(), padding=0)
    _, padded = one_step(Local(), padding=3)
    for name, value in clean.params.items():
        torch.testing.assert_close(padded.params[name], value, rtol=1e-12, atol=1e-12)


def test_a_client_that_has_finished_stands_still() -> None:
    local = Local(momentum=0.5)
    _, moved = one_step(local, padding=0, ragged=True, index=0)
    module, still = one_step(local, padding=0, ragged=True, index=1)  # it takes one step only
    assert all(torch.equal(still.params[name], p) for name, p in module.named_parameters())
    assert all(not leaf.any() for leaf in tree.leaves(still.opt))
    assert any(leaf.any() for leaf in tree.leaves(moved.opt))


# -- all of a client's data


def test_totals_are_added_up_over_chunks() -> None:
    """More samples than one chunk holds; padding at the end does not count."""
    torch.manual_seed(0)
    network = Network(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Dropout(0.5)))
    n, most = 2100, 2500
    x, y = torch.randn(most, 3), torch.randint(0, 2, (most,))
    data = Data(x, y, torch.arange(most) < n, lambda raw: 2 * raw)
    env = client.environment(
        Task(Chain(), network, Local()),
        visit(network.params),
        Carry(network.params, network.buffers, {}),
        *[torch.tensor(0)] * 3,
    )

    def measure(outputs: Tensor, y: Tensor, mask: Tensor) -> Tree:
        return {"n": mask.sum(), "sum": torch.where(mask, outputs[:, 0], 0).sum(), "ones": (y * mask).sum()}

    totals = data.totals(env, network.params, measure)
    expected = network.module.eval()(2 * x[:n])[:, 0].sum()
    assert totals["n"] == n
    assert totals["ones"] == y[:n].sum()
    torch.testing.assert_close(totals["sum"], expected)


# -- reach


def environment(local: Local, steps: int, lr: float) -> Env:
    one = torch.tensor(1.0, dtype=torch.float64)
    network = Network(linear())
    task, start = Task(Chain(), network, local), network.params
    here = Visit(start, {}, {}, {}, {}, torch.tensor(5), torch.tensor(steps), one, random.bits(1), lr * one)
    return client.environment(task, here, Carry(start, {}, {}), torch.tensor(0), one, one)


@pytest.mark.parametrize("steps", [1, 2, 3, 17, 64, 1000])
@pytest.mark.parametrize(
    ("momentum", "nesterov", "prox"),
    [(0.0, False, 0.0), (0.9, False, 0.0), (0.9, True, 0.0), (0.0, False, 0.5), (0.8, False, 0.5), (0.8, True, 0.5)],
)
def test_reach_equals_counting_step_by_step(steps: int, momentum: float, nesterov: bool, prox: float) -> None:
    local = Local(momentum=momentum, nesterov=nesterov, prox=prox)
    expected = normaliser(steps, 0.1, momentum, nesterov, prox)
    assert client.reach(environment(local, steps, 0.1)).item() == pytest.approx(expected, rel=1e-12)


def test_reach_of_plain_sgd_is_the_number_of_steps() -> None:
    assert client.reach(environment(Local(), 12_345_678, 0.1)).item() == 12_345_678


def test_reach_is_how_far_a_constant_gradient_carries_torchs_sgd() -> None:
    for momentum, nesterov in ((0.0, False), (0.9, False), (0.9, True)):
        weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.SGD([weight], lr=0.1, momentum=momentum, nesterov=nesterov)
        for _ in range(25):
            weight.grad = torch.ones_like(weight)
            optimiser.step()
        reach = client.reach(environment(Local(momentum=momentum, nesterov=nesterov), 25, 0.1))
        assert -weight.item() / 0.1 == pytest.approx(reach.item(), rel=1e-12)
