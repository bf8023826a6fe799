from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.core.errors import EquipoiseError, NotAllowed
from equipoise.data.samples import read_samples
from equipoise.deploy import tryout
from equipoise.runs.config import Config
from tests.deploy import outside


def config(**tables: Any) -> Config:
    return Config.from_dict({"data": {"source": "digits"}, "model": {"name": "logistic"}, **tables})


def test_the_data_are_divided_among_the_given_number_of_sites() -> None:
    made = tryout.divided(config(data={"source": "digits", "partition": "dirichlet(clients=20, alpha=0.3)"}), 3)
    assert made.data.partition.clients == 3
    assert made.data.partition.alpha == 0.3


@pytest.mark.parametrize(
    ("tables", "sites", "sentence"),
    [
        ({"train": {"cohort": 5}}, 3, r"train.cohort = 5: expected at most 3"),
        (
            {"data": {"source": "bank.csv", "options": {"label": "fraud", "client": "bank"}}},
            3,
            "the data have 2 owners; expected --sites 2",
        ),
        ({"data": {"source": "digits", "partition": "shards(clients=20, per_client=1)"}}, 2000, "no sample|samples"),
    ],
)
def test_data_that_cannot_be_divided_are_refused(
    tables: dict[str, Any], sites: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{n % 7},{n % 3},{'ab'[n % 2]},{n % 2}" for n in range(40)]
    Path("bank.csv").write_text("\n".join(["amount,age,bank,fraud", *rows]) + "\n")
    with pytest.raises(EquipoiseError, match=sentence):
        tryout.local(config(**tables), tmp_path / "run", sites)
    assert not (tmp_path / "run").exists()


class Child:
    """A site that is not started; it records the arguments that it would have been started with."""

    made: list[Child]
    code: int | None = 0

    def __init__(self, name: str, words: list[str], folder: Path, log: Path, env: dict[str, str]) -> None:
        self.name, self.words, self.env = name, words, env
        self.samples = read_samples(Path(words[words.index("--data") + 1]))
        self.stopped = False
        Child.made.append(self)

    def output(self) -> str:
        return "site: waiting\nerror: no such column\n"

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    Child.made = []

    def serve(config: Config, out: Path, door: Any, watch: Any, lost: Any) -> dict[str, Any]:
        seen.update(config=config, door=door, lost=lost)
        door.check(config.deploy.sites)
        return {"last": {}}

    monkeypatch.setattr(tryout, "Child", Child)
    monkeypatch.setattr(tryout, "serve", serve)
    return seen


def test_every_site_gets_its_samples_its_key_and_its_folder(staged: dict[str, Any], tmp_path: Path) -> None:
    tryout.local(config(), tmp_path / "run", 3)
    assert [child.name for child in Child.made] == ["site_1", "site_2", "site_3"]
    assert staged["config"].deploy.sites == ["site_1", "site_2", "site_3"]
    assert all(child.stopped for child in Child.made)
    assert sum(len(child.samples) for child in Child.made) > 1000
    for child in Child.made:
        assert child.samples.labels is not None
        assert set(child.samples.labels) == set("0123456789")
        assert child.samples.x.dtype == np.uint8
        where = {
            flag: child.words[child.words.index(flag) + 1] for flag in ("--server", "--name", "--certs", "--out")
        }
        assert where["--server"] == staged["door"].address
        assert where["--name"] == child.name
        assert where["--certs"].endswith(f"certs/{child.name}")
        assert where["--out"] == str(tmp_path / "run" / "sites" / child.name)
    assert not Path(staged["door"].certs).exists(), "keys and data of a try-out must not stay"


def test_sites_share_the_cores_unless_the_user_sets_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert tryout._env(3)["OMP_NUM_THREADS"] == "2"
    assert tryout._env(30)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert tryout._env(3)["OMP_NUM_THREADS"] == "5"


def test_a_site_with_a_mistake_ends_the_try_out(staged: dict[str, Any], tmp_path: Path) -> None:
    tryout.local(config(), tmp_path / "run", 2)
    assert staged["lost"]() is None
    Child.made[1].code = 2
    assert staged["lost"]() == "site_2 could not take part (error: no such column)"


@pytest.fixture
def mylab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    outside.write(tmp_path)
    (tmp_path / "mylab" / "__init__.py").write_text("from mylab.smooth import Smooth")
    monkeypatch.chdir(tmp_path)
    with outside.forgotten():
        yield


@pytest.mark.usefixtures("mylab")
@pytest.mark.parametrize(
    ("tables", "option"),
    [
        ({"method": "mylab.smooth:Smooth(amount=0.2) + climb"}, "--allow-method mylab.smooth:Smooth"),
        ({"method": "mylab:Smooth + climb"}, "--allow-method mylab.smooth:Smooth"),
        ({"model": {"name": "mylab.net:small"}}, "--allow-model mylab.net:small"),
    ],
    ids=["method", "method under another name", "model"],
)
def test_code_that_is_not_allowed_is_refused_before_a_process_starts(
    staged: dict[str, Any], tables: dict[str, Any], option: str, tmp_path: Path
) -> None:
    with pytest.raises(NotAllowed, match=rf"'{option.split()[1]}' is code from outside Equipoise, .*{option}$"):
        tryout.local(config(**tables), tmp_path / "run", 3)
    assert Child.made == []
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("mylab")
def test_what_the_user_allows_is_allowed_at_every_site(staged: dict[str, Any], tmp_path: Path) -> None:
    chosen = config(method="mylab:Smooth + climb", model={"name": "mylab.net:small"})
    methods = ["mylab.smooth:Smooth", "mylab.choice:Twice"]
    tryout.local(chosen, tmp_path / "run", 3, models=["mylab.net:small"], methods=methods)
    allowed = ["--allow-model", "mylab.net:small"]
    allowed += ["--allow-method", "mylab.smooth:Smooth", "--allow-method", "mylab.choice:Twice"]
    assert [child.words[-6:] for child in Child.made] == [allowed] * 3
