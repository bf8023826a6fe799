"""Every code block of the README and the docs runs: python, toml configs, and the shell lines that call equipoise."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import equipoise
from equipoise.runs.config import Config

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("**/*.md")])
WITH_SITES = ROOT / "docs" / "deploy.md"  # its commands are run with real sites, by tests/deploy_real
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    return [(kind, text) for kind, text in BLOCK.findall(page.read_text())]


def test_there_are_pages_with_code() -> None:
    assert len(PAGES) >= 5
    assert sum(kind == "python" for page in PAGES for kind, _ in blocks(page)) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    script = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)  # a page is a script, whose classes can be named
    for kind, text in blocks(page):
        if kind == "python":
            exec(compile(text, f"{page.name}", "exec"), vars(script))
        elif kind == "toml":
            Config.from_dict(tomllib.loads(text))
        elif kind in ("sh", "bash", "console", "shell") and page != WITH_SITES:
            for line in text.replace("\\\n", " ").splitlines():
                shell(line.partition(" # ")[0].strip(), tmp_path)
        else:
            assert page == WITH_SITES or kind in ("text", "json"), (
                f"{page.name} has a block of kind {kind!r} that nothing runs"
            )


def shell(line: str, folder: Path) -> None:
    words = shlex.split(line)
    if not words:
        return
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(word in targets for word in words[1:]), line
    elif words[0] == "equipoise":
        python(["-m", "equipoise.cli", *words[1:]], folder)
    elif words[0] == "python":
        python(words[1:], folder)
    else:
        assert words[0] in ("git", "cd", "pip"), f"nothing runs the line {line!r}"


def python(words: list[str], folder: Path) -> None:
    # One thread, since another test runs beside this one.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"


MODULES = [name for _, name, _ in pkgutil.walk_packages(equipoise.__path__, "equipoise.")]


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(module: str) -> None:
    if "kernels" in module:
        pytest.importorskip("triton")  # it comes with torch for CUDA
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
