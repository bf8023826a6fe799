from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest

from equipoise.core.errors import ConfigError
from equipoise.core.expression import parse, render, split
from equipoise.data.imbalance import IMBALANCES, Counts, LongTail, Step


@dataclass(frozen=True)
class Plain:
    name: ClassVar[str] = "fedavg"


@dataclass(frozen=True)
class Prox:
    mu: float

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise ConfigError("fedprox: mu must not be negative")


@dataclass(frozen=True)
class Adam:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    steps: int = 1
    amsgrad: bool = False
    clip: float | None = None
    mode: Literal["fast", "slow"] = "fast"
    batch: int | Literal["full"] = 32
    classes: tuple[int, ...] = ()
    names: list[str] = field(default_factory=list)
    weights: Sequence[float] = ()
    tag: str = ""
    anything: Any = None
    fixed: int = field(default=3, init=False)


@dataclass(frozen=True)
class Own:
    size: int

    def __post_init__(self) -> None:
        if self.size > 3:
            raise ValueError("size is above 3")


REGISTRY = {"fedavg": Plain, "FedProx": Prox, "fedadam": Adam, "own": Own}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fedavg", [Plain()]),
        (" FedAvg() ", [Plain()]),
        ("FEDPROX(mu=1) + fedavg", [Prox(1.0), Plain()]),
        ("fedavg + (fedprox(.5) + fedadam)", [Plain(), Prox(0.5), Adam()]),
        ("fedprox(\n    mu=1e-2,\n)", [Prox(0.01)]),
        ("fedadam(0.5, [0, 0.5], steps=+2)", [Adam(0.5, (0.0, 0.5), 2)]),
        ("fedadam(amsgrad=true, clip=None)", [Adam(amsgrad=True)]),
        ("fedadam(amsgrad=True, clip=5)", [Adam(amsgrad=True, clip=5.0)]),
        ("fedadam(mode='slow', batch='full')", [Adam(mode="slow", batch="full")]),
        (
            "fedadam(batch=8, classes=[1, -2], weights=(1, 2.5))",
            [Adam(batch=8, classes=(1, -2), weights=(1.0, 2.5))],
        ),
        (
            "fedadam(names=('a', 'b'), anything={1: [2, 'x']})",
            [Adam(names=["a", "b"], anything={1: [2, "x"]})],
        ),
        ("fedadam(clip=1e999)", [Adam(clip=math.inf)]),
    ],
)
def test_parse(text: str, expected: list[Any]) -> None:
    found = parse(text, REGISTRY)
    assert found == expected
    assert repr(found) == repr(expected)  # 1 == 1.0 == True, but their types differ


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fedpro", "unknown method 'fedpro'; did you mean 'fedprox'?"),
        ("xyz", "unknown method 'xyz'; the choices are fedadam, fedavg, fedprox, own"),
        ("fedadam(step=1)", "fedadam: unknown setting 'step'; did you mean 'steps'?"),
        ("fedadam(fixed=1)", "fedadam: unknown setting 'fixed'"),
        ("fedavg(mu=1)", "fedavg: unknown setting 'mu'; it has no settings"),
        ("fedavg(1)", "fedavg takes 0 settings, 1 are given"),
        ("fedprox", "fedprox: mu must be given, as in fedprox(mu=...)"),
        ("fedprox(mu='a')", "fedprox: mu must be a number, not 'a'"),
        ("fedprox(mu=True)", "fedprox: mu must be a number, not True"),
        ("fedprox(mu=None)", "fedprox: mu must be a number, not None"),
        ("fedprox(mu=-1)", "fedprox: mu must not be negative"),
        ("fedprox(1, mu=2)", "fedprox: mu is given twice"),
        ("fedprox(mu=1, mu=2)", "fedprox: mu is given twice"),
        ("fedprox(mu=1" + "0" * 400 + ")", "fedprox: mu must be a number, not 1000"),
        ("fedadam(steps=1.0)", "fedadam: steps must be a whole number, not 1.0"),
        ("fedadam(steps=true)", "fedadam: steps must be a whole number, not True"),
        ("fedadam(amsgrad=1)", "fedadam: amsgrad must be true or false, not 1"),
        ("fedadam(clip='x')", "fedadam: clip must be a number or none, not 'x'"),
        ("fedadam(mode='fats')", "fedadam: mode must be one of 'fast', 'slow', not 'fats'"),
        ("fedadam(batch='all')", "fedadam: batch must be a whole number or 'full', not 'all'"),
        ("fedadam(betas=(0.9,))", "fedadam: betas must be (a number, a number), not (0.9,)"),
        ("fedadam(betas=0.9)", "fedadam: betas must be (a number, a number), not 0.9"),
        ("fedadam(classes=('a',))", "classes must be a list with each entry a whole number, not ('a',)"),
        ("fedadam(tag=1)", "fedadam: tag must be a text, not 1"),
        ("own(size=4)", "own: size is above 3"),
        (
            "fedprox(mu=nan)",
            "fedprox: mu must be a number, a text in quotes, true, false or a list, not 'nan'",
        ),
        ("fedprox(mu=1e999-1e999)", "mu must be a number, a text in quotes"),
        ("fedprox(mu=2**3)", "not '2 ** 3'"),
        ("fedprox(mu=1j)", "not '1j'"),
        ("fedprox(mu=-'a')", "mu must be a number"),
        ("fedprox(mu=-True)", "mu must be a number"),
        ("fedprox(mu={[1]: 2})", "mu must be a number"),
        ("fedprox(**{'mu': 1})", "fedprox: '**' is not allowed"),
        ("fedprox(*[1])", "not '*[1]'"),
        ("fedprox(mu=open('/etc/passwd'))", "mu must be a number"),
        ("__import__('os').system('true')", "expected a name, or one with settings"),
        ("fedavg - fedprox(1)", "method 'fedavg - fedprox(1)': expected a name"),
        ("'fedavg'", "expected a name"),
        ("fedavg, fedprox(1)", "expected a name"),
        ("(lambda: 1)()", "expected a name"),
        ("fedavg()()", "expected a name"),
        ("fedavg +", "method 'fedavg +': expected names such as a + b(setting=1); invalid syntax"),
        ("", "method '': expected names"),
        ("fedprox(mu=1", "was never closed"),
        ("fedavg\0", "null bytes"),
        ("x = 1", "expected names"),
        ("fedprox(mu='\\d')", "fedprox: mu must be a number"),
    ],
)
def test_what_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, REGISTRY)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["-" * 50_000 + "1", "+".join(["fedavg"] * 50_000), "(" * 50_000, "own(" + "[" * 150 + "]" * 150 + ")"],
)
def test_a_hostile_text_is_an_error_and_not_a_crash(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text, REGISTRY)


def test_what_it_is_can_be_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown partition 'fedpro'"):
        parse("fedpro", REGISTRY, "partition")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("fedavg", ["fedavg"]),
        ("a, b + c(mu=.01) ,x(a=(1, 2), b=[3, 4]),", ["a", "b + c(mu=.01)", "x(a=(1, 2), b=[3, 4])"]),
        ("a(b=', (') , 'c,d', cuda:0", ["a(b=', (')", "'c,d'", "cuda:0"]),
    ],
)
def test_split(text: str, parts: list[str]) -> None:
    assert split(text) == parts


@pytest.mark.parametrize("text", ["", " ", ",", "a,,b", ", a"])
def test_split_refuses_empty_entries(text: str) -> None:
    with pytest.raises(ConfigError, match="has an empty entry"):
        split(text)


@pytest.mark.parametrize(
    ("instances", "text"),
    [
        ([Plain()], "fedavg"),
        ([Prox(0.0)], "FedProx(mu=0.0)"),
        ([Plain(), Adam(clip=5.0, betas=(0.0, 0.5))], "fedadam(betas=(0.0, 0.5), clip=5.0)"),
        ([Adam(classes=(-1,), mode="slow", names=["it's"])], None),
        ([Adam(clip=math.inf, weights=(-math.inf, 1e-30))], None),
    ],
)
def test_render_parses_back(instances: list[Any], text: str | None) -> None:
    rendered = render(instances, REGISTRY)
    assert text is None or rendered.endswith(text)
    assert parse(rendered, REGISTRY) == instances


def test_the_registries_of_data_render_and_parse() -> None:
    for instance in (Step(10, minority=(0, 2), joint=True), LongTail(0.01), Counts({3: 4})):
        assert parse(render([instance], IMBALANCES), IMBALANCES) == [instance]
