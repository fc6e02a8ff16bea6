"""Products replayed as CUDA graphs are the products, in any order, on any stream."""

from __future__ import annotations

import warnings

import pytest
import torch
from device_cases import DEVICE, Case, cases

import hessiankit as hk
from hessiankit.curvature import cuda_graph

pytestmark = pytest.mark.skipif(torch.device(DEVICE).type != "cuda", reason="only CUDA has these graphs")


@pytest.fixture(autouse=True)
def captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph._Trials, "launches_take_the_time", property(lambda self: self.count > 1 or None))


def vectors(H: hk.HessianOperator, count: int) -> torch.Tensor:
    return torch.randn(count, H.shape[0], 1, dtype=H.torch_dtype, device=DEVICE)


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize("model", ["encoder", "attention", "convolutions", "recurrent", "language"])
@pytest.mark.parametrize("options", [{}, {"recompute": "layers"}, {"micro_batch": 1}], ids=str)
def test_a_replayed_product_is_the_product(model: str, kind: str, options: dict[str, object]) -> None:
    case = cases(torch.float64)[model].on(DEVICE)
    H = hk.hessian_operator(case.module, *case.data, loss=case.loss, kind=kind, **options)
    v = vectors(H, 6)
    plain = [H._block(x.T)[0] for x in v]
    products = [(H @ x)[:, 0] for x in v]
    assert [type(graph).__name__ for graph in H._replayed._graphs.values()] == ["_Graph"]
    for right, product in zip(plain, products, strict=True):  # equal bits, but where rows are not aligned alike
        assert float((product - right).abs().max()) <= 1e-13 * float(right.abs().max())


def operator(**options: object) -> tuple[Case, hk.HessianOperator]:
    case = cases(torch.float32)["attention"].on(DEVICE)
    H = hk.hessian_operator(case.module, *case.data, loss=case.loss, **options)
    for _ in range(4):
        H @ torch.ones(H.shape[0], device=DEVICE)
    return case, H


def test_streams_do_not_share_a_product() -> None:
    _, H = operator()
    v = vectors(H, 8)
    plain = [H._block(x.T)[0] for x in v]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    products = []
    for k, x in enumerate(v):
        with torch.cuda.stream(streams[k % 2]):
            products.append((H @ x)[:, 0])
    torch.cuda.synchronize()
    for right, product in zip(plain, products, strict=True):
        assert torch.equal(product, right)


def test_a_replayed_product_waits_for_nothing() -> None:
    _, H = operator()
    v = vectors(H, 1)[0]
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype, it says
        torch.cuda.set_sync_debug_mode("error")
    try:
        H @ v
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_changed_parameter_is_refused() -> None:
    case, H = operator(snapshot=False)
    with torch.no_grad():
        next(case.module.parameters()).mul_(2)
    with pytest.raises(hk.InputError, match="has been given other values"):
        H @ torch.ones(H.shape[0], device=DEVICE)


def test_a_product_inside_another_capture_is_launched() -> None:
    _, H = operator()
    x, graph = torch.ones(H.shape[0], device=DEVICE), torch.cuda.CUDAGraph()
    expected = H @ x
    with torch.cuda.graph(graph):
        out = H @ x
    graph.replay()
    assert torch.equal(out, expected)
