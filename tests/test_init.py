from __future__ import annotations

import subprocess
import sys

import pytest

import equipoise
from equipoise import methods


def test_every_name_is_there() -> None:
    for name in equipoise.__all__:
        assert getattr(equipoise, name) is not None
    assert {kind.__name__ for kind in methods.METHODS.values()} <= set(equipoise.__all__)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Climbing'"):
        _ = equipoise.Climbing  # type: ignore[attr-defined]


def test_handing_a_message_over_needs_no_torch() -> None:
    code = "import sys; from equipoise.deploy.transport import carrier, wire; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
