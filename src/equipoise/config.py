"""The configuration of a run: TOML with four tables and a method, checked before anything is loaded.

Every mistake is one sentence that names the key, its value and what was expected.
"""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)

from equipoise import expression, mistakes
from equipoise.data import IMBALANCES, PARTITIONS
from equipoise.errors import ConfigError, nearest
from equipoise.local import Local

VERSION = 1
SITES = "sites"  # as a source of data: they are with the sites that join

# A description is what an error says was expected.
Count = Annotated[int, Field(ge=1, description="a whole number, 1 or above")]
Positive = Annotated[float, Field(gt=0, description="a number above 0")]
NotNegative = Annotated[float, Field(ge=0, description="a number, 0 or above")]
Fraction = Annotated[float, Field(ge=0, lt=1, description="a number in [0, 1)")]
Share = Annotated[float, Field(gt=0, le=1, description="a share above 0 and at most 1")]
Pair = Annotated[
    tuple[Fraction, Fraction],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    Field(description="two numbers in [0, 1)"),
]
Names = Annotated[list[str], Field(description="a list of names")]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")]


def _kind(path: str, registry: Mapping[str, type]) -> tuple[PlainValidator, PlainSerializer]:
    """For a field that holds one of a registry: written as an expression, or as a table with its `kind`."""

    def read(value: object) -> object:
        if type(value) in registry.values():
            return value
        try:
            if isinstance(value, str):
                instances = expression.parse(value, registry, path.rpartition(".")[2])
                if len(instances) == 1:
                    return instances[0]
            elif isinstance(value, Mapping):
                return _from_table(value, registry)
        except ConfigError as error:
            raise ValueError(f"{path}: {error}") from error
        raise ValueError(f"{path} = {value!r}: expected a kind, or a table such as {{kind = ...}}")

    names = {kind: name for name, kind in registry.items()}
    write = PlainSerializer(lambda instance: {"kind": names[type(instance)], **asdict(instance)})
    return PlainValidator(read), write


def _from_table(table: Mapping[str, Any], registry: Mapping[str, type]) -> Any:
    settings = dict(table)
    kind = settings.pop("kind", None)
    if kind is None:
        raise ConfigError(f"kind is missing; the choices are {', '.join(registry)}")
    name = str(kind).lower()
    if name not in registry:
        raise ConfigError(f"unknown kind {kind!r}; {nearest(kind, registry)}")
    return expression.build(registry[name], settings, name)


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DataTable(Table):
    source: str  # a data set's name, or a file
    dir: str | None = None  # where data sets are; else EQUIPOISE_DATA
    options: dict[str, JsonValue] = Field(
        {}, description="a table"
    )  # of the source: columns, normalisation, share of the test set
    imbalance: Annotated[Any, *_kind("data.imbalance", IMBALANCES)] = IMBALANCES["none"]()
    partition: Annotated[Any, *_kind("data.partition", PARTITIONS)] = PARTITIONS["iid"](clients=10)
    validation: Fraction = 0.0  # share of the training pool held out for selection and early stopping
    auxiliary: Annotated[int, Field(ge=0, description="a whole number, 0 or above")] = 0  # per class, at the server
    # Classes by number or name; those with less than half the mean count when not given.
    minority: list[int | str] | None = Field(None, description="a list of class numbers or names")

    @model_validator(mode="before")
    @classmethod
    def _owners(cls, table: Any) -> Any:
        """Data that come with owners are divided among them unless another partition is asked for."""
        if isinstance(table, dict) and "partition" not in table and isinstance(table.get("options"), dict):
            return table | {"partition": "natural"} if "client" in table["options"] else table
        return table


class ModelTable(Table):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    name: str  # a network's name, or "package.module:function"

    @property
    def options(self) -> dict[str, JsonValue]:
        """Every further key: they go to the network's factory."""
        return dict(self.__pydantic_extra__)


class LocalTable(Table):
    """The fields of `Local` that a user sets; see there for what they mean."""

    optimiser: Literal["sgd", "adam"] = Local.optimiser
    lr: Positive = Local.lr
    momentum: Fraction = Local.momentum
    nesterov: bool = Local.nesterov
    betas: Pair = Local.betas
    eps: Positive = Local.eps
    weight_decay: NotNegative = Local.weight_decay
    clip: Positive | None = Local.clip
    batch: Count | Literal["full"] | None = None  # 32 when steps_per_epoch is not given either
    steps_per_epoch: Count | None = Local.steps_per_epoch
    epochs: Count = Local.epochs
    schedule: Literal["constant", "step", "cosine", "linear"] = Local.schedule
    gamma: Positive = Local.gamma
    every: Count = Local.every
    horizon: Count | None = Local.horizon  # all rounds when not given
    weighting: Literal["size", "uniform"] = Local.weighting
    augment: Literal["none", "flip_crop"] = Local.augment

    @model_validator(mode="after")
    def _agree(self) -> LocalTable:
        if self.batch is not None and self.steps_per_epoch is not None:
            raise ValueError(
                f"local.batch = {self.batch!r} and local.steps_per_epoch = {self.steps_per_epoch}: "
                "expected one of them, as the steps of an epoch fix the batch"
            )
        try:
            Local(**self.build(rounds=1))
        except ConfigError as error:
            raise ValueError(error) from error  # the one kind that pydantic collects
        return self

    def build(self, rounds: int) -> dict[str, Any]:
        """The settings of `Local` in a run of so many rounds."""
        settings = self.model_dump()
        settings["batch"] = Local.batch if self.batch is None else self.batch
        settings["horizon"] = rounds if self.horizon is None else self.horizon
        return settings


class TrainTable(Table):
    rounds: Count = 100
    cohort: Count | Share | None = None  # clients of a round, as a count or a share; all when not given
    seed: Annotated[int, Field(ge=0, lt=2**63, description="a whole number, 0 or above")] = 0
    engine: Literal["stacked", "serial"] = "stacked"
    device: Device = "auto"
    precision: Literal["auto", "float32", "tf32", "bf16", "float64"] = "auto"  # tf32 on CUDA, float32 elsewhere
    compile: Literal["auto"] | bool = "auto"  # from an early round on, where the rounds are worth it
    block: Count | None = None  # clients trained at once
    threads: Count | None = None
    evaluate_every: Count = 1  # rounds
    checkpoint_every: Count = 1  # rounds ...
    checkpoint_seconds: NotNegative = 10.0  # ... but not before so many seconds have passed
    # What makes a round the best, on validation data where there are any.
    select: Literal["balanced_accuracy", "accuracy", "macro_f1", "minority_accuracy", "worst_class_accuracy"] = (
        "balanced_accuracy"
    )
    patience: Count | None = None  # stop after so many rounds without a better one on validation data
    target: Share | None = None  # accuracy; the rounds to reach it are reported
    memory_gib: Positive = 8.0  # the most that the clients' memories may take


class DeployTable(Table):
    """For `equipoise serve`: the sites, and how long to wait for them."""

    sites: Names | None = None  # else all that have a key
    held_out: Fraction = 0.2  # of each class at each site, for evaluation
    classes: Names | None = None  # else all that the sites name
    minimum: Count = 2  # sites without which no sum is taken
    deadline: Positive = 600.0  # seconds that a site has for one request
    wait: Positive = 600.0  # seconds that the server waits for sites to join, or for enough of them to answer
    message_mib: Count = 1024  # the largest message
    auxiliary: str | None = None  # a file of the server's own, for methods that need samples there
    test: str | None = None  # likewise, to evaluate on instead of what the sites hold out


def _version(version: int) -> int:
    if version != VERSION:
        raise ValueError(f"version = {version}: this Equipoise reads configs of version {VERSION}")
    return version


class Config(Table):
    """A whole run. `Config.from_dict(config.to_dict()) == config`."""

    version: Annotated[int, AfterValidator(_version)] = VERSION
    method: str = "fedavg"
    data: DataTable
    model: ModelTable
    local: LocalTable = LocalTable()
    train: TrainTable = TrainTable()
    deploy: DeployTable = DeployTable()

    @model_validator(mode="after")
    def _agree(self) -> Config:
        clients, cohort = getattr(self.data.partition, "clients", None), self.train.cohort
        if clients is not None and isinstance(cohort, int) and cohort > clients:
            raise ValueError(f"train.cohort = {cohort}: expected at most {clients}, the clients of data.partition")
        if self.train.patience is not None and not self.data.validation and self.data.source != SITES:
            raise ValueError(
                f"train.patience = {self.train.patience}: early stopping looks at validation samples, "
                "expected data.validation above 0"
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Config:
        if "method" not in raw:
            for path in mistakes.misplaced("method", raw, open_table="data.options"):
                raise ConfigError(mistakes.belongs_on_top(path))
        try:
            return cls.model_validate(dict(raw))
        except ValidationError as error:
            raise ConfigError(mistakes.sentences(error.errors(), raw, cls)) from None


def load_config(path: Path, sets: Sequence[str] = ()) -> Config:
    """The config in a TOML file, with `sets` such as "local.lr=0.1" put over it."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        raw = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}; {_nearby(path)}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text in UTF-8: {error.reason} at byte {error.start}") from error
    return Config.from_dict(override(raw, sets))


def override(raw: Mapping[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """The raw tables with each "a.b=value" set; a value is read as TOML, else as text, and `none` unsets it.

    >>> override({"local": {"lr": 0.1, "clip": 5}}, ["local.lr=1", "local.clip=none", "method=fedprox(mu=1)"])
    {'local': {'lr': 1}, 'method': 'fedprox(mu=1)'}
    """
    result: dict[str, Any] = _copy(raw)
    for entry in sets:
        key, equals, text = entry.partition("=")
        names = [name.strip() for name in key.split(".")]
        if not equals or not all(names):
            raise ConfigError(f"--set {entry!r}: expected a key and a value such as local.lr=0.1")
        table = result
        for depth, name in enumerate(names[:-1], start=1):
            child = table.setdefault(name, {})
            if isinstance(child, str) and name in ("imbalance", "partition") and child.isidentifier():
                child = table[name] = {"kind": child}  # the short form of a table
            if not isinstance(child, dict):
                raise ConfigError(f"--set {entry!r}: {'.'.join(names[:depth])} = {child!r} is not a table")
            table = child
        if text.strip() == "none":
            table.pop(names[-1], None)
        else:
            table[names[-1]] = _value(text.strip())
    return result


def grid(axes: Sequence[str]) -> list[list[str]]:
    """Every combination of the values of each axis, as lists of overrides.

    >>> grid(["local.lr=0.01,0.1", "train.seed=0"])
    [['local.lr=0.01', 'train.seed=0'], ['local.lr=0.1', 'train.seed=0']]
    """
    columns = []
    for axis in axes:
        key, equals, values = axis.partition("=")
        if not equals or not key.strip() or not values.strip():
            raise ConfigError(f"--grid {axis!r}: expected a key and its values such as local.lr=0.01,0.1")
        columns.append([f"{key.strip()}={value}" for value in expression.split(values)])
    return [list(point) for point in itertools.product(*columns)]


def _copy(value: Any) -> Any:
    return {key: _copy(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value


def _value(text: str) -> Any:
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text


def _nearby(path: Path) -> str:
    others = [other.name for other in path.parent.glob("*.toml")] if path.parent.is_dir() else []
    if not others:
        return f"{path.parent} holds no .toml file"
    close = difflib.get_close_matches(path.name, others, n=1, cutoff=0.3)
    return f"did you mean {path.parent / close[0]}?" if close else f"{path.parent} holds {', '.join(sorted(others))}"
