"""Methods by name: ours, those of installed packages, and anybody's as package.module:Class."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.methods import Climb, FedProx, registry
from equipoise.methods.registry import Known, parse

SMOOTH = """
from dataclasses import dataclass
import equipoise as eq

@dataclass(frozen=True)
class Smooth(eq.Method):
    eps: float = 0.1
    name = "{name}"
    about = "label smoothing"

    def losses(self, losses, logits, y, env):
        return (1 - self.eps) * losses - self.eps * logits.log_softmax(-1).mean(-1)

class NoMethod:
    pass
"""


@pytest.fixture
def mylab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a package outside the library, as a user has it beside a config."""
    (tmp_path / "mylab").mkdir()
    (tmp_path / "mylab" / "smooth.py").write_text(SMOOTH.format(name="smooth"))
    (tmp_path / "mylab" / "climb.py").write_text(SMOOTH.format(name="climb"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "mylab"]:
        del sys.modules[name]


def test_a_class_anywhere_is_named_by_its_module(mylab: Path) -> None:
    chain = parse("mylab.smooth:Smooth(eps=0.2) + climb")
    assert [method.name for method in chain] == ["smooth", "climb"]
    assert str(chain) == "mylab.smooth:Smooth(eps=0.2) + climb"
    assert parse(str(chain)) == chain


def test_it_never_clashes_with_a_known_name(mylab: Path) -> None:
    own = parse("mylab.climb:Smooth")
    assert str(own) == "mylab.climb:Smooth"
    assert parse("climb") == Chain(Climb())
    assert parse(str(own)) == own
    with pytest.raises(
        ConfigError, match=r"equipoise.methods.climb:Climb and mylab.climb:Smooth are both called 'climb'"
    ):
        parse("climb + mylab.climb:Smooth")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("mylab.smoth:Smooth", "names the module 'mylab.smoth', which is neither in .* nor installed"),
        ("mylab.smooth:Smoth", "'mylab.smooth' has no 'Smoth'; did you mean 'smooth'|did you mean 'Smooth'"),
        ("mylab.smooth:NoMethod", "mylab.smooth:NoMethod is no method; expected a class that inherits from"),
        ("mylab.smooth:Smooth(espilon=1)", "unknown setting 'espilon'"),
        ("mylab.smooth:Smooth(eps='a')", "eps must be a number, not 'a'"),
        ("mylab.smooth", "a class of your own is written package.module:Class"),
        ("mylab.smooth:", "expected names such as a \\+ b"),
        ("smooth", "unknown method 'smooth'"),
    ],
)
def test_a_mistake_is_one_sentence(mylab: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(text)


def test_code_of_others_needs_consent_where_it_is_asked_for(mylab: Path) -> None:
    with pytest.raises(ConfigError, match=r"allow it with --allow-method mylab.smooth:Smooth"):
        parse("climb + mylab.smooth:Smooth(eps=0.2)", allow=())
    assert "mylab" not in sys.modules, "it was imported before it was allowed"
    assert parse("mylab.smooth:Smooth", allow=["mylab.smooth:Smooth"])
    assert parse("climb + equipoise.methods.prox:FedProx(mu=0.5)", allow=()) == Climb() + FedProx(mu=0.5)


# -- installed packages ----------------------------------------------------------------------------------------------


@pytest.fixture
def installed(mylab: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same package as if it had been installed, with names of its own."""
    info = mylab / "mylab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mylab\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[equipoise.methods]\nsmooth = mylab.smooth:Smooth\nbroken = mylab.nowhere:X\nodd = mylab.smooth:NoMethod\n"
    )
    monkeypatch.syspath_prepend(str(mylab))
    registry._entry_points.cache_clear()
    yield info
    registry._entry_points.cache_clear()


def test_an_installed_package_registers_names(installed: Path) -> None:
    chain = parse("smooth(eps=0.3) + climb")
    assert str(chain) == "smooth(eps=0.3) + climb"
    assert parse(str(chain)) == chain
    assert "smooth" in Known()
    with pytest.raises(ConfigError, match="did you mean 'smooth'"):
        parse("smoth")


def test_a_registered_name_needs_consent_too(installed: Path) -> None:
    with pytest.raises(ConfigError, match="--allow-method smooth"):
        parse("smooth", allow=())
    assert parse("smooth", allow=["smooth"])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("broken", "method 'broken' of the installed package mylab: loading mylab.nowhere:X failed with"),
        ("odd", "method 'odd' of the installed package mylab: mylab.smooth:NoMethod is no method"),
    ],
)
def test_a_registration_that_leads_nowhere_is_one_sentence(installed: Path, name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse(name)


def test_a_package_cannot_take_the_name_of_a_method_of_ours(installed: Path) -> None:
    (installed / "entry_points.txt").write_text("[equipoise.methods]\nclimb = mylab.smooth:Smooth\n")
    registry._entry_points.cache_clear()
    with pytest.warns(UserWarning, match="the package mylab registers the method 'climb'"):
        parse("climb", allow=())
    assert parse("climb") == Chain(Climb())
