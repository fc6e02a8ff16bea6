"""What the paper leaves out: gains, shifts, eps, biases, W_O, masks, heads, other activations and losses, depth."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.bounds import norm_hessian_norm, norm_jacobian_norm
from derivations.composition import Composite, gauss_newton
from derivations.feedforward import FeedForwardAt
from derivations.loss import CrossEntropyAt
from derivations.multihead import MultiHeadAttentionAt
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.operation import Operation, Renamed
from derivations.pooling import MeanPoolHeadAt
from derivations.transformer import PostNormBlockAt
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.derivatives import hessian_of, jacobian_of
from hessiankit.ledger.curvature_gap.notation import dense, spectral
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, relative_error, small
from hessiankit.ledger.registry import claim

Values = dict[str, Tensor]
EPS = 0.01


def all_blocks(at: Operation, values: Values, function: Callable[[Values], Tensor]) -> Evidence:
    """Compare value, Jacobians and second derivatives of an operation, all arguments and pairs, with autograd.

    An error is relative to its block's largest entry; where the whole block is rounding, to that of all blocks.
    """
    names = list(at.arguments)
    ends = torch.tensor([values[name].numel() for name in names]).cumsum(0).tolist()
    places = {name: slice(end - values[name].numel(), end) for name, end in zip(names, ends, strict=True)}
    vector = torch.cat([values[name].reshape(-1) for name in names])

    def of_vector(v: Tensor) -> Tensor:
        return function({name: v[places[name]].reshape(values[name].shape) for name in names})

    n, value = vector.numel(), function(values)
    first, second = jacobian_of(of_vector, vector), hessian_of(of_vector, vector).reshape(-1, n, n)
    errors = [relative_error(at.value, value)]
    errors += [block_error(dense(at.jacobian(i)), first[:, places[i]], first) for i in names]
    for i in names:
        for j in names:
            reference = second[:, places[i], places[j]].reshape(-1, values[j].numel())
            errors.append(block_error(dense(at.hessian(i, j)), reference, second))
    return small(errors, f"{len(names)} Jacobians and {len(names) ** 2} second derivatives, against autograd")


def block_error(found: Tensor, reference: Tensor, whole: Tensor) -> float:
    """Return the largest error of a block, relative to its own entries unless they are rounding."""
    size, all_sizes = float(reference.abs().max()), float(whole.abs().max())
    return float((found - reference).abs().max()) / (size if size > 1e-12 * all_sizes else all_sizes)


def layer_norm(X: Tensor, gamma: Tensor | float = 1.0, beta: Tensor | float = 0.0, eps: float = 0.0) -> Tensor:
    """Return LayerNorm with gain, shift and eps."""
    centred = X - X.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + eps).sqrt() * gamma + beta


def attention(v: Values, mask: Tensor | None = None) -> Tensor:
    """Return F for the arguments by name, with W_O where there is one."""
    logits = v["X"] @ v["W_Q"] @ v["W_K"].T @ v["X"].T / math.sqrt(v["W_K"].shape[1])
    logits = logits if mask is None else logits.masked_fill(~mask, -math.inf)
    F = logits.softmax(1) @ v["X"] @ v["W_V"]
    return F @ v["W_O"] if "W_O" in v else F


def draw_attention(draw: Draw, *, projection: bool) -> Values:
    """Return X of 3 x 4, d_K = 2 and, with a projection, d_v = 3."""
    d_v = 3 if projection else 4
    shapes = {"X": (3, 4), "W_Q": (4, 2), "W_K": (4, 2), "W_V": (4, d_v)}
    shapes |= {"W_O": (3, 4)} if projection else {}
    return {name: 0.7 * draw.normal(*shape) for name, shape in shapes.items()}


@claim("ours/layernorm", "Closing the Curvature Gap, Theorems 2-3, with gain, shift and eps", "HOLDS", uses=[LayerNormAt])
def layernorm(seed: int) -> Evidence:
    r"""LayerNorm's first and second derivatives in $X$, $\gamma$, $\beta$: $\partial Y/\partial X =
    (P\otimes\Gamma)(I_L\otimes C - \frac1dVV^\top)$, $s_i = \sqrt{\|Cx_i\|^2/d + \epsilon}$, and all nine second ones"""
    draw = Draw(seed)
    v = {"X": draw.normal(3, 4), "gamma": draw.normal(4), "beta": draw.normal(4)}
    return all_blocks(LayerNormAt(**v, eps=EPS), v, lambda v: layer_norm(v["X"], v["gamma"], v["beta"], EPS))


@claim("ours/rmsnorm", "Closing the Curvature Gap, Theorems 2-3, for RMSNorm", "HOLDS", uses=[RMSNormAt])
def rmsnorm(seed: int) -> Evidence:
    r"""RMSNorm's: the same with $C = I$ and $s_i = \sqrt{\|x_i\|^2/d + \epsilon}$"""
    draw = Draw(seed)
    v = {"X": draw.normal(3, 4), "gamma": draw.normal(4)}
    return all_blocks(
        RMSNormAt(**v, eps=EPS), v, lambda v: v["X"] / (v["X"].square().mean(1, keepdim=True) + EPS).sqrt() * v["gamma"]
    )


@claim("ours/norm-norms", "Closing the Curvature Gap, in place of Lemma 4", "HOLDS", uses=[norm_jacobian_norm, norm_hessian_norm])
def norm_norms(seed: int) -> Evidence:
    r"""$\|J\|_2 = 1/\min_is_i$ and $\|H\|_2 = \max_i\frac{\rho_i}{\sqrt d\,s_i^2}\sqrt{\max(d-2+9(1-\rho_i^2)^2, 2)}$,
    $\rho_i^2 = \|\hat x_i\|^2/d$; for RMSNorm $d - 1$ in place of $d - 2$"""
    draw = Draw(seed)
    found, references = [], []
    for eps in (0.0, 0.3):
        X = draw.normal(3, 5)
        for kind, at in (("layernorm", LayerNormAt(X, eps=eps)), ("rmsnorm", RMSNormAt(X, eps=eps))):
            found += [norm_jacobian_norm(X, eps, norm=kind), norm_hessian_norm(X, eps, norm=kind)]
            references += [spectral(dense(at.jacobian("X"))), spectral(dense(at.hessian("X", "X")))]
    return agrees(found, references, "eps = 0 and 0.3, by singular values of the closed forms")


def feedforward(seed: int, activation: str, sigma: Callable[[Tensor], Tensor]) -> Evidence:
    """Compare the feed-forward network with biases and residual."""
    draw = Draw(seed)
    shapes = {"Y": (2, 3), "W_1": (3, 4), "W_2": (4, 3), "b_1": (4,), "b_2": (3,)}
    v = {name: draw.normal(*shape) for name, shape in shapes.items()}

    def function(v: Values) -> Tensor:
        return v["Y"] + sigma(v["Y"] @ v["W_1"] + v["b_1"]) @ v["W_2"] + v["b_2"]

    return all_blocks(FeedForwardAt(v["Y"], v["W_1"], v["W_2"], v["b_1"], v["b_2"], activation), v, function)


@claim("ours/feedforward-relu", "Closing the Curvature Gap, Theorems 4-5, with biases", "HOLDS", uses=[FeedForwardAt])
def feedforward_relu(seed: int) -> Evidence:
    r"""$S = Y + \mathrm{relu}(YW_1 + 1b_1^\top)W_2 + 1b_2^\top$: 5 Jacobians, 25 second derivatives"""
    return feedforward(seed, "relu", torch.relu)


@claim("ours/feedforward-gelu", "Closing the Curvature Gap, Theorems 4-5, with GELU", "HOLDS", uses=[FeedForwardAt])
def feedforward_gelu(seed: int) -> Evidence:
    r"""the same for GELU: $\partial_{ab} = (P_2\otimes Q_a^\top)E D_2 Q_b + \dots$ does not vanish for $a = b = W_1$"""
    return feedforward(seed, "gelu", lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))))


@claim("ours/feedforward-silu", "Closing the Curvature Gap, Theorems 4-5, with SiLU", "HOLDS", uses=[FeedForwardAt])
def feedforward_silu(seed: int) -> Evidence:
    """the same for SiLU"""
    return feedforward(seed, "silu", lambda x: x * torch.sigmoid(x))


@claim("ours/attention-input", "Closing the Curvature Gap, Theorem 9, for the input", "HOLDS", uses=[AttentionAt])
def attention_input(seed: int) -> Evidence:
    r"""$\partial F/\partial X = A\otimes W_V^\top + U\frac{\partial A}{\partial T}T_X$ and all second derivatives with $X$,
    which stacking blocks needs"""
    v = draw_attention(Draw(seed), projection=False)
    return all_blocks(AttentionAt(**v), v, attention)


@claim(
    "ours/attention-causal-projection",
    "Closing the Curvature Gap, Lemma 2, with $W_O$ and a causal mask",
    "HOLDS",
    uses=[AttentionAt],
)
def attention_projection(seed: int) -> Evidence:
    """$F = AXW_VW_O$ with $A$ masked: 5 Jacobians, 25 second derivatives, by the same formulas with the masked $A$"""
    v = draw_attention(Draw(seed), projection=True)
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    return all_blocks(AttentionAt(**v, mask=mask), v, lambda v: attention(v, mask))


@claim("ours/multi-head", "Closing the Curvature Gap, 'single-head' in Sec. 6", "HOLDS", uses=[MultiHeadAttentionAt])
def multi_head(seed: int) -> Evidence:
    r"""$F = \sum_hA_hXW_V^hW_O^h$: each head's blocks, and zero across heads"""
    draw = Draw(seed)
    X = draw.normal(2, 3)
    heads = [
        {name: draw.normal(*s) for name, s in (("W_Q", (3, 1)), ("W_K", (3, 1)), ("W_V", (3, 2)), ("W_O", (2, 3)))} for _ in "ab"
    ]
    v = {"X": X, **{f"{name}[{h}]": W for h, head in enumerate(heads) for name, W in head.items()}}

    def function(v: Values) -> Tensor:
        one_by_one = [attention({"X": v["X"], **{k: v[f"{k}[{h}]"] for k in heads[h]}}) for h in (0, 1)]
        return one_by_one[0] + one_by_one[1]

    return all_blocks(MultiHeadAttentionAt(X, heads), v, function)


def draw_block(draw: Draw, X: Tensor) -> Values:
    """Return every argument of a block of width 3, d_ff = 2, d_K = d_v = 2."""
    shapes = {"W_Q": (3, 2), "W_K": (3, 2), "W_V": (3, 2), "W_O": (2, 3), "W_1": (3, 2), "W_2": (2, 3), "b_1": (2,), "b_2": (3,)}
    shapes |= {f"{name}_{k}": (3,) for k in (1, 2) for name in ("gamma", "beta")}
    return {"X": X, **{name: 0.7 * draw.normal(*shape) for name, shape in shapes.items()}}


def block(v: Values) -> Tensor:
    """Return the block with everything: gains, shifts, eps, biases, W_O, causal mask, GELU."""
    mask = torch.ones(len(v["X"]), len(v["X"]), dtype=torch.bool).tril()
    Y = layer_norm(v["X"] + attention(v, mask), v["gamma_1"], v["beta_1"], EPS)
    U = Y @ v["W_1"] + v["b_1"]
    S = Y + (U * 0.5 * (1 + torch.erf(U / math.sqrt(2)))) @ v["W_2"] + v["b_2"]
    return layer_norm(S, v["gamma_2"], v["beta_2"], EPS)


def block_at(v: Values) -> PostNormBlockAt:
    """Return its closed forms."""
    return PostNormBlockAt(**v, mask=torch.ones(len(v["X"]), len(v["X"]), dtype=torch.bool).tril(), eps=EPS, activation="gelu")


@claim("ours/post-norm-block", "Closing the Curvature Gap, Theorems 4-5, with everything", "HOLDS", uses=[PostNormBlockAt])
def post_norm_block(seed: int) -> Evidence:
    r"""the block with gains, shifts, $\epsilon$, biases, $W_O$, a causal mask and GELU: Jacobians and second derivatives in
    all 13 arguments, for which the paper has no formula although it lists them as parameters"""
    draw = Draw(seed)
    v = draw_block(draw, draw.normal(2, 3))
    return all_blocks(block_at(v), v, block)


@claim("ours/cross-entropy", "Closing the Curvature Gap, Sec. 6", "HOLDS", uses=[CrossEntropyAt])
def cross_entropy(seed: int) -> Evidence:
    r"""cross-entropy over tokens: $l' = \frac1L\mathrm{vec}_r(P - Y)^\top$, $l'' =
    \frac1L\mathrm{blockdiag}(\mathrm{diag}\,p_i - p_ip_i^\top)$"""
    logits, labels = Draw(seed).normal(3, 4), torch.tensor([1, 3, 0])
    at = CrossEntropyAt(logits, labels)

    def loss(logits: Tensor) -> Tensor:
        return -logits.log_softmax(1)[torch.arange(3), labels].mean()

    found = [at.value.reshape(()), dense(at.jacobian("logits")), dense(at.hessian("logits", "logits"))]
    return agrees(found, [loss(logits), jacobian_of(loss, logits), hessian_of(loss, logits)], "value, gradient, Hessian")


@claim(
    "ours/mean-pool-head",
    "Closing the Curvature Gap, Sec. 5, 'averaged to obtain classification logits'",
    "HOLDS",
    uses=[MeanPoolHeadAt],
)
def mean_pool_head(seed: int) -> Evidence:
    r"""$o = \frac1L1^\top ZW_c$: Jacobians and the mixed second derivative"""
    draw = Draw(seed)
    v = {"Z": draw.normal(3, 4), "W_c": draw.normal(4, 2)}
    return all_blocks(MeanPoolHeadAt(v["Z"], v["W_c"]), v, lambda v: v["Z"].mean(0, keepdim=True) @ v["W_c"])


@cache
def stacked(seed: int) -> tuple[Operation, Operation, Values]:
    """Return two blocks and a mean-pool head, the cross-entropy on it, and the values of all parameters."""
    draw = Draw(seed)
    first = draw_block(draw, draw.normal(2, 3))
    lower = block_at(first)
    second = draw_block(draw, lower.value)
    upper = block_at(second)
    own = [Renamed(at, {name: f"{k}.{name}" for name in at.arguments if name != "X"}) for k, at in ((1, lower), (2, upper))]
    head = MeanPoolHeadAt(upper.value, draw.normal(3, 4))
    model = Composite(head, {"Z": Composite(own[1], {"X": own[0]})})
    values = {"X": first["X"], "W_c": head.W_c}
    values |= {f"{k}.{name}": W for k, v in ((1, first), (2, second)) for name, W in v.items() if name != "X"}
    return model, CrossEntropyAt(head.value, [2]), values


@claim("ours/depth", "Closing the Curvature Gap, Sec. 6, 'deep, multi-layer'", "HOLDS", uses=[Composite, gauss_newton])
def depth(seed: int) -> Evidence:
    r"""two blocks with everything, mean-pool head, cross-entropy: blocks of the Hessian across layers, by the chain rule
    $H_{\theta\theta} = (g_x\otimes I)H_x + (I\otimes J_x^\top)g_{xx}J_x$"""
    model, loss, values = stacked(seed)
    chosen = ["1.W_Q", "1.gamma_1", "2.W_K", "2.W_1", "2.b_2", "W_c"]
    sizes = [values[name].numel() for name in chosen]
    vector = torch.cat([values[name].reshape(-1) for name in chosen])

    def of_vector(w: Tensor) -> Tensor:
        moved = {name: part.reshape(values[name].shape) for name, part in zip(chosen, w.split(sizes), strict=True)}
        v = {**values, **moved}
        Z = v["X"]
        for k in (1, 2):
            Z = block({"X": Z, **{name[2:]: W for name, W in v.items() if name.startswith(f"{k}.")}})
        return -(Z.mean(0, keepdim=True) @ v["W_c"]).log_softmax(1)[0, 2]

    found = torch.cat([torch.cat([dense(gauss_newton(loss, model, i, j).total) for j in chosen], 1) for i in chosen])
    return agrees(found, hessian_of(of_vector, vector), f"36 blocks, {vector.numel()} of the parameters, against autograd")
