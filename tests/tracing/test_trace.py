"""Traces: the module's values, in order, with the closed form of every step; or one clear reason why not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw, randomised
from torch import Tensor, nn

import hessiankit as hk
from derivations.linear import Add, MatMul, Multiple
from hessiankit.tracing.fallback import AutomaticDifferentiation
from hessiankit.tracing.source_line import source_line
from hessiankit.tracing.trace import Trace

EVERYTHING = {"bias": True, "attention_bias": True, "n_heads": 2, "causal": True}


def traced(module: nn.Module, *inputs: Tensor) -> Trace:
    def function(parameters: dict[str, Tensor], *given: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, given)

    return hk.trace_module(function, dict(module.named_parameters()), inputs)


def kinds(trace: Trace) -> list[type]:
    return [type(a.primitive) for a in trace.applications]


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"placement": "pre", "norm": "rmsnorm", "activation": "silu", "d_k": 3}])
def test_values_are_the_modules(options):
    block = randomised(hk.TransformerBlock(4, 5, **options))
    x = draw(2, 3, 4)
    trace = traced(block, x)
    assert torch.equal(trace.values[trace.output], block(x))
    assert trace.fallbacks == ()
    for a in trace.applications:  # every step is its primitive applied to the values before it
        value = a.primitive.value(*trace.gather(a))
        assert value.shape == trace.values[a.output].shape
        assert torch.allclose(value, trace.values[a.output], rtol=0, atol=1e-14)
        assert all(i is None or i < a.output for i in a.inputs)


def test_what_has_no_chapter_is_named_once_and_differentiated():
    module = Formula(lambda s, x: torch.sinc(torch.special.i0e((x @ s.W).sinc())), W=(4, 2))
    trace = traced(module, draw(3, 4))
    assert trace.fallbacks == ("aten.sinc.default", "aten.special_i0e.default")
    assert kinds(trace) == [MatMul, *[AutomaticDifferentiation] * 3]
    assert "aten.sinc.default" in hk.hessian(module, draw(3, 4), draw(3, 2)).table()
    assert "AutomaticDifferentiation" in str(trace)
    assert str(trace).endswith(f"differentiated by torch: {', '.join(trace.fallbacks)}")


def test_nested_inputs_and_numbers():
    module = Formula(lambda s, pair, scale: (pair["a"] @ s.W) * scale + pair["b"][0], W=(4, 2))
    given = {"a": draw(3, 4), "b": [draw(3, 2)]}
    trace = hk.trace_module(lambda p, *g: torch.func.functional_call(module, p, g), {"W": module.W}, (given, 2.0))
    assert torch.equal(trace.values[trace.output], module(given, 2.0))
    assert kinds(trace) == [MatMul, Multiple, Add]


def branch_on_data(s: Formula, x: Tensor) -> Tensor:
    y = torch.tanh(x @ s.W)
    return y * 2 if (x > 0).all() else y * x.max().item() + x.tolist()[0][0]


def branch_on_values(s: Formula, x: Tensor) -> Tensor:
    y = torch.tanh(x @ s.W)
    return y * y if y.sum() > 0 and not torch.equal(y, x[:, :2]) else -y


def expert_of_each_row(s: Formula, x: Tensor) -> Tensor:
    y = torch.tanh(x @ s.W)
    best = int(y.sum(1).argmax())
    parts = [row.exp() if number == best else row for number, row in enumerate(y)]
    return torch.stack(parts) * (y > 0).sum().item() + y[y > 0].sum()


@pytest.mark.parametrize("f", [branch_on_data, branch_on_values, expert_of_each_row])
def test_branches_are_those_taken_at_the_point(f):
    module = Formula(f, W=(4, 2))
    assert assert_exact(module, draw(3, 4)).fallbacks == ()
    assert assert_exact(module, draw(3, 4).abs()).fallbacks == ()


def test_values_without_entries():
    module = Formula(lambda s, x: torch.cat([torch.tanh(x @ s.W), (x @ s.W)[:, 2:] + s.b[2:]], 1) + s.b, W=(4, 2), b=(2,))
    assert assert_exact(module, draw(3, 4)).fallbacks == ()


REFUSED: dict[str, tuple[Callable[..., object], str]] = {
    "array": (lambda s, x: x @ s.W * torch.from_numpy((x @ s.W).numpy()), "Can't call numpy.* at .*test_trace.py:[0-9]+ in"),
    "several outputs": (lambda s, x: (x @ s.W, x), "not one tensor"),
    "no tensor": (lambda s, x: None, "not one tensor"),
    "constant": (lambda s, x: x.exp(), "does not depend on the parameters"),
    "detached": (lambda s, x: (x @ s.W).detach(), "does not depend on the parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_traced(name):
    f, message = REFUSED[name]
    with pytest.raises(hk.TraceError, match=message):
        traced(Formula(f, W=(4, 2)), draw(3, 4))


def test_dropout_that_is_switched_off_is_not_random():
    off = Formula(lambda s, x: torch.dropout(x @ s.W, 0.5, False) + torch.dropout(x @ s.W, 0.0, True), W=(4, 2))
    assert_exact(off, draw(3, 4))


def test_trace_error_names_the_line() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 3).double(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                raise ValueError("one call is enough")
            return self.layer(x)

    with pytest.raises(hk.InputError, match=r'at .*test_trace.py:\d+ in forward: raise ValueError\("one call') as caught:
        hk.hessian(Stubborn(), draw(2, 4), draw(2, 3))
    assert "\n" not in str(caught.value)


def test_an_exception_that_led_to_another() -> None:
    def fail() -> None:
        raise ValueError("no")  # cause

    class Elsewhere(Exception):
        pass

    error = Elsewhere()
    try:
        fail()
    except ValueError as cause:
        error.__cause__ = cause
    assert source_line(error).endswith('in fail: raise ValueError("no")  # cause')
    assert source_line(ValueError("never raised")) == ""
