r"""A priori bounds on the Hessian of softmax attention: from norms alone, hence over a whole ball of weights.

For F = sum_h A_h X W_V W_O and the loss ||F - target||_F^2 / (L d_out). Every quantity below grows with every norm that it is
made of, so that norms of the weights inflated by a radius bound the Hessian at every point within that distance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from derivations.arrays import Array, as_array, to_float
from derivations.bounds.block_norms import BlockNorms, spectral_norm, symmetric
from derivations.bounds.constants import token_covariance_bound, token_cumulant_bound


@dataclass(frozen=True)
class AttentionNorms:
    """Norms of an attention problem, the input of its a priori bound.

    Args:
        length: L, the number of tokens.
        d_K: width of the queries of one head.
        x: ||X||_2.
        q: ||W_Q||_2 for every head.
        k: ||W_K||_2 for every head.
        v: ||W_V||_2 for every head.
        t: ||target||_2.
        o: ||W_O||_2 for every head, or None without output projection.
        d_out: width of the output.
        rho: largest norm of a token, or None (then x).
        diameter: largest distance of two tokens, or None (then what rho and x allow).
        t_F: ||target||_F, or None (then sqrt(min(L, d_out)) t).
        tau: largest norm of a row of the target, or None (then t).

    >>> AttentionNorms(4, 2, 1.0, (1.0,), (1.0,), (1.0,), 3.0, d_out=9).target_norms
    (6.0, 3.0)
    """

    length: int
    d_K: int
    x: float
    q: tuple[float, ...]
    k: tuple[float, ...]
    v: tuple[float, ...]
    t: float
    o: tuple[float, ...] | None = None
    d_out: int = 1
    rho: float | None = None
    diameter: float | None = None
    t_F: float | None = None
    tau: float | None = None

    def __post_init__(self) -> None:
        heads = {len(n) for n in (self.q, self.k, self.v, self.q if self.o is None else self.o)}
        if len(heads) > 1 or not self.q:
            raise ValueError("AttentionNorms: q, k, v and o need one norm for every head, the same number of each")
        for name in ("x", "t", "rho", "diameter", "t_F", "tau"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"AttentionNorms: {name} = {value}; expected a finite nonnegative norm")

    @classmethod
    def measured(
        cls, X: Array, W_Q: Array, W_K: Array, W_V: Array, target: Array, *, W_O: Array | None = None, heads: int = 1
    ) -> AttentionNorms:
        """Return the norms of given arrays, with shapes as in ``attention_structured``.

        >>> I = torch.eye(2)
        >>> AttentionNorms.measured(2 * I, I, I, I, I).rho
        2.0
        """
        x, q, k, v, t = (to_float(as_array(a)).double() for a in (X, W_Q, W_K, W_V, target))
        o = None if W_O is None else tuple(spectral_norm(W) for W in to_float(as_array(W_O)).double().chunk(heads, 0))
        q_norms, k_norms, v_norms = (tuple(spectral_norm(W) for W in weight.chunk(heads, 1)) for weight in (q, k, v))
        return cls(
            length=x.shape[0],
            d_K=q.shape[1] // heads,
            x=spectral_norm(x),
            q=q_norms,
            k=k_norms,
            v=v_norms,
            t=spectral_norm(t),
            o=o,
            d_out=t.shape[1],
            rho=largest_row(x),
            diameter=float((x.unsqueeze(0) - x.unsqueeze(1)).norm(dim=2).max()),
            t_F=float(t.norm()),
            tau=largest_row(t),
        )

    def inflated(self, radius: float) -> AttentionNorms:
        """Return norms that hold for all weights within Frobenius distance ``radius`` (all weights taken together).

        >>> AttentionNorms(1, 1, 1.0, (2.0,), (0.0,), (1.0,), 0.0).inflated(0.5).q
        (2.5,)
        """
        if radius < 0:
            raise ValueError(f"inflated: the radius is {radius}; expected a nonnegative number")

        def add(norms: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(n + radius for n in norms)

        o = None if self.o is None else add(self.o)
        return replace(self, q=add(self.q), k=add(self.k), v=add(self.v), o=o)

    @property
    def row(self) -> float:
        """The bound on the norms of tokens."""
        return self.x if self.rho is None else min(self.x, self.rho)

    @property
    def target_norms(self) -> tuple[float, float]:
        """Bounds on the Frobenius and largest row norm of the target."""
        t_F = math.sqrt(min(self.length, self.d_out)) * self.t
        return (t_F if self.t_F is None else min(t_F, self.t_F), self.t if self.tau is None else min(self.t, self.tau))

    @property
    def heads(self) -> int:
        """The number of heads."""
        return len(self.q)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weights, numbered where there are several heads."""
        kinds = ("W_Q", "W_K", "W_V") if self.o is None else ("W_Q", "W_K", "W_V", "W_O")
        return kinds if self.heads == 1 else tuple(f"{kind}.{h}" for h in range(self.heads) for kind in kinds)


def attention_a_priori(norms: AttentionNorms) -> BlockNorms:
    r"""Return bounds on the Hessian blocks of ||F - target||_F^2 / (L d_out), in place of Theorem 1 of Closing the Curvature Gap.

    With s = 1/sqrt(d_K), covariance c and third cumulant kappa of the tokens (``token_covariance_bound``), w = v o and

        g = (s x c w k,  s x c w q,  sqrt(L) rho o,  sqrt(L) rho v)                         for Q, K, V, O
        R_F = sqrt(L) rho w + ||T||_F,  R_2 = min(R_F, sqrt(L) rho w + ||T||_2),  r = rho w + tau

    the blocks are 2/(L d_out) times g_a g_b + f_ab with

        f_QQ = s^2 x^2 kappa k^2 w r,  f_KK = s^2 x^2 kappa q^2 w r,  f_QK = s^2 x^2 kappa k q w r + s x c w R_F,
        f_VQ = s x c k o R_2,  f_VK = s x c q o R_2,  f_OQ = s x c k v R_2,  f_OK = s x c q v R_2,  f_VO = sqrt(L) rho R_2

    (W_O, several heads, whose f vanishes between heads, and the diameter of the tokens in c and
    kappa are added here). A causal mask changes nothing: no more is used than that rows of A are probabilities.
    It is a bound over the ball of ``norms.inflated(radius)``.

    Raises:
        ValueError: by ``AttentionNorms`` for missing or negative norms. Biases and normalised queries are not covered.

    One token: c = kappa = 0 with its diameter, and W_V has 2 ||x||^2, exactly.

    >>> attention_a_priori(AttentionNorms(1, 1, 3.0, (1.0,), (1.0,), (1.0,), 0.0, rho=3.0, diameter=0.0)).matrix.tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 18.0]]
    """
    rho, (t_F, tau) = norms.row, norms.target_norms
    out = norms.o or (1.0,) * norms.heads
    w = sum(v * o for v, o in zip(norms.v, out, strict=True))
    mean_F = math.sqrt(norms.length) * rho * w
    residual = ResidualNorms(mean_F + t_F, min(mean_F + t_F, mean_F + norms.t), rho * w + tau)
    jacobian = jacobian_norms(norms)
    names = norms.names
    g = torch.tensor([jacobian[name] for name in names], dtype=torch.float64, device="cpu")
    functional = functional_norms(norms, residual)
    matrix = torch.outer(g, g) + functional
    parts = {
        "covariance": _covariance(norms),
        "third_cumulant": _cumulant(norms),
        "residual_F": residual.frobenius,
        "residual_row": residual.row,
        **{f"jacobian_{name}": value for name, value in jacobian.items()},
    }
    return BlockNorms(names, 2 / (norms.length * norms.d_out) * matrix, parts)


@dataclass(frozen=True)
class ResidualNorms:
    """Norms of the gradient at attention's output: Frobenius, spectral, largest row."""

    frobenius: float
    spectral: float
    row: float


def jacobian_norms(norms: AttentionNorms) -> dict[str, float]:
    """Return the bounds g on ||dF/dW||_2 for every weight, by name (``attention_a_priori``)."""
    s, c, mean = 1 / math.sqrt(norms.d_K), _covariance(norms), math.sqrt(norms.length) * norms.row
    bounds = []
    for q, k, v, o in zip(norms.q, norms.k, norms.v, norms.o or (1.0,) * norms.heads, strict=True):
        logits = s * norms.x * c * v * o
        bounds += [logits * k, logits * q, mean * o] + ([] if norms.o is None else [mean * v])
    return dict(zip(norms.names, bounds, strict=True))


def functional_norms(norms: AttentionNorms, residual: ResidualNorms) -> Tensor:
    """Return the bounds f on the blocks of <R, d2F> for a gradient R of the given norms (``attention_a_priori``)."""
    s, c, kappa, mean = 1 / math.sqrt(norms.d_K), _covariance(norms), _cumulant(norms), math.sqrt(norms.length) * norms.row
    names, pairs = norms.names, {}
    for h, (q, k, v, o) in enumerate(zip(norms.q, norms.k, norms.v, norms.o or (1.0,) * norms.heads, strict=True)):
        end = "" if norms.heads == 1 else f".{h}"
        curved = s**2 * norms.x**2 * kappa * v * o * residual.row
        straight = s * norms.x * c
        pairs["W_Q" + end, "W_Q" + end] = curved * k**2
        pairs["W_K" + end, "W_K" + end] = curved * q**2
        pairs["W_Q" + end, "W_K" + end] = curved * k * q + straight * v * o * residual.frobenius
        pairs["W_Q" + end, "W_V" + end] = straight * k * o * residual.spectral
        pairs["W_K" + end, "W_V" + end] = straight * q * o * residual.spectral
        if norms.o is not None:
            pairs["W_Q" + end, "W_O" + end] = straight * k * v * residual.spectral
            pairs["W_K" + end, "W_O" + end] = straight * q * v * residual.spectral
            pairs["W_V" + end, "W_O" + end] = mean * residual.spectral
    return symmetric(names, pairs)


def largest_row(A: Tensor) -> float:
    """Return the largest norm of a row."""
    return float(A.norm(dim=1).max()) if A.numel() else 0.0


def _covariance(norms: AttentionNorms) -> float:
    return token_covariance_bound(norms.x, norms.rho, norms.diameter)


def _cumulant(norms: AttentionNorms) -> float:
    return token_cumulant_bound(norms.x, norms.rho, norms.diameter)
