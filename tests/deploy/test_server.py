"""A whole run with sites that read their own files; the stand-in for Flower's grid carries the messages."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from equipoise.core.errors import DataError, TrainingError
from equipoise.deploy import flower, roll, server
from equipoise.deploy.agreement import Agreement
from equipoise.deploy.site import Site, reading
from equipoise.deploy.transport.relay import GridCarrier
from equipoise.deploy.transport.wire import Packet
from equipoise.runs import run as runs
from equipoise.runs.config import Config
from equipoise.runs.folder import RunFolder
from equipoise.testing.contract import compare as close
from tests.deploy.simulation import gathered, simulated
from tests.deploy.standin import StandInGrid

NAMES = ("clinic", "hospital", "surgery")


def write_tables(folder: Path, seed: int = 0) -> dict[str, Path]:
    """Tables for three sites of different sizes; one site has no case of the rare class, and one has its columns in
    another order."""
    draw = np.random.default_rng(seed)
    files = {}
    for name, (well, ill) in zip(NAMES, [(60, 8), (40, 0), (25, 10)], strict=True):
        labels = ["well"] * well + ["ill"] * ill
        age = draw.normal(50, 10, len(labels))
        marker = draw.normal(0, 1, len(labels)) + 2 * (np.array(labels) == "ill")
        columns = ["age", "marker", "state"] if name != "surgery" else ["state", "marker", "age"]
        rows = [{"age": a, "marker": m, "state": s} for a, m, s in zip(age, marker, labels, strict=True)]
        files[name] = folder / f"{name}.csv"
        with files[name].open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    return files


def config(method: str = "climb(every=1) + fedshift", **deploy: Any) -> Config:
    return Config.from_dict(
        {
            "method": method,
            "data": {"source": "sites", "options": {"label": "state"}},
            "model": {"name": "mlp", "hidden": [4]},
            "local": {"lr": 0.1, "batch": 8},
            "train": {"rounds": 3, "precision": "float64", "checkpoint_seconds": 0.0},
            "deploy": {"sites": list(NAMES), "wait": 2.0, "deadline": 2.0, **deploy},
        }
    )


class Clinics:
    """The sites and their grid. A function in `meddle` can change the answers of its site."""

    def __init__(self, folder: Path, files: dict[str, Path], **allowed: tuple[str, ...]) -> None:
        self.sites = {
            i + 10: Site(name, reading(file), folder / "at" / name, **allowed)
            for i, (name, file) in enumerate(files.items())
        }
        self.meddle: dict[int, Callable[[Packet, Packet], Packet]] = {}
        self.grid = StandInGrid({node: lambda packet, node=node: self.answer(node, packet) for node in self.sites})
        self.said: list[str] = []

    def answer(self, node: int, request: Packet) -> Packet:
        reply = self.sites[node].answer(request)
        return self.meddle[node](request, reply) if node in self.meddle else reply

    def run(self, settings: Config, out: Path) -> dict[str, Any]:
        watch = runs.Watch(notify=self.said.append)
        make = RunFolder.open(out) if (out / "config.json").exists() else RunFolder.create(out, settings.to_dict())
        with make as folder:
            return server.train(settings, folder, GridCarrier(self.grid), None, watch)


@pytest.fixture
def clinics(tmp_path: Path) -> Clinics:
    return Clinics(tmp_path, write_tables(tmp_path))


def test_three_sites_train_a_model_and_each_gets_it(clinics: Clinics, tmp_path: Path) -> None:
    result = clinics.run(config(), tmp_path / "run")
    last = result["last"]
    assert last["round"] == 3
    assert last["clients"] == 3
    assert last["dropped"] == 0
    assert sum(last["counts"]) == round(0.2 * 60) + round(0.2 * 8) + 8 + 5 + 2  # a fifth of each class at each site
    assert 0 <= last["minority_accuracy"] <= 1
    assert last["auroc"]
    federation = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert federation["classes"] == ["ill", "well"]
    assert federation["minority"] == [0]
    for site in clinics.sites.values():
        assert site.finished is not None
        assert (site.folder / "model.json").exists()
        assert site.finished.read_bytes() == (tmp_path / "run" / "model.safetensors").read_bytes()


def test_a_run_equals_a_simulation_of_the_same_samples(clinics: Clinics, tmp_path: Path) -> None:
    clinics.run(config(), tmp_path / "run")
    agreement = Agreement.from_dict(json.loads((tmp_path / "run" / "agreement.json").read_text()))
    sites = list(clinics.sites.values())
    x = gathered(config(), agreement, sites).x.numpy()
    np.testing.assert_allclose(x.mean(0), agreement.mean, rtol=1e-6)
    np.testing.assert_allclose(x.std(0), agreement.std, rtol=1e-6)
    close(load_file(tmp_path / "run" / "model.safetensors"), simulated(config(), agreement, sites), 1e-10)


def test_a_silent_site_is_left_out_by_the_deadline_and_comes_back(clinics: Clinics, tmp_path: Path) -> None:
    def silence(request: Packet, reply: Packet) -> Packet:
        """Silence one site from the end of the first round's training until the evaluation of the second."""
        if request.kind == "train" and request.header["round"] == 0:
            clinics.grid.silent = {10}
        if request.kind == "score" and request.header["version"][0] == 1:
            clinics.grid.silent = set()
        return reply

    clinics.meddle[12] = silence  # the last site to answer
    clinics.run(config(method="fedavg", deadline=1.0), tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["clients"] for record in records] == [3, 2, 3]
    assert [record["dropped"] for record in records] == [1, 1, 0]  # one in the evaluation, then one in the training
    assert any("clinic" in line and "deploy.deadline = 1 " in line for line in clinics.said)


def test_an_offline_site_is_named_and_the_round_goes_on(clinics: Clinics, tmp_path: Path) -> None:
    def vanish(request: Packet, reply: Packet) -> Packet:
        if request.kind == "train" and request.header["round"] == 1:
            clinics.grid.offline = {10}
        return reply

    clinics.meddle[12] = vanish
    result = clinics.run(config(method="scaffold"), tmp_path / "run")
    assert result["last"]["clients"] == 2
    assert result["last"]["dropped"] >= 1
    assert any("clinic" in line and "left out" in line for line in clinics.said)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda a: a * np.nan, "not finite"),
        (lambda a: a[:1], "expected float64"),
        (lambda a: a.astype(np.float32), "is float32"),
    ],
    ids=["nan", "shape", "type"],
)
def test_a_spoiled_update_is_left_out_and_named(
    clinics: Clinics, tmp_path: Path, spoil: Callable[[np.ndarray], np.ndarray], reason: str
) -> None:
    def meddle(request: Packet, reply: Packet) -> Packet:
        if request.kind != "train":
            return reply
        name = next(name for name in reply.arrays if name.startswith("delta/"))
        return reply._replace(arrays={**reply.arrays, name: spoil(reply.arrays[name])})

    clinics.meddle[11] = meddle
    result = clinics.run(config(method="fedavg"), tmp_path / "run")
    assert result["last"]["clients"] == 2
    assert any("hospital" in line and reason in line for line in clinics.said)
    assert np.isfinite(result["last"]["loss"])


def test_an_oversized_or_foreign_reply_is_left_out(clinics: Clinics, tmp_path: Path) -> None:
    big = np.zeros(200_000)

    def meddle(request: Packet, reply: Packet) -> Packet:
        return reply._replace(arrays={**reply.arrays, "extra": big}) if request.kind == "train" else reply

    clinics.meddle[11] = meddle
    result = clinics.run(config(method="fedavg", message_mib=1), tmp_path / "run")
    assert result["last"]["clients"] == 2
    assert any("hospital" in line and "at most 1,048,576" in line for line in clinics.said)


def test_too_few_sites_stop_the_run_with_a_sentence(clinics: Clinics, tmp_path: Path) -> None:
    clinics.grid.offline = {10, 12}
    with pytest.raises(TrainingError, match=r"1 of 3 sites have joined.*clinic, surgery did not"):
        clinics.run(config(), tmp_path / "run")


def test_sites_with_different_columns_are_named(tmp_path: Path) -> None:
    files = write_tables(tmp_path)
    text = files["hospital"].read_text().splitlines()
    files["hospital"].write_text("\n".join([f"{line},{'ward' if i == 0 else i}" for i, line in enumerate(text)]))
    clinics = Clinics(tmp_path, files)
    with pytest.raises(DataError, match="hospital has a column 'ward' that clinic does not have"):
        clinics.run(config(), tmp_path / "run")


def test_a_label_outside_the_agreed_classes_is_named(clinics: Clinics, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="label 'ill' is not among the classes of this run"):
        clinics.run(config(classes=["well", "unwell"], wait=0.5), tmp_path / "run")


@pytest.mark.parametrize("method", ["scaffold + climb(every=1)", "astraea(gamma=2, augment='repeat')", "fedavg"])
def test_a_server_that_dies_resumes_to_the_same_bits(tmp_path: Path, method: str) -> None:
    whole = Clinics(tmp_path / "a", files := write_tables(tmp_path))
    whole.run(config(method=method), tmp_path / "whole")
    cut = Clinics(tmp_path / "b", files)

    def die(request: Packet, reply: Packet) -> Packet:
        dies = {"ask"} if "climb" in method else {"train"}
        if request.kind in dies and (tmp_path / "cut" / "checkpoints" / "checkpoint-00000002.json").exists():
            raise KeyboardInterrupt
        return reply

    cut.meddle[12] = die  # the last site to answer, after the others have finished
    with pytest.raises(KeyboardInterrupt):
        cut.run(config(method=method), tmp_path / "cut")
    again = Clinics(tmp_path / "b", files)  # new processes with the old folders of the sites
    again.run(config(method=method), tmp_path / "cut")
    agreements = [json.loads((tmp_path / run / "agreement.json").read_text()) for run in ("whole", "cut")]
    assert agreements[0] | {"run": ""} == agreements[1] | {"run": ""}
    one, other = ((tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "cut"))
    assert one == other


def test_a_site_that_lost_its_memories_begins_without_them(clinics: Clinics, tmp_path: Path) -> None:
    def forget(request: Packet, reply: Packet) -> Packet:
        if request.kind == "train" and request.header["round"] == 0:
            for file in clinics.sites[11].folder.glob("*/round-*"):
                file.unlink()
        return reply

    clinics.meddle[11] = forget
    result = clinics.run(config(method="scaffold"), tmp_path / "run")
    assert any("hospital" in line and "is not in" in line for line in clinics.said)
    assert result["last"]["clients"] == 3


def test_a_site_that_lost_its_memories_is_asked_again_where_all_are_needed(
    clinics: Clinics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(request: Packet, reply: Packet) -> Packet:
        if request.kind == "train" and request.header["round"] == 0:
            for file in clinics.sites[11].folder.glob("*/round-*"):
                file.unlink()
        return reply

    monkeypatch.setattr(flower, "RETRY", 0.1)
    clinics.meddle[11] = forget
    result = clinics.run(config(method="scaffold", minimum=3), tmp_path / "run")
    assert result["last"]["clients"] == 3
    assert any("hospital" in line and "is not in" in line for line in clinics.said)


def test_a_server_can_go_back_several_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rarely = {"rounds": 7, "checkpoint_every": 3, "checkpoint_seconds": 0.0}
    settings = Config.from_dict(config(method="scaffold").to_dict() | {"train": rarely})
    train = runs.train_in_folder
    monkeypatch.setattr(
        runs, "train_in_folder", lambda _, *others: train(settings, *others)
    )  # without the server's own settings for checkpoints
    whole = Clinics(tmp_path / "a", files := write_tables(tmp_path))
    whole.run(settings, tmp_path / "whole")
    cut = Clinics(tmp_path / "b", files)

    def die(request: Packet, reply: Packet) -> Packet:
        if request.kind == "train" and request.header["round"] == 5:  # the last checkpoint is of round 3
            raise KeyboardInterrupt
        return reply

    cut.meddle[12] = die
    with pytest.raises(KeyboardInterrupt):
        cut.run(settings, tmp_path / "cut")
    again = Clinics(tmp_path / "b", files)
    again.run(settings, tmp_path / "cut")
    assert not any("is not in" in line for line in again.said)
    one, other = ((tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "cut"))
    assert one == other


def test_a_site_whose_file_is_missing_at_first_takes_part(clinics: Clinics, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(roll, "RETRY", 0.5)
    file = tmp_path / "hospital.csv"
    away = file.rename(tmp_path / "away.csv")

    def watch(request: Packet, reply: Packet) -> Packet:
        if reply.kind == "failure":
            away.rename(file)
        return reply

    clinics.meddle[11] = watch
    result = clinics.run(config(method="fedavg"), tmp_path / "run")
    assert result["last"]["clients"] == 3
    assert any("hospital.csv does not exist" in line for line in clinics.said)


def test_the_name_of_a_run_cannot_lead_to_another_folder(clinics: Clinics, tmp_path: Path) -> None:
    clinics.run(config(method="fedavg"), tmp_path / "run")
    agreement = json.loads((tmp_path / "run" / "agreement.json").read_text()) | {"run": "../../elsewhere"}
    reply = clinics.sites[10].answer(Packet("ask", {"agreement": agreement}, {}))
    assert reply.kind == "failure"
    assert "name of the run" in reply.header["reason"]


def test_a_site_that_lost_its_choice_of_samples_is_left_out_until_the_run_is_resumed(
    clinics: Clinics, tmp_path: Path
) -> None:
    def forget(request: Packet, reply: Packet) -> Packet:
        if request.kind == "train" and request.header["round"] == 0:
            for file in clinics.sites[11].folder.glob("*/data/*"):
                file.unlink()
        return reply

    clinics.meddle[12] = forget  # the last site to answer
    result = clinics.run(config(method="astraea(gamma=1, mediator_epochs=1, augment='repeat')"), tmp_path / "run")
    assert result["last"]["clients"] == 2
    assert any("hospital" in line and "has lost its choice of training samples" in line for line in clinics.said)
