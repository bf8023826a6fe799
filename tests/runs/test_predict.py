"""Predictions for new data: the same as the engine's, columns found by name, and one sentence for every damage."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

from equipoise.cli import console, main
from equipoise.core.errors import CheckpointError, ConfigError, DataError, EquipoiseError
from equipoise.data.tables import load_csv
from equipoise.deploy.packets import pack
from equipoise.deploy.site import Site, reading
from equipoise.deploy.transport.wire import decode, encode
from equipoise.engines import Serial
from equipoise.runs import predict
from equipoise.runs import run as runs
from equipoise.runs.config import Config
from equipoise.runs.predict import Card, Predictions
from tests.deploy.test_agreement import AGREED

NORM = "tests.federations:norm_cnn"


def table(
    path: Path, rows: int = 60, columns: tuple[str, ...] = ("id", "age", "marker", "state"), seed: int = 0
) -> Path:
    draw = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in range(rows):
            ill = row % 4 == 0
            cells = {
                "id": row,
                "age": draw.normal(50, 9),
                "marker": draw.normal(3 * ill),
                "state": "ill" if ill else "well",
            }
            writer.writerow([cells.get(name, "x") for name in columns])
    return path


def run(folder: Path, data: dict[str, Any], **train: Any) -> Config:
    """A short run in `folder / "run"`."""
    config = Config.from_dict(
        {
            "data": data,
            "model": {"name": "mlp", "hidden": [4]},
            "train": {"rounds": 3, "device": "cpu", "threads": 1, **train},
        }
    )
    runs.run(config, folder / "run")
    return config


def table_run(folder: Path, **train: Any) -> Config:
    options = {"label": "state", "drop": ["id"]}
    return run(folder, {"source": str(table(folder / "data.csv")), "options": options}, **train)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data.csv and the run on it."""
    folder = tmp_path_factory.mktemp("trained")
    table_run(folder)
    return folder


@pytest.mark.parametrize("precision", ["float32", "float64", "bf16"])
def test_predictions_are_the_outputs_of_the_engine(tmp_path: Path, precision: str) -> None:
    config = run(tmp_path, {"source": "digits"}, precision=precision)
    fed = runs.federate(config)
    assert fed.test is not None
    engine = runs.make_engine(json.loads((tmp_path / "run" / "plan.json").read_text()), fed, 1.0)
    for name in ("model", "best"):
        file = tmp_path / "run" / f"{name}.safetensors"
        want = engine.outputs(engine.place(load_file(file)), {}, fed.test.x).softmax(1)
        model = predict.load(file)
        assert torch.equal(model.probabilities(fed.test.x.numpy()), want)
    scores = Predictions(fed.classes, want).scores(np.array(fed.classes)[fed.test.y.numpy()])
    best = json.loads((tmp_path / "run" / "result.json").read_text())["best"]["record"]
    assert scores["recall"] == best["recall"]


def test_columns_are_found_by_name_among_other_columns(trained: Path, tmp_path: Path) -> None:
    model = predict.load(trained / "run")
    assert model.card.columns == ("age", "marker")
    assert model.card.label == "state"
    want = model.probabilities(load_csv(trained / "data.csv", label="state", drop=("id",), test=0.0).x)
    for columns in (("marker", "note", "age"), ("state", "age", "id", "marker")):
        other = table(tmp_path / "other.csv", columns=columns)
        samples = model.read(other)
        assert samples.labels is None
        assert torch.equal(model.probabilities(samples.x), want)
    with pytest.raises(ConfigError, match=r"has no column 'marker': did you mean 'markers'\?"):
        model.read(table(tmp_path / "new.csv", columns=("age", "markers")))


def test_buffers_are_used_in_evaluation_mode(tmp_path: Path) -> None:
    card = Card(NORM, ("a", "b", "c"), (1, 6, 6), "float32", (0.5,), (2.0,), precision="float64")
    network = card.network()
    values = {name: leaf.double() if leaf.is_floating_point() else leaf for name, leaf in network.params.items()}
    values |= {
        name: torch.rand_like(leaf, dtype=torch.float64) + 0.5 if leaf.is_floating_point() else leaf
        for name, leaf in network.buffers.items()
    }
    predict.save(tmp_path, card, {"model": values})
    x = np.random.default_rng(0).normal(size=(5, 1, 6, 6)).astype(np.float32)
    got = predict.load(tmp_path, [NORM]).probabilities(x)
    module = network.module.double()
    module.load_state_dict(values)
    inputs = (torch.from_numpy(x).double() - 0.5) / 2.0
    torch.testing.assert_close(got, module.eval()(inputs).softmax(1).detach())


def test_code_that_a_card_names_is_imported_only_if_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text(
        "import pathlib, torch\npathlib.Path('imported').touch()\n"
        "def net(shape, classes):\n    return torch.nn.Linear(shape[0], classes)\n"
    )
    monkeypatch.chdir(tmp_path)
    card = Card("theirs:net", ("a", "b"), (2,), "float32", (0.0,), (1.0,))
    predict.save(tmp_path / "model", card, {"model": {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}})
    for allowed in ((), ("theirs:other", "theirs")):
        with pytest.raises(
            ConfigError, match="whose own code would run here; if you trust it, use --allow-model theirs:net"
        ):
            predict.load(tmp_path / "model", allowed)
        assert not (tmp_path / "imported").exists()
    model = predict.load(tmp_path / "model", ["theirs:net"])
    assert (tmp_path / "imported").exists()
    assert model.probabilities(np.zeros((1, 2), np.float32)).tolist() == [[0.5, 0.5]]


def test_a_site_predicts_with_the_model_that_it_received(tmp_path: Path) -> None:
    agreement = replace(AGREED, data_options={"label": "state", "drop": ["id"]})
    params = {name: torch.randn_like(leaf, dtype=torch.float64) for name, leaf in agreement.network().params.items()}
    site = Site("clinic", reading(table(tmp_path / "data.csv")), tmp_path / "site")
    request = pack("deliver", {"agreement": agreement.to_dict()}, {"params": params, "buffers": {}})
    reply = site.answer(decode(encode(request)))
    assert reply.kind == "reply", reply.header
    model = predict.load(tmp_path / "site")
    assert model.card == agreement.card()
    got = model.probabilities(model.read(tmp_path / "data.csv").x)
    data = load_csv(tmp_path / "data.csv", label="state", drop=("id",), test=0.0)
    fed = agreement.federation(data.x, data.y, agreement.roster.index("clinic"))
    engine = Serial(fed, precision=agreement.precision)
    assert torch.equal(got, engine.outputs(params, {}, torch.from_numpy(data.x)).softmax(1))


# -- damage ----------------------------------------------------------------------------------------------------------
def card_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "model.json").read_text())
    return document


@pytest.fixture
def damaged(trained: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be damaged."""
    for name in ("model.safetensors", "best.safetensors", "model.json"):
        (tmp_path / name).write_bytes((trained / "run" / name).read_bytes())
    return tmp_path


def test_an_older_card_that_calls_the_columns_features_is_still_read(damaged: Path) -> None:
    document = card_of(damaged)
    new = predict.load(damaged).card
    document["model"]["features"] = document["model"].pop("columns")
    (damaged / "model.json").write_text(json.dumps(document))
    old = predict.load(damaged).card
    assert old == new
    assert old.columns == ("age", "marker")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: None, "does not describe an Equipoise model"),
        (lambda d: [d], "does not describe an Equipoise model"),
        (lambda d: d | {"format": "other"}, "does not describe an Equipoise model"),
        (lambda d: d | {"version": 2}, "schema version 2, and this Equipoise reads version 1"),
        (lambda d: d | {"model": None}, "is damaged"),
        (lambda d: d | {"sha256": 1}, "is damaged"),
        (lambda d: d | {"sha256": {"best.safetensors": ""}}, "does not list model.safetensors"),
        (lambda d: d | {"sha256": {"model.safetensors": "0"}}, "does not match its SHA-256"),
        (lambda d: d | {"model": {k: v for k, v in d["model"].items() if k != "classes"}}, "damaged: classes: "),
        (lambda d: d | {"model": d["model"] | {"more": 1}}, "damaged: more: "),
        (lambda d: d | {"model": d["model"] | {"shape": [2.5]}}, r"damaged: shape\.0: "),
        (lambda d: d | {"model": d["model"] | {"shape": [3]}}, "damaged: mean and std do not fit the shape"),
        (
            lambda d: d | {"model": d["model"] | {"shape": [2, 2]}},
            r"damaged: shape = \[2, 2\]: expected one or three sizes",
        ),
        (lambda d: d | {"model": d["model"] | {"std": [0.0, 1.0]}}, "damaged: mean and std do not fit"),
        (lambda d: d | {"model": d["model"] | {"classes": ["a", "a"]}}, "damaged: classes: expected two or more"),
        (lambda d: d | {"model": d["model"] | {"columns": ["age"]}}, "the columns do not fit the shape"),
        (lambda d: d | {"model": d["model"] | {"features": ["age", "marker"]}}, "damaged: features: "),
        (lambda d: d | {"model": d["model"] | {"dtype": "float16"}}, "damaged: dtype: "),
        (lambda d: d | {"model": d["model"] | {"precision": "float8"}}, "damaged: precision: "),
        (lambda d: d | {"model": d["model"] | {"name": "mpl"}}, r"there is no model 'mpl': did you mean 'mlp'\?"),
        (lambda d: d | {"model": d["model"] | {"options": {"hiden": [4]}}}, "did you mean 'hidden'"),
        (lambda d: d | {"model": d["model"] | {"options": {"hidden": [5]}}}, r"1\.weight is torch\.float32 \[4, 2\]"),
        (lambda d: d | {"model": d["model"] | {"options": {"hidden": [4, 4]}}}, "has the tensor '5.bias'"),
        (lambda d: d | {"model": d["model"] | {"precision": "float64"}}, "the network has torch.float64"),
    ],
)
def test_a_damaged_card_is_one_sentence(damaged: Path, change: Callable[[Any], Any], sentence: str) -> None:
    (damaged / "model.json").write_text(json.dumps(change(card_of(damaged))))
    with pytest.raises(CheckpointError, match=sentence) as caught:
        predict.load(damaged)
    assert "model.json" in str(caught.value)


def test_damaged_or_missing_files_are_one_sentence(damaged: Path, tmp_path: Path) -> None:
    def refused(path: Path, sentence: str) -> None:
        with pytest.raises(CheckpointError, match=sentence):
            predict.load(path)

    refused(tmp_path / "nowhere", "does not exist")
    refused(damaged / "model.json", "is not a model")
    file = damaged / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(damaged, "does not match its SHA-256 in model.json")
    file.write_bytes((damaged / "best.safetensors").read_bytes()[:10])
    refused(file, "does not match its SHA-256")
    file.write_bytes(content)
    assert predict.load(file)
    copy = damaged / "mine.safetensors"
    copy.write_bytes(content)
    refused(copy, r"model\.json does not list mine\.safetensors")
    file.unlink()
    refused(damaged, r"has no model\.safetensors: a run writes it when it is finished")
    (damaged / "model.json").write_text('{"format": ')
    refused(damaged / "best.safetensors", r"model\.json cannot be read")
    (damaged / "model.json").unlink()
    refused(damaged / "best.safetensors", r"model\.json is missing")


def test_a_file_that_is_not_safetensors_is_one_sentence(tmp_path: Path) -> None:
    import hashlib

    predict.save(tmp_path, Card("logistic", ("a", "b"), (2,), "float32", (0.0,), (1.0,)), {"model": {}})
    (tmp_path / "model.safetensors").write_bytes(b"text")
    digest = hashlib.sha256(b"text").hexdigest()
    (tmp_path / "model.json").write_text(json.dumps(card_of(tmp_path) | {"sha256": {"model.safetensors": digest}}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        predict.load(tmp_path)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        predict.save(tmp_path / "file", AGREED.card(), {})


# -- data ------------------------------------------------------------------------------------------------------------
def test_data_of_another_kind_is_one_sentence(trained: Path, tmp_path: Path) -> None:
    model = predict.load(trained / "run")
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)))
    for path, sentence in {
        tmp_path / "a.npz": "the model was trained on a table with the columns age, marker",
        tmp_path: "the model was trained on a table",
        tmp_path / "no.csv": "does not exist",
    }.items():
        with pytest.raises(DataError, match=sentence):
            model.read(path)
    arrays = Card("logistic", ("a", "b"), (3,), "float32", (0.0,), (1.0,))
    predict.save(tmp_path / "m", arrays, {"model": {"1.weight": torch.zeros(2, 3), "1.bias": torch.zeros(2)}})
    other = predict.load(tmp_path / "m")
    with pytest.raises(DataError, match=r"the model was trained on float32 arrays or images of shape \[3\]"):
        other.read(trained / "data.csv")
    with pytest.raises(DataError, match=r"the samples are float32 \[2\], and the model expects float32 \[3\]"):
        other.probabilities(other.read(tmp_path / "a.npz").x)


def test_a_number_too_large_for_the_model_is_named(trained: Path) -> None:
    model = predict.load(trained / "run")
    x = np.zeros((3, 2), np.float32)
    x[1] = 3e38
    model.params["3.weight"].mul_(1e10)
    with pytest.raises(DataError, match="sample 2: the model's output is not a finite number"):
        model.probabilities(x)


def image_model(folder: Path, channels: int) -> predict.Model:
    card = Card("logistic", ("dark", "light"), (channels, 2, 2), "uint8", (0.5,), (1.0,))
    weight = torch.ones(2, 4 * channels)
    weight[0] = -1
    predict.save(folder, card, {"model": {"1.weight": weight, "1.bias": torch.zeros(2)}})
    return predict.load(folder)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_named_by_file_and_grey_for_a_grey_model(tmp_path: Path, channels: int) -> None:
    model = image_model(tmp_path / "model", channels)
    (tmp_path / "images" / "light").mkdir(parents=True)
    Image.new("RGB", (2, 2), (9, 9, 9)).save(tmp_path / "images" / "b.png")
    Image.new("L", (2, 2), 240).save(tmp_path / "images" / "light" / "a.png")
    samples = model.read(tmp_path / "images")
    rows = Predictions(model.card.classes, model.probabilities(samples.x), samples.files).rows()
    assert [(row["file"], row["predicted"]) for row in rows] == [("b.png", "dark"), ("light/a.png", "light")]
    scored = model.read(tmp_path / "images", score=True)
    assert scored.labels is not None
    assert scored.labels.tolist() == ["light"]


def test_images_of_another_size_are_one_sentence(tmp_path: Path) -> None:
    model = image_model(tmp_path / "model", 3)
    (tmp_path / "images").mkdir()
    Image.new("RGB", (3, 2)).save(tmp_path / "images" / "a.png")
    with pytest.raises(DataError, match=r"samples are uint8 \[3, 2, 3\], and the model expects uint8 \[3, 2, 2\]"):
        model.probabilities(model.read(tmp_path / "images").x)


def test_unlabelled_arrays_are_predicted_and_labelled_ones_scored(tmp_path: Path) -> None:
    model = image_model(tmp_path / "model", 1)
    x = np.array([[[0, 0], [0, 0]], [[255, 255], [255, 255]]], np.uint8)
    np.savez(tmp_path / "a.npz", x=x)
    np.savez(tmp_path / "b.npz", x=x, y=["light", "light"])
    predictions = Predictions(model.card.classes, model.probabilities(model.read(tmp_path / "a.npz").x))
    assert predictions.counts() == {"dark": 1, "light": 1}
    labels = model.read(tmp_path / "b.npz", score=True).labels
    assert labels is not None
    assert predictions.scores(labels)["recall"] == [None, 0.5]
    with pytest.raises(DataError, match="no array called"):
        model.read(tmp_path / "a.npz", score=True)
    with pytest.raises(DataError, match="label 'dim' is not among the classes of this model"):
        predictions.scores(np.array(["dim", "dark"]))


# -- the command line ------------------------------------------------------------------------------------------------
class Printed(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run_predict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    def call(*words: object) -> Printed:
        monkeypatch.setattr(sys, "argv", ["equipoise", "predict", *map(str, words)])
        monkeypatch.setattr(console, "out", Console(file=sys.stdout, width=140))
        monkeypatch.setattr(console, "err", Console(file=sys.stderr, width=140))
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Printed(code, *capsys.readouterr())

    return call


def test_the_table_goes_to_the_output_or_to_a_file(
    trained: Path, tmp_path: Path, run_predict: Callable[..., Printed]
) -> None:
    new = table(tmp_path / "new.csv", rows=5, columns=("marker", "age"))
    printed = run_predict(trained / "run", new)
    assert printed.code == 0, printed.err
    rows = list(csv.DictReader(printed.out.splitlines()))
    assert [row["row"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert list(rows[0]) == ["row", "predicted", "p_ill", "p_well"]
    for row in rows:
        ill, well = float(row["p_ill"]), float(row["p_well"])
        assert ill + well == pytest.approx(1, abs=1e-5)
        assert row["predicted"] == ("ill" if ill > well else "well")
    summary = run_predict(trained / "run", new, "--out", tmp_path / "p.csv")
    assert "5 samples" in summary.out
    assert (tmp_path / "p.csv").read_text() == printed.out


def test_a_file_is_replaced_only_by_force(trained: Path, tmp_path: Path, run_predict: Callable[..., Printed]) -> None:
    out = tmp_path / "p.csv"
    out.write_text("mine")
    refused = run_predict(trained / "run", trained / "data.csv", "--out", out)
    assert refused.code == 2
    assert "exists already" in refused.err
    assert out.read_text() == "mine"
    assert run_predict(trained / "run", trained / "data.csv", "--out", out, "--force").code == 0
    assert out.read_text().startswith("row,predicted")
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]


def test_scores_if_the_true_classes_are_known(
    trained: Path, tmp_path: Path, run_predict: Callable[..., Printed]
) -> None:
    known = run_predict(trained / "run", trained / "data.csv", "--score", "--json")
    found = json.loads(known.out)
    right = {
        row["row"] for row in found["predictions"] if row["predicted"] == ("ill" if row["row"] % 4 == 1 else "well")
    }
    assert found["scores"]["accuracy"] == pytest.approx(len(right) / 60)
    assert sum(found["predicted"].values()) == 60
    printed = run_predict(trained / "run", trained / "data.csv", "--score")
    assert "recall" in printed.err  # only CSV is printed to the output
    assert printed.out.count("\n") == 61
    text = (trained / "data.csv").read_text().replace("state", "truth", 1)
    (tmp_path / "other.csv").write_text(text)
    named = run_predict(
        trained / "run", tmp_path / "other.csv", "--label", "truth", "--json", "--out", tmp_path / "p.csv"
    )
    assert json.loads(named.out)["scores"] == found["scores"]
    assert "predictions" not in json.loads(named.out)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nowhere", "data.csv"), "nowhere does not exist"),
        (("run", "nowhere.csv"), "nowhere.csv does not exist"),
        (("run", "data.csv", "--label", "stat"), "did you mean 'state'?"),
        (("run", "other.csv", "--score"), "has no column 'state'"),
        (("run", "data.csv", "--device", "gpu"), "--device gpu: expected auto, cpu, cuda or cuda:N"),
        (("run", "data.csv", "--device", "cuda:99"), "--device cuda:99: torch finds"),
        (("run", "data.csv", "--out", "no/such/folder.csv"), "cannot write no/such/folder.csv"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    words: tuple[str, ...],
    sentence: str,
    trained: Path,
    run_predict: Callable[..., Printed],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(trained)
    table(trained / "other.csv", columns=("age", "marker"))
    printed = run_predict(*words)
    assert printed.code == 2, printed.out
    assert sentence in printed.err.replace("\n", " ")
    assert printed.err.count("error:") == 1
    assert "Traceback" not in printed.err


def test_true_classes_without_a_column_name(tmp_path: Path) -> None:
    model = image_model(tmp_path / "model", 1)
    np.savez(tmp_path / "a.npz", x=np.zeros((1, 2, 2), np.uint8), y=["dark"])
    with pytest.raises(ConfigError, match=r"--label y: .* has no columns; use --score"):
        model.read(tmp_path / "a.npz", label="y")
    nameless = Card("logistic", ("a", "b"), (1,), "float32", (0.0,), (1.0,), columns=("age",))
    predict.save(tmp_path / "m", nameless, {"model": {"1.weight": torch.zeros(2, 1), "1.bias": torch.zeros(2)}})
    with pytest.raises(EquipoiseError, match=r"does not name the column of true classes in .*; name it with --label"):
        predict.load(tmp_path / "m").read(table(tmp_path / "d.csv"), score=True)
