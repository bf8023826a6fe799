"""Federations built from a pool: what is held out, how the rest is divided, and which settings are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from equipoise.core.errors import ConfigError, DataError
from equipoise.core.federation import Federation
from equipoise.core.local import Local
from equipoise.data import IID, Dataset, Dirichlet, Natural, Step, federate
from tests.federations import federation

CLASSES = 3


def pool(n: int = 90, owners: int = 0, test: bool = True) -> Dataset:
    """A pool in which the first feature of every sample is its row number, by which tests recognise it."""
    x = np.stack([np.arange(n), np.ones(n)], 1).astype(np.float32)
    client, roster = None, None
    if owners:
        client, roster = (np.arange(n) ** 2 % owners).astype(np.int64), tuple(f"site {i}" for i in range(owners))
        client[:owners] = np.arange(owners)
    return Dataset(
        "toy", x, np.arange(n) % CLASSES, x[:6] if test else None, np.arange(6) % CLASSES if test else None,
        ("a", "b", "c"), (0.0, 0.0), (1.0, 1.0), client, roster,
    )  # fmt: skip


def model() -> nn.Module:
    return nn.Linear(2, CLASSES)


def made(data: Dataset | None = None, partition: Any = None, **options: Any) -> Federation:
    return federate(data or pool(), model, partition or IID(5), **options)


def rows(x: torch.Tensor) -> set[int]:
    return {int(row) for row in x[:, 0]}


def held_by_clients(fed: Federation) -> set[int]:
    return rows(fed.x[fed.indices.long()])


# -- held-out samples


def test_held_out_samples_are_disjoint_and_balanced() -> None:
    fed = made(validation=0.2, auxiliary=4)
    assert fed.auxiliary is not None
    assert fed.validation is not None
    parts = [rows(fed.auxiliary.x), rows(fed.validation.x), held_by_clients(fed)]
    assert [len(part) for part in parts] == [12, 15, 63]
    assert set.union(*parts) == set(range(90))
    assert torch.bincount(fed.auxiliary.y).tolist() == [4, 4, 4]
    assert torch.bincount(fed.validation.y).tolist() == [5, 5, 5]
    assert fed.class_counts.tolist() == [21, 21, 21]
    for split in (fed.auxiliary, fed.validation):
        assert torch.equal(split.y, split.x[:, 0].long() % CLASSES)


def test_nothing_is_held_out_unless_asked() -> None:
    fed = made()
    assert fed.validation is fed.auxiliary is None
    assert held_by_clients(fed) == set(range(90))


def test_another_seed_holds_out_other_samples() -> None:
    one, same, other = (made(auxiliary=4, seed=seed).auxiliary for seed in (1, 1, 2))
    assert one is not None
    assert same is not None
    assert other is not None
    assert rows(one.x) == rows(same.x) != rows(other.x)


def test_held_out_sets_are_balanced_although_clients_are_not() -> None:
    fed = made(imbalance=Step(rho=5, minority=(0,)), validation=0.1, auxiliary=2)
    assert fed.auxiliary is not None
    assert fed.validation is not None
    assert torch.bincount(fed.auxiliary.y).tolist() == [2, 2, 2]
    assert torch.bincount(fed.validation.y).tolist() == [3, 3, 3]
    counts = fed.class_counts.tolist()
    assert counts[0] * 5 == counts[1] == counts[2] == 25
    assert fed.minority == (0,)
    assert not (rows(fed.auxiliary.x) | rows(fed.validation.x)) & held_by_clients(fed)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"auxiliary": 31}, DataError, "data.auxiliary asks for 31 samples of class 0, which has 30"),
        ({"auxiliary": -1}, ConfigError, "data.auxiliary = -1: expected a whole number, 0 or above"),
        ({"auxiliary": 2.5}, ConfigError, "data.auxiliary = 2.5: expected a whole number, 0 or above"),
        ({"validation": -0.1}, ConfigError, r"data.validation = -0.1: expected a number in \[0, 1\)"),
        ({"validation": 1.0}, ConfigError, r"data.validation = 1.0: expected a number in \[0, 1\)"),
        ({"validation": math.nan}, ConfigError, r"data.validation = nan: expected a number in \[0, 1\)"),
        ({"minority": (3,)}, ConfigError, r"data.minority = \(3,\): expected class numbers from 0 to 2"),
        ({"cohort": 6}, ConfigError, "train.cohort = 6: expected 1 to 5, the number of clients"),
        ({"cohort": 0}, ConfigError, "train.cohort = 0: expected 1 to 5, the number of clients"),
        ({"cohort": 1.2}, ConfigError, "train.cohort = 1.2: expected a share above 0 and at most 1"),
        ({"cohort": -0.5}, ConfigError, "train.cohort = -0.5: expected a share above 0 and at most 1"),
        ({"cohort": math.nan}, ConfigError, "train.cohort = nan: expected a share above 0 and at most 1"),
        ({"partition": Natural()}, ConfigError, "^data.partition: natural needs the owner of each sample"),
        ({"imbalance": Step(10, (0, 7))}, ConfigError, "^data.imbalance: step: minority names class 7"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(options: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        made(**options)


# -- cohorts


@pytest.mark.parametrize(("cohort", "expected"), [(None, 0), (3, 3), (0.4, 2), (1.0, 5), (0.01, 1)])
def test_a_cohort_is_a_count_or_a_share(cohort: float | None, expected: int) -> None:
    assert made(cohort=cohort).cohort == expected


def test_cohorts_are_drawn_without_replacement() -> None:
    fed = federation(sizes=(2,) * 50, cohort=10)
    drawn = [fed.draw(round) for round in range(20)]
    assert all(len(ids.unique()) == 10 for ids in drawn)
    assert len({tuple(ids.tolist()) for ids in drawn}) == 20
    assert torch.equal(fed.draw(7), drawn[7])
    assert not torch.equal(replace(fed, seed=99).draw(7), drawn[7])


def test_all_clients_are_drawn_when_no_cohort_is_given() -> None:
    assert federation(cohort=0).draw(3).tolist() == [0, 1, 2, 3, 4, 5]


def test_empty_clients_are_skipped() -> None:
    fed = federation(sizes=(3, 0, 5, 0, 4, 2), cohort=3)
    assert fed.clients == 6
    assert fed.eligible.tolist() == [0, 2, 4, 5]
    seen = torch.cat([fed.draw(round) for round in range(30)]).unique()
    assert seen.tolist() == [0, 2, 4, 5]
    assert replace(fed, cohort=5).draw(0).tolist() == [0, 2, 4, 5]


def test_a_partition_may_leave_clients_empty() -> None:
    fed = made(pool(30), IID(40), cohort=35)
    assert fed.clients == 40
    assert len(fed.eligible) == 30
    assert len(fed.draw(0)) == 30


# -- division and names


def test_owners_that_come_with_the_data() -> None:
    data = pool(owners=4)
    fed = made(data, Natural(), validation=0.1)
    assert data.client is not None
    assert fed.clients == 4
    for client in range(4):
        mine = fed.indices[int(fed.offsets[client]) : int(fed.offsets[client + 1])]
        assert {int(owner) for owner in data.client[mine.numpy()]} == {client}
    assert fed.client_name(2) == "site 2 (2)"


def test_only_owners_that_come_with_the_data_have_names() -> None:
    fed = made(pool(owners=4), IID(7))
    assert fed.roster is None
    assert fed.client_name(6) == "6"


def test_an_owner_emptied_by_an_imbalance_keeps_its_name() -> None:
    data = pool(owners=4)
    owner = np.where(data.y == 0, 3, data.y)  # the last owner has class 0 only
    data = replace(data, client=np.where(np.arange(90) == 1, 0, owner))
    fed = federate(data, model, Natural(), imbalance=lambda y, classes, seed: np.flatnonzero(y > 0))
    assert fed.clients == 4
    assert fed.eligible.tolist() == [0, 1, 2]
    assert fed.client_name(3) == "site 3 (3)"


def test_clients_hold_what_the_partition_says() -> None:
    fed = made(partition=Dirichlet(4, 0.5), seed=3)
    parts = Dirichlet(4, 0.5)(pool().y, CLASSES, 3)
    assert torch.equal(fed.offsets, torch.from_numpy(parts.offsets))
    assert torch.equal(fed.indices.long(), torch.from_numpy(parts.indices).long())


def test_the_minority_may_be_named() -> None:
    assert made(minority=(1, 2)).minority == (1, 2)
    assert made().minority == ()


# -- samples and model


def test_samples_are_normalised_by_feature() -> None:
    fed = replace(federation(), mean=(1.0, 2.0, 3.0, 4.0, 5.0), std=(1.0, 2.0, 4.0, 8.0, 16.0))
    x = fed.inputs(torch.device("cpu"), torch.float64)(fed.x)
    expected = (fed.x.double() - torch.arange(1.0, 6.0)) / torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)


def test_pixels_are_normalised_by_channel() -> None:
    images = torch.randint(0, 256, (4, 2, 3, 3), dtype=torch.uint8)
    fed = replace(federation(), x=images, mean=(0.5, 0.25), std=(0.1, 0.2))
    x = fed.inputs(torch.device("cpu"), torch.float32)(images)
    expected = torch.stack([(images[:, 0] / 255 - 0.5) / 0.1, (images[:, 1] / 255 - 0.25) / 0.2], 1)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x, expected)


def test_pixels_stay_uint8() -> None:
    x = np.zeros((30, 1, 4, 4), dtype=np.uint8)
    data = Dataset("pixels", x, np.arange(30) % 3, None, None, ("a", "b", "c"), (0.5,), (0.5,))
    fed = federate(data, lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), IID(3))
    assert fed.x.dtype == torch.uint8
    assert fed.test is None


def test_read_only_arrays_are_accepted() -> None:
    data = pool()
    for array in (data.x, data.y, data.test_x, data.test_y):
        assert array is not None
        array.flags.writeable = False
    assert made(data).clients == 5


def test_the_seed_makes_the_model_and_leaves_torchs_generator_alone() -> None:
    state = torch.get_rng_state()
    one, same, other = (made(seed=seed).network.params["weight"] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model: it cannot take samples of shape \(2,\)"):
        federate(pool(), lambda: nn.Linear(3, 3), IID(5))
    with pytest.raises(ConfigError, match=r"expected \(2, 3\): one score per class"):
        federate(pool(), lambda: nn.Linear(2, 4), IID(5))


def test_settings_reach_the_federation() -> None:
    fed = made(local=Local(lr=0.5), seed=11)
    assert fed.local.lr == 0.5
    assert fed.seed == 11
    assert fed.classes == ("a", "b", "c")
    assert fed.test is not None
    assert len(fed.test) == 6


def test_a_method_that_needs_auxiliary_samples_says_so() -> None:
    with pytest.raises(
        ConfigError, match="fedre needs samples of every class at the server, which has those of 0 of 3"
    ):
        made().auxiliary_for("fedre")
    assert len(made(auxiliary=2).auxiliary_for("fedre")) == 6


def test_only_images_can_be_mirrored_and_moved() -> None:
    with pytest.raises(ConfigError, match=r"local.augment = 'flip_crop': it moves images, and .* have shape \(5,\)"):
        federation(local=Local(augment="flip_crop"))


# -- samples that clients hold out


def client_parts(fed: Federation, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of a client's training samples, and of those that it holds out."""
    assert fed.held_offsets is not None
    assert fed.held_indices is not None
    trained = fed.indices[fed.offsets[client] : fed.offsets[client + 1]]
    return trained, fed.held_indices[fed.held_offsets[client] : fed.held_offsets[client + 1]]


def test_each_client_holds_out_its_share_of_every_class() -> None:
    whole, fed = made(partition=IID(3)), made(partition=IID(3), local_test=0.2)
    for client in range(3):
        trained, held = client_parts(fed, client)
        mine = whole.indices[whole.offsets[client] : whole.offsets[client + 1]]
        assert sorted([*trained.tolist(), *held.tolist()]) == sorted(mine.tolist())
        counts, kept = (torch.bincount(fed.y[rows], minlength=CLASSES) for rows in (mine, held))
        assert kept.tolist() == [int(0.2 * n + 0.5) for n in counts.tolist()]
    assert fed.class_counts.sum() == len(fed.indices) < 90
    assert fed.tried.tolist() == [0, 1, 2]


def test_a_client_keeps_a_sample_to_train_on() -> None:
    fed = made(pool(7), IID(5), local_test=0.9)
    sizes = [tuple(map(len, client_parts(fed, client))) for client in range(5)]
    assert all(trained >= 1 for trained, _ in sizes)
    assert {held for trained, held in sizes if trained + held == 1} == {0}
    assert fed.tried.tolist() == [client for client, (_, held) in enumerate(sizes) if held]


def test_samples_held_out_by_clients_follow_the_seed() -> None:
    one, same, other = (made(local_test=0.3, seed=seed).held_indices for seed in (1, 1, 2))
    assert one is not None
    assert same is not None
    assert other is not None
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("share", [0.0, 0.001])
def test_clients_that_hold_out_nothing_have_all_their_samples(share: float) -> None:
    plain, fed = made(), made(local_test=share)
    assert fed.held_offsets is fed.held_indices is None
    assert torch.equal(fed.indices, plain.indices)
    assert torch.equal(fed.offsets, plain.offsets)
    assert torch.equal(fed.tried, fed.eligible)


@pytest.mark.parametrize("share", [-0.1, 1.0, math.nan])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=rf"data.local_test = {share}: expected a number in \[0, 1\)"):
        made(local_test=share)
