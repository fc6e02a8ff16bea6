"""Attention and the cross entropy of a head against the formulas in torch's operations: derivatives in every order of modes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw, mse, reverse_over_reverse
from operator_cases import error
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import hessiankit as hk
from hessiankit.primitives import attention_strips, fused_attention, linear_cross_entropy
from hessiankit.support.errors import InputError

Function = Callable[..., Tensor]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 5e-2}


def by_matrices(*x: Any, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*x, **options)


def by_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, labels: Tensor, shift: bool = False, **options: Any
) -> Tensor:
    if shift:
        hidden, labels = hidden[..., :-1, :], labels[..., 1:]
    losses = F.cross_entropy(F.linear(hidden, weight, bias).reshape(-1, len(weight)), labels.reshape(-1), **options)
    return losses.reshape(labels.shape) if losses.ndim else losses


def head(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, labels: Tensor, **options: Any) -> Tensor:
    return hk.linear_cross_entropy(hidden, weight, labels, bias=bias, **options)


def with_empty_rows(*x: Tensor, attn_mask: Tensor) -> Tensor:
    """Rows that see no key are zero; torch's own third derivatives are NaN there."""
    empty = ~attn_mask.any(-1, keepdim=True)
    return by_matrices(*x, attn_mask=attn_mask | empty).masked_fill(empty, 0)


SAME = [(2, 2, 5, 3)] * 3
SEEN = draw(5, 5, seed=5) > 0
SEEN[2] = False  # a query that sees no key
GROUPED = [(2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 5, 3)]
LABELS = torch.tensor([[3, 0, -100, 6, 1], [2, 2, 5, 0, -100]])
HEAD = [(2, 5, 3), (7, 3)]
CASES: dict[str, Any] = {
    **{
        name: (hk.scaled_dot_product_attention, by_matrices, shapes, options)
        for name, shapes, options in (
            ("matrices", [(5, 3), (7, 3), (7, 4)], {"scale": 0.3}),
            ("heads", [(2, 2, 5, 3), (2, 2, 7, 3), (2, 2, 7, 4)], {}),
            ("causal", SAME, {"is_causal": True}),
            ("causal, a negative scale", SAME, {"is_causal": True, "scale": -0.7}),
            ("causal, no scores", SAME, {"is_causal": True, "scale": 0.0}),
            ("padding", SAME, {"attn_mask": draw(2, 1, 1, 5, seed=7) > 0}),
            ("additive mask", SAME, {"attn_mask": draw(2, 1, 5, 5, seed=7)}),
            ("grouped queries", GROUPED, {"enable_gqa": True, "is_causal": True}),
            ("broadcast", [(1, 3, 5, 3), (2, 1, 5, 3), (3, 5, 3)], {}),
        )
    },
    "boolean mask, an empty row": (hk.scaled_dot_product_attention, with_empty_rows, SAME, {"attn_mask": SEEN}),
    **{
        name: (partial(head, labels=LABELS), partial(by_logits, labels=LABELS), shapes, options)
        for name, shapes, options in (
            ("mean", HEAD, {}),
            ("bias, shifted", [*HEAD, (7,)], {"shift": True}),
            ("smooth sum", [*HEAD, (7,)], {"reduction": "sum", "label_smoothing": 0.1}),
        )
    },
}
CASES["losses, another label ignored"] = (
    partial(head, labels=LABELS.clamp(0)),
    partial(by_logits, labels=LABELS.clamp(0)),
    HEAD,
    {"reduction": "none", "ignore_index": 2},
)


SIZES = ("whole", "tiles")


@pytest.fixture(params=SIZES)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On whole matrices, or strip by strip, at sizes that no strip divides."""
    if request.param == "tiles":
        monkeypatch.setattr(fused_attention, "IN_STRIPS", 0)
        monkeypatch.setattr(attention_strips, "ENTRIES", 12)
        monkeypatch.setattr(linear_cross_entropy, "LOGITS", 20)


def inputs(shapes: Sequence[tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return tuple(draw(*shape, seed=seed + k).to(dtype).requires_grad_(not seed) for k, shape in enumerate(shapes))


def scalar(function: Function, options: dict[str, Any]) -> Function:
    """A function whose derivatives of every order are those of ours, with adjoints that move."""
    return lambda *x: function(*x, **options).double().sin().sum()


def derivatives(loss: Function, x: tuple[Tensor, ...], t: tuple[Tensor, ...], s: tuple[Tensor, ...]) -> dict[str, Any]:
    """Derivatives along tangents t and s, by name."""

    def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        return sum((u * v).sum() for u, v in zip(a, b, strict=True))  # type: ignore[return-value]

    every = tuple(range(len(x)))
    slope = torch.func.grad(loss, argnums=every)
    along: Function = lambda *y: torch.func.jvp(loss, y, t)[1]  # noqa: E731
    first = torch.autograd.grad(loss(*x), x, create_graph=True)
    second = torch.autograd.grad(dot(first, t), x, create_graph=True)
    pairs = tuple(torch.stack(pair) for pair in zip(t, s, strict=True))
    return {
        "value": loss(*x),
        "gradient": first,
        "double backward": second,
        "triple backward": torch.autograd.grad(dot(second, s), x),
        "jvp": along(*x),
        "jvp of grad": torch.func.jvp(slope, x, t)[1],
        "grad of jvp": torch.func.grad(along, argnums=every)(*x),
        "jvp of jvp": torch.func.jvp(along, x, s)[1],
        "vmap of grad": torch.func.vmap(slope)(*pairs),
        "vmap of jvp of grad": torch.func.vmap(lambda v: torch.func.jvp(slope, x, (v, *t[1:]))[1])(pairs[0]),
        "hessian": torch.func.hessian(lambda y: loss(y, *x[1:]))(x[0]),
    }


def close(found: Any, expected: Any, dtype: torch.dtype = torch.float64) -> None:
    for a, b in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True):
        assert a.shape == b.shape
        a, b = a.detach().double(), b.detach().double()
        assert float((a - b).abs().max()) <= TOLERANCE[dtype] * float(b.abs().max())


IN_TURN = [
    pytest.param(name, size, marks=() if k % 2 == n else pytest.mark.slow)
    for k, name in enumerate(CASES)
    for n, size in enumerate(SIZES)
]


@pytest.mark.parametrize(("name", "tiles"), IN_TURN, indirect=["tiles"])
def test_derivatives_in_every_order_of_modes(name: str, tiles: None) -> None:
    ours, plain, shapes, options = CASES[name]
    x, t, s = (inputs(shapes, seed) for seed in (0, 10, 20))
    found, expected = (derivatives(scalar(f, options), x, t, s) for f in (ours, plain))
    for kind in found:
        close(found[kind], expected[kind])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's older vmap, of batched gradients
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", ["causal", "bias, shifted"])
def test_gradcheck(name: str) -> None:
    ours, _, shapes, options = CASES[name]
    function, x = (lambda *x: ours(*x, **options)), inputs(shapes)
    assert torch.autograd.gradcheck(function, x, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, x, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", ["heads", "causal", "bias, shifted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_types(name: str, dtype: torch.dtype) -> None:
    """The result is of the inputs' type, but for losses; errors are of their rounding."""
    ours, plain, shapes, options = CASES[name]
    narrow, t = inputs(shapes, 0, dtype), inputs(shapes, 10, dtype)
    x = tuple(v.detach().double().requires_grad_() for v in narrow)
    out = ours(*narrow, **options)
    assert out.dtype == (torch.float32 if out.ndim == 0 else dtype)
    found = torch.autograd.functional.vhp(scalar(ours, options), narrow, t)[1]
    assert {v.dtype for v in found} == {dtype}
    close(found, torch.autograd.functional.vhp(scalar(plain, options), x, tuple(v.double() for v in t))[1], dtype)


@pytest.mark.usefixtures("tiles")
def test_a_mask_that_moves() -> None:
    x, mask = inputs(SAME), draw(2, 1, 5, 5, seed=7)
    found, expected = (
        torch.autograd.functional.hvp(lambda m, f=f: f(*x, attn_mask=m).sin().sum(), mask, mask)
        for f in (hk.scaled_dot_product_attention, by_matrices)
    )
    close(found, expected)


def test_queries_without_keys_are_zero_and_so_are_their_derivatives() -> None:
    q, k, v = inputs(SAME)
    out = hk.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(5, 5, dtype=torch.bool))
    (slope,) = torch.autograd.grad((out.sin() + out).sum(), q, create_graph=True)
    assert not out.any()
    assert not slope.any()
    assert not torch.autograd.grad(slope.sum(), q)[0].any()


def test_no_label_counts() -> None:
    """A mean over none is NaN, as in torch; a sum is zero."""
    hidden, weight = inputs(HEAD)
    ignored = torch.full_like(LABELS, -100)
    assert hk.linear_cross_entropy(hidden, weight, ignored).isnan()
    loss = hk.linear_cross_entropy(hidden, weight, ignored, reduction="sum")
    assert loss == 0
    assert not any(g.any() for g in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("name", ["causal", "bias, shifted"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(name: str, reentrant: bool) -> None:
    ours, _, shapes, options = CASES[name]
    x, loss = inputs(shapes), scalar(ours, options)
    checkpoint(loss, *x, use_reentrant=reentrant).backward()
    close([v.grad for v in x], torch.autograd.grad(loss(*x), x))


@pytest.mark.parametrize("name", ["causal", "bias, shifted"])
def test_autocast(name: str) -> None:
    """Inputs are rounded as torch rounds those of its own functions; derivatives come in the types of the inputs."""
    ours, plain, shapes, options = CASES[name]
    x, results = inputs(shapes, 0, torch.float32), []
    for f in (ours, plain):
        with torch.autocast("cpu", torch.bfloat16):
            out = f(*x, **options)
        results.append((out, *torch.autograd.grad(out.double().sin().sum(), x)))
    assert [v.dtype for v in results[0]] == [v.dtype for v in results[1]]
    close(results[0], results[1], torch.bfloat16)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's compiler looks at .grad
@pytest.mark.parametrize("name", ["causal", "mean"])
def test_compiled(name: str) -> None:
    """The call stays as it is between compiled parts, and the parts keep their derivatives where the compiler has them."""
    ours, _, shapes, options = CASES[name]
    x, t = inputs(shapes), inputs(shapes, 10)
    loss = scalar(ours, options)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="eager")
    close(torch.autograd.functional.vhp(compiled, x, t), torch.autograd.functional.vhp(loss, x, t))


def test_a_traced_module_has_their_closed_forms() -> None:
    """The operator sees attention and the head as torch's own."""

    def forward(m: Any, ids: Tensor) -> Tensor:
        q, k, v = (F.embedding(ids, m.table) @ m.mix).chunk(3, -1)
        return hk.linear_cross_entropy(hk.scaled_dot_product_attention(q, k, v, is_causal=True), m.table, ids, shift=True)

    model, ids = Formula(forward, table=(7, 4), mix=(4, 12)), LABELS.clamp(0)
    operator = hk.hessian_operator(model, ids, loss=None)
    assert not operator._linearised[0].fallbacks
    assert error(operator.to_matrix(), reverse_over_reverse(model, ids, None, None)) <= 1e-10


Q, K, V = inputs(SAME)
H, W = inputs(HEAD)
ATTEND, CROSS = hk.scaled_dot_product_attention, hk.linear_cross_entropy
WRONG: dict[str, Callable[[], Any]] = {
    r"dropout_p=0.1, expected 0": lambda: ATTEND(Q, K, V, dropout_p=0.1),
    r"both given; pass one": lambda: ATTEND(Q, K, V, SEEN, is_causal=True),
    r"of float64, float32, float64, expected one": lambda: ATTEND(Q, K.float(), V),
    r"shapes do not go together \(got query \(2, 2, 5, 3\), key \(2, 2, 5, 2\)": lambda: ATTEND(Q, K[..., 1:], V),
    r"leading axes do not broadcast \(got": lambda: ATTEND(Q, K[:, :, None].expand(2, 2, 3, 5, 3), V),
    r"nor with a mask of shape \(4, 5\)": lambda: ATTEND(Q, K, V, SEEN[1:]),
    r"heads do not go together": lambda: ATTEND(Q[:, :1], K, V, enable_gqa=True),
    r"reduction='men' is not known; did you mean 'mean'": lambda: CROSS(H, W, LABELS, reduction="men"),
    r"labels \(2, 4\), expected \(\.\.\., d\), \(C, d\)": lambda: CROSS(H, W, LABELS[:, 1:]),
    r"bias of shape \(3,\), expected \(7,\)": lambda: CROSS(H, W, LABELS, bias=W[0]),
    r"labels of torch.float32": lambda: CROSS(H, W, LABELS.float()),
    r"weight of torch.float32, expected one": lambda: CROSS(H, W.float(), LABELS),
}


@pytest.mark.parametrize("words", WRONG)
def test_arguments_that_do_not_go_together(words: str) -> None:
    with pytest.raises(InputError, match=words):
        WRONG[words]()


def test_values_that_have_no_derivative() -> None:
    with pytest.raises(ValueError, match="labels from 0 to 7, expected 0 to 6"):
        hk.linear_cross_entropy(H, W, LABELS.clamp(0) + (LABELS == 6))
    out = hk.scaled_dot_product_attention(Q * torch.inf, K, V)
    with pytest.raises(ValueError, match="the attention weights are not numbers"):
        torch.autograd.grad(out.sum(), V)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_a_module_whose_scores_are_not_scaled_by_a_positive_number(scale: float) -> None:
    """Torch's kernel on a processor multiplies the minus infinity of its causal mask too."""
    ours, matrices = (
        Formula(lambda s, x, f=f: f(x @ s.Q, x @ s.K, x @ s.V, is_causal=True, scale=scale), Q=(3, 3), K=(3, 3), V=(3, 3))
        for f in (hk.scaled_dot_product_attention, by_matrices)
    )
    x = draw(2, 1, 4, 3)
    assert error(hk.hessian(ours, x, x).matrix, reverse_over_reverse(matrices, x, x, mse)) <= 1e-10
