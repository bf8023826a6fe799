"""Questions and `Data.totals` may read what the model's head reads."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from equipoise import Stacked
from equipoise.core.chain import Chain
from equipoise.core.client import Data, Env
from equipoise.core.method import Method
from equipoise.core.questions import Question
from equipoise.core.round import one_round, start
from equipoise.core.tree import Tree
from equipoise.engines import Serial
from tests.federations import federation


@dataclass(frozen=True)
class FeatureSums(Question):
    needs_features = True

    def measure(self, outputs: Tensor, y: Tensor, mask: Tensor, features: Tensor | None = None) -> Tree:
        assert features is not None
        return {"sum": torch.where(mask[:, None], features, 0).sum(0)}


@dataclass(frozen=True)
class Adding(Method):
    name = "adding"
    needs_data = True

    def finish(self, delta: Tree, env: Env, data: Data | None) -> tuple[Tree, Tree]:
        assert data is not None

        def measure(outputs: Tensor, y: Tensor, mask: Tensor, features: Tensor) -> Tree:
            return {"sum": torch.where(mask[:, None], features, 0).sum(0)}

        return data.totals(env, env.start, measure, features=True), env.memory


@pytest.mark.parametrize("kind", [Serial, Stacked])
def test_sums_of_features_are_those_of_all_samples(kind: type) -> None:
    fed = federation(nn.Linear(5, 3))  # its head reads its inputs
    chain = Chain(Adding())
    engine = kind(fed, precision="float64")
    state = start(fed, chain, engine)
    wanted = engine.inputs(fed.x[fed.indices.long()]).sum(0)
    got = engine.ask(FeatureSums(), state.params, state.buffers)["sum"]
    torch.testing.assert_close(got, wanted)
    _, sums = one_round(state, fed, chain, engine)
    if sums.clients == len(fed.eligible):
        torch.testing.assert_close(sums.uploads["adding"]["sum"], wanted)
