"""Parameters on the host that are moved where products read them: against double backward, bytes present at a time, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sharded_models
import torch
import torch.nn.functional as F
from curvature_reference import Formula
from meter import PeakBytes
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hessiankit as hk

EXACT = 1e-12
TOKENS, LABELS = sharded_models.sequences()


def twice(model: nn.Module, v: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return H v by two reverse passes of torch."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with sdpa_kernel(SDPBackend.MATH):
        out = model(TOKENS)
        loss = F.cross_entropy(getattr(out, "logits", out).flatten(0, 1), LABELS.flatten())
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        products = torch.autograd.grad(slopes, parameters, list(v.values()))
    return dict(zip(v, products, strict=True))


@pytest.mark.parametrize("name", sharded_models.MODELS)
def test_products_are_those_of_double_backward(name: str) -> None:
    model = sharded_models.MODELS[name]().eval()
    before, buffers = list(model.parameters()), list(model.buffers())
    data = [(TOKENS[:2], LABELS[:2]), (TOKENS[2:], LABELS[2:])]
    A = hk.hessian_operator(model, data, loss="cross_entropy", offload="cpu")
    v = sharded_models.vector(dict(A.shapes))
    found, expected = A @ v, twice(model, v)
    largest = max(float(x.abs().max()) for x in expected.values())
    assert max(float((found[n] - expected[n]).abs().max()) for n in v) <= EXACT * largest
    assert all(p is q and q.grad is None for p, q in zip(before, model.parameters(), strict=True))
    assert all(x is y for x, y in zip(buffers, model.buffers(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("kind", ["ggn", "fisher-empirical", "fisher-mc"])
def test_other_matrices_eigenvalues_and_solutions(kind: str) -> None:
    model = sharded_models.MODELS["tied"]().eval()
    A, B = (
        hk.hessian_operator(model, TOKENS, LABELS, loss="cross_entropy", kind=kind, **options)
        for options in ({}, {"offload": "cpu"})
    )
    matrix = A.to_matrix()
    assert float((B.to_matrix() - matrix).abs().max()) <= EXACT * float(matrix.abs().max())
    assert float((B.gradient - A.gradient).abs().max()) <= EXACT * float(A.gradient.abs().max())
    assert hk.spectrum(B, k=1, tol=EXACT).eigenvalues[0] == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=EXACT)
    expected = torch.linalg.solve(matrix + torch.eye(len(matrix)), A.gradient)
    assert float((B.solve(A.gradient, damping=1.0, tol=1e-13).x - expected).norm()) <= EXACT * float(expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_layers_are_present_at_a_time(dtype: torch.dtype) -> None:
    """Bytes beside the model and vectors, in layers of the type of vectors, of a model with twelve layers."""
    model = hk.Transformer(13, 128, 512, 12, 2, placement="pre", max_len=3, causal=True).to(dtype).eval()
    layer = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    held = sum(p.numel() * p.itemsize for p in model.parameters())
    tokens = torch.tensor([[1, 2, 3]])
    with PeakBytes(*model.parameters()) as alive:
        A = hk.hessian_operator(model, tokens, tokens, loss="cross_entropy", offload="cpu", handshake=False)
    assert layer / 2 < alive.marked - held < 2.5 * layer
    V = torch.randn(A.shape[0], 2)
    A @ V  # with the test of symmetry
    v = V[:, 0].clone()
    with PeakBytes(*model.parameters(), V, v) as alive:
        A @ v
    vectors = 4 * 4 * len(v)  # V, v, a row of it, and the result
    assert layer < alive.marked - held - vectors < 3 * layer


def linear(formula: Callable[[Any, Tensor], Tensor] = lambda m, x: m.lin(x), **options: Any) -> Any:
    x = torch.ones(2, 3)
    return hk.hessian_operator(Formula(formula, lin=nn.Linear(3, 3)).float(), x, x, **{"offload": "cpu", **options})


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "a device that is not there": (lambda: linear(offload="cuda:77"), "hessian_operator: offload='cuda:77': "),
    "a name of no device": (lambda: linear(offload="gpus"), "hessian_operator: offload='gpus': "),
    "parts of a batch": (lambda: linear(micro_batch=1), "micro_batch= does not go with offload="),
    "second order": (lambda: linear(handshake="second order"), "handshake= does not go with offload=; pass handshake=True"),
    "copies": (lambda: linear(snapshot=True), "snapshot= does not go with offload="),
    "no closed form": (lambda: linear(lambda m, x: torch.sinc(m.lin(x))), "sinc.* has no closed form yet"),
    "an approximation": (lambda: linear().approximation("kfac"), "'kfac' takes whole layers"),
    "parameters elsewhere": (
        lambda: hk.hessian_operator(nn.Linear(1, 1, device="meta"), torch.ones(1, 1), torch.ones(1, 1), offload="cpu"),
        "some are on meta",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(hk.InputError, match=message):
        call()


def test_another_gradient_than_that_of_the_trace_is_an_error() -> None:
    def hooked(m: Any, x: Tensor) -> Tensor:
        z = torch.tanh(m.lin(x))
        z.register_hook(lambda slope: 3 * slope)
        return z

    with pytest.raises(hk.TraceError, match=r"the gradient with respect to '.*', as traced, is off by"):
        linear(hooked)
