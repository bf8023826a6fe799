"""What is kept of clients while the same ones come again."""

from __future__ import annotations

import torch

from equipoise.engines import cohort_cache as recent
from equipoise.engines.cohort_cache import CohortCache


def test_what_was_found_is_kept_for_the_same_clients_and_question() -> None:
    kept, asked = CohortCache(), []

    def find() -> int:
        asked.append(None)
        return len(asked)

    ids = torch.tensor([3, 1])
    assert [kept.of(ids, "a", find=find), kept.of(ids.clone(), "a", find=find)] == [1, 1]
    assert kept.of(ids, "b", find=find) == 2
    assert kept.of(ids.flip(0), "a", find=find) == 3
    assert kept.of(ids[None], "a", find=find) == 4  # the same numbers, of another shape
    kept.forget()
    assert kept.of(ids, "a", find=find) == 5


def test_cohorts_that_hardly_ever_come_again_do_not_pile_up() -> None:
    kept = CohortCache()
    for number in range(3 * recent.MOST):
        assert kept.of(torch.tensor([number]), find=lambda number=number: number) == number  # type: ignore[misc]
        assert len(kept.found) <= recent.MOST
