"""The verbs' own mistakes; what they do is in tests/deploy_real."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from equipoise import cli
from equipoise.deploy import cli as deploy_cli
from equipoise.errors import ConfigError


def call(*words: object) -> str:
    """The output; an error is raised as it is."""
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_certs_are_made_and_sites_added(tmp_path: Path) -> None:
    call("certs", "--sites", "site_a, site_b", "--host", "fl.example.org,10.0.0.5")
    assert (tmp_path / "certs/site_b/key").exists()
    call("certs", "--sites", "site_c")
    assert (tmp_path / "certs/server/sites/site_c.pub").exists()
    with pytest.raises(ConfigError, match="never overwritten"):
        call("certs", "--sites", "site_c")


@pytest.mark.parametrize("verb", [["serve", "a.toml"], ["local", "a.toml"], ["certs"]])
def test_without_flower_it_is_said_what_to_install(verb: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_cli, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"`pip install equipoise\[flower\]`"):
        call(*verb)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data", "nowhere.csv"], r"--data nowhere.csv: there is no such file"),
        (["--data", "."], r"--certs certs/site_a: there is no ca.crt"),
        (["--data", ".", "--insecure"], "expected HOST:PORT"),
    ],
)
def test_joins_mistakes_are_told_before_anything_starts(words: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call("join", "--server", "nowhere", "--name", "site_a", *words)
    assert not (tmp_path / "sites").exists()


def test_insecure_must_be_asked_for_and_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    said: list[str] = []

    def serve(config: Any, out: Path, door: Any, watch: Any) -> dict[str, Any]:
        seen["door"] = door
        return {}

    monkeypatch.setattr("equipoise.deploy.serve.serve", serve)
    monkeypatch.setattr(cli, "show_run", lambda *shown: None)
    monkeypatch.setattr(cli.err_console, "print", lambda text, **options: said.append(text))
    (tmp_path / "a.toml").write_text('[data]\nsource = "sites"\n[model]\nname = "logistic"\n')
    call("serve", "a.toml")
    assert seen["door"].certs == Path("certs/server")
    assert not any("WARNING" in text for text in said)
    call("serve", "a.toml", "--insecure", "--port", "9999")
    assert seen["door"].certs is None
    assert seen["door"].port == 9999
    assert any("WARNING: --insecure" in text for text in said)


def test_the_verbs_cost_nothing_until_they_are_used() -> None:
    code = "import sys, equipoise.deploy.cli; sys.exit(bool({'torch', 'flwr', 'cryptography'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
