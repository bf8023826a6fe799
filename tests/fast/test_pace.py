"""Estimates of a round's time, and when compiling is worth its time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from equipoise.core.local import Local
from equipoise.fast.pace import FIRST_COMPILED, compile_from, latency_clients, round_seconds
from tests.federations import federation


def test_long_runs_are_compiled_and_short_ones_are_not() -> None:
    fed = federation(nn.Linear(1000, 3), sizes=(600,) * 6, shape=(1000,), cohort=0)
    seconds = round_seconds(fed, fed.local, "cpu", 1)
    enough = round(
        8.0 / 0.3 / seconds
    )  # two tensors take eight seconds to compile, and three tenths of a round are saved
    assert compile_from(fed, fed.local, FIRST_COMPILED + enough - 10, "cpu", 1) is None
    assert compile_from(fed, fed.local, FIRST_COMPILED + enough + 10, "cpu", 1) == FIRST_COMPILED


def test_every_batch_width_is_another_compilation() -> None:
    fed = federation(nn.Linear(1000, 3), sizes=(600, 500, 90, 11), shape=(1000,), cohort=0)
    full, fixed = Local(batch="full"), Local(batch=8)
    seconds = round_seconds(fed, full, "cpu", 1)
    enough = round(8.0 / 0.3 / seconds)
    assert compile_from(fed, fixed, FIRST_COMPILED + enough + 10, "cpu", 1) == FIRST_COMPILED
    assert compile_from(fed, full, FIRST_COMPILED + 3 * enough - 10, "cpu", 1) is None
    assert compile_from(fed, full, FIRST_COMPILED + 4 * enough + 10, "cpu", 1) == FIRST_COMPILED


def test_on_a_cpu_the_operations_take_the_time() -> None:
    fed = federation(nn.Linear(5, 3), sizes=(7, 12, 20), cohort=0)
    once = Local(batch=4)
    assert round_seconds(fed, once, "cpu", 2) == 3 * 2 * 5 * 3 * 39 / (2 * 18e9)
    assert round_seconds(fed, replace(once, epochs=4), "cpu", 2) == 4 * round_seconds(fed, once, "cpu", 2)


def test_on_a_gpu_every_step_takes_time_and_clipping_more() -> None:
    fed = federation(nn.Linear(5, 3), sizes=(7, 12, 20), cohort=0)
    plain, clipped = (round_seconds(fed, Local(batch=4, clip=clip), "cuda", 2) for clip in (None, 1.0))
    assert plain == pytest.approx(5 * 2e-4, rel=1e-3)  # the steps of the longest client
    steps, numbers = 2 + 3 + 5, 5 * 3 + 3
    assert clipped - plain == pytest.approx(40 * 4 * numbers * steps / 3.5e12)


def test_only_clients_of_the_cohort_take_time() -> None:
    fed = federation(nn.Linear(5, 3), sizes=(10,) * 6, cohort=3)
    assert len(fed.draw(0)) == 3
    assert round_seconds(fed, Local(), "cpu", 1) == 3 * 2 * 15 * 30 / 18e9
    assert torch.is_grad_enabled()


def test_many_clients_of_a_small_model_train_in_the_time_of_one_but_not_of_a_large_model() -> None:
    small, large = (
        federation(nn.Sequential(nn.Linear(784, width), nn.Linear(width, 10)), sizes=(64,), shape=(784,), classes=10)
        for width in (128, 20_000)
    )
    assert 10 < latency_clients(small, Local(batch=32)) < 100
    assert latency_clients(large, Local(batch=32)) == 1
