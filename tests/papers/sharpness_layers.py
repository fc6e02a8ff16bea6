"""The layers of the Sharpness Disparity theorems written out, and what holds of bounds on their gradients.

Any number of leading axes is allowed: problems side by side, which autograd differentiates together. Nothing of ``derivations`` is
used but the result that bounds come in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformer_reference as reference
from bound_problems import F64
from torch import Tensor
from transformer_reference import normalised

from papers.sharpness_disparity.gradient_bounds import GradientBounds, average_sharpness

ROUNDING = 1 + 1e-12
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky_relu": torch.nn.functional.leaky_relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda z: torch.nn.functional.gelu(z, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
}
NORMS = ("layernorm", "rmsnorm")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def normed(X: Tensor, gamma: Tensor, norm: str) -> Tensor:
    return normalised(X, norm=norm) * gamma[..., None, :]


def feedforward(X: Tensor, gamma: Tensor, W_1: Tensor, W_2: Tensor, *, activation: str, norm: str) -> Tensor:
    return ACTIVATIONS[activation](normed(X, gamma, norm) @ W_1) @ W_2


def gated(X: Tensor, gamma: Tensor, W_gate: Tensor, W_up: Tensor, W_down: Tensor, *, activation: str, norm: str) -> Tensor:
    N = normed(X, gamma, norm)
    return (ACTIVATIONS[activation](N @ W_gate) * (N @ W_up)) @ W_down


def attention(
    X: Tensor,
    gamma: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    W_O: Tensor,
    *,
    heads: int,
    kv_heads: int,
    causal: bool,
    norm: str,
) -> Tensor:
    N = normed(X, gamma, norm)
    return reference.attention(N, W_Q, W_K, W_V, W_O, causal=causal, heads=heads, kv_heads=kv_heads)


def causal_mask(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def gradients(
    layer: Callable[..., Tensor], leaves: dict[str, Tensor], G: Tensor, create_graph: bool = False
) -> dict[str, Tensor]:
    """dQ/dtheta of Q = <G, layer>, all leaves but X."""
    arrays = {name: t if t.requires_grad else t.clone().requires_grad_() for name, t in leaves.items()}
    wanted = [name for name in leaves if name != "X"]
    found = torch.autograd.grad((G * layer(**arrays)).sum(), [arrays[name] for name in wanted], create_graph=create_graph)
    return dict(zip(wanted, found, strict=True))


def hold(bounds: GradientBounds, found: dict[str, Tensor], scale: GradientBounds | None = None) -> dict[str, float]:
    """Assert lower <= true <= upper and the numbers of entries; return true / upper.

    A gradient that vanishes is what rounding leaves of its terms: 1e-14 of a bound on those is ``scale``.
    """
    assert set(bounds.upper) == set(found) == set(bounds.sizes)
    ratios = {}
    for letter, gradient in found.items():
        true = float(gradient.norm())
        floor = 1e-14 * scale.upper[letter] if scale else 0.0
        assert true <= bounds.upper[letter] * ROUNDING + floor, letter
        assert true * ROUNDING >= bounds.lower.get(letter, 0.0), letter
        assert bounds.sizes[letter] == gradient.numel()
        ratios[letter] = true / bounds.upper[letter] if bounds.upper[letter] else 1.0  # one token: W_Q and W_K do not matter
        low, high = bounds.sharpness(letter, terms=3)
        assert low <= average_sharpness(true, gradient.numel(), 3) * ROUNDING**2
        assert average_sharpness(max(true - floor, 0.0), gradient.numel(), 3) <= high * ROUNDING**3
    return ratios


def assert_loose(
    true: dict[str, Tensor], near: GradientBounds, far: GradientBounds, limits: dict[str, tuple[float, float]]
) -> None:
    """Assert 1 <= near / true < the first limit, and near <= far < the second one times the true norm."""
    for letter, (first, second) in limits.items():
        low, high = (bound.upper[letter] / float(true[letter].norm()) for bound in (near, far))
        assert 1 <= low < first, letter
        assert low <= high < second, letter
