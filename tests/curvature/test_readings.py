"""Every reading of a Hessian, or of its Gauss-Newton part, is that of one matrix by autograd, and refuses the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from curvature_reference import Formula, cross_entropy, draw, gauss_newton, mse, randomised, reverse_over_reverse
from operator_cases import LABELS, TOKENS
from readings import BY_PANELS, PANEL, READINGS, assert_readings
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature import streaming

X, T = draw(5, 3, 4), draw(5, 3, 4, seed=7)
SHORT = (X[:2, :2], T[:2, :2])


class Request(NamedTuple):
    """A module, its data as they are given, and the weighted sum of losses that they stand for: (weight, inputs, target)."""

    module: nn.Module
    data: tuple[Any, ...]
    terms: list[tuple[float, Any, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = mse
    options: dict[str, Any] = {}  # noqa: RUF012


def network() -> nn.Module:
    """Tokens that parameters move meet in the attention."""
    return randomised(nn.Sequential(nn.Linear(4, 4), hk.TransformerBlock(4, 3, d_k=2)))


def perceptron() -> Formula:
    return Formula(lambda s, x: torch.tanh(x @ s.A + s.b) @ s.C, A=(4, 3), b=(3,), C=(3, 4))


def labelled() -> Request:
    batches = [(TOKENS[:1, :3], LABELS[:1, :3]), (TOKENS[1:], LABELS[1:])]
    terms = [(2 / 6, *batches[0]), (4 / 6, *batches[1])]
    module = Formula(lambda s, ids: torch.tanh(s.E[ids] @ s.W) @ s.E.T, E=(7, 4), W=(4, 4))
    return Request(module, (batches,), terms, cross_entropy, {"loss": "cross_entropy"})


def reached_by_one_batch() -> Request:
    module = Formula(lambda s, x: torch.tanh(x @ (s.A if len(x) == 3 else s.B)), A=(4, 2), B=(4, 2))
    batches = [(X[:3], T[:3, :, :2]), (X[3:], T[3:, :, :2])]
    return Request(module, (batches,), [(0.8, *batches[0]), (0.2, *batches[1])], mse, {"params": ["A"], "weights": [4, 1]})


def partly_used() -> Formula:
    return Formula(lambda s, x: torch.tanh(x @ s.W), W=(4, 2), unused=(3,))


REQUESTS: dict[str, Callable[[], Request]] = {
    "batches of unequal lengths and weights": lambda: Request(
        network(), ([(X, T), SHORT],), [(0.25, X, T), (0.75, *SHORT)], options={"weights": [1, 3]}
    ),
    "sum over batches": lambda: Request(
        perceptron(), ([(X, T), SHORT],), [(60.0, X, T), (16.0, *SHORT)], options={"reduction": "sum"}
    ),
    "labels that are ignored": labelled,
    "a batch without effect": reached_by_one_batch,
    "a parameter without effect": lambda: Request(partly_used(), (X, T[..., :2]), [(1.0, X, T[..., :2])]),
    "some parameters": lambda: Request(
        network(), (X, T), [(1.0, X, T)], options={"params": ["1.attention.W_V", "1.feedforward.W_1"]}
    ),
    "a loss of one's own": lambda: Request(
        perceptron(), (X, T), [(1.0, X, T)], nn.functional.huber_loss, {"loss": nn.functional.huber_loss}
    ),
}


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize("name", REQUESTS)
def test_every_reading_is_that_of_one_matrix(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PANEL", PANEL)
    module, data, terms, loss, options = REQUESTS[name]()
    derivative = reverse_over_reverse if kind == "hessian" else gauss_newton
    expected = sum(weight * derivative(module, x, t, loss, options.get("params")) for weight, x, t in terms)
    value = sum(weight * float(loss(module(x).detach(), t)) for weight, x, t in terms)
    readings = READINGS | BY_PANELS if kind == "hessian" else READINGS
    given = options if kind == "hessian" else {**options, "kind": kind}
    for found in assert_readings(expected, module, *data, readings=readings, **given).values():
        assert found.loss == pytest.approx(value, rel=1e-13)
        assert found.fallbacks == ()


def test_a_module_that_returns_its_loss() -> None:
    module = Formula(lambda s, x: torch.tanh(x @ s.W).square().sum(), W=(4, 5))
    assert_readings(reverse_over_reverse(module, X, None, None), module, X, readings=READINGS | BY_PANELS, loss=None)


@pytest.mark.parametrize("name", [*READINGS, *BY_PANELS])
def test_what_has_no_matrix_is_refused_by_name(name: str) -> None:
    call = (READINGS | BY_PANELS)[name].call
    with pytest.raises(hk.InputError, match=r"none of the parameters \('unused'\) has an effect"):
        call(partly_used(), X, T[..., :2], params="unused")
    root = Formula(lambda s, x: torch.sqrt(x @ s.W), W=(4, 2), b=(3,))
    place = "products with the Hessian are" if name == "hessian_operator" else r"the block \('W', 'W'\) is"
    with pytest.raises(hk.TraceError, match="the module's own gradient in 'W' is NaN or infinite where that of the trace is not"):
        call(root, 0 * X, T[..., :2])  # no entry moves: the Hessian is zero, and torch multiplies zero by infinity
    root.W.data.zero_()
    with pytest.raises(hk.InputError, match=f"{place} NaN or infinite"):
        call(root, X, T[..., :2])
    with pytest.raises(hk.InputError, match="the derivative for '_unique2' is not implemented"):
        call(Formula(lambda s, x: (x @ s.W).unique(), W=(4, 2)), X, torch.zeros(()), loss=lambda z, t: z.square().sum())
