"""Plain functions of parameters and data: every call takes them, and tensors keep their identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from curvature_reference import draw
from torch import Tensor, nn

import hessiankit as hk

X, Y = draw(5, 3), draw(5, 2)


def fit(p: Any, x: Tensor, y: Tensor) -> Tensor:
    """The squared error of a network with its parameters in a dict of a tensor and a list."""
    return (torch.tanh(x @ p["w"]) @ p["v"][0] - y + p["v"][1]).square().mean()


def exact(f: Any, flat: Tensor) -> Tensor:
    """Reverse over reverse, of a function of one flat vector."""
    v = flat.clone().requires_grad_()
    (slope,) = torch.autograd.grad(f(v), v, create_graph=True)
    return torch.stack([torch.autograd.grad(s, v, retain_graph=True)[0] for s in slope])


def parameters() -> dict[str, Any]:
    return {"w": draw(3, 4), "v": [draw(4, 2), draw(2)]}


def of_flat(v: Tensor) -> dict[str, Any]:
    return {"w": v[:12].view(3, 4), "v": [v[12:20].view(4, 2), v[20:]]}


def test_every_call_takes_a_function_of_nested_parameters() -> None:
    p = parameters()
    module = hk.from_function(fit, p)
    H = exact(lambda v: fit(of_flat(v), X, Y), torch.cat([p["w"].reshape(-1), p["v"][0].reshape(-1), p["v"][1]]))
    found = hk.hessian(module, X, Y)
    assert found.names == ("w", "v.0", "v.1")
    torch.testing.assert_close(found.matrix, H, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(hk.hessian_operator(module, (X, Y)).to_matrix(), H, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(hk.hessian_diagonal(module, X, Y).flat, H.diagonal(), atol=1e-12, rtol=1e-12)
    assert abs(hk.frobenius_norms(module, X, Y).whole - float(H.norm())) < 1e-12
    assert abs(float(hk.spectrum(module, X, Y, k=1).eigenvalues[0]) - float(torch.linalg.eigvalsh(H)[-1])) < 1e-9
    assert hk.check(module, (X, Y))


@pytest.mark.parametrize(
    ("f", "params", "inputs"),
    [
        (lambda x: (x[1:] - x[:-1]).norm(dim=1).square().sum() + (x**4).sum(), draw(3, 2), ()),  # an energy, in positions
        (lambda p, x: (p[0] * x).sin().sum() * p[1].square().sum(), (draw(3), draw(2)), draw(3)),
        (lambda z, w: torch.logsumexp(w @ z, 0), draw(4), draw(6, 4)),  # a loss in an activation
    ],
)
def test_functions_of_positions_of_tuples_and_of_activations(f: Any, params: Any, inputs: Any) -> None:
    parts = list(params) if isinstance(params, tuple) else [params]
    data = inputs if isinstance(inputs, tuple) else (inputs,)
    sizes = [part.numel() for part in parts]

    def flat(v: Tensor) -> Tensor:
        pieces = [piece.view(part.shape) for piece, part in zip(v.split(sizes), parts, strict=True)]
        return f(tuple(pieces) if isinstance(params, tuple) else pieces[0], *data)

    H = exact(flat, torch.cat([part.reshape(-1) for part in parts]))
    torch.testing.assert_close(hk.hessian(hk.from_function(f, params), inputs).matrix, H, atol=1e-11, rtol=1e-11)


def test_tensors_keep_their_identity() -> None:
    p, layer = draw(3), nn.Linear(3, 1).double()
    module = hk.from_function(lambda q, x: (layer(x) * q["p"]).square().sum(), {"p": p, "weight": layer.weight})
    assert dict(module.named_parameters())["weight"] is layer.weight
    before = hk.hessian(module, X).matrix
    p.mul_(2)  # written into: seen
    after = hk.hessian(module, X).matrix
    assert float(after[-1, -1]) == pytest.approx(4 * float(before[-1, -1]))
    assert float(after[0, 0]) == pytest.approx(float(before[0, 0]))


@pytest.mark.parametrize(
    ("f", "params", "message"),
    [
        (nn.Linear(2, 2), draw(2), "f is a Linear; pass a function"),
        (3, draw(2), "f is a int; pass a function"),
        (lambda p: p, {"a": 3}, "params holds int; pass floating-point tensors"),
        (lambda p: p, {}, "params holds dict; pass floating-point tensors"),
        (lambda p: p, torch.tensor([1]), "params holds torch.int64; pass floating-point tensors"),
    ],
)
def test_what_is_no_function_of_tensors(f: Any, params: Any, message: str) -> None:
    with pytest.raises(hk.InputError, match=f"^from_function: {message}"):
        hk.from_function(f, params)


def test_a_function_that_is_no_scalar() -> None:
    with pytest.raises(hk.InputError, match="hessian: loss=None means that the module returns the loss, but it returns shape"):
        hk.hessian(hk.from_function(lambda p: p, draw(2)), ())
