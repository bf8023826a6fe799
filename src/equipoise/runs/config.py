"""The configuration of a run: a TOML file with a method and tables of settings, checked before any data are loaded.

Every mistake is reported as one sentence that names the key, its value and what was expected.
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

from equipoise.core import expression
from equipoise.core.errors import ConfigError, nearest
from equipoise.core.local import Local
from equipoise.data import IMBALANCES, PARTITIONS
from equipoise.runs import mistakes

VERSION = 1
SITES = "sites"  # as `data.source`: the data stay with real sites, which join `equipoise serve`

# An error message quotes the description after "expected".
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


def _one_registered(path: str, registry: Mapping[str, type]) -> tuple[PlainValidator, PlainSerializer]:
    """Return validator and serialiser of a field that holds an instance of a registered class.

    In a config it is an expression such as `step(rho=10)`, or a table with `kind` and the settings.
    """

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
    dir: str | None = None  # the folder of the data sets; the default is $EQUIPOISE_DATA
    # Options of the source: columns, normalisation, share of the test set.
    options: dict[str, JsonValue] = Field({}, description="a table")
    imbalance: Annotated[Any, *_one_registered("data.imbalance", IMBALANCES)] = IMBALANCES["none"]()
    partition: Annotated[Any, *_one_registered("data.partition", PARTITIONS)] = PARTITIONS["iid"](clients=10)
    validation: Fraction = 0.0  # share of the training pool held out for selection and early stopping
    # Share of its samples that each client holds out, on which its own accuracy is taken.
    local_test: Fraction = 0.0
    # Samples of each class that the server holds.
    auxiliary: Annotated[int, Field(ge=0, description="a whole number, 0 or above")] = 0
    # Class numbers or names; the default is all classes with less than half the mean count.
    minority: list[int | str] | None = Field(None, description="a list of class numbers or names")

    @model_validator(mode="before")
    @classmethod
    def _natural_by_default(cls, table: Any) -> Any:
        """Make `natural` the default partition of data with a column of owners."""
        if isinstance(table, dict) and "partition" not in table and isinstance(table.get("options"), dict):
            return table | {"partition": "natural"} if "client" in table["options"] else table
        return table


class ModelTable(Table):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    name: str  # a network's name, or "package.module:function"

    @property
    def options(self) -> dict[str, JsonValue]:
        """All keys but `name`; they are passed to the function that builds the network."""
        return dict(self.__pydantic_extra__)


class LocalTable(Table):
    """The settings of `Local` that a user may change; `Local` explains them."""

    optimiser: Literal["sgd", "adam"] = Local.optimiser
    lr: Positive = Local.lr
    momentum: Fraction = Local.momentum
    nesterov: bool = Local.nesterov
    betas: Pair = Local.betas
    eps: Positive = Local.eps
    weight_decay: NotNegative = Local.weight_decay
    clip: Positive | None = Local.clip
    batch: Count | Literal["full"] | None = None  # 32 if neither batch nor steps_per_epoch is given
    steps_per_epoch: Count | None = Local.steps_per_epoch
    epochs: Count = Local.epochs
    schedule: Literal["constant", "step", "cosine", "linear"] = Local.schedule
    gamma: Positive = Local.gamma
    every: Count = Local.every
    horizon: Count | None = Local.horizon  # the default is train.rounds
    weighting: Literal["size", "uniform"] = Local.weighting
    augment: str = Local.augment

    @model_validator(mode="after")
    def _check_together(self) -> LocalTable:
        if self.batch is not None and self.steps_per_epoch is not None:
            raise ValueError(
                f"local.batch = {self.batch!r} and local.steps_per_epoch = {self.steps_per_epoch}: "
                "expected only one of them, since the steps of an epoch determine the batch size"
            )
        try:
            Local(**self.build(rounds=1))
        except ConfigError as error:
            raise ValueError(error) from error  # pydantic collects only ValueError
        return self

    def build(self, rounds: int) -> dict[str, Any]:
        """Return the settings of `Local` for a run of `rounds` rounds."""
        settings = self.model_dump()
        settings["batch"] = Local.batch if self.batch is None else self.batch
        settings["horizon"] = rounds if self.horizon is None else self.horizon
        return settings


class TrainTable(Table):
    rounds: Count = 100
    cohort: Count | Share | None = None  # clients of a round, as a number or a share; the default is all
    seed: Annotated[int, Field(ge=0, lt=2**63, description="a whole number, 0 or above")] = 0
    engine: Literal["stacked", "serial"] = "stacked"
    device: Device = "auto"
    precision: Literal["auto", "float32", "tf32", "bf16", "float64"] = "auto"  # tf32 on CUDA, float32 elsewhere
    # "auto" compiles from an early round on, if the run is long enough to gain from it.
    compile: Literal["auto"] | bool = "auto"
    block: Count | None = None  # how many clients are trained at once
    threads: Count | None = None
    evaluate_every: Count = 1  # in rounds
    checkpoint_every: Count = 1  # in rounds
    checkpoint_seconds: NotNegative = 10.0  # the least time between two checkpoints
    # The measure by which the best round is chosen, on validation data if there are any.
    select: Literal["balanced_accuracy", "accuracy", "macro_f1", "minority_accuracy", "worst_class_accuracy"] = (
        "balanced_accuracy"
    )
    patience: Count | None = None  # stop after this many rounds without a better one on validation data
    target: Share | None = None  # an accuracy; the first round that reaches it is reported
    memory_gib: Positive = 8.0  # the most that the clients' memories may take, in GiB


class DeployTable(Table):
    """Settings of `equipoise serve`: which sites take part, and how long the server waits for them."""

    sites: Names | None = None  # the default is all sites that have a key
    held_out: Fraction = 0.2  # the share of each class that each site keeps for evaluation
    classes: Names | None = None  # the default is all classes that any site names
    minimum: Count = 2  # the fewest sites over which a sum is taken
    deadline: Positive = 600.0  # seconds that a site has to answer a request
    wait: Positive = 600.0  # seconds that the server waits for sites to join, or for enough of them to answer
    message_mib: Count = 1024  # the largest message in MiB
    auxiliary: str | None = None  # a file with samples of the server, for methods that need them
    test: str | None = None  # a file with a test set of the server, used instead of the samples that sites hold out


def _version(version: int) -> int:
    if version != VERSION:
        raise ValueError(f"version = {version}: this Equipoise reads configs of version {VERSION}")
    return version


class Config(Table):
    """All settings of a run. `Config.from_dict(config.to_dict()) == config`."""

    version: Annotated[int, AfterValidator(_version)] = VERSION
    method: str = "fedavg"
    data: DataTable
    model: ModelTable
    local: LocalTable = LocalTable()
    train: TrainTable = TrainTable()
    deploy: DeployTable = DeployTable()

    @model_validator(mode="after")
    def _check_together(self) -> Config:
        clients, cohort = getattr(self.data.partition, "clients", None), self.train.cohort
        if clients is not None and isinstance(cohort, int) and cohort > clients:
            raise ValueError(
                f"train.cohort = {cohort}: expected at most {clients}, the number of clients in data.partition"
            )
        if self.train.patience is not None and not self.data.validation and self.data.source != SITES:
            raise ValueError(
                f"train.patience = {self.train.patience}: early stopping needs validation samples; "
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
    """Return the config in a TOML file, changed by `sets` such as "local.lr=0.1"."""
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
        raise ConfigError(f"{path} is not a text file in UTF-8: {error.reason} at byte {error.start}") from error
    return Config.from_dict(override(raw, sets))


def override(raw: Mapping[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """Return the raw tables changed by each "a.b=value".

    A value is read as TOML, and as text if it is not valid TOML; `none` removes the key.

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
                child = table[name] = {"kind": child}  # a bare name is short for a table with only its kind
            if not isinstance(child, dict):
                raise ConfigError(f"--set {entry!r}: {'.'.join(names[:depth])} = {child!r} is not a table")
            table = child
        if text.strip() == "none":
            table.pop(names[-1], None)
        else:
            table[names[-1]] = _value(text.strip())
    return result


def grid(axes: Sequence[str]) -> list[list[str]]:
    """Return every combination of the axes' values, each as a list of overrides.

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
