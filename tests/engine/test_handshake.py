"""Before a result, the trace's loss and gradient are those of the module's own call; what differs is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw, mse, reverse_over_reverse
from torch import Tensor, nn

import hessiankit as hk
from derivations.linear import Linear
from derivations.primitive import Linearised, into

X, T = draw(6, 4), draw(6, 3, seed=7)

RESULTS: dict[str, Callable[..., Any]] = {
    "hessian": lambda *a, **k: hk.hessian(*a, **k).matrix,
    "lazy": lambda *a, **k: hk.hessian(*a, lazy=True, **k).block("0.weight", "2.weight"),
    "in chunks": lambda *a, **k: hk.hessian(*a, batch_size=2, **k).matrix,
    "outer": lambda *a, **k: hk.hessian(*a, lazy=True, **k).outer(),
    "operator": lambda *a, **k: hk.hessian_operator(*a, **k),
    "ggn": lambda *a, **k: hk.hessian_operator(*a, kind="ggn", **k),
    "diagonal": lambda *a, **k: hk.hessian_diagonal(*a, **k),
    "diagonal in chunks": lambda *a, **k: hk.hessian_diagonal(*a, batch_size=2, **k),
    "norms": lambda *a, **k: hk.frobenius_norms(*a, **k),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


class _Halved:
    """A linearised primitive that pulls back half of every covector."""

    def __init__(self, right: Linearised) -> None:
        self._right = right

    def __getattr__(self, name: str) -> Any:
        return getattr(self._right, name)

    def pull(self, *args: Any, **kwargs: Any) -> Any:
        return tuple(None if c is None else c / 2 for c in self._right.pull(*args, **kwargs))

    def pull_into(self, bar: Any, tangents: Any, sums: Any) -> Any:
        return into(sums, self.pull(bar, tangents))


@pytest.mark.parametrize("name", RESULTS)
def test_a_wrong_derivative_of_a_primitive_stops_every_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linearise = Linear.linearise
    monkeypatch.setattr(Linear, "linearise", lambda self, *args: _Halved(linearise(self, *args)))
    with pytest.raises(hk.TraceError, match=r"the gradient in '[02]\.(weight|bias)', as traced, is off by"):
        RESULTS[name](network(), X, T)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-6), (torch.float32, 1e-2)])
def test_a_wrong_value_stops_a_result(dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from derivations.loss import MeanSquaredError

    value = MeanSquaredError.value
    monkeypatch.setattr(MeanSquaredError, "value", lambda self, z, t: value(self, z, t) + error)
    with pytest.raises(hk.TraceError, match="the loss, as traced, is off by"):
        hk.hessian(network().to(dtype), X.to(dtype), T.to(dtype))


def test_without_it_the_result_says_so() -> None:
    module = network()
    H = hk.hessian(module, X, T, handshake=False)
    operator = hk.hessian_operator(module, X, T, handshake=False)
    diagonal = hk.hessian_diagonal(module, X, T, handshake=False)
    norms = hk.frobenius_norms(module, X, T, handshake=False)
    assert not any(found.handshake for found in (H, operator, diagonal, norms))
    for found in (H, diagonal, norms):
        assert "not compared with the module's own gradient" in found.table()
    compared = hk.hessian(module, X, T)
    assert compared.handshake
    assert "not compared" not in compared.table()
    assert torch.equal(compared.matrix, H.matrix)


class _Counted(nn.Tanh):
    """A layer that counts its calls where nothing puts the count back."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x)


@pytest.mark.parametrize("handshake", [True, False])
def test_the_module_is_called_once_as_it_is_and_once_to_be_traced(handshake: bool) -> None:
    module = network()
    module[1] = _Counted()
    _Counted.calls = 0
    hk.hessian_operator(module, X, T, handshake=handshake)
    assert _Counted.calls == 2


def test_a_gradient_of_nothing_but_rounding_is_no_difference() -> None:
    """At a minimum the gradient is what cancellation leaves, and the two routes leave other digits of it."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).double()
    with torch.no_grad():
        ones = torch.cat([X, torch.ones(6, 1).double()], 1)
        best = torch.linalg.lstsq(ones, T).solution
        layer.weight.copy_(best[:4].T)
        layer.bias.copy_(best[4])
    found = hk.hessian(layer, X, T).matrix
    expected = reverse_over_reverse(layer, X, T, mse)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_a_row_that_an_embedding_leaves_out_of_the_gradient_is_a_constant() -> None:
    """The row of a padding_idx: torch's gradient does not know it, and neither does the Hessian."""
    torch.manual_seed(0)
    padded = nn.Sequential(nn.Embedding(5, 4, padding_idx=1), nn.Tanh(), nn.Linear(4, 3)).double()
    plain = nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        padded[0].weight.normal_()
    plain.load_state_dict(padded.state_dict())
    tokens = torch.tensor([0, 1, 2, 1, 4, 3])
    expected = hk.hessian(plain, tokens, T).matrix.clone()
    assert expected[4:8].any()
    expected[4:8], expected[:, 4:8] = 0, 0
    found = hk.hessian(padded, tokens, T).matrix
    assert torch.equal(found == 0, expected == 0)
    assert (found - expected).abs().max() <= 1e-15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_of_coarse_types_is_no_difference(dtype: torch.dtype) -> None:
    block = hk.TransformerBlock(d_model=16, d_ff=32, n_heads=2, activation="gelu").to(dtype)
    x = draw(2, 5, 16).to(dtype)
    assert hk.hessian_operator(block, x, x.flip(0)).handshake


@pytest.mark.parametrize("change", [lambda m: delattr(m, "W"), lambda m: setattr(m, "v", m.W)])
def test_a_lazy_result_is_that_of_the_parameters_that_there_were(change: Callable[[nn.Module], None]) -> None:
    module = Formula(lambda s, x: torch.fft.rfft(torch.tanh(x @ s.W) * s.v).abs().sum(-1, keepdim=True) * s.v, W=(4, 3), v=(3,))
    lazy, expected = hk.hessian(module, X, T, lazy=True), hk.hessian(module, X, T)
    assert expected.fallbacks  # of which central differences of the module's own gradient are taken
    change(module)
    assert torch.equal(lazy.matrix, expected.matrix)


def test_what_a_later_gradient_shows_to_have_changed_is_refused() -> None:
    """A flag that detaches leaves the loss as it was; the rest of a result is computed later."""
    stopped = _FLAGS["stopped"]
    module = Formula(_with_a_flag, W=(4, 3), V=(3, 3))
    found, lazy = hk.hessian(module, X, T), hk.hessian(module, X, T, lazy=True)
    expected = found.outer()
    stopped.add("yes")
    for compute in (found.outer, lambda: lazy.matrix):
        with pytest.raises(hk.TraceError, match="two calls of the module on the same data give different gradients in 'W'"):
            compute()
    stopped.clear()
    assert torch.equal(found.outer(), expected)


_FLAGS: dict[str, set[str]] = {"stopped": set()}


def _with_a_flag(s: nn.Module, x: Tensor) -> Tensor:
    y = torch.tanh(x @ s.W)
    return (y.detach() if _FLAGS["stopped"] else y) @ s.V
