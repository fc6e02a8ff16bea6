"""Every primitive against torch.func: its four actions, the same at a linearised point, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from action_reference import check_actions
from primitive_cases import ACTIVATIONS, CASES, ELEMENTWISE, EMPTY, QKV, Case, draw
from second_order_reference import relative_error

from derivations.activation_functions import KINDS as ACTIVATION_KINDS
from hessiankit.primitives import directions
from hessiankit.primitives.activation import Activation
from hessiankit.primitives.binary import KINDS as BINARY_KINDS
from hessiankit.primitives.binary import Binary
from hessiankit.primitives.cast import Cast
from hessiankit.primitives.elementwise import KINDS as ELEMENTWISE_KINDS
from hessiankit.primitives.elementwise import Elementwise
from hessiankit.primitives.embedding import Embedding
from hessiankit.primitives.fused_attention import ScaledDotProductAttention
from hessiankit.primitives.linear import MatMul
from hessiankit.primitives.loss import CrossEntropy
from hessiankit.primitives.normalization import LayerNorm
from hessiankit.primitives.pooling import Extreme
from hessiankit.primitives.primitive import Primitive
from hessiankit.primitives.softmax import Softmax


@pytest.mark.parametrize("name", CASES)
def test_actions(name: str) -> None:
    primitive, f, inputs, _ = case = CASES[name]
    check_actions(primitive, f, inputs, case.subsets)
    without_tangents(case)


def without_tangents(case: Case) -> None:
    """Nothing moves: the value does not, and the jvp says so; no second derivative of what is affine."""
    primitive, inputs, none = case.primitive, case.inputs, (None,) * len(case.inputs)
    with pytest.raises(ValueError, match=r"every tangent is None|tangent of \w+ is None|only they, must move"):
        primitive.jvp(inputs, none)
    if not isinstance(primitive, CrossEntropy):  # which names what has to move there, too
        assert all(c is None for c in primitive.curvature(inputs, primitive.value(*inputs), none))
    tangents = [torch.ones(1, *x.shape).to(x) if k in case.movable else None for k, x in enumerate(inputs)]
    seen = primitive.curvature(inputs, primitive.value(*inputs), tangents)
    assert not primitive.is_linear or seen == none


SINGLE = ["matmul (2, 3, 4) (4, 5)", "softmax (3, 4) -1", "layer norm (2, 3, 5) 1", "rms norm (2, 3, 5) 1"]
SINGLE += ["cross entropy 0.0 None", "attention, batch and heads", *(f"activation {kind}" for kind in ("gelu", "silu", "tanh"))]


@pytest.mark.parametrize("name", SINGLE)
def test_single_precision(name: str) -> None:
    primitive, _, inputs, _ = CASES[name]
    adjoint = draw(primitive.value(*inputs).shape, seed=5)[0]
    tangents = [draw((3, *x.shape), seed=6 + k)[0] if x.is_floating_point() else None for k, x in enumerate(inputs)]
    short = [x.float() if x.is_floating_point() else x for x in inputs]
    single = primitive.curvature(short, adjoint.float(), [None if t is None else t.float() for t in tangents])
    for a, b in zip(single, primitive.curvature(inputs, adjoint, tangents), strict=True):
        assert (a is None and b is None) or (a.dtype == torch.float32 and relative_error(a.double(), b) <= 2e-6)


def test_every_kind_has_a_case() -> None:
    for prefix, kinds in (("activation", ACTIVATION_KINDS), ("elementwise", ELEMENTWISE_KINDS), ("binary", BINARY_KINDS)):
        seen = {name.split()[1].rstrip(",") for name in CASES if name.startswith(prefix + " ")}
        assert seen == set(kinds) - (set(ACTIVATION_KINDS) if prefix == "elementwise" else set())


@pytest.mark.parametrize("primitive", [MatMul(), Softmax(-1), LayerNorm(), ScaledDotProductAttention()])
def test_tangents_need_an_adjoint(primitive: Primitive) -> None:
    inputs = draw(*[(3, 3)] * (2 if isinstance(primitive, MatMul) else 3))[
        : 1 if isinstance(primitive, Softmax | LayerNorm) else 3
    ]
    with pytest.raises(ValueError, match="without an adjoint"):
        primitive.linearise(inputs).pull(None, [x.unsqueeze(0) for x in inputs])


# First derivatives where torch chose one -----------------------------------------------------------------------------

F, aten = torch.nn.functional, torch.ops.aten
KINKS: dict[str, tuple[Primitive, Callable[..., torch.Tensor], list[list[float]]]] = {
    "relu": (Activation("relu"), torch.relu, [[0.0]]),
    "leaky_relu": (Activation("leaky_relu"), F.leaky_relu, [[0.0]]),
    "abs": (Elementwise("abs"), torch.abs, [[-1.0, 0.0, 1.0]]),
    "clamp": (Elementwise("clamp", (-1.0, 1.0)), lambda v: v.clamp(-1, 1), [[-1.0, 0.0, 1.0]]),
    "elu": (Elementwise("elu", (0.7, 1.3, 1.0)), lambda x: aten.elu(x, 0.7, 1.3), [[0.0]]),
    "hardsigmoid": (Elementwise("hardsigmoid"), F.hardsigmoid, [[-3.0, 3.0]]),
    "hardshrink": (Elementwise("hardshrink", (0.5,)), F.hardshrink, [[-0.5, 0.5]]),
    "softshrink": (Elementwise("softshrink", (0.5,)), F.softshrink, [[-0.5, 0.5]]),
    "threshold": (Elementwise("threshold", (0.5, 2.0)), lambda x: F.threshold(x, 0.5, 2.0), [[0.5]]),
    "frac": (Elementwise("frac"), torch.frac, [[1.0]]),
    "remainder": (Elementwise("remainder", (0.5,)), lambda x: torch.remainder(x, 0.5), [[1.0]]),
    "fmod": (Elementwise("fmod", (0.5,)), lambda x: torch.fmod(x, 0.5), [[1.0]]),
    "logit_within": (Elementwise("logit_within", (0.25,)), lambda x: torch.logit(x, 0.25), [[0.25, 0.75]]),
    "maximum": (CASES["binary maximum (2, 3) ()"].primitive, torch.maximum, [[1.0, 2.0, 3.0], [1.0, 3.0, 2.0]]),
    "minimum": (CASES["binary minimum (2, 3) ()"].primitive, torch.minimum, [[1.0, 2.0, 3.0], [1.0, 3.0, 2.0]]),
    "at_least": (
        CASES["binary at_least (2, 3) ()"].primitive,
        lambda a, b: torch.clamp(a, min=b),
        [[1.0, 2.0, 3.0], [1.0, 3.0, 2.0]],
    ),
    "at_most": (
        CASES["binary at_most (2, 3) ()"].primitive,
        lambda a, b: torch.clamp(a, max=b),
        [[1.0, 2.0, 3.0], [1.0, 3.0, 2.0]],
    ),
    "amax": (Extreme("amax", (-1,)), lambda x: x.amax(-1, keepdim=True), [[1.0, 3.0, 3.0]]),
    "amin": (Extreme("amin", (-1,)), lambda x: x.amin(-1, keepdim=True), [[2.0, 2.0, 2.0]]),
    "embedding": (Embedding(torch.tensor(1), 1), lambda w: F.embedding(torch.tensor(1), w, padding_idx=1), [[[1.0], [2.0]]]),
}


@pytest.mark.parametrize("name", KINKS)
def test_derivatives_at_a_kink_are_torchs(name: str) -> None:
    primitive, f, points = KINKS[name]
    inputs = [torch.tensor(point, dtype=torch.float64, requires_grad=True) for point in points]
    expected = torch.autograd.grad(f(*inputs).sum(), inputs)
    detached = [x.detach() for x in inputs]
    seen = primitive.vjp(detached, torch.ones_like(primitive.value(*detached)).unsqueeze(0))
    for covector, slope in zip(seen, expected, strict=True):
        torch.testing.assert_close(covector[0], slope, rtol=1e-15, atol=0)


def test_powers_of_zero_and_of_negative_numbers() -> None:
    a = torch.tensor([0.0, 0.0, 0.0, -2.0], dtype=torch.float64)
    b = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    one, power = torch.ones(1, 4, dtype=torch.float64), CASES["binary power (2, 3) ()"].primitive
    assert power.vjp((a, b), one)[0].tolist() == [[0.0, 1.0, 0.0, 12.0]]
    assert power.curvature((a, b), one[0], (one, None))[0].tolist() == [[0.0, 0.0, 2.0, -12.0]]
    for p, x, slope, bend in ((0, 0.0, 0, None), (1, 0.0, 1, None), (2, 0.0, 0, 2), (3, 0.0, 0, 0), (3, -2.0, 12, -12)):
        at, single = (torch.tensor([x], dtype=torch.float64),), torch.ones(1, 1, dtype=torch.float64)
        assert float(Elementwise("power", (p,)).vjp(at, single)[0]) == slope
        (second,) = Elementwise("power", (p,)).curvature(at, single[0], (single,))
        assert second is None if bend is None else float(second) == bend


def test_constants_that_are_not_finite_do_not_reach_the_derivatives() -> None:
    x, t = draw((2, 3, 4), (5, 2, 3, 4))
    mask = CASES["masked fill (3, 4)"].primitive.mask
    hidden = type(CASES["masked fill (3, 4)"].primitive)(mask, -torch.inf)
    assert torch.isinf(hidden.value(x)[:, mask]).all()
    assert torch.isfinite(hidden.jvp((x,), (t,))).all()
    assert (hidden.vjp((x,), t)[0][:, :, mask] == 0).all()
    where, minus = CASES["where"].primitive, torch.tensor(-torch.inf, dtype=torch.float64)
    assert where.vjp((minus, x), torch.ones(1, *x.shape))[1].isfinite().all()
    assert where.jvp((minus, x), (None, x.unsqueeze(0))).isfinite().all()
    values = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float64)
    finite = Elementwise("finite", (5.0, 6.0, 7.0))
    assert finite.value(values).tolist() == [1.0, 6.0, 7.0, 5.0]
    assert finite.vjp((values,), torch.ones(1, 4, dtype=torch.float64))[0].tolist() == [[1.0, 0.0, 0.0, 0.0]]


SMOOTH = {f"activation {kind}": (Activation(kind), ACTIVATIONS[kind]) for kind in ("gelu", "gelu_tanh", "silu", "tanh")}
SMOOTH |= {kind: (Elementwise(kind), ELEMENTWISE[kind][0]) for kind in ("atan", "asinh")}
SMOOTH |= {
    "sigmoid": (Elementwise("sigmoid"), torch.sigmoid),
    "log_sigmoid": (Elementwise("log_sigmoid"), F.logsigmoid),
    "softplus": (Elementwise("softplus"), F.softplus),
    "erf": (Elementwise("erf"), torch.erf),
    "erfc": (Elementwise("erfc"), torch.erfc),
    "mish": (Elementwise("mish"), F.mish),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_far_from_the_origin(name: str) -> None:
    primitive, f = SMOOTH[name]
    x = torch.linspace(-40, 40, 80, dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    at, one = (x.detach(),), torch.ones(1, 80, dtype=torch.float64)
    torch.testing.assert_close(primitive.value(*at), f(x).detach(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(primitive.vjp(at, one)[0][0], slope.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(primitive.curvature(at, one[0], (one,))[0][0], bend, rtol=1e-11, atol=1e-14)
    for far in torch.tensor([[-1e4], [1e4]], dtype=torch.float64):
        assert torch.isfinite(primitive.curvature((far,), one[0, :1], (one[:, :1],))[0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_change_of_type_is_rounded_once(dtype: torch.dtype) -> None:
    X, T = draw((2, 3), (4, 2, 3))
    cast = Cast(dtype)
    assert torch.equal(cast.value(X), X.to(dtype))
    assert torch.equal(cast.jvp((X,), (T,)), T.to(dtype))
    (pulled,) = cast.vjp((X,), T.to(dtype))
    assert pulled.dtype == torch.float64
    assert torch.equal(pulled, T.to(dtype).double())
    assert Cast(torch.float64).vjp((X.float(),), T)[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Activation("swish"), "no kind 'swish'; the kinds are identity, relu"),
        (lambda: Elementwise("cube"), "no kind 'cube'; the kinds are exp, expm1"),
        (lambda: Binary("hypot"), "no kind 'hypot'"),
        (lambda: Extreme("mode"), "no kind 'mode'"),
    ],
)
def test_unknown_kinds(make: Callable[[], Primitive], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("entries", [1, 24])
@pytest.mark.parametrize(
    "name", ["layer norm (3, 4) 1", "rms norm (3, 4) 1", "softmax (3, 4) 0", "softmax (3, 4) -1", "cross entropy 0.0 None"]
)
def test_actions_do_not_depend_on_the_size_of_a_part(name, entries, monkeypatch):
    monkeypatch.setattr(directions, "CACHE_ENTRIES", entries)
    case = CASES[name]
    check_actions(case.primitive, case.f, case.inputs, [case.movable], directions=5)


def test_rows_of_attention_that_are_masked_altogether_are_zero() -> None:
    inputs = draw(*QKV["batch"])
    attention = ScaledDotProductAttention(EMPTY)  # row 1 sees no key, row 2 one, which has weight one wherever the query goes
    assert (attention.value(*inputs)[:, 1] == 0).all()  # torch's convention
    adjoint, *tangents = draw((2, 3, 2), *((4, *x.shape) for x in inputs), seed=5)
    to_Q, to_K, to_V = attention.curvature(inputs, adjoint, tangents)
    assert (to_Q[:, :, 1:] == 0).all()
    assert all((covector[:, :, [2, 4]] == 0).all() for covector in (to_K, to_V))


def test_many_directions_of_attention_are_those_of_each() -> None:
    inputs = draw((2, 3, 40, 4), (2, 3, 50, 4), (2, 3, 50, 3))
    adjoint, *tangents = draw((2, 3, 40, 3), *((25, *x.shape) for x in inputs), seed=5)  # more than one part of directions
    attention = ScaledDotProductAttention()
    together = (attention.jvp(inputs, tangents), *attention.curvature(inputs, adjoint, tangents))
    for s in (0, 12, 24):
        one = [t[s : s + 1] for t in tangents]
        each = (attention.jvp(inputs, one), *attention.curvature(inputs, adjoint, one))
        assert all(relative_error(a[s : s + 1], b) < 1e-14 for a, b in zip(together, each, strict=True))


def test_weights_of_attention_that_are_not_numbers_are_refused() -> None:
    Q, K, V = draw(*QKV["batch"])
    with pytest.raises(ValueError, match="weights are not numbers"):
        ScaledDotProductAttention().vjp((Q / 0, K, V), torch.ones(1, 2, 3, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="weights are not numbers"):
        ScaledDotProductAttention(torch.full((3, 5), torch.inf)).jvp((Q, K, V), (Q.unsqueeze(0), None, None))
