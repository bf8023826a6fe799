from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .stage import Stage, clean_stage


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.deploy)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with clean_stage(tmp_path) as made:
        yield made
