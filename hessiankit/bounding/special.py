"""The sharper bounds that Closing the Curvature Gap's own attention and block have (``derivations.bounds``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from derivations.bounds.attention_bounds import AttentionNorms, attention_a_priori
from derivations.bounds.attention_structured import attention_structured
from derivations.bounds.block_bounds import PostBlockNorms, post_block_a_priori
from derivations.bounds.block_norms import BlockNorms
from derivations.bounds.block_structured import post_block_structured
from hessiankit.blocks import Attention, TransformerBlock
from hessiankit.bounding.a_priori import NormTable
from hessiankit.bounding.structured import ROUNDING, SLACK, Structured
from hessiankit.derivation.branches import causal_mask, is_the_papers

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
