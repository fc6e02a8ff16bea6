"""Errors that a reader of the paper could make: check() has to catch each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import hessiankit as hk
from derivations import activation
from derivations.composition import GaussNewton
from derivations.linear import Multiple
from derivations.linearised_norms import LinearisedNorm
from derivations.loss import MeanSquaredError
from derivations.matrix import Commutation
from derivations.normalization import LayerNorm
from derivations.softmax import LinearisedSoftmax
from derivations.transformer import PostNormBlockAt
from hessiankit.engine.jacobians import GainJacobian
from hessiankit.engine.paths import Paths
from hessiankit.tracing import primitives
from hessiankit.verify.check_report import CheckReport

AGAINST = ("reverse-over-reverse", "central-differences")


def verdict(**options: object) -> CheckReport:
    torch.manual_seed(0)
    block = hk.TransformerBlock(d_model=4, d_ff=5, d_k=2, activation="gelu")
    return hk.check(block, against=AGAINST, **options)


def failed_names(report: CheckReport) -> set[str]:
    return {row.name for row in report.rows if not row.passed}


def negated_softmax(right: Any, self: LinearisedSoftmax, bar: Any, tangents: Any = None) -> Any:
    """The second derivative with the other sign: still a function of Q K^T, whose identities it fulfils."""
    if tangents is None:
        return right(self, bar)
    first, second = right(self, bar) if bar is not None else None, right(self, None, tangents)
    return tuple(None if c is None else -c if first is None else first[k] - c for k, c in enumerate(second))


def without_gain(right: Any, self: Paths, a: Any, *rest: Any) -> Any:
    return (None, None) if isinstance(a.primitive, LayerNorm) else right(self, a, *rest)


def without_inputs(right: Any, self: GainJacobian, *outputs: int) -> GainJacobian:
    """A gain taken for a shift."""
    return replace(right(self, *outputs), X=torch.ones((), dtype=self.X.dtype).expand(self.X.shape[0], len(range(*outputs))))


def normalised_twice(right: Any, self: MeanSquaredError, *args: Any) -> Any:
    return tuple(None if c is None else c * 2 / self.normalizer for c in right(self, *args))


def swapped_orders(right: Any, self: Commutation, y: torch.Tensor) -> torch.Tensor:
    return y.reshape(self.m, self.n, -1).swapaxes(0, 1).reshape(self.m * self.n, -1)


def normalised_twice_in_the_formulas(right: Any, self: PostNormBlockAt, target: torch.Tensor, i: str, j: str) -> GaussNewton:
    found, c = right(self, target, i, j), 2 / target.numel()
    return GaussNewton(c * found.outer, c * found.functional)


Q_Q, V_V, W_1 = (f"{name} x {name}" for name in ("attention.W_Q", "attention.W_V", "feedforward.W_1"))
MISTAKES: list[tuple[type, str, Any, str, str]] = [
    # of a class, a method, what is in its place, a row that fails, and one that passes
    (LinearisedSoftmax, "pull", negated_softmax, Q_Q, V_V),
    (Paths, "_mixed", without_gain, "attention.W_V x norm_1.weight", W_1),
    (GainJacobian, "part", without_inputs, "norm_1.weight x norm_1.weight", W_1),
    (MeanSquaredError, "curvature", normalised_twice, W_1, "loss"),
    (Commutation, "apply", swapped_orders, "attention.W_Q x attention.W_K (formula)", Q_Q),
    (PostNormBlockAt, "loss_hessian", normalised_twice_in_the_formulas, f"{W_1} (formula)", W_1),
]


@pytest.mark.parametrize(
    ("owner", "method", "wrong", "fails", "passes"), MISTAKES, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_mistake_is_seen_where_it_is(
    owner: type, method: str, wrong: Any, fails: str, passes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda *args, **options: wrong(right, *args, **options))
    report = verdict(formulas=fails.endswith("(formula)"))
    assert not report
    failed = failed_names(report)
    assert fails in failed
    assert passes not in failed
    assert passes in {row.name for row in report.rows}
    assert wrong is not negated_softmax or report.identities  # identities are necessary, not sufficient


def test_dropped_scale_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(primitives.RULES, torch.ops.aten.div.Tensor, lambda a, b: (Multiple(1.0), (a,)))
    report = verdict(formulas=False)
    assert not report
    assert "attention.W_Q x attention.W_K" in failed_names(report)
    assert "feedforward.W_1 x feedforward.W_1" not in failed_names(report)
    assert [row.family for row in report.identities.rows if not row.passed] == ["logits"]


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
