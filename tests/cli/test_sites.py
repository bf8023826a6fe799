"""Mistakes in the arguments of certs, serve, join and local; tests/deploy_real tests what the commands do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from equipoise.cli import commands as cli
from equipoise.cli import console
from equipoise.cli import sites as deploy_cli
from equipoise.core.errors import ConfigError


def call(*words: object) -> str:
    """Run a command and return its output; an error of the command is raised."""
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
def test_without_flower_the_error_says_what_to_install(verb: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_cli, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"`pip install equipoise\[flower\]`"):
        call(*verb)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data", "nowhere.csv"], r"--data nowhere.csv: there is no such file"),
        (["--data", "."], r"--certs certs/site_a: there is no file ca.crt"),
        (["--data", ".", "--insecure"], "expected HOST:PORT"),
    ],
)
def test_mistakes_in_a_join_are_refused_before_anything_starts(
    words: list[str], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        call("join", "--server", "nowhere", "--name", "site_a", *words)
    assert not (tmp_path / "sites").exists()


def test_insecure_is_off_by_default_and_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}
    said: list[str] = []

    def serve(config: Any, out: Path, door: Any, watch: Any) -> dict[str, Any]:
        seen["door"] = door
        return {}

    monkeypatch.setattr("equipoise.deploy.serve.serve", serve)
    monkeypatch.setattr(console, "show_run", lambda *shown: None)
    monkeypatch.setattr(console.err, "print", lambda text, **options: said.append(text))
    (tmp_path / "a.toml").write_text('[data]\nsource = "sites"\n[model]\nname = "logistic"\n')
    call("serve", "a.toml")
    assert seen["door"].certs == Path("certs/server")
    assert not any("WARNING" in text for text in said)
    call("serve", "a.toml", "--insecure", "--port", "9999")
    assert seen["door"].certs is None
    assert seen["door"].port == 9999
    assert any("WARNING: --insecure" in text for text in said)


def test_optional_dependencies_are_imported_when_they_are_used() -> None:
    code = "import sys, equipoise.cli.sites; sys.exit(bool({'flwr', 'cryptography'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_join_and_local_pass_on_the_code_that_the_user_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allowed = ["--allow-model", "mylab.net:small", "--allow-method", "mylab.a:A", "--allow-method", "mylab.b:B"]
    joined: list[Any] = []
    monkeypatch.setattr("equipoise.deploy.join.join", lambda site, way, say: joined.append(site))
    call("join", "--server", "localhost:1", "--name", "site_a", "--data", ".", "--insecure", *allowed)
    assert joined[0].models == ("mylab.net:small",)
    assert joined[0].methods == ("mylab.a:A", "mylab.b:B")

    seen: dict[str, Any] = {}
    monkeypatch.setattr("equipoise.deploy.tryout.local", lambda *words, **options: seen.update(options))
    monkeypatch.setattr(console, "show_run", lambda *shown: None)
    (tmp_path / "a.toml").write_text('[data]\nsource = "digits"\n[model]\nname = "logistic"\n')
    call("local", "a.toml", *allowed)
    assert seen == {"models": ["mylab.net:small"], "methods": ["mylab.a:A", "mylab.b:B"]}


def test_local_refuses_code_that_is_not_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[data]\nsource = "digits"\n[model]\nname = "mylab.net:small"\n')
    with pytest.raises(ConfigError, match=r"'mylab.net:small' .* --allow-model mylab.net:small$"):
        call("local", "a.toml")
    assert not (tmp_path / "runs").exists()
