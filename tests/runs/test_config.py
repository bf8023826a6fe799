from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from equipoise.core.errors import ConfigError
from equipoise.core.expression import parse
from equipoise.core.local import Local
from equipoise.data import PARTITIONS, Counts, Dirichlet, Natural, Step, Unchanged, load
from equipoise.methods import METHODS
from equipoise.models import MODELS, build
from equipoise.runs.config import Config, grid, load_config, override

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))

SMALLEST = {"data": {"source": "digits"}, "model": {"name": "mlp"}}

TOML = """
method = "scaffold"

[data]
source = "digits"
imbalance = "step(rho=10, minority=[0, 2])"
partition = {kind = "dirichlet", clients = 20, alpha = 0.3}

[model]
name = "mlp"
hidden = [64]

[local]
lr = 0.05

[train]
cohort = 10
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "first.toml"
    path.write_text(TOML)
    return path


def refusal(path: Path, *sets: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, sets)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_is_read(file: Path) -> None:
    config = load_config(file)
    assert config.method == "scaffold"
    assert config.data.imbalance == Step(10, minority=(0, 2))
    assert config.data.partition == Dirichlet(clients=20, alpha=0.3)
    assert config.model.options == {"hidden": [64]}
    assert config.local.lr == 0.05
    assert config.train.cohort == 10


def test_settings_that_are_not_given_have_their_defaults() -> None:
    config = Config.from_dict(SMALLEST)
    assert config.method == "fedavg"
    assert config.data.imbalance == Unchanged()
    assert config.data.partition == PARTITIONS["iid"](clients=10)
    assert Local(**config.local.build(rounds=7)) == Local(horizon=7)


def test_data_with_a_client_column_are_divided_by_it() -> None:
    data = {"source": "bank.csv", "options": {"client": "branch"}}
    assert Config.from_dict(SMALLEST | {"data": data}).data.partition == Natural()
    asked = Config.from_dict(SMALLEST | {"data": data | {"partition": "iid(clients=3)"}})
    assert asked.data.partition == PARTITIONS["iid"](clients=3)


def test_the_local_table_gives_the_settings_of_local() -> None:
    table = {
        "optimiser": "adam",
        "betas": [0.5, 0],
        "lr": 1,
        "batch": "full",
        "schedule": "cosine",
        "horizon": 9,
    }
    settings = Config.from_dict(SMALLEST | {"local": table}).local.build(rounds=7)
    expected = Local(optimiser="adam", betas=(0.5, 0.0), lr=1.0, batch="full", schedule="cosine", horizon=9)
    assert Local(**settings) == expected
    steps = Config.from_dict(SMALLEST | {"local": {"steps_per_epoch": 5}}).local.build(rounds=7)
    assert Local(**steps).steps_per_epoch == 5


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("data.imbalance={kind='step', rho=3}", "data.partition=natural"),
        ("data.minority=[0, 'two']", "local.steps_per_epoch=5", "train.cohort=0.5", "train.device=cuda:1"),
        ("local.betas=[0.1, 0.2]", "local.batch=full", "data.validation=0.1", "train.patience=3"),
    ],
)
def test_a_config_survives_json(file: Path, changes: tuple[str, ...]) -> None:
    config = load_config(file, changes)
    again = Config.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.to_dict() == config.to_dict()


def test_counts_by_class_survive_json(file: Path) -> None:
    config = load_config(file, ["data.imbalance={kind='counts', counts={0=5, 3=6}}"])
    assert config.data.imbalance == Counts({0: 5, 3: 6})
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        # unknown keys
        ("train.round=5", "unknown key train.round; did you mean 'rounds'?"),
        ("train.lr=5", "unknown key train.lr; did you mean 'local.lr'?"),
        ("partition=iid", "unknown key partition; did you mean 'data.partition'?"),
        ("modle.name=mlp", "unknown key modle; did you mean 'model'?"),
        (
            "data.partition.alhpa=1",
            "data.partition: dirichlet: unknown setting 'alhpa'; did you mean 'alpha'?",
        ),
        (
            "data.partition.kind=dirichlt",
            "data.partition: unknown kind 'dirichlt'; did you mean 'dirichlet'?",
        ),
        ("data.partition={clients=3}", "data.partition: kind is missing; the choices are iid,"),
        ("data.imbalance=setp(rho=10)", "data.imbalance: unknown imbalance 'setp'; did you mean 'step'?"),
        ("data.imbalance=step(ro=10)", "data.imbalance: step: unknown setting 'ro'; did you mean 'rho'?"),
        ("data.imbalance=step(10) + step(5)", "data.imbalance = 'step(10) + step(5)': expected a kind"),
        ("data.imbalance=3", "data.imbalance = 3: expected a kind, or a table"),
        ("data.partition.kind=3", "data.partition: unknown kind 3"),
        # wrong types
        ("local.lr=fast", "local.lr = 'fast': expected a number above 0"),
        ("local.lr=true", "local.lr = True: expected a number above 0"),
        ("local.epochs=1.5", "local.epochs = 1.5: expected a whole number, 1 or above"),
        ("local.nesterov=1", "local.nesterov = 1: expected true or false"),
        ("local.betas=[0.9]", "local.betas = [0.9]: expected two numbers in [0, 1)"),
        ("local.betas=[0.9, 'x']", "local.betas = [0.9, 'x']: expected two numbers in [0, 1)"),
        ("local.batch=half", "local.batch = 'half': expected a whole number, 1 or above, or 'full'"),
        ("local.optimiser=sdg", "local.optimiser = 'sdg': expected one of 'sgd', 'adam'"),
        ("train.cohort=true", "train.cohort = True: expected a whole number, 1 or above, or a share above 0"),
        ("train.device=gpu", "train.device = 'gpu': expected auto, cpu, cuda or cuda:N"),
        ("data.minority=[0.5]", "data.minority = [0.5]: expected a list of class numbers or names"),
        ("data.options=3", "data.options = 3: expected a table"),
        ("method=3", "method = 3: expected a text"),
        ("local=3", "local = 3: expected a table"),
        ("model=3", "model = 3: expected a table with name"),
        ("model.when=2020-01-01", "expected a number, a text, true, false, or a list or table of these"),
        ("data.partition.alpha=x", "data.partition: dirichlet: alpha must be a number, not 'x'"),
        # out of range
        ("local.lr=nan", "local.lr = nan: expected a number above 0"),
        ("local.lr=inf", "local.lr = inf: expected a number above 0"),
        ("local.lr=-1", "local.lr = -1: expected a number above 0"),
        ("local.lr=0", "local.lr = 0: expected a number above 0"),
        ("local.momentum=1", "local.momentum = 1: expected a number in [0, 1)"),
        ("local.clip=0", "local.clip = 0: expected a number above 0"),
        ("train.rounds=0", "train.rounds = 0: expected a whole number, 1 or above"),
        ("train.seed=-1", "train.seed = -1: expected a whole number, 0 or above"),
        ("train.cohort=0", "train.cohort = 0: expected"),
        ("train.cohort=0.0", "train.cohort = 0.0: expected"),
        ("train.cohort=1.5", "train.cohort = 1.5: expected"),
        ("data.validation=1.0", "data.validation = 1.0: expected a number in [0, 1)"),
        ("data.partition.alpha=-1", "data.partition: dirichlet: alpha must be"),
        ("data.partition.alpha=nan", "data.partition: dirichlet: alpha must be a number, not nan"),
        ("data.partition.clients=0", "data.partition: dirichlet: clients must be"),
        ("version=2", "version = 2: this Equipoise reads configs of version 1"),
        # in conflict with another setting
        ("train.cohort=21", "train.cohort = 21: expected at most 20, the number of clients in data.partition"),
        ("train.patience=3", "train.patience = 3: early stopping needs validation samples"),
        ("local.nesterov=true", "local.nesterov = True: expected false, or momentum above 0"),
        # missing
        ("model.name=none", "model.name is missing: expected a text"),
        ("model=none", "model is missing: expected a table with name"),
        # malformed overrides
        ("train.rounds", "--set 'train.rounds': expected a key and a value"),
        ("=3", "--set '=3': expected a key and a value"),
        ("train..rounds=3", "--set 'train..rounds=3': expected a key and a value"),
        ("method.x=3", "--set 'method.x=3': method = 'scaffold' is not a table"),
        ("data.imbalance.rho=5", "data.imbalance = 'step(rho=10, minority=[0, 2])' is not a table"),
    ],
)
def test_each_mistake_is_one_sentence(file: Path, change: str, sentence: str) -> None:
    assert sentence in refusal(file, change)
    assert "more)" not in refusal(file, change)


def test_batch_and_steps_exclude_each_other(file: Path) -> None:
    sentence = refusal(file, "local.batch=8", "local.steps_per_epoch=5")
    assert sentence.startswith("local.batch = 8 and local.steps_per_epoch = 5: expected only one of them")


def test_further_mistakes_are_counted(file: Path) -> None:
    sentence = refusal(file, "local.lr=fast", "train.cohort=x", "train.round=3")
    assert sentence == "local.lr = 'fast': expected a number above 0 (and 2 more)"


@pytest.mark.parametrize("table", ["data", "model", "local", "train", "data.partition"])
def test_a_method_below_a_table_is_explained(tmp_path: Path, table: str) -> None:
    file = tmp_path / "late.toml"
    partition = '\npartition = {kind = "iid", clients = 3}' if table != "data.partition" else ""
    body = {"data": 'source = "digits"' + partition, "model": 'name = "mlp"', "local": "", "train": ""}
    body |= {"data.partition": 'kind = "iid"\nclients = 3'} if table == "data.partition" else {}
    body[table] += '\nmethod = "scaffold"'
    file.write_text("\n".join(f"[{name}]\n{lines}" for name, lines in body.items()))
    assert refusal(file) == (
        f"{table}.method: method belongs at the top of the file; below [{table}] it is read as a key of that table"
    )


def test_a_second_method_or_a_version_in_a_table_is_explained_too(file: Path) -> None:
    assert refusal(file, "train.method=fedavg").startswith("train.method: method belongs at the top")
    assert refusal(file, "train.version=1").startswith("train.version: version belongs at the top")
    # If the method is given, networks and sources may have an option of that name.
    assert load_config(file, ["model.method=x", "data.options.method=y"]).model.options["method"] == "x"


def test_toml_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text('method = "fedavg"\n[data\n')
    assert refusal(file).startswith(f"{file} is not valid TOML: ")
    assert "line 2" in refusal(file)
    file.write_bytes(b"method = '\xff'")
    assert "broken.toml is not a text file in UTF-8" in refusal(file)
    assert refusal(tmp_path).startswith(f"cannot read the config file {tmp_path}: Is a directory")


def test_a_file_from_a_windows_editor(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + TOML.replace("\n", "\r\n").encode())
    assert load_config(file).method == "scaffold"


def test_the_error_for_a_missing_file_names_the_nearest_file(file: Path, tmp_path: Path) -> None:
    missing = tmp_path / "frist.toml"
    assert refusal(missing) == f"there is no config file {missing}; did you mean {file}?"
    assert refusal(tmp_path / "x" / "y.toml").endswith(f"{tmp_path / 'x'} holds no .toml file")
    assert refusal(tmp_path / "0").endswith(f"{tmp_path} holds first.toml")


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("a.b=1", {"a": {"b": 1, "c": "x"}}),
        ("a.b = 1e-3", {"a": {"b": 0.001, "c": "x"}}),
        ("a.b=[1, 2]", {"a": {"b": [1, 2], "c": "x"}}),
        ("a.b=true", {"a": {"b": True, "c": "x"}}),
        ("a.b='none'", {"a": {"b": "none", "c": "x"}}),
        ("a.b=cuda:0", {"a": {"b": "cuda:0", "c": "x"}}),
        ("a.b=1\nc=2", {"a": {"b": "1\nc=2", "c": "x"}}),
        ("a.c=none", {"a": {}}),
        ("a.d=none", {"a": {"c": "x"}}),
        ("e.f.g=x = y", {"a": {"c": "x"}, "e": {"f": {"g": "x = y"}}}),
    ],
)
def test_override(entry: str, expected: dict[str, Any]) -> None:
    raw = {"a": {"c": "x"}}
    assert override(raw, [entry]) == expected
    assert raw == {"a": {"c": "x"}}


def test_a_setting_can_be_added_to_a_kind_that_is_given_by_name(file: Path) -> None:
    config = load_config(file, ["data.imbalance=step", "data.imbalance.rho=4"])
    assert config.data.imbalance == Step(4)


def test_grid_is_every_combination() -> None:
    axes = ["method=fedavg, fedadam(lr=0.1, tau=1e-3)", "train.seed=0,1"]
    assert grid(axes) == [
        ["method=fedavg", "train.seed=0"],
        ["method=fedavg", "train.seed=1"],
        ["method=fedadam(lr=0.1, tau=1e-3)", "train.seed=0"],
        ["method=fedadam(lr=0.1, tau=1e-3)", "train.seed=1"],
    ]
    assert grid([]) == [[]]


@pytest.mark.parametrize("axis", ["local.lr", "local.lr=", "=1,2", "local.lr=1,,2"])
def test_grid_refuses_an_axis_without_values(axis: str) -> None:
    with pytest.raises(ConfigError, match=r"expected"):
        grid([axis])


def test_there_are_examples() -> None:
    assert {file.name for file in EXAMPLES} >= {"digits.toml", "mnist_climb.toml", "bank.toml"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_is_valid(example: Path) -> None:
    config = load_config(example)
    assert parse(config.method, METHODS)
    assert Local(**config.local.build(config.train.rounds))
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.model.name in MODELS


@pytest.mark.parametrize("name", ["digits", "bank"])
def test_the_examples_that_need_no_download_have_data_model_and_clients(name: str) -> None:
    config = load_config(EXAMPLES[0].parent / f"{name}.toml", [f"data.dir={EXAMPLES[0].parent}"])
    data = load(config.data.source, config.data.dir, **config.data.options)
    assert {str(label) for label in config.data.minority or []} <= set(data.classes)
    kept = config.data.imbalance(data.y, data.num_classes, config.train.seed)
    client = None if data.client is None else data.client[kept]
    parts = config.data.partition(data.y[kept], data.num_classes, config.train.seed, client)
    assert len(parts) >= (config.train.cohort or 1)
    assert build(config.model.name, data.x.shape[1:], data.num_classes, **config.model.options)


def test_the_climb_example_is_the_papers_hard_case() -> None:
    config = load_config(EXAMPLES[0].parent / "mnist_climb.toml")
    assert config.data.imbalance == Step(10, minority=(0, 2, 4), joint=True)
    assert config.data.partition == PARTITIONS["mix"](clients=100, alpha=0.0)
    settings = Local(**config.local.build(config.train.rounds))
    assert (settings.lr, settings.weight_decay, settings.clip) == (0.05, 1e-3, 5.0)
    assert (settings.epochs, settings.steps_per_epoch, settings.weighting) == (5, 5, "uniform")
    assert config.train.cohort is None
