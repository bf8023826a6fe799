"""Trained models on disk, and their predictions for new data.

A folder holds the models of one run as safetensors files, and one card for all of them: `model.json` says how to use
them, and has the SHA-256 of each file. The card is written last. If a crash leaves new tensors beside an older card,
their SHA-256 does not match.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AliasChoices, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from equipoise import models
from equipoise.core import tree
from equipoise.core.errors import CheckpointError, ConfigError, DataError, EquipoiseError, nearest
from equipoise.core.federation import Federation
from equipoise.core.network import Network
from equipoise.core.tree import Tree
from equipoise.data.draw import Array
from equipoise.data.samples import Samples, positions, read_samples
from equipoise.engines import Simulator
from equipoise.engines.precision import PRECISIONS
from equipoise.runs import metrics
from equipoise.runs.checkpoint import owned, write_atomically
from equipoise.runs.evaluation import confusion_matrix

FORMAT = "equipoise model"
VERSION = 1
CARD = "model.json"
TABLES = (".csv", ".parquet")


@dataclass(frozen=True)
class Card:
    """Everything that is needed to use a model's tensors: the network, its inputs, and the classes it predicts."""

    name: str  # the name of the network, or "package.module:function"
    classes: tuple[str, ...]
    shape: tuple[int, ...]  # the shape of one sample
    dtype: Literal["uint8", "float32"]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    precision: Literal["float32", "tf32", "bf16", "float64"] = "float32"
    options: dict[str, Any] = field(default_factory=dict)  # settings of the network
    # Only for tables: the columns and their order. Older cards call the field "features".
    columns: Annotated[tuple[str, ...], Field(validation_alias=AliasChoices("columns", "features"))] = ()
    label: str | None = None  # only for tables: the column of the true classes
    delimiter: str = ","

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def __post_init__(self) -> None:
        def need(ok: bool, what: str) -> None:
            if not ok:
                raise ValueError(what)

        need(len(self.classes) == len(set(self.classes)) > 1, "classes: expected two or more, each named once")
        need(
            len(self.shape) in (1, 3) and min(self.shape) > 0,
            f"shape = {list(self.shape)}: expected one or three sizes, each above 0",
        )
        scales = len(self.mean) == len(self.std) and len(self.mean) in (1, self.shape[0]) and min(self.std) > 0
        need(scales, "mean and std do not fit the shape: expected one value, or one per channel")
        need(
            len(self.columns) in (0, self.shape[0]),
            "the columns do not fit the shape: expected one per feature, or none",
        )

    def network(self) -> Network:
        """Build the network, with weights that are still to be replaced by the trained ones."""
        with torch.random.fork_rng(devices=[]):
            return Network(models.build(self.name, self.shape, len(self.classes), **self.options))


def save(folder: Path, card: Card, trained: Mapping[str, Tree]) -> None:
    """Write each model as NAME.safetensors, and then the card. Each file is replaced atomically."""
    digests = {}
    file = folder / CARD
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, values in trained.items():
            file = folder / f"{name}.safetensors"
            content = save_tensors(owned(tree.flatten(values)))
            write_atomically(file, content)
            digests[file.name] = hashlib.sha256(content).hexdigest()
        file = folder / CARD
        document = {"format": FORMAT, "version": VERSION, "model": asdict(card), "sha256": digests}
        write_atomically(file, json.dumps(document, indent=1).encode())
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {error.strerror or error}") from error


@dataclass(frozen=True, eq=False)
class Model:
    """A trained model with its card."""

    card: Card
    network: Network = field(repr=False)
    params: Tree = field(repr=False)
    buffers: Tree = field(repr=False)

    @torch.no_grad()
    def probabilities(self, x: Array, device: str = "cpu") -> Tensor:
        """Return one row per sample and one column per class. `x` holds raw samples, as a data set stores them."""
        found = (str(x.dtype), x.shape[1:])
        if found != (self.card.dtype, self.card.shape):
            raise DataError(
                f"the samples are {found[0]} {list(found[1])}, and the model expects {self.card.dtype}"
                f" {list(self.card.shape)}"
            )
        none = torch.zeros(0, dtype=torch.int64)
        samples = torch.from_numpy(np.require(x, requirements=["C", "W"]))
        fed = Federation(
            self.network, samples[:0], none, torch.zeros(2, dtype=torch.int64), none, self.card.classes,
            self.card.mean, self.card.std,
        )  # fmt: skip
        engine = Simulator(fed, device=device, precision=self.card.precision)
        outputs = engine.outputs(engine.place(self.params), engine.place(self.buffers), samples)
        wrong = ~outputs.isfinite().all(1)
        if bool(wrong.any()):
            raise DataError(f"sample {int(wrong.int().argmax()) + 1}: the model's output is not a finite number")
        return outputs.softmax(1).cpu()

    def read(self, path: Path, *, score: bool = False, label: str | None = None) -> Samples:
        """Read new samples for the model, with their true classes if `score` is set or a `label` column is named."""
        card, table = self.card, path.suffix.lower() in TABLES and not path.is_dir()
        if path.exists() and table != bool(card.columns):
            some = ", ".join(card.columns[:5]) + (", ..." if len(card.columns) > 5 else "")
            arrays = f"{card.dtype} arrays or images of shape {list(card.shape)}"
            expected = f"a table with the columns {some}" if card.columns else arrays
            raise DataError(f"{path}: the model was trained on {expected}")
        if label is not None and not table:
            raise ConfigError(
                f"--label {label}: {path} is no table and has no columns; use --score to read its true classes"
            )
        column = label or (card.label if score else None)
        if score and table and column is None:
            raise ConfigError(
                f"--score: the model's card does not name the column of true classes in {path}; name it with --label"
            )
        return read_samples(
            path,
            label=column,
            delimiter=card.delimiter,
            columns=card.columns or None,
            labelled=score or label is not None,
            grey=card.shape[0] == 1,
        )


def load(path: Path, allowed: Collection[str] = ()) -> Model:
    """Load a model from a folder, or from a .safetensors file with its card beside it.

    A card may name code ("package.module:function"). Such code is imported only if its name is in `allowed`.
    """
    file = path / "model.safetensors" if path.is_dir() else path
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; expected the folder of a finished run, or a .safetensors file")
    if file.suffix != ".safetensors":
        raise CheckpointError(
            f"{path} is not a model; expected a folder, or a .safetensors file with {CARD} beside it"
        )
    if not file.exists():
        raise CheckpointError(f"{path} has no {file.name}: a run writes it when it is finished")
    card, digests = _read_card(file.with_name(CARD))
    if file.name not in digests:
        raise CheckpointError(f"{file.with_name(CARD)} does not list {file.name}; {nearest(file.name, digests)}")
    if ":" in card.name and card.name not in allowed:
        raise ConfigError(
            f"{file.with_name(CARD)} names the model {card.name!r}, whose own code would run here;"
            f" if you trust it, use --allow-model {card.name}"
        )
    try:
        network = card.network()
        network.check(torch.zeros(2, *card.shape), len(card.classes))
    except EquipoiseError as error:
        raise CheckpointError(f"{file.with_name(CARD)}: {error}") from error
    values = _read_tensors(file, digests[file.name])
    _check_fit(file, values, network, PRECISIONS[card.precision])
    params, buffers = ({name: values[name] for name in part} for part in (network.params, network.buffers))
    return Model(card, network, params, buffers)


def _read_card(file: Path) -> tuple[Card, dict[str, str]]:
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: the model beside it cannot be used without it") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{file} does not describe an Equipoise model")
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"{file} has schema version {document.get('version')}, and this Equipoise reads version {VERSION}"
            ": use the release that wrote it, or a newer one"
        )
    try:
        card = TypeAdapter(Card).validate_json(json.dumps(document.get("model")))
        digests = TypeAdapter(dict[str, str]).validate_python(document.get("sha256"))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"])
        fault = first["msg"].removeprefix("Value error, ")
        raise CheckpointError(f"{file} is damaged: {place + ': ' if place else ''}{fault}") from error
    return card, digests


def _read_tensors(file: Path, digest: str) -> dict[str, Tensor]:
    try:
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise CheckpointError(
                f"{file} does not match its SHA-256 in {CARD}: it is damaged, or comes from another run"
            )
        return load_tensors(content)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error


def _check_fit(file: Path, values: dict[str, Tensor], network: Network, dtype: torch.dtype) -> None:
    """Refuse tensors whose names, shapes or dtypes are not those of the network."""
    wanted = {
        name: (leaf.shape, dtype if leaf.is_floating_point() else leaf.dtype)
        for name, leaf in {**network.params, **network.buffers}.items()
    }
    for name in sorted(wanted.keys() ^ values.keys()):
        more, less = (CARD, file) if name in wanted else (file, CARD)
        raise CheckpointError(f"{file} does not fit {CARD}: {more} has the tensor {name!r} and {less} has not")
    for name, (shape, kind) in wanted.items():
        if (values[name].shape, values[name].dtype) != (shape, kind):
            raise CheckpointError(
                f"{file} does not fit {CARD}: {name} is {values[name].dtype} {list(values[name].shape)}, and the"
                f" network has {kind} {list(shape)}"
            )


def device_named(name: str) -> str:
    """Return the torch device for a value of `--device`."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: torch finds {torch.cuda.device_count()} CUDA devices here")
    return name


@dataclass(frozen=True, eq=False)
class Predictions:
    """Class probabilities of new samples."""

    classes: tuple[str, ...]
    probabilities: Tensor = field(repr=False)
    files: tuple[str, ...] = field(default=(), repr=False)  # names of image files; other samples are numbered from 1

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each sample, ready for JSON."""
        best = self.probabilities.argmax(1).tolist()
        key, names = ("file", self.files) if self.files else ("row", range(1, len(best) + 1))
        return [
            {key: name, "predicted": self.classes[winner], "probabilities": row}
            for name, winner, row in zip(names, best, self.probabilities.tolist(), strict=True)
        ]

    def csv(self) -> str:
        """Return a CSV table with a row for each sample and a column of probabilities for each class."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["file" if self.files else "row", "predicted", *(f"p_{name}" for name in self.classes)])
        for row in self.rows():
            name, predicted, shares = row.values()
            writer.writerow([name, predicted, *(f"{share:.6g}" for share in shares)])
        return text.getvalue()

    def write(self, path: Path) -> None:
        """Write the CSV table to a file, atomically."""
        try:
            write_atomically(path, self.csv().encode())
        except OSError as error:
            raise DataError(f"cannot write {path}: {error.strerror or error}") from error

    def counts(self) -> dict[str, int]:
        """Return how many samples are predicted as each class."""
        found = torch.bincount(self.probabilities.argmax(1), minlength=len(self.classes)).tolist()
        return dict(zip(self.classes, found, strict=True))

    def scores(self, labels: Array) -> dict[str, Any]:
        """Return the metrics of the predictions, given the true classes."""
        y = torch.from_numpy(positions(labels, self.classes, "this model"))
        return metrics.summary(confusion_matrix(self.probabilities, y))
