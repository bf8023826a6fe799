"""The rooms of the package: who may import whom, what they may hold, and that the house stands without `fast`."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from equipoise.core.chain import Chain
from equipoise.core.client import Env
from equipoise.core.method import Method
from equipoise.core.round import one_round, start
from equipoise.engines.stacked import Stacked
from tests.federations import federation

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "equipoise"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py")


def room(path: Path) -> str:
    """The first folder below the package, or the module itself where it lies in none."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, wherever the import stands, and its line."""
    here = ("equipoise", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield module, node.lineno
            if module == "equipoise":
                yield from ((f"equipoise.{alias.name}", node.lineno) for alias in node.names)


def rooms_imported(path: Path) -> Iterator[tuple[str, int]]:
    for module, line in imported(path):
        parts = module.split(".")
        if parts[0] == "equipoise" and len(parts) > 1 and parts[1] != "__version__":
            yield parts[1], line


def allowed() -> dict[str, set[str]]:
    """The table of docs/architecture.md: each room, and the rooms that it may import."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    return {name: set(re.findall(r"`(\w+)`", may)) for name, may in rows}


def test_every_room_imports_only_what_the_picture_allows() -> None:
    rules = allowed()
    assert set(rules) == {room(path) for path in MODULES}
    for path in MODULES:
        for other, line in rooms_imported(path):
            assert other == room(path) or other in rules[room(path)], f"{path}:{line} imports from {other}"


def test_the_picture_allows_nothing_that_no_room_needs() -> None:
    needed = {
        name: {other for path in MODULES if room(path) == name for other, _ in rooms_imported(path)}
        for name in allowed()
    }
    for name, may in allowed().items():
        assert may <= needed[name], f"{name} never imports {may - needed[name]}"


def test_no_cycle_between_rooms() -> None:
    rules, done = allowed(), set[str]()
    while ready := [name for name, may in rules.items() if name not in done and may <= done]:
        done |= set(ready)
    assert done == set(rules), f"a cycle among {set(rules) - done}"


def test_no_cycle_between_packages() -> None:
    """Folders within folders too; what a room does inside one of its folders is its own."""
    graph: dict[str, set[str]] = {}
    packages = {".".join(path.parent.relative_to(PACKAGE).parts) for path in MODULES}
    for path in MODULES:
        mine = ".".join(path.parent.relative_to(PACKAGE).parts)
        for module, _ in imported(path):
            parts = module.split(".")[1:] if module.startswith("equipoise.") else []
            owner = next(
                (".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in packages), ""
            )
            if owner and owner != mine:
                graph.setdefault(mine, set()).add(owner)
    left = {name: set(others) for name, others in graph.items()}
    while ready := [name for name, others in left.items() if not others & set(left)]:
        for name in ready:
            del left[name]
    assert not left, f"packages import each other in a circle: {left}"


def test_no_two_modules_have_one_name() -> None:
    names = Counter(path.stem for path in MODULES if path.name != "__init__.py")
    assert [name for name, times in names.items() if times > 1] == []


def test_no_room_is_crowded() -> None:
    sizes = Counter(path.parent for path in MODULES)
    del sizes[PACKAGE / "methods"]
    assert max(sizes.values()) <= 20, sizes.most_common(1)


def test_the_round_fits_a_screen() -> None:
    assert len((PACKAGE / "core" / "round.py").read_text().splitlines()) <= 60


def test_the_core_uses_no_internals_of_torch() -> None:
    for path in (PACKAGE / "core").glob("*.py"):
        for module, line in imported(path):
            assert not re.match(r"torch(\.\w+)*\._", module), f"{path}:{line} imports {module}"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert not node.attr.startswith("_") or node.attr == "__version__", f"{path}:{node.lineno}"


seen: list[traceback.FrameSummary] = []


@dataclass(frozen=True)
class Looking(Method):
    """Writes down the frames between a round and a tap of its step, as a traceback would show them."""

    name = "looking"

    def losses(self, losses: Tensor, logits: Tensor, y: Tensor, env: Env) -> Tensor:
        seen[:] = [frame for frame in traceback.extract_stack() if str(PACKAGE) in frame.filename]
        return losses


def test_ten_frames_from_a_round_to_a_step() -> None:
    fed = federation()
    engine, chain = Stacked(fed), Chain(Looking())
    one_round(start(fed, chain, engine), fed, chain, engine)
    names = [frame.name for frame in seen]
    path = names[names.index("one_round") : len(names) - names[::-1].index("step")]
    assert 3 < len(path) <= 10, path


# -- without fast ----------------------------------------------------------------------------------------------------
CONTRACT = """
import torch
torch.set_num_threads(1)
from equipoise.core import speed
from equipoise.testing.contract import RULES, _found
from tests.contract.methods import EVERY
assert speed.off() == "it is not installed", speed.off()
unchecked = 0
for name, chain in EVERY.items():
    for rule, check in RULES.items():
        found = _found(rule, lambda: check(chain))
        assert found.kept is not False, (name, rule, found.sentence)
        unchecked += found.kept is None
assert unchecked == len(EVERY), unchecked  # whether taps are one graph is all that cannot be checked
"""


def run(code: str, source: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": f"{source}:{ROOT}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code, *words],
        capture_output=True,
        text=True,
        env=environment,
    )


@pytest.fixture(scope="module")
def without_fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("plain")
    shutil.copytree(PACKAGE, source / "equipoise", ignore=shutil.ignore_patterns("fast", "__pycache__"))
    return source


def test_the_contract_holds_without_fast(without_fast: Path) -> None:
    done = run(CONTRACT, without_fast)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_run_needs_no_fast(without_fast: Path, tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    config.write_text(
        '[data]\nsource = "digits"\n[model]\nname = "logistic"\n[train]\nrounds = 2\n[local]\nbatch = 64\n'
    )
    code = "import sys; sys.argv = ['equipoise', *sys.argv[1:]]; from equipoise.cli import main; main()"
    words = ["compare", str(config), "--methods", "fedavg, climb", "--seeds", "2", "--out", str(tmp_path / "out")]
    done = run(code, without_fast, *words)
    assert done.returncode == 0, done.stderr
    done = run(code, without_fast, "run", str(config), "--set", "train.compile=true", "--out", str(tmp_path / "b"))
    assert done.returncode == 2
    assert "train.compile = true: the fast code that compiles is off, since it is not installed" in done.stderr


def test_an_old_torch_is_one_sentence() -> None:
    code = "import torch; torch.__version__ = '2.10.1+cpu'; from equipoise.cli import main; main()"
    done = run(code, ROOT / "src")
    assert done.returncode == 2
    assert "torch 2.10.1+cpu is too old: expected 2.11 or newer" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("torch.__version__ = '2.99.0'", "torch 2.99.0 is newer than 2.13, the newest it was tested with"),
        ("del torch.autograd.function._SingleLevelFunction", "it does not load with torch"),
    ],
    ids=["a newer torch", "a renamed internal"],
)
def test_fast_is_off_with_one_warning_where_it_was_not_tested(change: str, reason: str) -> None:
    code = f"""
import warnings
import torch
import torch.autograd.function
{change}
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from tests.federations import federation, norm_cnn, image_federation
    import equipoise as eq
    fed = image_federation(norm_cnn())
    outcome = eq.fit(fed, eq.Scaffold(), 2)
    assert eq.Stacked.__name__ == "Stacked", eq.Stacked
mine = [str(one.message) for one in said if "Equipoise" in str(one.message)]
assert len(mine) == 1, mine
print(mine[0])
"""
    done = run(code, ROOT / "src")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Equipoise runs without its fast code: ")
    assert reason in done.stdout
