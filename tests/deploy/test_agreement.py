"""The agreement between server and sites: it is sent as JSON, and a site refuses a harmful one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from equipoise.core.errors import DataError
from equipoise.deploy.agreement import Agreement
from equipoise.deploy.transport.wire import WireError

AGREED = Agreement(
    run="0a1b2c3d4e5f",
    roster=("clinic", "hospital"),
    classes=("ill", "well"),
    shape=(2,),
    dtype="float32",
    mean=(1.0, 2.0),
    std=(1.0, 0.5),
    columns=("age", "marker"),
    model="mlp",
    method="scaffold",
    precision="float64",
    seed=3,
    held_out=0.2,
    model_options={"hidden": [4]},
    data_options={"label": "state", "delimiter": ";"},
)


def travelled(**changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(json.dumps(AGREED.to_dict()))
    return raw | changes


def test_an_agreement_comes_back_unchanged() -> None:
    assert Agreement.from_dict(travelled()) == AGREED


def test_an_older_agreement_that_calls_the_columns_features_is_still_read() -> None:
    raw = travelled()
    raw["features"] = raw.pop("columns")
    assert Agreement.from_dict(raw) == AGREED


@pytest.mark.parametrize("raw", [travelled(speed=1), {"run": "a"}, {}, ["run"]], ids=["more", "less", "none", "list"])
def test_another_version_is_refused(raw: Any) -> None:
    with pytest.raises(WireError, match="the server speaks another version of Equipoise"):
        Agreement.from_dict(raw)


@pytest.mark.parametrize("run", ["../../etc", "/elsewhere", "", ".", "..", "a/b", "a\\b", "a" * 65, "a\n", 3.5, None])
def test_the_name_of_a_run_cannot_be_a_path(run: Any) -> None:
    with pytest.raises(WireError, match="the name of the run is"):
        Agreement.from_dict(travelled(run=run))


def test_labels_become_numbers() -> None:
    encoded = AGREED.encode(np.array(["well", "ill", "well"]))
    assert encoded.dtype == np.int64
    assert encoded.tolist() == [1, 0, 1]
    assert AGREED.encode(np.array([], dtype=str)).tolist() == []
    with pytest.raises(
        DataError, match="label 'sick' is not among the classes of this run; the choices are ill, well"
    ):
        AGREED.encode(np.array(["ill", "sick"]))


def test_a_federation_has_the_samples_of_one_client_only() -> None:
    x, y = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([0, 1, 1])
    fed = AGREED.federation(x, y, 1)
    assert fed.offsets.tolist() == [0, 0, 3]
    assert fed.eligible.tolist() == [1]
    assert fed.client_name(1) == "hospital (1)"
    assert fed.columns == ("age", "marker")
    inputs = fed.inputs(torch.device("cpu"), torch.float64)(fed.x)
    assert inputs[1].tolist() == [1.0, 2.0]


def test_the_network_has_the_agreed_architecture_and_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    shapes = {name: tuple(leaf.shape) for name, leaf in AGREED.network().params.items()}
    assert shapes == {"1.weight": (4, 2), "1.bias": (4,), "3.weight": (2, 4), "3.bias": (2,)}
    assert torch.equal(before, torch.get_rng_state())


def test_the_card_has_all_that_a_prediction_needs() -> None:
    card = AGREED.card()
    assert (card.name, card.options, card.classes) == ("mlp", {"hidden": [4]}, ("ill", "well"))
    assert (card.columns, card.label, card.delimiter) == (("age", "marker"), "state", ";")
    assert (card.shape, card.dtype, card.mean, card.std) == ((2,), "float32", (1.0, 2.0), (1.0, 0.5))
