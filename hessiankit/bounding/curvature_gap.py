"""Bounds of Closing the Curvature Gap, sharpened for its attention and block, and as printed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from derivations.bounds.attention_bounds import AttentionNorms, attention_a_priori
from derivations.bounds.attention_printed import PrintedAttentionBlocks, theorem_1_appendix_printed, theorem_1_printed
from derivations.bounds.attention_structured import attention_structured
from derivations.bounds.block_bounds import PostBlockNorms, post_block_a_priori
from derivations.bounds.block_norms import BlockNorms
from derivations.bounds.block_printed import phi_printed, sigma_min_printed, theorem_6_factors_printed, theorem_6_printed
from derivations.bounds.block_structured import post_block_structured
from hessiankit.blocks import Attention, TransformerBlock
from hessiankit.bounding.a_priori import NormTable
from hessiankit.bounding.structured import ROUNDING, SLACK, Structured
from hessiankit.formulas.block_at import causal_mask, is_the_papers

_FEEDFORWARD = ("relu", "leaky_relu", "identity")


def sharpened(
    module: nn.Module, x: Tensor, t: Tensor, loss: str, prior: NormTable, own: Structured
) -> tuple[NormTable, Structured]:
    """Return the two kinds of bounds, each replaced where the special one is smaller.

    Args:
        module: whose Hessian is bounded.
        x: B x L x d.
        t: the target.
        loss: of the report.
        prior: the bounds from norms, of any placement.
        own: the bounds from intermediate values, of any module.
    """
    if loss != "mse" or not _covered(module):
        return prior, own
    pairs = [_special(module, a.detach().double(), b.detach().double()) for a, b in zip(x, t, strict=True)]
    prefix = {name.rsplit(".", 1)[-1]: name for name, _ in module.named_parameters()}
    a_priori, structured = (_mean([pair[k] for pair in pairs], prefix) for k in (0, 1))
    complete = set(a_priori[1]) == {(i, j) for i in prior.names for j in prior.names}
    norms = prior.norms.clone()
    for (i, j), value in a_priori[1].items():
        a, b = prior.names.index(i), prior.names.index(j)
        norms[a, b] = min(float(norms[a, b]), value + ROUNDING * float(norms[a, b]))
    floor = ROUNDING * own.whole
    table = {pair: min(value, structured[1].get(pair, value) * SLACK + floor) for pair, value in own.pairs.items()}
    whole = min(own.whole, structured[0] * SLACK + floor) if complete else own.whole
    spectral = a_priori[0] + ROUNDING * prior.whole if complete else float("inf")
    smaller = NormTable(prior.names, norms, prior.lipschitz, spectral)
    return smaller, Structured(whole, table, own.sites)


def _covered(module: nn.Module) -> bool:
    if isinstance(module, Attention):
        return is_the_papers(module)
    if not isinstance(module, TransformerBlock) or module.placement != "post" or not is_the_papers(module.attention):
        return False
    network = module.feedforward
    return network.W_G is None and network.activation in _FEEDFORWARD and network.b_1 is None and _bare(module)


def _bare(block: TransformerBlock) -> bool:
    return all(isinstance(norm, nn.LayerNorm) and norm.weight is None for norm in (block.norm_1, block.norm_2))


def _special(module: nn.Module, X: Tensor, T: Tensor) -> tuple[BlockNorms, BlockNorms]:
    part: Attention = module if isinstance(module, Attention) else module.attention  # type: ignore[assignment]
    q, k, v, o = (None if W is None else W.detach().double() for W in (part.W_Q, part.W_K, part.W_V, part.W_O))
    mask = causal_mask(X.shape[0], 1) if part.causal else None
    if isinstance(module, Attention):
        norms = AttentionNorms.measured(X, q, k, v, T, W_O=o)
        return attention_a_priori(norms), attention_structured(X, q, k, v, T, W_O=o, mask=mask)
    assert isinstance(module, TransformerBlock)
    w_1, w_2 = (W.detach().double() for W in (module.feedforward.W_1, module.feedforward.W_2))
    eps, kind = float(module.norm_1.eps), module.feedforward.activation  # type: ignore[union-attr, arg-type]
    leak = {"relu": 0.0, "leaky_relu": 0.01, "identity": 1.0}[kind]
    measured = PostBlockNorms.measured(X, q, k, v, w_1, w_2, T, W_O=o, eps=eps, leak=leak, mask=mask)
    structured = post_block_structured(X, q, k, v, w_1, w_2, T, W_O=o, eps=eps, mask=mask, activation=kind)
    return post_block_a_priori(measured, activation=kind), structured


def _mean(samples: list[BlockNorms], names: Mapping[str, str]) -> tuple[float, dict[tuple[str, str], float]]:
    """Return the mean of the samples' bounds: of the whole, and of each block by full names."""
    matrix = torch.stack([one.matrix for one in samples]).mean(0)
    found = {
        (names[i], names[j]): float(matrix[a, b]) for a, i in enumerate(samples[0].names) for b, j in enumerate(samples[0].names)
    }
    return sum(one.whole for one in samples) / len(samples), found


Rows = dict[str, dict[str, float]]
_PAIRS = {"VV": ("W_V", "W_V"), "QQ": ("W_Q", "W_Q"), "VQ": ("W_V", "W_Q"), "QK": ("W_Q", "W_K")}
_ORDER = ("feedforward.W_1", "feedforward.W_2", "attention.W_K", "attention.W_Q", "attention.W_V")


def printed(module: nn.Module, x: Tensor, t: Tensor, loss: str, notes: list[str]) -> Rows:
    """Return "whole" or "i x j" -> kind -> value; what they miss, or why they are not defined, goes to ``notes``.

    Args:
        module: an attention or a block.
        x: B x L x d.
        t: the target.
        loss: of the report.
        notes: added to.
    """
    missing = _missing(module, x, loss)
    if missing:
        notes.append(f"printed: not defined here, {missing}")
        return {}
    X, T = x[0].detach().double(), t[0].detach().double()
    return _theorem_1(module, X, T, notes) if isinstance(module, Attention) else _theorem_6(module, X, T, notes)  # type: ignore[arg-type]


def _missing(module: nn.Module, x: Tensor, loss: str) -> str:
    if loss != "mse":
        return "the paper's loss is the squared error"
    if x.shape[0] > 1:
        return "the paper bounds the Hessian of one sample; pass one"
    part = module if isinstance(module, Attention) else getattr(module, "attention", None)
    if not isinstance(part, Attention) or not is_the_papers(part) or part.W_O is not None or part.causal:
        return "the paper has one head, without mask, biases, norms inside and output projection"
    if isinstance(module, TransformerBlock):
        plain = module.placement == "post" and module.feedforward.activation == "relu" and module.feedforward.b_1 is None
        norms = [module.norm_1, module.norm_2]
        if not plain or not all(isinstance(norm, nn.LayerNorm) and norm.weight is None for norm in norms):
            return "the paper's block is post-norm with ReLU, and its norms have neither gain nor shift"
    return ""


def _norm(A: Tensor) -> float:
    return float(torch.linalg.matrix_norm(A.detach().double(), 2))


def _theorem_1(part: Attention, X: Tensor, T: Tensor, notes: list[str]) -> Rows:
    (length, d), sizes = X.shape, [_norm(A) for A in (X, part.W_Q, part.W_K, part.W_V, T)]
    found: Rows = {}
    kinds: dict[str, PrintedAttentionBlocks] = {
        "printed_theorem_1": theorem_1_printed(length, d, part.d_k, *sizes),
        "printed_theorem_1_appendix": theorem_1_appendix_printed(length, d, part.d_k, *sizes),
    }
    for kind, blocks in kinds.items():
        found.setdefault("whole", {})[kind] = blocks.M
        for letters, pair in _PAIRS.items():
            _put(found, pair, kind, getattr(blocks, letters))
    notes.append("printed theorem 1: leaves out (W_K, W_K) and (W_V, W_K), and takes ||dA/dT|| <= 1/L, true at uniform attention")
    return found


def _theorem_6(block: TransformerBlock, X: Tensor, T: Tensor, notes: list[str]) -> Rows:
    part, network = block.attention, block.feedforward
    with torch.no_grad():
        before = X + part.double()(X)
        Y = block.norm_1(before)  # type: ignore[misc]
        S = Y + network(Y)
        residual = float((block.norm_2(S) - T).norm())  # type: ignore[misc]
    (length, d), d_ff = X.shape, network.W_1.shape[1]
    x, w_Q, w_K, w_V = (_norm(A) for A in (X, part.W_Q, part.W_K, part.W_V))
    w_1, w_2 = _norm(network.W_1), _norm(network.W_2)
    found: Rows = {}
    for reading, kind in (("stated", "printed_theorem_6"), ("proof", "printed_theorem_6_proof")):
        scales = {"sigma": sigma_min_printed(before, reading=reading), "sigma_prime": sigma_min_printed(S, reading=reading)}
        factors = theorem_6_factors_printed(length, d, part.d_k, d_ff, x, w_Q, w_K, w_V, w_1, w_2, **scales)
        phi = phi_printed(length, d, part.d_k, x, w_Q, w_K, w_V)
        terms = theorem_6_printed(length, d, d_ff, factors, phi, w_1, w_2, residual)
        found.setdefault("whole", {})[kind] = terms.whole
        outer = 2 / (length * d) * factors.J_Z**2 * torch.outer(terms.B, terms.B) + residual * terms.H_tr
        for a, i in enumerate(_ORDER):
            for b, j in enumerate(_ORDER):
                _put(found, (i, j), kind, float(outer[a, b]))
    notes.append("printed theorem 6: its steps (17), (21) and Phi fail; with the stated sigma_min it is exceeded from d = 5 on")
    return found


def _put(found: Rows, pair: tuple[str, str], kind: str, value: float) -> None:
    for i, j in (pair, pair[::-1]):
        found.setdefault(f"{i} x {j}", {})[kind] = value
