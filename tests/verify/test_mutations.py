"""Errors that a reader of the paper could make: check() has to catch each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hessiankit as hk
from derivations.matrix import Commutation
from hessiankit.primitives import activation
from hessiankit.primitives.linear import Multiple
from hessiankit.primitives.linearised_norms import LinearisedNorm
from hessiankit.tracing import rules
from hessiankit.verify.check_report import CheckReport


def verdict(**options: object) -> CheckReport:
    torch.manual_seed(0)
    block = hk.TransformerBlock(d_model=4, d_ff=5, d_k=2, activation="gelu")
    return hk.check(block, against=("reverse-over-reverse", "central-differences"), **options)


def failed_names(report: CheckReport) -> set[str]:
    return {row.name for row in report.rows if not row.passed}


def test_dropped_scale_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules.RULES, torch.ops.aten.div.Tensor, lambda a, b: (Multiple(1.0), (a,)))
    report = verdict(formulas=False)
    assert not report
    assert "attention.W_Q x attention.W_K" in failed_names(report)
    assert "feedforward.W_1 x feedforward.W_1" not in failed_names(report)
    assert [row.family for row in report.identities.rows if not row.passed] == ["logits"]


def test_an_error_in_the_formulas_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commutation with its orders swapped."""
    monkeypatch.setattr(Commutation, "apply", lambda K, y: y.reshape(K.m, K.n, -1).swapaxes(0, 1).reshape(K.m * K.n, -1))
    report = verdict()
    assert not report
    assert "attention.W_Q x attention.W_K (formula)" in failed_names(report)
    assert all(name.endswith("(formula)") for name in failed_names(report))


def test_an_error_in_products_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix is right, and the operator finds itself asymmetric and refuses."""
    right = LinearisedNorm._to_gain

    def half(self: LinearisedNorm, u: Any, t: Any, along: Any, out: torch.Tensor, scratch: Any) -> None:
        right(self, u, t, along, out, scratch)
        out.mul_(0.5)

    monkeypatch.setattr(LinearisedNorm, "_to_gain", half)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)).double()
    report = hk.check(module, torch.randn(5, 3).double(), torch.randn(5, 4).double())
    assert failed_names(report) == {"operator"}
    assert not report
    assert "hessian_operator refuses the same call" in str(report)


def test_an_error_in_a_block_that_is_a_billionth_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Faint(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W, self.V = (torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.W + 1e-9 * torch.tanh(x @ self.V)

    torch.manual_seed(0)
    module, x, target = Faint(), torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    assert hk.check(module, x, target)
    right = activation.derivatives

    def other(kind: str, x: Any, *rest: Any) -> Any:
        value, first, second = right(kind, x, *rest)
        return value, first, second if second is None or kind != "tanh" else -second

    monkeypatch.setattr(activation, "derivatives", other)
    report = hk.check(module, x, target)
    assert not report
    assert failed_names(report) == {"V x V", "operator: V", "diagonal: V"}
