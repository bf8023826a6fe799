"""Laws of expressions: what is rendered is read back, and no text can do more than raise a ConfigError."""

from __future__ import annotations

import gc
import importlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from equipoise.core.chain import Chain
from equipoise.core.errors import ConfigError
from equipoise.core.expression import names, parse, render, split
from equipoise.core.method import Method
from equipoise.data.imbalance import IMBALANCES
from equipoise.data.partition import PARTITIONS, SIZES
from equipoise.methods import METHODS, registry
from equipoise.methods.climb_settings import PRESETS
from tests.strategies import instances


@dataclass(frozen=True)
class Everything:
    """One setting of each type that an expression can hold."""

    text: str
    number: float = 0.5
    count: int = 3
    flag: bool = False
    mode: Literal["fast", "slow"] = "fast"
    size: int | Literal["full"] = 8
    limit: float | None = None
    pair: tuple[float, int] = (0.9, 1)
    words: tuple[str, ...] = ()
    nested: tuple[tuple[int, ...], ...] = ((1, 2),)


OWN: dict[str, type[Any]] = {"everything": Everything}
REGISTRIES: dict[str, Mapping[str, type[Any]]] = {
    "methods": METHODS,
    "imbalances": IMBALANCES,
    "partitions": PARTITIONS,
    "own": OWN,
}
# Settings that take few of all values of their type.
CHOICES: dict[str, tuple[Any, ...]] = {
    "preset": (None, *PRESETS),
    "sizes": SIZES,
    "prior": ("global", "uniform", (0.25, 0.75), (0.5, 0.25, 0.25)),
    "order": (None, (1, 0), (2, 0, 1)),
    "minority": ((0,), (3, 1), (7, 0, 2)),
    "clients": (1, 10, 10**6),
    "rho": (1, 2.5, 100),
    "ratio": (1, 10.5),
    "alpha": (0.1, 1.0, 1e-5, 1e5),
    "factor": (100, 0.01, 1e-310),
}


def members(which: str) -> st.SearchStrategy[Any]:
    """Return random instances of the classes of a registry."""
    return st.one_of([instances(kind, CHOICES) for kind in REGISTRIES[which].values()])


# -- what is rendered is read back -----------------------------------------------------------------------------------
@pytest.mark.parametrize("which", REGISTRIES)
@given(data=st.data())
@settings(max_examples=80)
def test_what_is_rendered_is_read_back(which: str, data: st.DataObject) -> None:
    known = REGISTRIES[which]
    given_ones = data.draw(st.lists(members(which), min_size=1, max_size=3))
    text = render(given_ones, known)
    found = parse(text, known)
    assert found == given_ones
    assert [type(one) for one in found] == [type(one) for one in given_ones]
    assert parse(render(found, known), known) == found
    assert parse(f"  {text}\n".upper() if text.isalpha() else f"  {text}\n", known) == given_ones
    by_kind = {kind: name for name, kind in known.items()}
    assert names(text) == [by_kind[type(one)] for one in given_ones]


@given(st.lists(members("methods"), min_size=1, max_size=3, unique_by=lambda method: method.name))
def test_the_text_of_a_chain_gives_the_chain(methods: list[Method]) -> None:
    chain = Chain(*methods)
    assert registry.parse(str(chain)) == chain
    assert registry.parse(str(chain), allow=()) == chain


@given(st.floats(allow_nan=False), st.text(max_size=6))
def test_a_method_of_ones_own_with_any_number_and_text_gives_its_text_back(number: float, text: str) -> None:
    own = Own(limit=number, text=text)
    assert parse(str(own), {}, load={f"{__name__}:Own": Own}.__getitem__) == [own]


@dataclass(frozen=True)
class Own(Method):
    limit: float = math.inf
    text: str = ""

    name = "own"


@pytest.mark.parametrize("joined", [",", ", ", " ,\n"])
@given(
    parts=st.lists(members("own") | members("methods") | members("imbalances"), min_size=1, max_size=4),
    quoted=st.lists(st.text("ab,()'\"\\", max_size=6), max_size=2),
)
def test_split_undoes_joining_with_commas(joined: str, parts: list[Any], quoted: list[str]) -> None:
    every = {f"{which}_{name}": kind for which, known in REGISTRIES.items() for name, kind in known.items()}
    texts = [render([part], every) for part in parts] + [repr(text) for text in quoted]
    assert split(joined.join(texts)) == texts
    assert split(joined.join(texts) + ",") == texts


# -- names of classes of one's own -----------------------------------------------------------------------------------
WORD = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True) | st.sampled_from(["_own0", "_own1", "os", "if"])
REFERENCE = st.builds(lambda path, name: f"{'.'.join(path)}:{name}", st.lists(WORD, min_size=1, max_size=3), WORD)
SETTINGS = st.one_of(
    st.just(""),
    st.just("()"),
    st.builds(lambda key, text: f"(a{key}={text!r}, other=[1, (2, 3)])", WORD, st.text(max_size=8) | REFERENCE),
    st.builds(lambda text: f"({text!r}, {{1: {text!r}}})", st.text("()[]{}'\"\\:,+ab.", max_size=8)),
)
SPACE = st.sampled_from(["", " ", "  ", "\t"])


@given(st.lists(st.tuples(REFERENCE | st.sampled_from(["climb", "_own0", "fedavg"]), SETTINGS, SPACE), min_size=1))
def test_names_are_as_they_are_written(terms: list[tuple[str, str, str]]) -> None:
    text = "+".join(f"{space}{name}{given_settings}{space}" for name, given_settings, space in terms)
    assert names(text) == [name for name, _, _ in terms]


@given(REFERENCE)
def test_a_class_of_ones_own_is_loaded_by_its_name_only_where_that_is_allowed(name: str) -> None:
    asked: list[str] = []

    def load(given_name: str) -> type:
        asked.append(given_name)
        return Everything

    assert parse(f"{name}('a') + everything('b')", OWN, load=load) == [Everything("a"), Everything("b")]
    assert asked == [name]
    with pytest.raises(ConfigError, match="unknown method"):
        parse(f"{name}('a')", OWN)


# -- no text does harm -----------------------------------------------------------------------------------------------
PIECES = [
    "climb", "fedavg", "step", "iid", "everything", "text", "clients", "=", "==", "(", ")", "[", "]", "{", "}", ",",
    "+", "-", "*", "**", ":", ".", ";", "'", '"', "\\", "#", "\n", " ", "\t", "0", "1", "1e999", "-1", "1j",
    "0x" + "f" * 4000, "9" * 5000, "true", "None", "lambda",
    "import", "for x in", "await", "yield", ":=", "f'{", "}'", "b'", "...", "@",
    "__import__('os').system('true')", "open('/dev/null')", "eval('1')", "exec('1')", "colorsys:hsv_to_rgb",
    "this:s", "os:system", "().__class__", "[x for x in ()]", "\0", "\ud800", "é", "ﬁ", "\ufeff", "_own0",
]  # fmt: skip
TEXTS = st.one_of(
    st.text(),
    st.text(st.characters(categories=None)),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=6).map(lambda pieces: f"everything({''.join(pieces)})"),
    st.lists(st.sampled_from(PIECES), max_size=6).map(lambda pieces: f"everything(text={''.join(pieces)})"),
)
# What the interpreter reports when code is run, a module is imported, a file is opened or a process is started.
# Reading the grammar is reported as "compile", which is allowed.
HARM = ("exec", "import", "open", "os.", "subprocess.", "socket.", "ctypes.", "marshal.", "pickle.")
_seen: list[str] | None = None


def _audit(event: str, _: Any) -> None:
    if _seen is None or not event.startswith(HARM) or threading.current_thread() is not threading.main_thread():
        return
    if event == "exec" and sys._getframe(1).f_globals["__name__"] == "typing":
        return  # the annotations of a class of ours, which no text can change
    _seen.append(event)


sys.addaudithook(_audit)  # a hook cannot be removed; without a list to write to it does nothing


@contextmanager
def harmless() -> Iterator[None]:
    """Fail if code is run, or anything is imported, opened or started."""
    global _seen
    seen: list[str] = []
    gc.disable()  # what another test has left behind may open or remove files when it is collected
    _seen = seen
    try:
        # A module that is loaded already, or is not there, is imported without a report of the interpreter.
        with patch.object(importlib, "import_module", seen.append):
            yield
    finally:
        _seen = None
        gc.enable()
    assert not seen


@pytest.mark.parametrize(
    "deed",
    [
        lambda: eval("1"),
        lambda: exec("1"),
        lambda: open(os.devnull).close(),
        lambda: os.system("true"),
        lambda: importlib.import_module("a_module_that_nobody_has"),
    ],
    ids=["eval", "exec", "open", "system", "import"],
)
def test_harm_would_be_seen(deed: Callable[[], Any]) -> None:
    with pytest.raises(AssertionError), harmless(), suppress(ImportError):
        deed()


@given(TEXTS)
@example("everything(" + "(" * 5000)
@example("-" * 20_000 + "1")
@example("everything(text=" + "[" * 150 + "]" * 150 + ")")
@example("+".join(["everything"] * 5000))
@example("everything(number=0x" + "f" * 5000 + ")")
@example("everything(text=f(0x" + "f" * 5000 + "))")
@example("\ud800")
@example("everything(**{'text': 'a'})")
@example("everything(*['a'])")
@example("colorsys:hsv_to_rgb(1)")
@example("fedavg + os:system")
@example("everything('a', text='b')")
@settings(max_examples=250)
def test_no_text_does_more_than_raise_a_config_error(text: str) -> None:
    with harmless():
        sentences = refusals(text)
    assert sentences  # no text means something in all places
    assert all(sentences)


def refusals(text: str) -> list[str]:
    """Return the errors that a text raises in all places that read one."""
    sentences = []
    for attempt in (
        lambda: parse(text, OWN),
        lambda: parse(text, IMBALANCES, "imbalance"),
        lambda: names(text),
        lambda: split(text),
        lambda: registry.parse(text, allow=()),
    ):
        try:
            attempt()
        except ConfigError as error:
            sentences.append(str(error))
    return sentences


refusals("nothing(1, [], 2)")  # what is read from disk once, such as the list of installed packages, is read now
