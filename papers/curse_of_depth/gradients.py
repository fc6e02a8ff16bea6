"""Theorem 4.3: the gradient of the first block's queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.normalization import LayerNormAt
from hessiankit.blocks import TransformerBlock
from papers.autodiff import jacobian_of
from papers.claim import Evidence
from papers.curse_of_depth.stacks import StackSizes, attention_head, make_stack, stream
from papers.curse_of_depth.variance import grown
from papers.drawing import Draw
from papers.evidence import assumed, bounded, loose, small, violated, wrong
from papers.hybridnorm.gradient_bounds import pre_norm_gradient_bounds
from papers.notation import layer_norm, rms_norm, spectral
from papers.registry import claim


class AttentionBranch:
    """y_1 = x + Attn(RMSNorm(x)) with one head, as a function of W_1, the query projection."""

    def __init__(self, seed: int, *, std: float = 0.3, deviation: float = 1.0, s: int = 4, d: int = 8) -> None:
        draw = Draw(seed)
        self.X = draw.normal(s, d, std=deviation)
        self.W = [draw.normal(d, d, std=std) for _ in range(4)]
        self.size = StackSizes(d=d, d_ffn=4 * d, h=1, s=s, sigma=std)

    def __call__(self, W_1: Tensor) -> Tensor:
        """Return y_1."""
        return self.X + attention_head(rms_norm(self.X), W_1, *self.W[1:3]) @ self.W[3]

    @property
    def jacobian(self) -> Tensor:
        """dy_1/dW_1 by automatic differentiation."""
        return jacobian_of(self, self.W[0])

    @property
    def bound(self) -> float:
        """The sharp bound on its Frobenius norm, HybridNorm's Eq. 28 corrected."""
        return pre_norm_gradient_bounds(len(self.X), *self.W).W_Q


@claim("eq18", "Theorem 4.3, Eq. 18", "OMITTED", uses=[pre_norm_gradient_bounds])
def eq18(seed: int) -> Evidence:
    r"""$\|\frac{\partial y_L}{\partial W_1}\|_2\le\prod_{\ell=1}^{L-1}\left(1 + \frac{A'}{\ell\,\sigma_{x_\ell}} +
    \frac{B'}{\ell^2\sigma_{x_\ell}^2}\right)$: $A'$ and $B'$, 'defined in A.5'
    Correct: A.5 does not define them. They have to contain $\frac{\partial y_1}{\partial W_1}$, which no product from $L = 1$ on
    has if they are constants; it is bounded by $\sqrt s\,d^{3/2}d_k^{-1/2}\|W_K\|_2\|W_V\|_2\|W_O\|_2$"""
    point = AttentionBranch(seed)
    point.W[3] = 100 * point.W[3]
    found, detail = point.jacobian, "one block of one head, L = 1; in Frobenius norm against the sharp bound"
    return violated([spectral(found), float(found.norm())], [1.0, math.inf], detail, corrected=[math.inf, point.bound])


@claim("eq66", "App. A.5, Eqs. 66-68", "WRONG AS PRINTED", uses=[LayerNormAt])
def eq66(seed: int) -> Evidence:
    r"""$\frac{\partial y_L}{\partial W_1} = \frac{\partial y_L}{\partial x_1}\frac{\partial
    x_1}{\partial\,\mathrm{LN}(x_1)}\frac{\partial\,\mathrm{LN}(x_1)}{\partial\,\mathrm{Attn}(\mathrm{LN}(x_1))}\cdots$
    Correct: $\frac{\partial y_L}{\partial x'_1}\frac{\partial\,\mathrm{Attn}}{\partial W_1}$: the weights do not act through
    $x_1$, and $\frac{\partial\,\mathrm{LN}}{\partial x}$ has rank $d - 2$ and no inverse
    Severity: false"""
    J = jacobian_of(layer_norm, Draw(seed).normal(1, 8))
    rank = int(torch.linalg.matrix_rank(J, rtol=1e-10))
    second = int((torch.linalg.eigvals(J).abs() > 1e-10).sum())
    return wrong(
        8.0,
        float(rank),
        "rank of dLN/dx at d = 8, to be invertible",
        corrected=8.0 - 2,
        second=float(second),
        by="eigenvalues",
        at={"dLN/dx": J},
    )


@claim("eq69", "App. A.5, Eq. 69", "WRONG AS PRINTED", uses=[LayerNormAt])
def eq69(seed: int) -> Evidence:
    r"""$\|\frac{\partial x_1}{\partial\,\mathrm{LN}(x_1)}\|_2 = \sigma_{x_1}$
    Correct: $\frac{\partial\,\mathrm{LN}}{\partial x}$ has the singular value 0, twice; $\sigma_{x_1}$ is the norm of its
    pseudo-inverse
    Severity: false
    Follows: eq66"""
    x = Draw(seed).normal(1, 8)
    J = jacobian_of(layer_norm, x)
    deviation, least = float(x.var(correction=0).sqrt()), round(float(torch.linalg.svdvals(J)[-1]), 12)
    inverse = spectral(torch.linalg.pinv(J, rtol=1e-10))
    detail = f"least singular value of dLN/dx, 1 / sigma if invertible; its pseudo-inverse has {inverse / deviation:.6f} sigma"
    return wrong(1 / deviation, least, detail, corrected=0.0, at={"x": x})


@claim("eq73", "App. A.5, Eq. 73", "WRONG AS PRINTED", uses=[AttentionAt.jacobian])
def eq73(seed: int) -> Evidence:
    r"""$\|\frac{\partial\,\mathrm{Attn}(x)}{\partial W_1}\|_2\le\frac{\|x\|_2}{\sqrt{d_k}}$
    Correct: $\frac{\|x\|_2\|K\|_2\|V\|_2}{2\sqrt{d_k}}$: keys and values are lost, and the softmax's Jacobian has norm up to
    $\frac12$
    Severity: constant"""
    draw = Draw(seed)
    X, W = draw.normal(4, 8), [draw.normal(8, 8, std=0.2), draw.normal(8, 8), draw.normal(8, 8)]
    found = spectral(jacobian_of(lambda W_Q: attention_head(X, W_Q, *W[1:]), W[0]))
    printed = spectral(X) / math.sqrt(8)
    return violated(found, printed, "one head", corrected=printed * spectral(X @ W[1]) * spectral(X @ W[2]) / 2)


@claim("eq78", "App. A.5, Eq. 78", "HOLDS UNDER ASSUMPTION")
def eq78(seed: int) -> Evidence:
    r"""$\|W^O\|_2\le\sigma(\sqrt d + \sqrt{h\,d_{\mathrm{head}}})$
    Needs: in expectation (Gordon); a single matrix may exceed it"""
    draw = Draw(seed)
    norms = torch.linalg.matrix_norm(draw.normal(2000, 4, 4), 2) / (2 * math.sqrt(4))
    return assumed(bounded(float(norms.mean()), "mean over 2000 matrices of width 4"), float(norms.max()), above=1.05)


@claim("eq81", "App. A.5, Eqs. 79-81", "WRONG AS PRINTED", uses=[pre_norm_gradient_bounds])
def eq81(seed: int) -> Evidence:
    r"""$\|\frac{\partial y_L}{\partial W_1}\|_2\le\prod_{\ell=1}^{L-1}(\ldots)\,\sigma_{x_1}^2\sigma(\sqrt d +
    \sqrt{h\,d_{\mathrm{head}}})h\left[(\sqrt s + 2 + \frac{1}{\sqrt s})\sigma^3\sqrt{d^3d_{\mathrm{head}}} +
    \sigma_{x_1}(\sqrt d + \sqrt{d_{\mathrm{head}}})\right]$
    Correct: the norm cancels $\sigma_{x_1}$: $\frac{\partial y_1}{\partial W_1}$ does not fall with it, but the right
    side falls with its square. Eq. 81 also lacks the $\frac1\ell$ of Eq. 18
    Severity: false
    Follows: eq69, eq73"""
    deviation = 0.02
    point = AttentionBranch(seed, deviation=deviation)
    size, d = point.size, point.size.d
    inner = size.of_sequence * size.sigma**3 * math.sqrt(d**4) + deviation * 2 * math.sqrt(d)
    right = deviation**2 * size.sigma * 2 * math.sqrt(d) * inner
    detail = "L = 1, embedding of standard deviation 0.02; in Frobenius norm against the sharp bound"
    found = point.jacobian
    return violated([spectral(found), float(found.norm())], [right, math.inf], detail, corrected=[math.inf, point.bound])


@claim("eq82", "App. A.5, Eq. 82", "DOES NOT FOLLOW", uses=[AttentionAt.jacobian])
def eq82(seed: int) -> Evidence:
    r"""'we find that it is in the following form: $\|\frac{\partial y_L}{\partial x_1}\|_2\le\prod(1 +
    \frac{A'}{\sigma_{x_\ell}} + \frac{B'}{\sigma_{x_\ell}^2})$'
    Correct: that is about $x_1$ again, and Eq. 81, about $W_1$, has the factors of Eq. 79 in front: the left side is
    homogeneous in $W_V$ and $W_O$ of the first block"""
    point = AttentionBranch(seed)
    before = spectral(point.jacobian)
    point.W[3] = 1e4 * point.W[3]
    after = spectral(point.jacobian)
    return wrong(before, after, "||dy_1/dW_1|| with W_O times 10^4, L = 1", corrected=1e4 * before)


@claim("eq19", "Sec. 4.1, Eq. 19", "HOLDS UNDER ASSUMPTION")
def eq19(seed: int) -> Evidence:
    r"""'the good variance growth rate is sub linearly growth', $\sigma_{x_\ell}^2\sim\ell$, 'which is actually the LayerNorm
    Scaling convergence rate'
    Needs: branches correlated with the stream by at least $\rho_0 > 0$ (see Eq. 14); uncorrelated ones have $\log\ell$
    Correct: $\ell$ is linear, not 'sub linearly'"""
    slopes = []
    for rho in (0.5, 1.0, 0.0):
        values = grown(10_000, rho=rho, lns=True)
        slopes.append(math.log10(float(values[-1] / values[999])))
    holds = small([abs(slope - 1) for slope in slopes[:2]], "exponent of l from 10^3 to 10^4 less 1, rho = 0.5 and 1", below=0.05)
    return assumed(holds, abs(slopes[2] - 1), above=0.5)


@claim("sec4.1-every-layer", "Sec. 4.1, last paragraph", "LOOSE", uses=[TransformerBlock])
def every_layer(seed: int) -> Evidence:
    r"""for every layer $\ell$ the norm $\|\frac{\partial y_L}{\partial W_\ell}\|_2$ 'has the same upper bound'; 'the proof is
    omitted'
    Correct: the factors of the blocks before $\ell$ do not enter, so that a bound of the first block is one of all, and loose for
    the later ones: at initialisation with LNS the norm falls with $\ell$, far faster than with Pre-LN"""
    falls = {}
    for name in ("pre", "lns"):
        X, blocks = Draw(seed).normal(4, 8), make_stack(seed, 6, name, d_model=8, d_ff=16, n_heads=1)
        states, norms = stream(blocks, X), []
        for layer in (1, 6):
            block = blocks[layer - 1]

            def from_query(
                W_Q: Tensor, block: TransformerBlock = block, layer: int = layer, states: list[Tensor] = states
            ) -> Tensor:
                parameters = {"attention.W_Q": W_Q}
                Y = torch.func.functional_call(block, parameters, (states[layer - 1],))
                return stream(blocks[layer:], Y)[-1]  # noqa: B023

            norms.append(spectral(jacobian_of(from_query, block.attention.W_Q)))
        falls[name] = norms[1] / norms[0]
    text = f"||dy_L/dW_Q|| of block 6 over block 1: Pre-LN {falls['pre']:.3f}, LNS {falls['lns']:.3f}"
    return loose(falls["lns"], text, factor=1 / 0.6)
