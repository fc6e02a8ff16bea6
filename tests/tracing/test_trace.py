"""Traces: the module's values, in order, with the closed form of every step; or one clear reason why not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw, randomised
from torch import Tensor, nn

import hessiankit as hk
from derivations.activation import Activation
from derivations.linear import Add, Linear, MatMul, Multiple, Multiply, Permute
from derivations.normalization import LayerNorm
from derivations.pooling import Mean
from derivations.softmax import Softmax
from hessiankit.tracing.fallback import AutomaticDifferentiation
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


def test_the_steps_of_the_papers_block():
    trace = traced(randomised(hk.TransformerBlock(4, 5, activation="gelu")), draw(3, 4))
    attention = [MatMul, MatMul, MatMul, Permute, MatMul, Multiple, Softmax, MatMul]
    assert kinds(trace) == [*attention, Add, LayerNorm, MatMul, Activation, MatMul, Add, LayerNorm]
    assert [a.output for a in trace.applications] == sorted({a.output for a in trace.applications})


def test_only_what_the_parameters_reach_is_recorded():
    module = Formula(lambda s, x, y: torch.tanh(x @ s.W + (y.exp() @ y.T).sum()), W=(4, 2))
    x, y = draw(3, 4), draw(2, 3)
    trace = traced(module, x, y)
    assert kinds(trace) == [MatMul, Add, Activation]
    assert trace.moving == {trace.parameters["W"], *(a.output for a in trace.applications)}
    assert trace.fallbacks == ()  # exp is applied to data alone


def test_what_has_no_chapter_is_named_once_and_differentiated():
    module = Formula(lambda s, x: torch.sinc(torch.special.i0e((x @ s.W).sinc())), W=(4, 2))
    trace = traced(module, draw(3, 4))
    assert trace.fallbacks == ("aten.sinc.default", "aten.special_i0e.default")
    assert kinds(trace) == [MatMul, *[AutomaticDifferentiation] * 3]
    assert "aten.sinc.default" in hk.hessian(module, draw(3, 4), draw(3, 2)).table()
    assert "AutomaticDifferentiation" in str(trace)
    assert str(trace).endswith(f"differentiated by torch: {', '.join(trace.fallbacks)}")


def test_operations_with_several_outputs():
    def several(s: Formula, x: Tensor) -> Tensor:
        volume = torch.linalg.slogdet(torch.eye(4).double() + s.W.T @ s.W)[1]
        return torch.mul(*torch.tanh(x @ s.W).chunk(2, -1)) + (x @ s.W).max(-1, keepdim=True)[0] * volume

    module = Formula(several, W=(4, 4))
    trace = traced(module, draw(3, 4))
    assert trace.fallbacks == ("aten.linalg_slogdet.default",)
    assert torch.equal(trace.values[trace.output], module(draw(3, 4)))
    assert_exact(module, draw(3, 4))
    with torch.no_grad():
        constant = Formula(lambda s, x: torch.topk(x @ s.W, 2).indices.double() * (x @ s.W)[:, :2], W=(4, 4))
        assert kinds(traced(constant, draw(3, 4)))[-1] is Multiply  # indices do not move


def test_nested_inputs_and_numbers():
    module = Formula(lambda s, pair, scale: (pair["a"] @ s.W) * scale + pair["b"][0], W=(4, 2))
    given = {"a": draw(3, 4), "b": [draw(3, 2)]}
    trace = hk.trace_module(lambda p, *g: torch.func.functional_call(module, p, g), {"W": module.W}, (given, 2.0))
    assert torch.equal(trace.values[trace.output], module(given, 2.0))
    assert kinds(trace) == [MatMul, Multiple, Add]


def test_tied_weights_are_one_parameter():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    trace = traced(randomised(module), draw(3, 4))
    assert list(trace.parameters) == ["0.weight", "0.bias", "2.bias"]
    uses = [a for a in trace.applications if trace.parameters["0.weight"] in a.inputs]
    assert [type(a.primitive) for a in uses] == [Linear, Linear]


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


def test_mean_over_the_tokens_is_a_mean():
    trace = traced(randomised(hk.VisionTransformer(5, 3, 2, d_model=4, d_ff=6, d_k=2)), draw(2, 3, 5))
    assert Mean in kinds(trace)
    assert trace.fallbacks == ()
