"""The bounds of Closing the Curvature Gap as they stand in print, for a problem at hand, where they are defined."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from derivations.bounds.attention_printed import PrintedAttentionBlocks, theorem_1_appendix_printed, theorem_1_printed
from derivations.bounds.block_printed import phi_printed, sigma_min_printed, theorem_6_factors_printed, theorem_6_printed
from hessiankit.blocks import Attention, TransformerBlock
from hessiankit.derivation.branches import is_the_papers

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
