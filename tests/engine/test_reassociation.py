"""Products of three matrices taken in another order: the derivatives of attention written in any way, beside torch's."""

from __future__ import annotations

import torch
from curvature_reference import Formula, draw, mse, reverse_over_reverse
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hessiankit as hk

WEIGHTS = {
    "softmax": lambda scores, dim: scores.softmax(dim),
    "softmax of a product": lambda scores, dim: (2 * scores).softmax(dim),
    "sigmoid": lambda scores, dim: scores.sigmoid(),
    "masked": lambda scores, dim: scores.masked_fill(torch.eye(scores.shape[-1], dtype=torch.bool), -torch.inf).softmax(dim),
    "logarithm": lambda scores, dim: scores.log_softmax(dim),
    "of a constant": lambda scores, dim: scores.detach().softmax(dim),
}


@given(
    weights=st.sampled_from(sorted(WEIGHTS)),
    dim=st.sampled_from([-1, -2, 2, 1]),
    biases=st.tuples(*[st.booleans()] * 3),
    turned=st.booleans(),
    leading=st.sampled_from([(), (2,)]),
    seed=st.integers(0, 5),
)
@settings(deadline=None, max_examples=60)
def test_attention_in_any_order_of_its_products(
    weights: str, dim: int, biases: tuple[bool, ...], turned: bool, leading: tuple[int, ...], seed: int
) -> None:
    """A softmax over queries, whose rows do not sum to one, biases, weights as torch's layers or as matrices hold them."""

    def attention(s: Formula, x: Tensor) -> Tensor:
        if turned:
            q, k, v = (x @ weight for weight in (s.q.weight.mT, s.k.weight.mT, s.v.weight.mT))
            v = v if s.v.bias is None else v + s.v.bias
        else:
            q, k, v = s.q(x), s.k(x), s.v(x)
        A = WEIGHTS[weights](q @ k.mT, dim % x.ndim if abs(dim) <= x.ndim else -1)
        return A @ v

    module = Formula(attention, **{name: nn.Linear(3, 4, bias=bias) for name, bias in zip("qkv", biases, strict=True)})
    x, target = draw(*leading, 5, 3, seed=seed), draw(*leading, 5, 4, seed=seed + 20)
    expected = reverse_over_reverse(module, x, target, mse)
    assert (hk.hessian(module, x, target).matrix - expected).abs().max() < 1e-12 * expected.abs().max()
