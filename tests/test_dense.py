"""Dense layers with few outputs: the same values and gradients as torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from equipoise import dense
from equipoise.dense import FEW, Dense, sum_of_products
from equipoise.network import Network


def test_few_outputs_are_enough_to_be_replaced() -> None:
    class Own(nn.Linear):
        pass

    others = [nn.Linear(4, FEW + 1), Own(4, 3)]
    network = Network(nn.Sequential(nn.Linear(7, 4), *others))
    assert [type(layer) for layer in network.module] == [Dense, *map(type, others)]


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_stacked_clients_equal_torchs(
    bias: bool, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(7, 3, bias=bias).double()
    draw = torch.Generator().manual_seed(0)
    params = {k: torch.randn(4, *p.shape, generator=draw, dtype=p.dtype) for k, p in layer.named_parameters()}
    x = torch.randn(4, 5, 7, generator=draw, dtype=torch.float64)
    used = []

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(layer, params, (x,))
        return y.sin().square().sum()

    want = torch.vmap(torch.func.grad(loss, argnums=(0, 1)))(params, x)
    layer.__class__ = Dense
    monkeypatch.setattr(dense, "_narrow", lambda *_: True)
    monkeypatch.setattr(dense, "sum_of_products", lambda *given: used.append(1) or sum_of_products(*given))
    ours = torch.vmap(torch.func.grad(loss, argnums=(0, 1)))
    if backend:
        torch._dynamo.reset()
        ours = torch.compile(ours, fullgraph=False, dynamic=False, backend=backend)
    got = ours(params, x)
    assert used
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
