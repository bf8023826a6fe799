"""What goes wrong in silence is refused where a method is defined, or where a chain is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from torch import Tensor

from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.method import FedAvg, Method, helper
from equipoise.methods import Climb


def test_a_method_without_a_name_is_refused_where_it_is_defined() -> None:
    with pytest.raises(ConfigError, match=r"Nameless has no name of its own: .* such as name = 'nameless'"):

        class Nameless(Method):
            pass


def test_a_name_is_not_inherited() -> None:
    """A method that inherits from another one would be reported under its name."""
    with pytest.raises(ConfigError, match="Mine has no name of its own"):

        class Mine(FedAvg):
            pass


def test_an_abstract_class_needs_no_name() -> None:
    class Base(Method, abstract=True):
        pass

    with pytest.raises(ConfigError, match="Child has no name of its own"):

        class Child(Base):
            pass


@pytest.mark.parametrize(
    ("misspelt", "tap"), [("logit", "logits"), ("loses", "losses"), ("weights", "weight"), ("gradss", "grads")]
)
def test_a_function_close_to_a_tap_is_refused(misspelt: str, tap: str) -> None:
    with pytest.raises(ConfigError, match=f"has a function {misspelt}, which is no tap: did you mean {tap}"):
        type("Misspelt", (Method,), {"name": "misspelt", misspelt: lambda self, values, env: values})


def test_helpers_are_marked_or_private() -> None:
    class Marked(Method):
        name = "marked"

        @helper
        def weights(self) -> int:
            return 1

        def _logit(self) -> int:
            return 1

        def temperature(self) -> int:
            return 1

    assert Marked().weights() == 1


def test_a_tap_with_other_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has a tap logits\(self, z\), expected logits\(self, logits, env\)"):

        class Short(Method):
            name = "short"

            def logits(self, z: Tensor) -> Tensor:  # type: ignore[override]
                return z


def test_a_dataclass_with_slots_is_made_twice_and_works() -> None:
    @dataclass(frozen=True, slots=True)
    class Slotted(Method):
        scale: float = 2.0
        name: ClassVar[str] = "slotted"

        def logits(self, logits: Tensor, env: Any) -> Tensor:
            return self.scale * logits

    assert [m.name for m in Chain(Slotted(scale=3.0))] == ["slotted"]


def test_a_notebook_cell_may_be_run_again() -> None:
    """It defines the same class once more; chains of the new one are no chains of two."""

    def cell() -> type[Method]:
        @dataclass(frozen=True)
        class Again(Method):
            name = "again"

        return Again

    first, second = cell(), cell()
    assert first is not second
    assert len(Chain(second(), Climb()).methods) == 2
    with pytest.raises(ConfigError, match="are both called 'again'"):
        Chain(first(), second())


@dataclass(frozen=True)
class Holding(Method):
    values: Any = ()
    name = "holding"


def test_a_setting_that_cannot_be_hashed_is_refused_in_a_chain() -> None:
    with pytest.raises(ConfigError, match=r"holding has the setting values = \[1\], which cannot be hashed"):
        Chain(Holding([1]))
    assert Chain(Holding((1,)))


def test_a_method_must_be_a_dataclass() -> None:
    class Undecorated(Method):
        scale: float = 1.0
        name = "undecorated"

    with pytest.raises(ConfigError, match=r"Undecorated is no dataclass: expected @dataclass\(frozen=True\)"):
        Chain(Undecorated())


def test_a_name_is_no_setting() -> None:
    @dataclass(frozen=True)
    class Typed(Method):
        name: str = "typed"  # type: ignore[misc]

    with pytest.raises(ConfigError, match="has a setting 'name': expected name = 'typed' without a type"):
        Chain(Typed())


def test_settings_with_factories_are_settings() -> None:
    @dataclass(frozen=True)
    class Made(Method):
        levels: tuple[int, ...] = field(default_factory=lambda: (1, 2))
        name = "made"

    assert str(Made()).endswith("Made")
    assert "levels=(3,)" in str(Made((3,)))
