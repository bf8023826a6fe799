from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from equipoise.runs.mistakes import belongs_on_top, misplaced, sentences


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    size: Annotated[int, Field(ge=1, description="a count")]
    mode: Literal["fast", "slow"] | Annotated[float, Field(gt=0, description="a speed")] | None = None
    share: float = 0.5

    @field_validator("share")
    @classmethod
    def _checked(cls, share: float) -> float:
        if share > 1:
            raise ValueError("inner.share is a share")
        return share


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    title: str = ""
    inner: Inner


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({}, "inner is missing: expected a table with size"),
        ({"inner": 3}, "inner = 3: expected a table with size"),
        ({"inner": {}}, "inner.size is missing: expected a count"),
        ({"inner": {"size": 0}}, "inner.size = 0: expected a count"),
        ({"inner": {"size": 1, "mode": "x"}}, "inner.mode = 'x': expected one of 'fast', 'slow', or a speed"),
        ({"inner": {"size": 1, "share": 2.0}}, "inner.share is a share"),
        ({"inner": {"size": 1, "mood": 1}}, "unknown key inner.mood; did you mean 'mode'?"),
        ({"inner": {"size": 1}, "mode": 1.0}, "unknown key mode; did you mean 'inner.mode'?"),
        ({"inner": {"size": 1, "title": ""}}, "inner.title: title belongs at the top of the file"),
        ({"inner": {"size": 0, "mode": 0.0}, "title": 1}, "title = 1: expected a text (and 2 more)"),
    ],
)
def test_sentences(raw: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(raw)
    assert sentences(caught.value.errors(), raw, Outer).startswith(sentence)


def test_misplaced_looks_into_every_table_but_the_open_one() -> None:
    raw = {"method": 1, "a": {"method": 2, "b": {"method": 3}, "c": {"method": 4}}}
    assert list(misplaced("method", raw, open_table="a.c")) == ["a.method", "a.b.method"]
    assert belongs_on_top("a.b.method").startswith("a.b.method: method belongs at the top of the file; below [a.b]")
